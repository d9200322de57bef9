"""Confidence bounds of expected scores, and the sizes they certify under noise in the network.

Hoeffding's and the empirical Bernstein bound are pure functions of counts and sums, in float64,
rounded outwards, for independent draws whose number was fixed in advance; early-stopped counts
need ``dpdist.certification.sequential``.

Betting bounds an expected score from a histogram of scores. Let the mean of scores in [0, 1] be at
most m. A capital that stakes the fraction f of itself on each draw x being more than m grows by 1 -
f + f x / m, at most 1 on average. So does its mean over several f chosen beforehand, and it exceeds
1 / alpha with probability at most alpha (Markov, and Ville for all numbers of draws at once). The
lower bound is the smallest mean that is not refuted. In Waudby-Smith and Ramdas (JRSS B 2024,
"Estimating means of bounded random variables by betting") the stake follows the draws; here the
stakes are fixed and mixed, so that a histogram suffices and the order of the draws does not matter.
If scores vary little, the interval is much narrower than Hoeffding's, without the second term of
the empirical Bernstein bound. Scores are counted in bins, finest near 0 and 1, where most are, with
their sum in each bin. Every score is then moved to the ends of its bin, with weights that keep the
mean: ln of the capital is concave in each score, so that this can only make it smaller.

Certified sizes (PixelDP and its descendants): if the network after the noise is (epsilon,
delta)-DP for inputs at distance mu, its expected scores cannot change by more than e^epsilon and
delta, so the label stays if p_a > e^(2 epsilon) p_b + (1 + e^epsilon) delta (Lecuyer et al., IEEE
S&P 2019, Proposition 2). The noise is fixed; the certified size is the largest mu for which some
(epsilon, delta) satisfies that condition and is provided by the noise at sensitivity (operator norm
times mu). Here p_a is a lower bound of the label's expected score and p_b an upper bound of every
other class's, all at one confidence. ``sensitivity`` is the norm of the layers before the noise,
from the certified norm of the input to L2 (Gaussian) or L1 (Laplace): see
``dpdist.certification.operator_norms``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from dpdist.certification.noise import gaussian_l2_radius_two_class
from dpdist.core.binomial import RELATIVE_MARGIN, check_alpha, clopper_pearson_interval
from dpdist.privacy import mechanisms

# --- Hoeffding and empirical Bernstein --------------------------------------------------------


Bound = np.ndarray | np.float64


def hoeffding_interval(
    mean: ArrayLike, draws: ArrayLike, alpha: ArrayLike, *, classes: int = 1
) -> tuple[Bound, Bound]:
    """Return an interval for the expectation of scores in [0, 1] from their sample ``mean``.

    With ``classes`` = K the lower and the upper bound of all K expectations are valid together with
    probability at least 1 - alpha (union bound over 2K one-sided statements), half width
    sqrt(ln(2K / alpha) / (2 draws)). Clipped to [0, 1].
    Source: Hoeffding, JASA 1963, Theorem 2.

    Raises ValueError for a mean outside [0, 1], draws or classes < 1, alpha outside (0, 1).
    """
    m, n, log_term = _check_sample(mean, draws, alpha, classes)
    half = np.sqrt(log_term / (2 * n)) * (1 + RELATIVE_MARGIN)
    return _clip_interval(m, half)


def empirical_bernstein_interval(
    mean: ArrayLike, variance: ArrayLike, draws: ArrayLike, alpha: ArrayLike, *, classes: int = 1
) -> tuple[Bound, Bound]:
    """Return an interval for the expectation of scores in [0, 1] from sample mean and variance.

    ``variance`` is the unbiased sample variance (divisor draws - 1). With ``classes`` = K all K
    lower and K upper bounds are valid together with probability at least 1 - alpha; half width,
    with d = alpha / (2K): sqrt(2 V ln(2/d) / n) + 7 ln(2/d) / (3 (n - 1)).
    Source: Maurer and Pontil, COLT 2009, Theorem 4.

    Raises ValueError for draws < 2, a negative variance, and as ``hoeffding_interval``.
    """
    m, n, log_term = _check_sample(mean, draws, alpha, classes)
    v = np.asarray(variance, dtype=np.float64)
    if np.any(n < 2):
        raise ValueError("draws must be at least 2 for a sample variance")
    if not np.all(v >= 0):
        raise ValueError("variance must be non-negative and finite")
    log_two = log_term + np.log(2.0)
    half = np.sqrt(2 * v * log_two / n) + 7 * log_two / (3 * (n - 1))
    return _clip_interval(m, half * (1 + RELATIVE_MARGIN))


def _check_sample(
    mean: ArrayLike, draws: ArrayLike, alpha: ArrayLike, classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = np.asarray(mean, dtype=np.float64)
    n = np.asarray(draws, dtype=np.float64)
    if not np.all((m >= 0) & (m <= 1)):
        raise ValueError("mean must lie in [0, 1]")
    if not np.all(n >= 1):
        raise ValueError(f"draws must be at least 1, got {draws!r}")
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")
    return m, n, np.log(2 * classes) - np.log(check_alpha(alpha))


def _clip_interval(mean: np.ndarray, half: np.ndarray) -> tuple[Bound, Bound]:
    return np.clip(mean - half, 0.0, 1.0)[()], np.clip(mean + half, 0.0, 1.0)[()]


# --- certified sizes --------------------------------------------------------------------------


_ROWS = 500  # inputs at once
SCORE_UNIT = 2**20  # scores are counted in these units: sums of integers have no order

# Noise scales for (epsilon, delta) at sensitivity 1: arrays to an array.
Scale = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Sensitivity:
    """Upper bounds of the norms of the first layer over sqrt(K r), from the input to L2.

    as_printed: that of HGM's Equation 6 for one feature map, which is not an upper bound.
    """

    l2: float
    linf: float
    as_printed: float


@dataclass(frozen=True)
class ScoreBounds:
    """Lower and upper bounds of the K expected scores, all 2K valid together at the confidence.

    Arrays (K,) of one input, whose properties are numbers; or (N, K) of N inputs, whose properties
    are arrays (N,).
    """

    lower: np.ndarray
    upper: np.ndarray

    @property
    def label(self) -> Any:
        """Return the class with the largest lower bound; it may be chosen by the bounds."""
        label = np.argmax(self.lower, -1)
        return label if self.lower.ndim > 1 else int(label)

    @property
    def p_a(self) -> Any:
        """Return the largest lower bound."""
        largest = self.lower.max(-1)
        return largest if self.lower.ndim > 1 else float(largest)

    @property
    def p_b(self) -> Any:
        """Return the largest upper bound among the other classes."""
        others = self.upper.copy()
        np.put_along_axis(others, np.argmax(self.lower, -1, keepdims=True), 0.0, -1)
        largest = others.max(-1)
        return largest if self.lower.ndim > 1 else float(largest)


def score_bounds_hoeffding(
    sums: np.ndarray, draws: int, confidence: float, *, paper_faithful: bool = False
) -> ScoreBounds:
    """Return bounds from the sums of scores in [0, 1] over ``draws``, shape (K,) or (N, K).

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
    """Return bounds as ``score_bounds_hoeffding``, by empirical Bernstein from squares too."""
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
    """Return bounds of one-hot scores, by Clopper-Pearson at (1 - eta) / (2K) a side.

    draws: their number; those without a class have score 0 in every class. None: all had a class.
    """
    counts = np.asarray(histogram)
    alpha = _error(confidence) / counts.shape[-1]
    n = counts.sum(-1, keepdims=True) if draws is None else draws
    return _bounds(clopper_pearson_interval(counts, n, alpha))


