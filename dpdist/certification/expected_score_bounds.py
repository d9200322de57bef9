"""Certificates from expected scores under noise in the network (PixelDP and its descendants).

If the network from the noise on is (epsilon, delta)-DP for inputs at distance mu, its expected
scores cannot change by more than e^epsilon and delta, so the label stays when
p_a > e^(2 epsilon) p_b + (1 + e^epsilon) delta (Lecuyer et al., IEEE S&P 2019, Proposition 2). The
noise is fixed; the certified size is the largest mu for which some (epsilon, delta) satisfies that
condition and is provided by the noise at sensitivity (operator norm times mu). Here p_a is a lower
bound of the label's expected score and p_b an upper bound of every other class's, all at one
confidence.

``sensitivity`` is the norm of the layers before the noise, from the certified norm of the input to
L2 (Gaussian) or L1 (Laplace): see ``dpdist.certification.operator_norms``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpdist.base.binomial import clopper_pearson_interval
from dpdist.certification.bounds import (
    Bound,
    empirical_bernstein_interval,
    hoeffding_interval,
)
from dpdist.certification.radii import gaussian_l2_radius_two_class
from dpdist.privacy import mechanisms

_ROWS = 500  # inputs at once
SCORE_UNIT = 2**20  # scores are counted in these units: sums of integers have no order

# Noise scales for (epsilon, delta) at sensitivity 1: arrays to an array.
Scale = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Sensitivity:
    """Norms of the first layer over sqrt(K r), from the input to L2; true upper bounds.

    as_printed: the one HGM's Equation 6 prints for one feature map. It is none.
    """

    l2: float
    linf: float
    as_printed: float


@dataclass(frozen=True)
class ScoreBounds:
    """Lower and upper bounds of the K expected scores, all 2K valid together at the confidence.

    Of one input, (K,), where all that follows is a number; of N inputs, (N, K), where it is (N,).
    """

    lower: np.ndarray
    upper: np.ndarray

    @property
    def label(self) -> Any:
        """The class with the largest lower bound; may be chosen after seeing the bounds."""
        return np.argmax(self.lower, -1).tolist() if self.lower.ndim == 1 else self._label[..., 0]

    @property
    def p_a(self) -> Any:
        return self._one(np.take_along_axis(self.lower, self._label, -1)[..., 0])

    @property
    def p_b(self) -> Any:
        """The largest upper bound among the other classes."""
        others = self.upper.copy()
        np.put_along_axis(others, self._label, 0.0, -1)
        return self._one(others.max(-1))

    @property
    def _label(self) -> np.ndarray:
        return np.argmax(self.lower, -1, keepdims=True)

    def _one(self, values: np.ndarray) -> Any:
        """As a number, of one input."""
        return float(values) if self.lower.ndim == 1 else values


def score_bounds_hoeffding(
    sums: np.ndarray, draws: int, confidence: float, *, paper_faithful: bool = False
) -> ScoreBounds:
    """Bounds from the sums of scores in [0, 1] over ``draws``, shape (K,) or (N, K).

    confidence: eta, e.g. 0.95. The error 1 - eta is shared by K lower and K upper bounds,
    ln(2K / (1 - eta)); ``paper_faithful`` takes ln(K / (1 - eta)) as the papers print it, whose
    true error is up to twice the stated one.
    """
    alpha = _error(confidence) * (2 if paper_faithful else 1)
    sums = np.asarray(sums, dtype=np.float64)
    means = np.clip(sums / draws, 0.0, 1.0)
    return _bounds(hoeffding_interval(means, draws, alpha, classes=sums.shape[-1]))


def score_bounds_bernstein(
    sums: np.ndarray, squares: np.ndarray, draws: int, confidence: float
) -> ScoreBounds:
    """As ``score_bounds_hoeffding``, by the empirical Bernstein bound from sums of squares too."""
    sums = np.asarray(sums, dtype=np.float64)
    means = np.clip(sums / draws, 0.0, 1.0)
    spread = np.maximum(np.asarray(squares, dtype=np.float64) - draws * means**2, 0.0)
    variances = spread / (draws - 1)
    alpha = _error(confidence)
    classes = sums.shape[-1]
    return _bounds(empirical_bernstein_interval(means, variances, draws, alpha, classes=classes))


def score_bounds_counts(
    histogram: np.ndarray, confidence: float, draws: int | None = None
) -> ScoreBounds:
    """The argmax-count variant: scores are one-hot, Clopper-Pearson at (1 - eta) / (2K) a side.

    draws: how many were made; one without a class has score 0 in every class. None: all had one.
    """
    counts = np.asarray(histogram)
    alpha = _error(confidence) / counts.shape[-1]
    n = counts.sum(-1, keepdims=True) if draws is None else draws
    return _bounds(clopper_pearson_interval(counts, n, alpha))


def classical_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """PixelDP's certificate: classical Gaussian mechanism, epsilon <= 1 (HGM paper, Eq. 5)."""
    return _largest_size(
        bounds, std, sensitivity, _scale(mechanisms.classical_gaussian_formula), largest=1.0
    )


