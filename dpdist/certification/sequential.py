"""Tests of a class probability that look at the counts more than once, with the error exact.

Two ways. A test against one probability p0 with planned looks: the thresholds come from the exact
distribution of the counts at p0, so the error over all looks together is at most alpha. And a
confidence sequence, valid at every number of draws at once. Clopper-Pearson on an early-stopped
count is neither (its error at alpha = 0.001 is about 0.004).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import ArrayLike

from dpdist.base.binomial import check_alpha, clopper_pearson_upper

# Probability below which a tail is not carried along; it is charged as an error all the same.
_NEGLIGIBLE = 1e-25


def planned_looks(cap: int, step: int, count: int = 26) -> tuple[int, ...]:
    """Numbers of draws at which a decision may be made: geometric, in multiples of ``step``."""
    grid = np.geomspace(min(step, cap), cap, count)
    rounded = np.unique(np.minimum(-(-grid // step) * step, cap).astype(int))
    return tuple(int(look) for look in rounded)


@dataclass(frozen=True)
class Thresholds:
    """Reject p <= p0 at looks[i] when the cumulative count reaches needed[i].

    needed[i] = looks[i] + 1 means that no decision is possible there. error: the exact probability
    at p0 of ever rejecting, at most alpha.
    """

    p0: float
    alpha: float
    looks: tuple[int, ...]
    needed: tuple[int, ...]
    error: float


@lru_cache(maxsize=256)
def thresholds(p0: float, alpha: float, looks: tuple[int, ...]) -> Thresholds:
    """Thresholds for H0: p <= p0 that spend alpha * sqrt(n / cap) of the error by look n.

    Computed by the exact binomial recursion over the looks (direct convolution of probabilities,
    all of one sign, so every value has full relative precision). The count grows with p, so the
    error is largest at p0 itself. Spending: Lan and DeMets, Biometrika 1983; boundary at p0 by
    Armitage, McPherson and Rowe, JRSS A 1969.

    Raises ValueError unless 0 < p0 < 1, 0 < alpha < 1 and the looks ascend.
    """
    check_alpha(alpha)
    if not 0 < p0 < 1:
        raise ValueError(f"p0 must lie strictly between 0 and 1, got {p0}")
    if not looks or any(a >= b for a, b in zip((0, *looks[:-1]), looks, strict=True)):
        raise ValueError(f"looks must be positive and ascending, got {looks}")
    cap = looks[-1]
    low, alive = 0, np.ones(1)  # Pr[count = low + i and not rejected yet]
    spent = 0.0
    needed = []
    before = 0
    for look in looks:
        start, pmf = _binomial_window(look - before, p0)
        low, alive = low + start, np.convolve(alive, pmf)
        budget = alpha * np.sqrt(look / cap) - spent
        tail = np.cumsum(alive[::-1])[::-1]  # Pr[count >= low + i, alive], smallest first summed
        first = int(np.searchsorted(-tail, -budget, side="left"))
        needed.append(min(low + first, look + 1) if first < len(alive) else look + 1)
        if first < len(alive):
            spent += float(tail[first])
        alive = alive[:first]
        before = look
    # The mass that was cut away, in case all of it would have been rejected.
    lost = 2 * len(looks) * _NEGLIGIBLE
    return Thresholds(p0, alpha, looks, tuple(needed), spent + lost)


def _binomial_window(draws: int, p: float) -> tuple[int, np.ndarray]:
    """First count and probabilities of Binomial(draws, p), without its negligible tails."""
    low = int(scipy.stats.binom.ppf(_NEGLIGIBLE, draws, p))
    high = int(scipy.stats.binom.isf(_NEGLIGIBLE, draws, p))
    low, high = max(low, 0), min(max(high, low), draws)
    return low, scipy.stats.binom.pmf(np.arange(low, high + 1), draws, p)


class TargetTest:
    """Several radii, ascending, each as a test against its p0 on the same cumulative counts.

    The tests are made in a fixed order and the first failure ends them, so the probability that
    any certified radius is false is at most alpha (fixed-sequence procedure: Maurer, Hothorn and
    Lehmacher 1995). ``futile``: error of the upper bound by which hopeless inputs are given up; it
    can only lose certificates, never add a false one, because the thresholds do not use it.
    """

    def __init__(
        self,
        probabilities: tuple[float, ...],
        alpha: float,
        looks: tuple[int, ...],
        futile: float,
    ) -> None:
        self.looks = looks
        self.futile = futile
        self._tests = [thresholds(p0, alpha, looks) for p0 in probabilities]
        self._rejected = [False] * len(probabilities)

    def passed(self) -> int:
        """How many of the radii, from the smallest on, are certified."""
        return next((i for i, done in enumerate(self._rejected) if not done), len(self._rejected))

    def look(self, place: int, hits: int) -> bool:
        """Take the cumulative count at looks[place]; True when nothing more can be decided."""
        for i, test in enumerate(self._tests):
            self._rejected[i] |= hits >= test.needed[place]
        first = self.passed()
        if first == len(self._tests):
            return True
        test, draws = self._tests[first], self.looks[place]
        if draws == self.looks[-1]:
            return True
        missing = min(
            needed - hits - (look - draws)
            for look, needed in zip(self.looks[place + 1 :], test.needed[place + 1 :], strict=True)
        )
        return missing > 0 or bool(clopper_pearson_upper(hits, draws, self.futile) <= test.p0)


def beta_mixture_log_evidence(hits: ArrayLike, draws: ArrayLike, p0: ArrayLike) -> np.ndarray:
    """ln of the test martingale against p <= p0: the likelihood ratio averaged over p > p0.

    The average is over the uniform distribution on (p0, 1), so that the ratio's expectation is at
    most 1 for every p <= p0; by Ville's inequality it ever exceeds 1 / alpha with probability at
    most alpha. Robbins, Annals of Mathematical Statistics 1970.
    """
    k = np.asarray(hits, dtype=np.float64)
    n = np.asarray(draws, dtype=np.float64)
    p = np.asarray(p0, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        above = np.log(scipy.special.betaincc(k + 1, n - k + 1, p)) - np.log1p(-p)
        null = scipy.special.xlogy(k, p) + scipy.special.xlog1py(n - k, -p)
    return scipy.special.betaln(k + 1, n - k + 1) + above - null


def beta_mixture_rejects(
    hits: ArrayLike, draws: ArrayLike, p0: ArrayLike, alpha: float
) -> np.ndarray:
    """Whether p <= p0 is rejected now; the error over all numbers of draws is at most alpha."""
    # The slack covers the rounding of ln beta, which grows with the counts.
    limit = np.log(1 / alpha) + 1e-9 + 1e-14 * np.asarray(draws, dtype=np.float64)
    return beta_mixture_log_evidence(hits, draws, p0) >= limit


def anytime_lower(hits: ArrayLike, draws: ArrayLike, alpha: float) -> np.ndarray:
    """Lower confidence bound of the probability that holds at all numbers of draws together.

    The smallest p0 that the beta mixture does not reject at threshold 1 / alpha; 0 for no draws.
    May be evaluated after any number of draws, chosen by any rule, and again later with another
    alpha chosen beforehand. Vectorised, for counts up to 1e9.

    Raises ValueError unless 0 <= hits <= draws and 0 < alpha < 1/4.
    """
    k, n = np.broadcast_arrays(
        np.asarray(hits, dtype=np.float64), np.asarray(draws, dtype=np.float64)
    )
    check_alpha(alpha)
    if alpha >= 0.25:
        # Beyond, the evidence need not fall monotonically where it crosses the threshold.
        raise ValueError(f"alpha must be below 1/4 for a confidence sequence, got {alpha}")
    if np.any((k < 0) | (k > n)):
        raise ValueError("hits must lie between 0 and draws")
    low, high = np.zeros(k.shape), np.where(n > 0, k / np.maximum(n, 1), 0.0)
    for _ in range(100):
        middle = (low + high) / 2
        rejected = (middle > 0) & beta_mixture_rejects(k, n, middle, alpha)
        low, high = np.where(rejected, middle, low), np.where(rejected, high, middle)
    return low[()]
