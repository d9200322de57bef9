"""Epsilon of many equal steps by published composition theorems: to compare, no run uses them."""

from __future__ import annotations

import math

import numpy as np

from dpdist.privacy import mechanisms


def advanced_composition_epsilon(
    step_epsilon: float, step_delta: float, steps: int, delta: float
) -> float:
    """Return epsilon at `delta` of `steps` mechanisms that are (step_epsilon, step_delta)-DP.

    sqrt(2 k ln(1/d)) e + k e (exp(e) - 1), d = delta - k step_delta: proved, for adaptive steps.
    Source: Dwork, Rothblum and Vadhan 2010; Dwork and Roth 2014, Theorem 3.20. Raises ValueError
    where the steps' deltas leave nothing of delta.
    """
    slack = _composition_slack(step_epsilon, step_delta, steps, delta)
    if step_epsilon > _LARGEST_EPSILON:
        return math.inf
    drift = steps * step_epsilon * math.expm1(step_epsilon)
    return math.sqrt(2 * steps * math.log(1 / slack)) * step_epsilon + drift


def optimal_composition_epsilon(
    step_epsilon: float, step_delta: float, steps: int, delta: float
) -> float:
    """Return the least epsilon that any composition theorem for such steps can give, rounded up.

    That of `steps` answers of randomized response (Kairouz, Oh and Viswanath 2015, Theorem 3.3).
    Arguments and errors are those of `advanced_composition_epsilon`.
    """
    _composition_slack(step_epsilon, step_delta, steps, delta)
    if step_epsilon > _LARGEST_EPSILON:
        return steps * step_epsilon
    from scipy import special

    left = np.arange(steps + 1.0)  # answers that speak against
    counts = (
        special.gammaln(steps + 1) - special.gammaln(left + 1) - special.gammaln(steps - left + 1)
    )
    whole = -steps * np.logaddexp(0.0, step_epsilon)
    first, second = ((counts + n * step_epsilon + whole) for n in (steps - left, left))
    broken = steps * math.log1p(-step_delta)  # ln of the probability that no delta was used

    def holds(epsilon: float) -> bool:
        losses = np.maximum(0.0, -np.expm1(np.minimum(epsilon + second - first, 0.0)))
        profile = float(np.sum(np.exp(first) * losses))
        total = -math.expm1(broken) + math.exp(broken) * profile
        return total * (1 + _ROUNDING) <= delta

    low, high = 0.0, steps * step_epsilon
    if holds(low):
        return 0.0
    if not holds(high):  # rounding, or delta at its least
        return high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


_LARGEST_EPSILON = 700.0  # beyond, exp(epsilon) is no float64
_ROUNDING = 1e-5  # relative, of sums of up to a million terms


def _composition_slack(step_epsilon: float, step_delta: float, steps: int, delta: float) -> float:
    if step_epsilon <= 0 or not 0 <= step_delta < 1 or steps < 1 or not 0 < delta < 1:
        raise ValueError("step epsilon > 0, 0 <= step delta < 1, steps >= 1, 0 < delta < 1 needed")
    slack = delta - steps * step_delta
    if slack <= 1e-9 * delta:  # nothing but rounding
        raise ValueError(
            f"delta: must be above {steps:,} x {step_delta:g} = {steps * step_delta:g}, the steps' "
            f"own, got {delta:g}"
        )
    return slack


def advanced_dp_sgd_epsilon(
    sample_rate: float, noise_multiplier: float, steps: int, delta: float
) -> float:
    """Return epsilon of DP-SGD by advanced composition of amplified steps: proved, and loose.

    A step is the exact Gaussian at delta / (2 steps), with ln(1 + q (exp(e) - 1)) by Poisson
    sampling. Add-or-remove-one.
    """
    step_delta = delta / (2 * steps)
    within = min(step_delta / sample_rate, 0.5)
    alone = float(mechanisms.gaussian_epsilon(within, noise_multiplier))
    if alone > _LARGEST_EPSILON:
        return math.inf
    step_epsilon = max(math.log1p(sample_rate * math.expm1(alone)), 1e-300)
    return advanced_composition_epsilon(step_epsilon, step_delta, steps, delta)


def clt_epsilon(sample_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """Return epsilon of DP-SGD by the central limit theorem: an APPROXIMATION, proved of nothing.

    mu = q sqrt(T (exp(1 / sigma^2) - 1)) of Gaussian differential privacy, a limit of many steps at
    small q; it may lie below what holds. Source: Bu, Dong, Long and Su 2020, Corollary 4.
    """
    exponent = noise_multiplier**-2
    if exponent > _LARGEST_EPSILON:
        return math.inf
    mu = sample_rate * math.sqrt(steps * math.expm1(exponent))
    return float(mechanisms.gaussian_epsilon(delta, 1.0, mu))
