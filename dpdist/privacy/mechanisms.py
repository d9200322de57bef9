"""Compute guarantees of single mechanisms from their noise, noise from guarantees, delta(epsilon).

Everything is float64 and broadcasts over array arguments. Noise scales are standard deviations, in
the units of the sensitivity. A value that is found numerically is rounded to the safe side: more
noise, larger epsilon.

Shuffled fixed batches have no plan: no useful upper bound is known, and accounting them as Poisson
sampling understates the loss, by orders of magnitude when the noise is small. The known lower
bound for one epoch is computed here (Chua et al. 2024, "How Private are DP-SGD Implementations?").
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from dpdist.privacy.guarantee import check_delta

Array = NDArray[np.float64]
_BISECTIONS = 200


def _check(epsilon: ArrayLike | None = None, delta: ArrayLike | None = None) -> None:
    if epsilon is not None and not np.all(np.asarray(epsilon) > 0):
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    if delta is not None:
        values = np.asarray(delta)
        if not np.all((values > 0) & (values < 1)):
            raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}")


def _scales(noise_scale: ArrayLike, sensitivity: ArrayLike) -> Array:
    """Return sensitivity / noise_scale, both positive."""
    noise, reach = np.asarray(noise_scale, float), np.asarray(sensitivity, float)
    if not (np.all(noise > 0) and np.all(reach > 0)):
        raise ValueError("noise scale and sensitivity must be > 0")
    scales: Array = reach / noise
    return scales


def _largest(holds: Callable[[Array], NDArray[np.bool_]], low: Array, high: Array) -> Array:
    """Return the largest x in [low, high] with holds(x), true at low, by element-wise bisection."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        inside = holds(middle)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
        if np.all(high - low <= 4e-16 * np.abs(high)):
            break
    return low


# --- Gaussian ---------------------------------------------------------------------------------


def gaussian_delta(
    epsilon: ArrayLike, noise_scale: ArrayLike, sensitivity: ArrayLike = 1.0
) -> Array:
    """Return the exact delta(epsilon) of the Gaussian mechanism (Balle and Wang 2018, Theorem 8).

    With m = sensitivity / noise_scale: Phi(m/2 - epsilon/m) - e^epsilon Phi(-m/2 - epsilon/m),
    epsilon >= 0. Evaluated through Mills' ratio, so that tiny deltas keep their digits.
    """
    m = _scales(noise_scale, sensitivity)
    epsilon = np.asarray(epsilon, float)
    if not np.all(epsilon >= 0):
        raise ValueError("epsilon must be >= 0")
    upper = m / 2 - epsilon / m
    # e^epsilon phi(upper - m) = phi(upper): both terms share the density at `upper`.
    density = np.exp(-(upper**2) / 2) / math.sqrt(2 * math.pi)
    second = _mills(m - upper)
    tail = density * (_mills(np.maximum(-upper, 0.0)) - second)
    bulk = scipy.special.ndtr(upper) - density * second
    return np.clip(np.where(upper <= 0, tail, bulk), 0.0, 1.0)


def _mills(t: Array) -> Array:
    """Return (1 - Phi(t)) / phi(t) for t >= 0."""
    ratio: Array = math.sqrt(math.pi / 2) * scipy.special.erfcx(t / math.sqrt(2))
    return ratio


def gaussian_epsilon(
    delta: ArrayLike, noise_scale: ArrayLike, sensitivity: ArrayLike = 1.0
) -> Array:
    """Return the smallest epsilon >= 0 with gaussian_delta <= delta, rounded up."""
    _check(delta=delta)
    m = _scales(noise_scale, sensitivity)
    m, target = np.broadcast_arrays(m, np.asarray(delta, float))
    high = extended_gaussian_epsilon(target, 1.0, m) + 1.0  # an upper bound, plus a margin
    free = gaussian_delta(0.0, 1.0, m) <= target
    # Search downwards: x = high - epsilon is the largest that still holds.
    saved = _largest(
        lambda x: gaussian_delta(high - x, 1.0, m) <= target, np.zeros_like(high), high.copy()
    )
    return np.where(free, 0.0, high - saved)


def analytic_gaussian_scale(
    epsilon: ArrayLike, delta: ArrayLike, sensitivity: ArrayLike = 1.0
) -> Array:
    """Return the smallest noise scale for (epsilon, delta), exact for every epsilon > 0.

    Source: Balle and Wang 2018.
    """
    _check(epsilon, delta)
    epsilon, target = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(delta, float))
    low = 1.0 / extended_gaussian_scale(epsilon, target)  # safe; the exact m is a little larger
    high = low.copy()
    while np.any(short := gaussian_delta(epsilon, 1.0, high) <= target):
        high = np.where(short, 2 * high, high)
        if np.any(high > 1e9):  # delta close to 1: any noise will do
            break
    m = _largest(lambda x: gaussian_delta(epsilon, 1.0, x) <= target, low, high)
    return np.asarray(sensitivity, float) / m


def classical_gaussian_formula(
    epsilon: ArrayLike, delta: ArrayLike, sensitivity: ArrayLike = 1.0
) -> Array:
    """Return sqrt(2 ln(1.25/delta)) * sensitivity / epsilon, for any epsilon.

    A theorem only for epsilon <= 1; see `classical_gaussian_scale`.
    """
    _check(epsilon, delta)
    factor = np.sqrt(2 * np.log(1.25 / np.asarray(delta, float)))
    scale: Array = factor * np.asarray(sensitivity, float) / np.asarray(epsilon, float)
    return scale