def classical_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """Return PixelDP's size: classical Gaussian mechanism, epsilon <= 1 (HGM paper, Eq. 5)."""
    return _largest_size(
        bounds, std, sensitivity, mechanisms.classical_gaussian_formula, largest=1.0
    )


def analytic_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """Return PixelDP's size with the exact (epsilon, delta) profile (Balle and Wang, ICML 2018)."""
    return _largest_size(bounds, std, sensitivity, mechanisms.analytic_gaussian_scale)


def extended_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """Return the size by the extended Gaussian mechanism (HGM, IJCAI 2019, Theorem 2)."""
    return _largest_size(bounds, std, sensitivity, mechanisms.extended_gaussian_scale)


def hgm_size_as_printed(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """Return HGM's size as its Equation 10 prints it: noise std * sqrt(K r) per component.

    ``sensitivity`` is that of the output divided by sqrt(K r), of all feature maps jointly. It
    differs from `extended_gaussian_size`, which is valid, by a factor of epsilon: for epsilon > 1
    it overstates the size by that factor and is not valid.
    """
    scale = mechanisms.extended_gaussian_scale
    return _largest_size(
        bounds, std, sensitivity, lambda epsilon, delta: scale(epsilon, delta) / epsilon
    )


def exact_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """Return the exact Gaussian size, std / (2 sensitivity) (Phi^-1(p_a) - Phi^-1(p_b)).

    It is at least any size through (epsilon, delta). It applies to expected scores in [0, 1] as to
    probabilities of classes: Salman et al., NeurIPS 2019, Lemma 2.
    """
    _check(std, sensitivity)
    return gaussian_l2_radius_two_class(bounds.p_a, bounds.p_b, std) / sensitivity


def pure_epsilon(bounds: ScoreBounds) -> Any:
    """Return the largest epsilon with p_a >= e^(2 epsilon) p_b; 0 if the label is not ahead."""
    p_a, p_b = np.asarray(bounds.p_a), np.asarray(bounds.p_b)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(p_a <= p_b, 0.0, np.log(p_a / p_b) / 2 * (1 - 1e-14))
    return found[()]


def _largest_size(
    bounds: ScoreBounds, std: float, sensitivity: float, scale: Scale, largest: float = 30.0
) -> Any:
    """Return the largest std / (sensitivity * scale(epsilon, delta)) that the condition allows.

    Any epsilon gives a valid size, so an imperfect maximum is smaller, but not wrong.
    """
    _check(std, sensitivity)
    limit = np.atleast_1d(np.minimum(largest, pure_epsilon(bounds)))
    p_a, p_b = np.atleast_1d(bounds.p_a), np.atleast_1d(bounds.p_b)
    found, ahead = np.zeros(len(limit)), np.flatnonzero(limit > 0)
    for start in range(0, len(ahead), _ROWS):
        rows = ahead[start : start + _ROWS]
        found[rows] = _largest_sizes(
            p_a[rows], p_b[rows], np.log(limit[rows]), std, sensitivity, scale
        )
    return found if bounds.lower.ndim > 1 else float(found[0])


def _largest_sizes(
    p_a: np.ndarray,
    p_b: np.ndarray,
    log_limit: np.ndarray,
    std: float,
    sensitivity: float,
    scale: Scale,
) -> np.ndarray:
    """Return `_largest_size` of inputs whose label is ahead: float64 (N,)."""

    def sizes(log_epsilons: np.ndarray) -> np.ndarray:
        epsilons = np.exp(log_epsilons)
        # Slightly below equality: the condition is strict.
        left = p_a[:, None] - np.exp(2 * epsilons) * p_b[:, None]
        deltas = left / (1 + np.exp(epsilons)) * (1 - 1e-12)
        found: np.ndarray = np.zeros_like(epsilons)
        usable = (deltas > 1e-300) & (deltas < 1)
        if usable.any():
            scales = scale(epsilons[usable], deltas[usable])
            found[usable] = std / (sensitivity * scales)
        return found

    rows, last = np.arange(len(p_a)), 120
    grid = np.linspace(log_limit - 12, log_limit, last + 1, axis=1)
    largest_size = np.zeros(len(p_a))
    for _ in range(3):  # the grid, then two finer ones around the best point
        found = sizes(grid)
        best = np.argmax(found, axis=1)
        largest_size = np.maximum(largest_size, found[rows, best])
        around = (grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, last)])
        last = 40
        grid = np.linspace(*around, last + 1, axis=1)
    return largest_size


