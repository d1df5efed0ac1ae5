"""Killing the processes of a run on purpose, and checking that it shows in nothing that counts."""
