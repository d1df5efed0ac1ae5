"""Tools that the gateway performs itself, for they reach out of the sandbox."""
