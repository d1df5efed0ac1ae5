"""What the Makefile calls. Not part of the package."""
