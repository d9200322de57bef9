"""Residual perturbation: noise after every residual block."""
