"""The token door: generation requests of many episodes over one authenticated connection per client and replica."""
