"""Measuring a policy from stored episodes and their rewards."""