def _bounds(interval: tuple[Bound, Bound]) -> ScoreBounds:
    return ScoreBounds(np.asarray(interval[0]), np.asarray(interval[1]))


def _error(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    return 1 - confidence


def _check(noise: float, sensitivity: float) -> None:
    if not (noise > 0 and sensitivity > 0):
        raise ValueError(f"noise and sensitivity must be positive, got {noise} and {sensitivity}")


# --- betting ----------------------------------------------------------------------------------


# Bin b has the scores from BIN_EDGES[b] to BIN_EDGES[b + 1], in units of 1 / SCORE_UNIT.
_INNER = np.round(SCORE_UNIT / (1 + np.exp(-np.linspace(-13, 13, 62)))).astype(np.int64)
BIN_EDGES = np.unique(np.concatenate([[0], _INNER, [SCORE_UNIT]]))
NUM_BINS = len(BIN_EDGES) - 1

_ROUNDS = 44
_STEP = 1e-9  # by which a stated bound may differ from the recomputed one
_SLACK = 1e-9  # rounding of ln of the capital, a sum of many logarithms


def log_capital(counts: np.ndarray, scores: np.ndarray, mean: float) -> np.ndarray:
    """Return ln of the capital against means up to `mean` > 0: a number, or (K,).

    counts: (B,) or (B, K), of each score (B,).
    """
    stakes = _bet_fractions()
    growth = np.log1p(stakes[:, None] * (scores / mean - 1))
    result: np.ndarray = np.logaddexp.reduce(growth @ counts) - math.log(len(stakes))
    return result


@cache
def _bet_fractions() -> np.ndarray:
    result: np.ndarray = scipy.special.expit(np.linspace(-9, 7, 48))
    return result


def means_exceed(counts: np.ndarray, scores: np.ndarray, mean: float, alpha: float) -> np.ndarray:
    """Return whether each mean is shown to be above `mean`, in (0, 1): bool (K,).

    It is wrong at *any* number of draws, however chosen, with probability at most alpha. counts:
    (B, K), of each score (B,).
    """
    return log_capital(counts, scores, mean) >= _log_capital_threshold(
        alpha, float(counts.sum(0).max(initial=0))
    )


def _log_capital_threshold(alpha: float, draws: float) -> float:
    """Return the limit that ln of the capital must reach."""
    return -math.log(alpha) + _SLACK * (1 + draws * 1e-3)


def betting_lower_bound(counts: np.ndarray, scores: np.ndarray, alpha: float) -> float:
    """Return a lower bound of the mean of the scores at error alpha, rounded down.

    counts: (B,), of each score (B,); the number of draws must not depend on them. The capital falls
    as the mean grows, so that bisection finds where it is 1 / alpha.
    """
    drawn = counts > 0
    counts, scores = counts[drawn].astype(np.float64), scores[drawn]
    total = counts.sum()
    if not total:
        return 0.0
    limit = _log_capital_threshold(alpha, float(total))
    low, high = 0.0, float(counts @ scores / total)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if middle > 0 and log_capital(counts, scores, middle) >= limit:
            low = middle
        else:
            high = middle
    return low


def score_bounds_betting(counts: np.ndarray, excess: np.ndarray, confidence: float) -> ScoreBounds:
    """Return bounds of the K expected scores, all 2K together at the confidence.

    counts, excess: results of `bin_scores`.
    """
    alpha, scores = (1 - confidence) / (2 * len(counts)), BIN_EDGES / SCORE_UNIT
    weights = bin_edge_weights(counts, excess)
    lower = [betting_lower_bound(each, scores, alpha) for each in weights]
    upper = [1 - betting_lower_bound(each, 1 - scores, alpha) for each in weights]
    return ScoreBounds(np.array(lower), np.nextafter(np.array(upper), 2))


def score_bounds_betting_one_sided(
    counts: np.ndarray, excess: np.ndarray, selected: int, confidence: float
) -> ScoreBounds:
    """Return a lower bound of the selected class's expected score, at the whole error.

    selected: chosen by other draws. The upper bound of all other classes is 1 minus that bound,
    since scores add up to at most 1. counts, excess: results of `bin_scores`.
    """
    lower, upper = np.zeros(len(counts)), np.ones(len(counts))
    weights = bin_edge_weights(counts, excess)[selected]
    lower[selected] = betting_lower_bound(weights, BIN_EDGES / SCORE_UNIT, 1 - confidence)
    upper[np.arange(len(counts)) != selected] = np.nextafter(1 - lower[selected], 2)
    return ScoreBounds(lower, upper)


def verified_label(
    counts: np.ndarray,
    excess: np.ndarray,
    lower: float,
    upper: float,
    alpha: float,
    selected: int | None = None,
) -> int:
    """Return the class with the largest lower bound if stated bounds are correct, else -1.

    lower, upper: the stated largest lower bound and the largest upper bound of any other class.
    They must be those of `score_bounds_betting`, or for a selected class those of
    `score_bounds_betting_one_sided`. A bound is where the capital crosses a threshold, so two means
    suffice, one on each side. counts, excess: (K, BINS).
    """
    scores, weights = BIN_EDGES / SCORE_UNIT, bin_edge_weights(counts, excess).T
    share = alpha if selected is not None else alpha / (2 * len(counts))

    def above(values: np.ndarray, mean: float) -> np.ndarray:
        if mean <= 0 or mean >= 1:
            return np.full(len(counts), mean <= 0)
        return means_exceed(weights, values, mean, share)

    beyond = above(scores, lower + _STEP)
    crossing = above(scores, lower - _STEP) & ~beyond
    if selected is not None:
        correct = crossing[selected] and abs(upper - (1 - lower)) <= _STEP
        return (selected if lower > 0 else 0) if correct else -1
    if not crossing.any() or beyond.any():
        return -1
    label = int(crossing.argmax())
    others = np.arange(len(counts)) != label
    enough = above(1 - scores, 1 - upper - _STEP)[others].all()
    least = not above(1 - scores, 1 - upper + _STEP)[others].all()
    return label if enough and least else -1


def bin_edge_weights(counts: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Return the weight of each class's scores at each edge of a bin: (K, BINS + 1)."""
    moved = excess / np.diff(BIN_EDGES)
    weights = np.zeros((len(counts), NUM_BINS + 1))
    weights[:, :-1] += counts - moved
    weights[:, 1:] += moved
    return weights


def lead_scores(scores: np.ndarray, leader: int) -> np.ndarray:
    """Return the leads (1 + leader's score - other's) / 2, rounded down: int64 (n, K - 1) in units.

    scores: int64 (n, K) in units of 1 / SCORE_UNIT. A lead is at least the leader's own score.
    """
    others = np.delete(scores, leader, axis=1)
    result: np.ndarray = (SCORE_UNIT + scores[:, [leader]] - others) // 2
    return result


def bin_scores(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of scores in each bin and the sum of their excess: int64 (K, BINS) each.

    scores: int64 (n, K) in units of 1 / SCORE_UNIT. The excess is over the lower edge of the bin.
    """
    places = np.minimum(np.searchsorted(BIN_EDGES, scores, side="right") - 1, NUM_BINS - 1)
    beyond = (scores - BIN_EDGES[places]).ravel()
    flat = (places + np.arange(scores.shape[1]) * NUM_BINS).ravel()
    size = scores.shape[1] * NUM_BINS
    found = np.bincount(flat, minlength=size), np.bincount(flat, beyond, size).astype(np.int64)
    return found[0].reshape(-1, NUM_BINS), found[1].reshape(-1, NUM_BINS)
