"""Confidence bounds for probabilities and expected scores: pure functions of counts and sums.

All functions take scalars or arrays (broadcast together), work in float64 and round outwards, so
that a bound is never on the wrong side of the exact one. They hold for independent draws whose
number was fixed in advance; early-stopped counts need ``dpdist.certification.sequential``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dpdist.base.binomial import MARGIN, check_alpha

Bound = np.ndarray | np.float64


def hoeffding_interval(
    mean: ArrayLike,
    draws: ArrayLike,
    alpha: ArrayLike,
    *,
    classes: int = 1,
    low: float = 0.0,
    high: float = 1.0,
) -> tuple[Bound, Bound]:
    """Interval for the expectation of scores in [low, high] from their sample ``mean``.

    With ``classes`` = K the lower and the upper bound of all K expectations hold together with
    probability at least 1 - alpha (union bound over 2K one-sided statements), half width
    (high - low) * sqrt(ln(2K / alpha) / (2 draws)). Clipped to [low, high].
    Source: Hoeffding, JASA 1963, Theorem 2.

    Raises ValueError for a mean outside [low, high], draws or classes < 1, alpha outside (0, 1).
    """
    m, n, log_term = _scores(mean, draws, alpha, classes, low, high)
    half = (high - low) * np.sqrt(log_term / (2 * n)) * (1 + MARGIN)
    return _clip_interval(m, half, low, high)


def empirical_bernstein_interval(
    mean: ArrayLike,
    variance: ArrayLike,
    draws: ArrayLike,
    alpha: ArrayLike,
    *,
    classes: int = 1,
    low: float = 0.0,
    high: float = 1.0,
) -> tuple[Bound, Bound]:
    """Interval for the expectation of scores in [low, high] from sample mean and variance.

    ``variance`` is the unbiased sample variance (divisor draws - 1). With ``classes`` = K all K
    lower and K upper bounds hold together with probability at least 1 - alpha; half width, with
    d = alpha / (2K) and scores scaled to [0, 1]: sqrt(2 V ln(2/d) / n) + 7 ln(2/d) / (3 (n - 1)).
    Source: Maurer and Pontil, COLT 2009, Theorem 4.

    Raises ValueError for draws < 2, a negative variance, and what ``hoeffding_interval`` refuses.
    """
    m, n, log_term = _scores(mean, draws, alpha, classes, low, high)
    v = np.asarray(variance, dtype=np.float64)
    if np.any(n < 2):
        raise ValueError("draws must be at least 2 for a sample variance")
    if not np.all(v >= 0):
        raise ValueError("variance must be non-negative and finite")
    log_two = log_term + np.log(2.0)
    span = high - low
    half = np.sqrt(2 * v * log_two / n) + span * 7 * log_two / (3 * (n - 1))
    return _clip_interval(m, half * (1 + MARGIN), low, high)


def _scores(
    mean: ArrayLike, draws: ArrayLike, alpha: ArrayLike, classes: int, low: float, high: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = np.asarray(mean, dtype=np.float64)
    n = np.asarray(draws, dtype=np.float64)
    if not high > low:
        raise ValueError(f"high must exceed low, got [{low}, {high}]")
    if not np.all((m >= low) & (m <= high)):
        raise ValueError(f"mean must lie in [{low}, {high}]")
    if not np.all(n >= 1):
        raise ValueError(f"draws must be at least 1, got {draws!r}")
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")
    return m, n, np.log(2 * classes) - np.log(check_alpha(alpha))


def _clip_interval(
    mean: np.ndarray, half: np.ndarray, low: float, high: float
) -> tuple[Bound, Bound]:
    return np.clip(mean - half, low, high)[()], np.clip(mean + half, low, high)[()]
