"""Residual perturbation: noise behind every residual block."""