def classical_gaussian_scale(
    epsilon: ArrayLike, delta: ArrayLike, sensitivity: ArrayLike = 1.0
) -> Array:
    """Return the scale of the classical Gaussian mechanism (Dwork and Roth 2014, Theorem A.1).

    Raises ValueError for epsilon > 1, where the formula is not a theorem (at delta 1e-5 it first
    fails near epsilon 8.4, at delta 0.3 near 5).
    """
    if np.any(np.asarray(epsilon) > 1):
        raise ValueError(
            f"the classical Gaussian mechanism is proved for epsilon <= 1 only, got {epsilon!r}; "
            "use the analytic Gaussian"
        )
    return classical_gaussian_formula(epsilon, delta, sensitivity)


def _extended_s(delta: ArrayLike) -> Array:
    # s >= 1/2 is the proof's first condition; it matters for delta > 0.484 only.
    return np.maximum(np.log(math.sqrt(2 / math.pi) / np.asarray(delta, float)), 0.5)


def extended_gaussian_scale(
    epsilon: ArrayLike, delta: ArrayLike, sensitivity: ArrayLike = 1.0
) -> Array:
    """Return the scale of the extended Gaussian mechanism for any epsilon > 0.

    Source: HGM, IJCAI 2019, Theorem 2.

    sqrt(2) (sqrt(s) + sqrt(s + epsilon)) / (2 epsilon) * sensitivity, s = ln(sqrt(2/pi) / delta):
    the constant of the proof (the theorem's statement prints sqrt(2)/pi). Sound but loose.
    """
    _check(epsilon, delta)
    epsilon, s = np.asarray(epsilon, float), _extended_s(delta)
    unit = (np.sqrt(s) + np.sqrt(s + epsilon)) / (math.sqrt(2) * epsilon)
    scale: Array = unit * np.asarray(sensitivity, float)
    return scale


def extended_gaussian_epsilon(
    delta: ArrayLike, noise_scale: ArrayLike, sensitivity: ArrayLike = 1.0
) -> Array:
    """Return the inverse of `extended_gaussian_scale` in closed form: m sqrt(2 s) + m^2 / 2."""
    _check(delta=delta)
    m = _scales(noise_scale, sensitivity)
    return m * np.sqrt(2 * _extended_s(delta)) + m**2 / 2


# --- heterogeneous and multivariate Gaussian --------------------------------------------------


def mahalanobis_sensitivity(covariance: ArrayLike, bounds: float | ArrayLike) -> float:
    """Return at least sup ||S^(-1/2) v||_2 over differences v of neighbors, S the covariance.

    Noise N(0, S) is the Gaussian mechanism of standard deviation 1 at this sensitivity: S^(-1/2)
    turns one into the other and back. covariance: symmetric, (K, K), fixed without private records.
    bounds: of ||v||_2, or of each |v_i|, (K,); exact for the first, and for a diagonal covariance.
    Infinite where a direction has no noise. Raises ValueError for what is no covariance.
    """
    noise, reach = np.asarray(covariance, float), np.asarray(bounds, float)
    if noise.ndim != 2 or noise.shape[0] != noise.shape[1] or noise.size == 0:
        raise ValueError(f"covariance: must be a square matrix, got shape {noise.shape}")
    if not np.all(np.isfinite(noise)) or np.abs(noise - noise.T).max() > 1e-9 * np.abs(noise).max():
        raise ValueError("covariance: must be symmetric and of finite numbers")
    if reach.shape not in ((), noise.shape[:1]) or not np.all((reach > 0) & np.isfinite(reach)):
        raise ValueError(f"bounds: must be one number > 0, or {len(noise)}, got {reach.tolist()}")
    values, vectors = np.linalg.eigh((noise + noise.T) / 2)
    error = 4 * len(noise) * np.finfo(float).eps * np.abs(values).max()  # of an eigenvalue
    if values[0] < -error:
        raise ValueError(f"covariance: has a negative eigenvalue, {values[0]:.4g}")
    if values[0] <= 2 * error:
        return math.inf
    by_norm = float(np.linalg.norm(reach) / math.sqrt(values[0] - error))
    if not reach.shape:
        return by_norm
    inverse = np.abs((vectors / (values - error)) @ vectors.T)
    return min(by_norm, float(np.sqrt(reach @ inverse @ reach)))


# --- shuffled fixed batches -------------------------------------------------------------------


_POINTS = 20_001


def shuffled_delta_lower_bound(epsilon: float, noise_multiplier: float, steps: int) -> float:
    """Return a lower bound of delta for one shuffled epoch of `steps` batches, at `epsilon`.

    All records but one pull one way, the remaining one the other way (or is blanked out); the event
    is that some batch's noisy sum exceeds a threshold, and the best threshold on a grid is taken.
    Any threshold gives a valid bound. Raises ValueError unless noise_multiplier > 0, steps >= 1.
    """
    if noise_multiplier <= 0 or steps < 1 or epsilon < 0:
        raise ValueError("noise_multiplier > 0, steps >= 1 and epsilon >= 0 are needed")
    reach = noise_multiplier * (np.sqrt(2 * np.log(steps + 1)) + 12)
    threshold = np.linspace(-1.0, 2.0 + reach, _POINTS)
    others = (steps - 1) * scipy.stats.norm.logcdf(threshold / noise_multiplier)
    present = -np.expm1(scipy.stats.norm.logcdf((threshold - 2) / noise_multiplier) + others)
    blanked = -np.expm1(scipy.stats.norm.logcdf((threshold - 1) / noise_multiplier) + others)
    with np.errstate(over="ignore", invalid="ignore"):
        gap = present - np.exp(min(epsilon, 700.0)) * blanked
    return float(max(0.0, np.nanmax(gap)))


def shuffled_epsilon_lower_bound(delta: float, noise_multiplier: float, steps: int) -> float:
    """Return a lower bound of epsilon for one shuffled epoch, at `delta`; 0 if it says nothing."""
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
