"""Doing again what an episode recorded: re-execution step by step, its report, and branches that go on from a step."""
