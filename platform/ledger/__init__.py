"""The ledger: episode queue and head in one place (P4). docs/ledger.md is the map."""
