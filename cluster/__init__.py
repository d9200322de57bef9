"""Where work runs: knows Ray, knows nothing of privacy or robustness."""
