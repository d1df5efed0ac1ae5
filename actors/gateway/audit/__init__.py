"""The record of every decision: append-only, hash-chained, verifiable."""
