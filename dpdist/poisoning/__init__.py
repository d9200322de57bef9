"""Certificates against poisoned training records, from votes of many models."""
