"""Confidence bounds of expected scores, and the sizes they certify under noise in the network.

Hoeffding's and the empirical Bernstein bound are pure functions of counts and sums, in float64,
rounded outwards, for independent draws whose number was fixed in advance; early-stopped counts
need ``dpdist.certification.sequential``.

Betting bounds an expected score from a histogram of scores. If the mean of scores in [0, 1] is at
most m, a capital that stakes the fraction f of itself on each draw x being more than m grows by 1
- f + f x / m, at most 1 on average; so does its mean over a few f chosen beforehand, and it
exceeds 1 / alpha with probability at most alpha (Markov, and Ville for all numbers of draws at
once). The lower bound is the smallest mean not refuted so. Waudby-Smith and Ramdas (JRSS B 2024,
"Estimating means of bounded random variables by betting") let the stake follow the draws; here the
stakes are fixed and mixed, so that a histogram suffices and the order of the draws does not
matter. Where scores vary little it is far below Hoeffding's half width, and has no such second
term as the empirical Bernstein bound. Scores are counted in bins, finest near 0 and 1, where they
lie, with their sum in each bin. Every score is then moved to the ends of its bin, in the shares
that leave the mean as it is: ln of the capital is concave in each score, so that this makes it
smaller, never larger.

Certified sizes (PixelDP and its descendants): if the network from the noise on is (epsilon,
delta)-DP for inputs at distance mu, its expected scores cannot change by more than e^epsilon and
delta, so the label stays when p_a > e^(2 epsilon) p_b + (1 + e^epsilon) delta (Lecuyer et al.,
IEEE S&P 2019, Proposition 2). The noise is fixed; the certified size is the largest mu for which
some (epsilon, delta) satisfies that condition and is provided by the noise at sensitivity
(operator norm times mu). Here p_a is a lower bound of the label's expected score and p_b an upper
bound of every other class's, all at one confidence. ``sensitivity`` is the norm of the layers
before the noise, from the certified norm of the input to L2 (Gaussian) or L1 (Laplace): see
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
    mean: ArrayLike,
    draws: ArrayLike,
    alpha: ArrayLike,
    *,
    classes: int = 1,
) -> tuple[Bound, Bound]:
    """Interval for the expectation of scores in [0, 1] from their sample ``mean``.

    With ``classes`` = K the lower and the upper bound of all K expectations hold together with
    probability at least 1 - alpha (union bound over 2K one-sided statements), half width
    sqrt(ln(2K / alpha) / (2 draws)). Clipped to [0, 1].
    Source: Hoeffding, JASA 1963, Theorem 2.

    Raises ValueError for a mean outside [0, 1], draws or classes < 1, alpha outside (0, 1).
    """
    m, n, log_term = _check_sample(mean, draws, alpha, classes)
    half = np.sqrt(log_term / (2 * n)) * (1 + RELATIVE_MARGIN)
    return _clip_interval(m, half)


def empirical_bernstein_interval(
    mean: ArrayLike,
    variance: ArrayLike,
    draws: ArrayLike,
    alpha: ArrayLike,
    *,
    classes: int = 1,
) -> tuple[Bound, Bound]:
    """Interval for the expectation of scores in [0, 1] from sample mean and variance.

    ``variance`` is the unbiased sample variance (divisor draws - 1). With ``classes`` = K all K
    lower and K upper bounds hold together with probability at least 1 - alpha; half width, with
    d = alpha / (2K): sqrt(2 V ln(2/d) / n) + 7 ln(2/d) / (3 (n - 1)).
    Source: Maurer and Pontil, COLT 2009, Theorem 4.

    Raises ValueError for draws < 2, a negative variance, and what ``hoeffding_interval`` refuses.
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
        return (
            np.argmax(self.lower, -1).tolist()
            if self.lower.ndim == 1
            else self._label_index[..., 0]
        )

    @property
    def p_a(self) -> Any:
        return self._as_scalar(np.take_along_axis(self.lower, self._label_index, -1)[..., 0])

    @property
    def p_b(self) -> Any:
        """The largest upper bound among the other classes."""
        others = self.upper.copy()
        np.put_along_axis(others, self._label_index, 0.0, -1)
        return self._as_scalar(others.max(-1))

    @property
    def _label_index(self) -> np.ndarray:
        result: np.ndarray = np.argmax(self.lower, -1, keepdims=True)
        return result

    def _as_scalar(self, values: np.ndarray) -> Any:
        """Return the bound of one input as a number."""
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
    """Return bounds as ``score_bounds_hoeffding``, by the empirical Bernstein bound.

    It uses sums of squares too.
    """
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
        bounds, std, sensitivity, mechanisms.classical_gaussian_formula, largest=1.0
    )


