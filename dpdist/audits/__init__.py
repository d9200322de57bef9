"""Empirical audits: lower bounds of epsilon, and membership inference."""
