"""The training loop on Ray Train: checks, workers, checkpoints, resuming, public pre-training."""
