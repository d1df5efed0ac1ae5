"""One fake beside each contract: small, typed, deterministic."""
