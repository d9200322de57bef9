"""Exact confidence bounds of a probability, as pure functions of integer counts.

All functions take scalars or arrays (broadcast together), compute in float64 and round outwards, so
that a bound is never on the wrong side of the exact one. They are valid for independent draws whose
number is fixed in advance.
"""

from __future__ import annotations

import numpy as np
import scipy  # `special` is loaded when a bound is first asked for
from numpy.typing import ArrayLike

# Inverse incomplete beta functions have a relative error of about 1e-14; this margin covers it and
# is far below any printed digit.
RELATIVE_MARGIN = 1e-13

Bound = np.ndarray | np.float64


def clopper_pearson_lower(hits: ArrayLike, draws: ArrayLike, alpha: ArrayLike) -> Bound:
    """Return the one-sided lower confidence bound of a probability, from hits in draws.

    It is the largest p with Pr[Binomial(draws, p) >= hits] <= alpha; 0 when hits = 0. The true
    probability lies below it with probability at most alpha. Exact for counts up to 1e9 and more.
    Source: Clopper and Pearson, Biometrika 1934; used by Cohen et al., ICML 2019, Section 3.2.2.

    Raises ValueError unless 0 <= hits <= draws, draws >= 1 and 0 < alpha < 1.
    """
    k, n, a = _validate_counts(hits, draws, alpha)
    return _lower_bound_and_complement(k, n, a)[0][()]


def clopper_pearson_upper(hits: ArrayLike, draws: ArrayLike, alpha: ArrayLike) -> Bound:
    """Return the one-sided upper confidence bound of a probability; 1 when hits = draws.

    See ``clopper_pearson_lower``.
    """
    k, n, a = _validate_counts(hits, draws, alpha)
    return _lower_bound_and_complement(n - k, n, a)[1][()]


def clopper_pearson_interval(
    hits: ArrayLike, draws: ArrayLike, alpha: ArrayLike
) -> tuple[Bound, Bound]:
    """Return a two-sided confidence interval of a probability.

    Its error is at most alpha in all, alpha / 2 on each side.
    """
    half = np.asarray(alpha, dtype=np.float64) / 2
    return clopper_pearson_lower(hits, draws, half), clopper_pearson_upper(hits, draws, half)


def hoeffding_lower(hits: ArrayLike, draws: ArrayLike, alpha: ArrayLike) -> Bound:
    """Return Hoeffding's one-sided lower confidence bound of a probability.

    hits / draws - sqrt(ln(1 / alpha) / (2 draws)), 0 where that is negative, rounded down. The true
    probability lies below it with probability at most alpha. It is never above
    ``clopper_pearson_lower``, which is the largest bound of its kind. Source: Hoeffding, Journal of
    the American Statistical Association 1963, Theorem 1.

    Raises ValueError unless 0 <= hits <= draws, draws >= 1 and 0 < alpha < 1.
    """
    k, n, a = _validate_counts(hits, draws, alpha)
    width = np.sqrt(-np.log(a) / (2 * n)) * (1 + RELATIVE_MARGIN)
    found: Bound = np.maximum((k / n - width) * (1 - RELATIVE_MARGIN) - RELATIVE_MARGIN, 0.0)[()]
    return found


def two_sided_p_value(hits: int, draws: int) -> float:
    """Return the p value of hits or more extreme under Binomial(draws, 1/2)."""
    most = max(hits, draws - hits)
    if 2 * most == draws:  # also without draws
        return 1.0
    return float(min(1.0, 2 * scipy.special.betainc(most, draws - most + 1, 0.5)))


def check_alpha(alpha: ArrayLike) -> np.ndarray:
    """Return alpha as a float64 array.

    Raises ValueError unless every entry lies strictly between 0 and 1.
    """
    a = np.asarray(alpha, dtype=np.float64)
    if not np.all((a > 0) & (a < 1)):
        raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha!r}")
    return a


def _validate_counts(
    hits: ArrayLike, draws: ArrayLike, alpha: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    k = np.asarray(hits, dtype=np.float64)
    n = np.asarray(draws, dtype=np.float64)
    if not (np.all(k == np.floor(k)) and np.all(n == np.floor(n))):
        raise ValueError("hits and draws must be whole numbers")
    if not np.all((n >= 1) & np.isfinite(n)):
        raise ValueError(f"draws must be at least 1, got {draws!r}")
    if not np.all((k >= 0) & (k <= n)):
        raise ValueError(f"hits must lie between 0 and draws, got {hits!r} of {draws!r}")
    k, n, a = np.broadcast_arrays(k, n, check_alpha(alpha))
    return k, n, a


def _lower_bound_and_complement(
    k: np.ndarray, n: np.ndarray, a: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return p_lower rounded down and 1 - p_lower rounded up, exact even when tiny."""
    positive = np.maximum(k, 1)
    p = scipy.special.betaincinv(positive, n - positive + 1, a)
    q = scipy.special.betainccinv(n - positive + 1, positive, a)
    # At k = n the bound is alpha ** (1 / n), whose complement expm1 keeps to full precision.
    q = np.where(k == n, -np.expm1(np.log(a) / n), q)
    q = np.where(k == 0, 1.0, np.minimum(q * (1 + RELATIVE_MARGIN), 1.0))
    near_one = q < 0.5
    p = np.where(near_one, np.nextafter(1 - q, 0), p * (1 - RELATIVE_MARGIN))
    p = np.where(k == 0, 0.0, p)
    q = np.where(near_one, q, np.nextafter(1 - p, 2))
    return p, np.minimum(q, 1.0)
