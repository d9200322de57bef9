"""A run on disk: its recipe and plan, its folder and verified ledger, its archive."""
