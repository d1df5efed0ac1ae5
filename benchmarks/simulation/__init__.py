"""A training run on a virtual clock: the real ledger and the real pacing, simulated episodes and learner steps."""
