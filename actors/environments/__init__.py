"""Worlds that episodes play in, and the table that finds them by name."""
