"""Evasion attacks in bulk, and attacks on certificates."""
