"""From bounds to certified radii: pure, vectorised functions in float64 that never round up.

A radius is in the units of the model's input ([0, 1] pixels). 0 means that nothing is certified.
"""

from __future__ import annotations

import math

import numpy as np
import scipy
from numpy.typing import ArrayLike

from dpdist.base.rounding import bound

# ndtri, log and products are good to a few units in the last place; this margin covers them.
_MARGIN = 1e-14

Radius = np.ndarray | np.float64


def norm_name(norm: str) -> str:
    """Of a norm's key, as people write it."""
    return {"l1": "L1", "l2": "L2", "linf": "L-infinity"}.get(norm, norm)


def gaussian_l2_radius(p_lower: ArrayLike, sigma: ArrayLike) -> Radius:
    """L2 radius sigma * Phi^-1(p_lower) of Gaussian smoothing; 0 where p_lower <= 1/2.

    ``p_lower`` is a lower bound of the probability of the predicted class under N(0, sigma^2 I).
    Source: Cohen et al., ICML 2019, Theorem 1 with p_B = 1 - p_A.
    """
    p, s = _probability(p_lower, "p_lower"), _positive(sigma, "sigma")
    return _down(s * scipy.special.ndtri(p))


def gaussian_l2_radius_two_class(
    p_lower: ArrayLike, runner_up_upper: ArrayLike, sigma: ArrayLike
) -> Radius:
    """L2 radius sigma / 2 * (Phi^-1(p_a) - Phi^-1(p_b)), exact by the Neyman-Pearson lemma.

    ``runner_up_upper`` bounds every other class from above; both bounds must hold together at the
    stated confidence. Source: Cohen et al., ICML 2019, Theorem 1.
    """
    p, s = _probability(p_lower, "p_lower"), _positive(sigma, "sigma")
    other = _probability(runner_up_upper, "runner_up_upper")
    # The runner-up cannot have more than what the winner leaves.
    other = np.minimum(other, np.nextafter(1 - p, 2))
    with np.errstate(invalid="ignore"):
        gap = scipy.special.ndtri(p) - scipy.special.ndtri(other)
    return _down(s / 2 * gap)


def gaussian_probability_for_radius(radius: ArrayLike, sigma: ArrayLike) -> Radius:
    """Phi(radius / sigma): the class probability above which ``radius`` is certified."""
    r = np.asarray(radius, dtype=np.float64)
    if not np.all(r >= 0):
        raise ValueError(f"radius must not be negative, got {radius!r}")
    return scipy.special.ndtr(r / _positive(sigma, "sigma"))


def laplace_l1_radius(p_lower: ArrayLike, scale: ArrayLike) -> Radius:
    """L1 radius -scale * ln(2 (1 - p_lower)) of independent Laplace(scale) noise per coordinate.

    Source: Teng et al., "l1 adversarial robustness certificates" (2019), Theorem 1; tight for
    the two-class bound p_B = 1 - p_A.
    """
    p, b = _probability(p_lower, "p_lower"), _positive(scale, "scale")
    with np.errstate(divide="ignore"):
        return _down(-b * np.log(2 * (1 - p)))


def uniform_l1_radius(p_lower: ArrayLike, half_width: ArrayLike) -> Radius:
    """L1 radius 2 * half_width * (p_lower - 1/2) of uniform noise on [-half_width, half_width]^d.

    Source: Yang et al., ICML 2020, Table 1 (uniform noise, L1).
    """
    p, w = _probability(p_lower, "p_lower"), _positive(half_width, "half_width")
    return _down(2 * w * (p - 0.5))


def linf_from_l2(l2_radius: ArrayLike, dimension: int) -> Radius:
    """Largest L-infinity ball inside an L2 ball in ``dimension`` coordinates: radius / sqrt(d)."""
    return _down(_distance(l2_radius) / np.sqrt(_dimension(dimension)))


def ball_factor(certified: str, attacked: str, numbers: int) -> float:
    """The certified radius that contains the attacked ball of size 1, in ``numbers`` dimensions.

    Raises ValueError for an unknown norm.
    """
    order = {"l1": 1.0, "l2": 2.0, "linf": math.inf}
    if certified not in order or attacked not in order:
        raise ValueError(f"norms must be l1, l2 or linf, got {certified!r} and {attacked!r}")
    p, q = order[certified], order[attacked]
    # ||x||_p <= n^(1/p - 1/q) ||x||_q for p <= q, and ||x||_p <= ||x||_q otherwise.
    return numbers ** (1 / p - 1 / q) if p < q else 1.0


def format_radius(radius: float, digits: int = 3) -> str:
    """Return a radius with so many decimals, rounded down: text must not enlarge a guarantee."""
    return bound(radius, digits)


def _down(radius: ArrayLike) -> Radius:
    r = np.asarray(radius, dtype=np.float64)
    return np.where(r > 0, r * (1 - _MARGIN), 0.0)[()]


def _probability(value: ArrayLike, name: str) -> np.ndarray:
    p = np.asarray(value, dtype=np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    return p


def _positive(value: ArrayLike, name: str) -> np.ndarray:
    v = np.asarray(value, dtype=np.float64)
    if not np.all((v > 0) & np.isfinite(v)):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return v


def _distance(value: ArrayLike) -> np.ndarray:
    v = np.asarray(value, dtype=np.float64)
    if not np.all(v >= 0):
        raise ValueError(f"radius must not be negative, got {value!r}")
    return v


def _dimension(dimension: int) -> int:
    if dimension < 1:
        raise ValueError(f"dimension must be at least 1, got {dimension}")
    return dimension
