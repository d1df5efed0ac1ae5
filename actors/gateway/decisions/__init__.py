"""What a call must pass, one file for each decision; `pipeline.py` has their order."""