def analytic_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """The same condition with the exact (epsilon, delta) profile (Balle and Wang, ICML 2018)."""
    return _largest_size(bounds, std, sensitivity, _scale(mechanisms.analytic_gaussian_scale))


def extended_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """The extended Gaussian mechanism, any epsilon (HGM, IJCAI 2019, Theorem 2)."""
    return _largest_size(bounds, std, sensitivity, _scale(mechanisms.extended_gaussian_scale))


def heterogeneous_gaussian_size(
    bounds: ScoreBounds, std: float, sensitivity: float, *, paper_faithful: bool = False
) -> Any:
    """HGM's certificate: noise std * sqrt(K r) per component, weighted sensitivity.

    ``sensitivity`` is that of the output divided by sqrt(K r), of all feature maps jointly.
    Equation 10 of the paper divides by epsilon twice; ``paper_faithful`` does so too and is not
    valid for epsilon > 1 (it overstates the size by epsilon).
    """
    scale = _scale(mechanisms.extended_gaussian_scale)
    if not paper_faithful:
        return _largest_size(bounds, std, sensitivity, scale)
    return _largest_size(
        bounds, std, sensitivity, lambda epsilon, delta: scale(epsilon, delta) / epsilon
    )


def exact_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """The exact Gaussian certificate, std / (2 sensitivity) (Phi^-1(p_a) - Phi^-1(p_b)).

    Never smaller than any certificate through (epsilon, delta). Holds for expected scores in
    [0, 1] as for probabilities of classes: Salman et al., NeurIPS 2019, Lemma 2.
    """
    _check(std, sensitivity)
    return gaussian_l2_radius_two_class(bounds.p_a, bounds.p_b, std) / sensitivity


def pure_epsilon(bounds: ScoreBounds) -> Any:
    """The largest epsilon with p_a >= e^(2 epsilon) p_b; 0 when the label is not ahead."""
    p_a, p_b = np.asarray(bounds.p_a), np.asarray(bounds.p_b)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(p_a <= p_b, 0.0, np.log(p_a / p_b) / 2 * (1 - 1e-14))
    return found[()]


def _largest_size(
    bounds: ScoreBounds, std: float, sensitivity: float, scale: Scale, largest: float = 30.0
) -> Any:
    """max over epsilon of std / (sensitivity * scale(epsilon, delta)), delta as the condition lets.

    Any epsilon gives a valid size, so an imperfect maximum is smaller, but not wrong.
    """
    _check(std, sensitivity)
    limit = np.atleast_1d(np.minimum(largest, pure_epsilon(bounds)))
    p_a, p_b = np.atleast_1d(bounds.p_a), np.atleast_1d(bounds.p_b)
    found, ahead = np.zeros(len(limit)), np.flatnonzero(limit > 0)
    for start in range(0, len(ahead), _ROWS):
        rows = ahead[start : start + _ROWS]
        of = (p_a[rows], p_b[rows], np.log(limit[rows]), std, sensitivity, scale)
        found[rows] = _largest_sizes(*of)
    return found if bounds.lower.ndim > 1 else float(found[0])


def _largest_sizes(
    p_a: np.ndarray,
    p_b: np.ndarray,
    log_limit: np.ndarray,
    std: float,
    sensitivity: float,
    scale: Scale,
) -> np.ndarray:
    """As `_largest_size`, of inputs whose label is ahead: float64 (N,)."""

    def sizes(log_epsilons: np.ndarray) -> np.ndarray:
        epsilons = np.exp(log_epsilons)
        # A hair below equality: the condition is strict.
        left = p_a[:, None] - np.exp(2 * epsilons) * p_b[:, None]
        deltas = left / (1 + np.exp(epsilons)) * (1 - 1e-12)
        found = np.zeros_like(epsilons)
        usable = (deltas > 1e-300) & (deltas < 1)
        if usable.any():
            scales = scale(epsilons[usable], deltas[usable])
            found[usable] = std / (sensitivity * scales)
        return found

    rows, last = np.arange(len(p_a)), 120
    grid = np.linspace(log_limit - 12, log_limit, last + 1, axis=1)
    largest_size = np.zeros(len(p_a))
    for _ in range(3):  # the grid, then twice a finer one around its best point
        found = sizes(grid)
        best = np.argmax(found, axis=1)
        largest_size = np.maximum(largest_size, found[rows, best])
        around = (grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, last)])
        last = 40
        grid = np.linspace(*around, last + 1, axis=1)
    return largest_size


def _bounds(interval: tuple[Bound, Bound]) -> ScoreBounds:
    return ScoreBounds(np.asarray(interval[0]), np.asarray(interval[1]))


def _scale(mechanism: Callable[..., np.ndarray]) -> Scale:
    return lambda epsilons, deltas: mechanism(epsilons, deltas)


def _error(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    return 1 - confidence


def _check(noise: float, sensitivity: float) -> None:
    if not (noise > 0 and sensitivity > 0):
        raise ValueError(f"noise and sensitivity must be positive, got {noise} and {sensitivity}")
