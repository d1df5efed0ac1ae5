"""One suite beside each contract: plain async functions that raise AssertionError and say what is wrong."""
