"""Evasion attacks, and certificates under attack."""
