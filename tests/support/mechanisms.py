"""Mechanisms that nothing here releases: what accounting and claims are held against."""

from __future__ import annotations

from collections.abc import Callable

import dp_accounting as dpa
import numpy as np
from numpy.typing import ArrayLike

from dpdist.privacy.accounting import compute_privacy_losses
from dpdist.privacy.guarantee import Neighbors
from dpdist.privacy.mechanisms import Array, extended_gaussian_scale


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


def smallest_delta(event: dpa.DpEvent, adjacency: Neighbors, epsilon: float) -> float:
    """Delta of an event at epsilon, by the privacy losses that its epsilon is computed from."""
    _, losses = compute_privacy_losses([event], adjacency)
    return max(loss.delta(epsilon) for loss in losses)
