"""The DP training loop on Ray Train: checkpoints and resume."""
