"""Attacks on the tool gateway, played through a real one, and what became of them in the world."""
