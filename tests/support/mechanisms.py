"""Mechanisms that nothing here releases: what accounting and claims are held against."""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting as dpa
import numpy as np
from numpy.typing import ArrayLike

from dpdist.privacy.accounting import compute_privacy_losses
from dpdist.privacy.guarantee import Neighbors
from dpdist.privacy.mechanisms import Array, extended_gaussian_scale
from dpdist.privacy.selection import TrialDistribution


def laplace_epsilon(delta: ArrayLike, b: ArrayLike, l1_sensitivity: ArrayLike = 1.0) -> Array:
    """Return the smallest epsilon at delta in [0, 1); at delta 0 it is l1_sensitivity / b."""
    delta = np.asarray(delta, float)
    if not np.all((delta >= 0) & (delta < 1)):
        raise ValueError("delta must be in [0, 1)")
    return np.maximum(0.0, np.asarray(l1_sensitivity, float) / b + 2 * np.log1p(-delta))


def heterogeneous_std(
    epsilon: float,
    delta: float,
    weighted: float,
    r: ArrayLike,
    scale: Callable[..., Array] = extended_gaussian_scale,
) -> Array:
    """Return the standard deviation per component: scale(epsilon, delta, weighted) sqrt(K r), (K,).

    HGM Theorem 3 with the extended scale. Whitening shows that the noise is isotropic on
    A / sqrt(K r), so `scale=analytic_gaussian_scale` gives the exact, smaller noise.
    """
    r = np.asarray(r, float)
    return float(scale(epsilon, delta, weighted)) * np.sqrt(r.size * r)


def weighted_sensitivity(component_bounds: ArrayLike, r: ArrayLike) -> float:
    """Return the weighted L2 sensitivity of HGM: max ||(A(D) - A(D')) / sqrt(K r)||_2.

    HGM, Theorem 3. component_bounds: of |A(D) - A(D')|, shape (K,), jointly attainable in the worst
    case.
    """
    bounds, r = np.asarray(component_bounds, float), np.asarray(r, float)
    return float(np.sqrt(np.sum(bounds**2 / (r.size * r))))


def smallest_delta(event: dpa.DpEvent, adjacency: Neighbors, epsilon: float) -> float:
    """Delta of an event at epsilon, by the privacy losses that its epsilon is computed from."""
    _, losses = compute_privacy_losses([event], adjacency)
    return max(loss.delta(epsilon) for loss in losses)


def log_pmf(distribution: TrialDistribution, runs: int) -> float:
    """Return ln P(K = runs), in closed form: what draws and tails are held against."""
    from scipy.special import gammaln

    if distribution.max_runs is not None:
        from scipy.stats import binom

        return float(
            binom.logpmf(runs, distribution.max_runs, distribution.mean / distribution.max_runs)
        )
    if math.isinf(distribution.shape):
        if runs < 0:
            return -math.inf
        return float(runs * math.log(distribution.mean) - distribution.mean - gammaln(runs + 1))
    if runs < 1:
        return -math.inf
    if distribution.mean == 1:
        return 0.0 if runs == 1 else -math.inf
    log_rest = runs * math.log(-math.expm1(distribution.log_gamma))
    if distribution.shape == 0:
        return log_rest - math.log(runs) - math.log(-distribution.log_gamma)
    # For a negative shape both gamma(shape) and gamma^-shape - 1 are negative: gammaln and abs
    # take the sign out of both.
    ways = gammaln(runs + distribution.shape) - gammaln(distribution.shape) - gammaln(runs + 1)
    log_norm = math.log(abs(math.expm1(-distribution.shape * distribution.log_gamma)))
    return float(log_rest + ways - log_norm)
