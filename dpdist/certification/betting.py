"""Bounds of an expected score from a histogram of scores, by betting against each smaller mean.

If the mean of scores in [0, 1] is at most m, a capital that stakes the fraction f of itself on each
draw x being more than m grows by 1 - f + f x / m, at most 1 on average; so does its mean over a few
f chosen beforehand, and it exceeds 1 / alpha with probability at most alpha (Markov, and Ville for
all numbers of draws at once). The lower bound is the smallest mean not refuted so. Waudby-Smith and
Ramdas (JRSS B 2024, "Estimating means of bounded random variables by betting") let the stake follow
the draws; here the stakes are fixed and mixed, so that a histogram is all that is needed and the
order of the draws does not matter. Where scores vary little it is far below Hoeffding's half width,
and has no such second term as the empirical Bernstein bound.

Scores are counted in bins, finest near 0 and 1, where they lie, with their sum in each bin. Every
score is then moved to the ends of its bin, in the shares that leave the mean as it is: ln of the
capital is concave in each score, so that this makes it smaller, never larger.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import scipy

from dpdist.certification.expected_score_bounds import SCORE_UNIT, ScoreBounds

# Bin b holds the scores from ENDS[b] to ENDS[b + 1], in units of 1 / SCORE_UNIT.
_INNER = np.round(SCORE_UNIT / (1 + np.exp(-np.linspace(-13, 13, 62)))).astype(np.int64)
ENDS = np.unique(np.concatenate([[0], _INNER, [SCORE_UNIT]]))
BINS = len(ENDS) - 1

_ROUNDS = 44
_STEP = 1e-9  # from a bound to either side
_SLACK = 1e-9  # of ln capital, relative: sums of many logarithms


def log_capital(counts: np.ndarray, scores: np.ndarray, mean: float) -> np.ndarray:
    """ln of the capital against means up to `mean`, > 0: counts (B,) or (B, K) of each score (B,);
    a number or (K,)."""
    stakes = _stakes()
    growth = np.log1p(stakes[:, None] * (scores / mean - 1))
    return np.logaddexp.reduce(growth @ counts) - math.log(len(stakes))


@cache
def _stakes() -> np.ndarray:
    return scipy.special.expit(np.linspace(-9, 7, 48))


def means_above(counts: np.ndarray, scores: np.ndarray, mean: float, alpha: float) -> np.ndarray:
    """Whether each mean is shown to be above `mean`, in (0, 1); counts (B, K), bool (K,). Wrong at
    *any* number of draws, however chosen, with probability at most alpha."""
    return log_capital(counts, scores, mean) >= _limit(alpha, float(counts.sum(0).max(initial=0)))


def _limit(alpha: float, draws: float) -> float:
    """What ln of the capital must reach."""
    return -math.log(alpha) + _SLACK * (1 + draws * 1e-3)


def lower_bound(counts: np.ndarray, scores: np.ndarray, alpha: float) -> float:
    """A mean below that of the scores but for probability alpha; rounded down. counts (B,) of each
    score (B,), of a number of draws that did not depend on them.

    The capital falls as the mean grows, so that bisection finds where it is 1 / alpha.
    """
    there = counts > 0
    counts, scores = counts[there].astype(np.float64), scores[there]
    total = counts.sum()
    if not total:
        return 0.0
    limit = _limit(alpha, float(total))
    low, high = 0.0, float(counts @ scores / total)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if middle > 0 and log_capital(counts, scores, middle) >= limit:
            low = middle
        else:
            high = middle
    return low


def score_bounds(counts: np.ndarray, excess: np.ndarray, confidence: float) -> ScoreBounds:
    """Bounds of the K expected scores, all 2K together at the confidence. counts, excess: as
    `binned` makes them."""
    alpha, scores = (1 - confidence) / (2 * len(counts)), ENDS / SCORE_UNIT
    weights = at_ends(counts, excess)
    lower = [lower_bound(each, scores, alpha) for each in weights]
    upper = [1 - lower_bound(each, 1 - scores, alpha) for each in weights]
    return ScoreBounds(np.array(lower), np.nextafter(np.array(upper), 2))


def one_score_bound(
    counts: np.ndarray, excess: np.ndarray, selected: int, confidence: float
) -> ScoreBounds:
    """The class that other draws selected, bounded from below at the whole error; all others have
    at most what it leaves, since scores add up to at most 1."""
    lower, upper = np.zeros(len(counts)), np.ones(len(counts))
    weights = at_ends(counts, excess)[selected]
    lower[selected] = lower_bound(weights, ENDS / SCORE_UNIT, 1 - confidence)
    upper[np.arange(len(counts)) != selected] = np.nextafter(1 - lower[selected], 2)
    return ScoreBounds(lower, upper)


def label_of(
    counts: np.ndarray,
    excess: np.ndarray,
    lower: float,
    upper: float,
    alpha: float,
    selected: int | None = None,
) -> int:
    """Return the class with the largest lower bound, where that is `lower` and the largest upper
    bound of another class `upper`; -1 where they are other numbers.

    As `score_bounds`, or of the selected class alone as `one_score_bound`: a bound is where the
    capital crosses, which two means tell, one on each side. counts, excess: (K, BINS).
    """
    scores, weights = ENDS / SCORE_UNIT, at_ends(counts, excess).T
    share = alpha if selected is not None else alpha / (2 * len(counts))

    def above(values: np.ndarray, mean: float) -> np.ndarray:
        if mean <= 0 or mean >= 1:
            return np.full(len(counts), mean <= 0)
        return means_above(weights, values, mean, share)

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


def at_ends(counts: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """How many of the scores of each class lie at each end, once moved there: (K, BINS + 1)."""
    moved = excess / np.diff(ENDS)
    weights = np.zeros((len(counts), BINS + 1))
    weights[:, :-1] += counts - moved
    weights[:, 1:] += moved
    return weights


def leads(scores: np.ndarray, leader: int) -> np.ndarray:
    """(1 + its score - the other's) / 2 over each other class, rounded down: scores in [0, 1] that
    are never below the leader's own. int64 (n, K) in units to (n, K - 1)."""
    others = np.delete(scores, leader, axis=1)
    return (SCORE_UNIT + scores[:, [leader]] - others) // 2


def binned(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the scores of draws, int64 (n, K) in units: how many lie in each bin, and the sum of what
    they exceed its lower end by; int64 (K, BINS) each."""
    places = np.minimum(np.searchsorted(ENDS, scores, side="right") - 1, BINS - 1)
    beyond = (scores - ENDS[places]).ravel()
    flat = (places + np.arange(scores.shape[1]) * BINS).ravel()
    size = scores.shape[1] * BINS
    found = np.bincount(flat, minlength=size), np.bincount(flat, beyond, size).astype(np.int64)
    return found[0].reshape(-1, BINS), found[1].reshape(-1, BINS)