def analytic_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """The same condition with the exact (epsilon, delta) profile (Balle and Wang, ICML 2018)."""
    return _largest_size(bounds, std, sensitivity, mechanisms.analytic_gaussian_scale)


def extended_gaussian_size(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """The extended Gaussian mechanism, any epsilon (HGM, IJCAI 2019, Theorem 2)."""
    return _largest_size(bounds, std, sensitivity, mechanisms.extended_gaussian_scale)


def hgm_size_as_printed(bounds: ScoreBounds, std: float, sensitivity: float) -> Any:
    """HGM's certificate as its Equation 10 has it: noise std * sqrt(K r) per component.

    ``sensitivity`` is that of the output divided by sqrt(K r), of all feature maps jointly. It
    divides `extended_gaussian_size`, which is valid, by epsilon once more: it is not valid for
    epsilon > 1, where it overstates the size by epsilon.
    """
    scale = mechanisms.extended_gaussian_scale
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
    """Return `_largest_size` of inputs whose label is ahead: float64 (N,)."""

    def sizes(log_epsilons: np.ndarray) -> np.ndarray:
        epsilons = np.exp(log_epsilons)
        # A hair below equality: the condition is strict.
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


def _error(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    return 1 - confidence


def _check(noise: float, sensitivity: float) -> None:
    if not (noise > 0 and sensitivity > 0):
        raise ValueError(f"noise and sensitivity must be positive, got {noise} and {sensitivity}")


# --- betting ----------------------------------------------------------------------------------


# Bin b holds the scores from ENDS[b] to ENDS[b + 1], in units of 1 / SCORE_UNIT.
_INNER = np.round(SCORE_UNIT / (1 + np.exp(-np.linspace(-13, 13, 62)))).astype(np.int64)
BIN_EDGES = np.unique(np.concatenate([[0], _INNER, [SCORE_UNIT]]))
NUM_BINS = len(BIN_EDGES) - 1

_ROUNDS = 44
_STEP = 1e-9  # from a bound to either side
_SLACK = 1e-9  # of ln capital, relative: sums of many logarithms


def log_capital(counts: np.ndarray, scores: np.ndarray, mean: float) -> np.ndarray:
    """ln of the capital against means up to `mean`, > 0: counts (B,) or (B, K) of each score (B,);
    a number or (K,)."""
    stakes = _bet_fractions()
    growth = np.log1p(stakes[:, None] * (scores / mean - 1))
    result: np.ndarray = np.logaddexp.reduce(growth @ counts) - math.log(len(stakes))
    return result


@cache
def _bet_fractions() -> np.ndarray:
    result: np.ndarray = scipy.special.expit(np.linspace(-9, 7, 48))
    return result


def means_exceed(counts: np.ndarray, scores: np.ndarray, mean: float, alpha: float) -> np.ndarray:
    """Whether each mean is shown to be above `mean`, in (0, 1); counts (B, K), bool (K,). Wrong at
    *any* number of draws, however chosen, with probability at most alpha."""
    return log_capital(counts, scores, mean) >= _log_capital_threshold(
        alpha, float(counts.sum(0).max(initial=0))
    )


def _log_capital_threshold(alpha: float, draws: float) -> float:
    """Return the limit that ln of the capital must reach."""
    return -math.log(alpha) + _SLACK * (1 + draws * 1e-3)


def betting_lower_bound(counts: np.ndarray, scores: np.ndarray, alpha: float) -> float:
    """A mean below that of the scores but for probability alpha; rounded down. counts (B,) of each
    score (B,), of a number of draws that did not depend on them.

    The capital falls as the mean grows, so that bisection finds where it is 1 / alpha.
    """
    there = counts > 0
    counts, scores = counts[there].astype(np.float64), scores[there]
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
    """Bounds of the K expected scores, all 2K together at the confidence. counts, excess: as
    `bin_scores` makes them."""
    alpha, scores = (1 - confidence) / (2 * len(counts)), BIN_EDGES / SCORE_UNIT
    weights = bin_edge_weights(counts, excess)
    lower = [betting_lower_bound(each, scores, alpha) for each in weights]
    upper = [1 - betting_lower_bound(each, 1 - scores, alpha) for each in weights]
    return ScoreBounds(np.array(lower), np.nextafter(np.array(upper), 2))


def score_bounds_betting_one_sided(
    counts: np.ndarray, excess: np.ndarray, selected: int, confidence: float
) -> ScoreBounds:
    """The class that other draws selected, bounded from below at the whole error; all others have
    at most what it leaves, since scores add up to at most 1."""
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
    """Return the class with the largest lower bound, where that is `lower` and the largest upper
    bound of another class `upper`; -1 where they are other numbers.

    As `score_bounds_betting`, or of the selected class alone as `score_bounds_betting_one_sided`:
    a bound is where the capital crosses, which two means tell, one on each side. counts, excess:
    (K, BINS).
    """
    scores, weights = BIN_EDGES / SCORE_UNIT, bin_edge_weights(counts, excess).T
    share = alpha if selected is not None else alpha / (2 * len(counts))

    def above(values: np.ndarray, mean: float) -> np.ndarray:
        if mean <= 0 or mean >= 1:
            return np.full(len(counts), mean <= 0)
        return means_exceed(weights, values, mean, share)

    there = above(scores, lower - _STEP) & ~above(scores, lower + _STEP)
    if selected is not None:
        found = there[selected] and abs(upper - (1 - lower)) <= _STEP
        return (selected if lower > 0 else 0) if found else -1
    if not there.any() or above(scores, lower + _STEP).any():
        return -1
    label = int(there.argmax())
    others = np.arange(len(counts)) != label
    enough = above(1 - scores, 1 - upper - _STEP)[others].all()
    least = not above(1 - scores, 1 - upper + _STEP)[others].all()
    return label if enough and least else -1


def bin_edge_weights(counts: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Return how many scores of each class lie at each end, once moved there: (K, BINS + 1)."""
    moved = excess / np.diff(BIN_EDGES)
    weights = np.zeros((len(counts), NUM_BINS + 1))
    weights[:, :-1] += counts - moved
    weights[:, 1:] += moved
    return weights


def lead_scores(scores: np.ndarray, leader: int) -> np.ndarray:
    """(1 + its score - the other's) / 2 over each other class, rounded down: scores in [0, 1] that
    are never below the leader's own. int64 (n, K) in units to (n, K - 1)."""
    others = np.delete(scores, leader, axis=1)
    result: np.ndarray = (SCORE_UNIT + scores[:, [leader]] - others) // 2
    return result


def bin_scores(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return counts and excess sums of the scores of draws, int64 (n, K) in units, by bin.

    How many lie in each bin, and the sum by which they exceed its lower end; int64 (K, BINS)
    each.
    """
    places = np.minimum(np.searchsorted(BIN_EDGES, scores, side="right") - 1, NUM_BINS - 1)
    beyond = (scores - BIN_EDGES[places]).ravel()
    flat = (places + np.arange(scores.shape[1]) * NUM_BINS).ravel()
    size = scores.shape[1] * NUM_BINS
    found = np.bincount(flat, minlength=size), np.bincount(flat, beyond, size).astype(np.int64)
    return found[0].reshape(-1, NUM_BINS), found[1].reshape(-1, NUM_BINS)
