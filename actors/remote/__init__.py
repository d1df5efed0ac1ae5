"""Environments that are played by other processes."""
