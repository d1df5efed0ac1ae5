"""Composition and operation: wiring, runtimes, recipes, command line."""
