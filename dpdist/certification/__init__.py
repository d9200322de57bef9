"""Monte Carlo certification of robustness in bulk: counts to bounds, bounds to radii."""
