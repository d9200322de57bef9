"""Epsilon of many equal steps by advanced composition: to compare, no run uses it."""

from __future__ import annotations

import math


def advanced_composition_epsilon(
    step_epsilon: float, step_delta: float, steps: int, delta: float
) -> float:
    """Return epsilon at `delta` of `steps` mechanisms that are (step_epsilon, step_delta)-DP.

    sqrt(2 k ln(1/d)) e + k e (exp(e) - 1), d = delta - k step_delta: proved, for adaptive steps.
    Source: Dwork, Rothblum and Vadhan 2010; Dwork and Roth 2014, Theorem 3.20. Raises ValueError
    where the steps' deltas leave nothing of delta.
    """
    if step_epsilon <= 0 or not 0 <= step_delta < 1 or steps < 1 or not 0 < delta < 1:
        raise ValueError("step epsilon > 0, 0 <= step delta < 1, steps >= 1, 0 < delta < 1 needed")
    slack = delta - steps * step_delta
    if slack <= 1e-9 * delta:  # nothing but rounding
        raise ValueError(
            f"delta: must be above {steps:,} x {step_delta:g} = {steps * step_delta:g}, the steps' "
            f"own, got {delta:g}"
        )
    if step_epsilon > _LARGEST_EPSILON:
        return math.inf
    drift = steps * step_epsilon * math.expm1(step_epsilon)
    return math.sqrt(2 * steps * math.log(1 / slack)) * step_epsilon + drift


_LARGEST_EPSILON = 700.0  # beyond, exp(epsilon) is no float64
