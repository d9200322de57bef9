"""What leaks, measured: lower bounds of epsilon, and membership inference."""
