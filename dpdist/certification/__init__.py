"""Monte Carlo certification: counts to bounds, bounds to radii, in bulk."""
