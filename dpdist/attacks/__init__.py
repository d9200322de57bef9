"""Evasion attacks, membership inference and audits."""
