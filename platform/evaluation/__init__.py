"""Measuring a policy, and comparing two measurements, from the outcomes of evaluated episodes."""
