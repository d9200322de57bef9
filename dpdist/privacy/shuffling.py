"""What shuffled fixed batches cannot promise: a lower bound on their privacy loss.

There is no plan for shuffled batches: no useful upper bound is known, and accounting them as
Poisson sampling understates the loss, by orders of magnitude when the noise is small. This module
computes the known lower bound for one epoch (Chua et al. 2024, "How Private are DP-SGD
Implementations?").
"""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from dpdist.privacy.guarantee import check_delta

_POINTS = 20_001


def shuffled_delta_lower_bound(epsilon: float, noise_multiplier: float, steps: int) -> float:
    """delta that one shuffled epoch of `steps` batches has at least, at `epsilon`.

    All records but one pull one way, the remaining one the other way (or is blanked out); the event
    is that some batch's noisy sum exceeds a threshold, and the best threshold on a grid is taken.
    Any threshold gives a valid bound. Raises ValueError unless noise_multiplier > 0, steps >= 1.
    """
    if noise_multiplier <= 0 or steps < 1 or epsilon < 0:
        raise ValueError("noise_multiplier > 0, steps >= 1 and epsilon >= 0 are needed")
    reach = noise_multiplier * (np.sqrt(2 * np.log(steps + 1)) + 12)
    threshold = np.linspace(-1.0, 2.0 + reach, _POINTS)
    others = (steps - 1) * norm.logcdf(threshold / noise_multiplier)
    present = -np.expm1(norm.logcdf((threshold - 2) / noise_multiplier) + others)
    blanked = -np.expm1(norm.logcdf((threshold - 1) / noise_multiplier) + others)
    with np.errstate(over="ignore", invalid="ignore"):
        gap = present - np.exp(min(epsilon, 700.0)) * blanked
    return float(max(0.0, np.nanmax(gap)))


def shuffled_epsilon_lower_bound(delta: float, noise_multiplier: float, steps: int) -> float:
    """epsilon that one shuffled epoch costs at least, at `delta`; 0 if the bound says nothing."""
    check_delta(delta)
    low, high = 0.0, 1.0
    if shuffled_delta_lower_bound(low, noise_multiplier, steps) <= delta:
        return 0.0
    while shuffled_delta_lower_bound(high, noise_multiplier, steps) > delta and high < 600:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        if shuffled_delta_lower_bound(middle, noise_multiplier, steps) > delta:
            low = middle
        else:
            high = middle
    return low
