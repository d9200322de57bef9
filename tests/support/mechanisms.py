"""Mechanisms that nothing here releases: what accounting and claims are held against."""

from __future__ import annotations

from collections.abc import Callable

import dp_accounting as dpa
import numpy as np
from numpy.typing import ArrayLike

from dpdist.privacy.accounting import compute_privacy_losses
from dpdist.privacy.guarantee import Neighbours
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


def smallest_delta(event: dpa.DpEvent, neighbours: Neighbours, epsilon: float) -> float:
    """Delta of an event at epsilon, by the privacy losses that its epsilon is computed from."""
    _, losses = compute_privacy_losses([event], neighbours)
    return max(loss.delta(epsilon) for loss in losses)


def weighted_sensitivity(component_bounds: ArrayLike, r: ArrayLike) -> float:
    """Return the L2 norm of (A(D) - A(D')) / sqrt(K r) by bounds of components: HGM, Theorem 3.

    component_bounds: shape (K,) and jointly attainable in the worst case. Raises ValueError unless
    r > 0 and sums to 1.
    """
    bounds, r = np.asarray(component_bounds, float), np.asarray(r, float)
    if r.shape != bounds.shape or r.ndim != 1:
        raise ValueError(f"bounds and r must be vectors of one length: {bounds.shape}, {r.shape}")
    if np.any(r <= 0) or abs(r.sum() - 1) > 1e-9:
        raise ValueError("r must be positive and sum to 1")
    return float(np.sqrt(np.sum(bounds**2 / (r.size * r))))
