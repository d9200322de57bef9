"""Two classifiers on the same inputs: how sure it is that one of them is better.

Each input gives a pair: whether the first is right there (and certified), and whether the second
is. The pairs are taken as independent draws from one population of inputs, and what is said is said
of that population, for these two models and these certificates. Inputs on which both succeed or
both fail do not tell them apart; of the others, the *discordant* ones, each is the second's with
probability 1/2 if both succeed equally often (McNemar, Psychometrika 1947).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from dpdist.base.binomial import clopper_pearson_interval, two_sided_p_value

ERROR = 0.05
# Of the interval's error; the rest goes to the split of the discordant inputs, which decides.
SHARE_OF_DISCORDANT = 0.1


@dataclass(frozen=True)
class Comparison:
    """The second classifier against the first, on ``inputs`` inputs.

    first, second: share of the inputs on which each succeeds. only_first, only_second: how many
    only one of them succeeds on. low, high: of the population's difference, as
    ``difference_interval``. p_value, anytime: that both succeed equally often there.
    """

    inputs: int
    first: float
    second: float
    only_first: int
    only_second: int
    low: float
    high: float
    p_value: float
    anytime: float

    @property
    def difference(self) -> float:
        """Share of the second less that of the first."""
        return (self.only_second - self.only_first) / self.inputs


def compare(first: np.ndarray, second: np.ndarray, error: float = ERROR) -> Comparison:
    """Compare the successes of two classifiers, bool (N,) each, on the same inputs in their order.

    error: of the interval. Raises ValueError for arrays of unequal length, or of none.
    """
    if first.shape != second.shape or not first.size:
        raise ValueError(f"both must be of the same inputs, got {first.shape} and {second.shape}")
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    low, high = difference_interval(only_first, only_second, first.size, error)
    return Comparison(
        inputs=first.size,
        first=float(first.mean()),
        second=float(second.mean()),
        only_first=only_first,
        only_second=only_second,
        low=low,
        high=high,
        p_value=mcnemar_p_value(only_first, only_second),
        anytime=anytime_p_value(first, second),
    )


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Exact two-sided p value that both succeed equally often, from the discordant counts.

    Of a number of inputs fixed in advance. At most u with probability at most u, whatever the share
    of discordant inputs: the test is Binomial(discordant, 1/2), given how many there are.
    """
    return two_sided_p_value(only_second, only_first + only_second)


def difference_interval(
    only_first: int, only_second: int, inputs: int, error: float = ERROR
) -> tuple[float, float]:
    """Interval of the second's share less the first's, wrong with probability at most ``error``.

    The difference is d (2 s - 1), with d the share of discordant inputs and s the second's share of
    those. Clopper-Pearson intervals of d (a tenth of the error) and of s given their number (nine
    tenths) hold together by the union bound; every difference that they leave is in the interval.
    So it is conservative, never approximate. It leaves 0 out only where the p value of McNemar is
    below 9/10 of the error.
    """
    discordant = only_first + only_second
    spent = SHARE_OF_DISCORDANT * error
    fewest, most = clopper_pearson_interval(discordant, inputs, spent)
    low, high = 0.0, 1.0
    if discordant:
        low, high = map(float, clopper_pearson_interval(only_second, discordant, error - spent))
    worst, best = 2 * low - 1, 2 * high - 1
    return (
        float(worst * (most if worst < 0 else fewest)),
        float(best * (most if best > 0 else fewest)),
    )


def anytime_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """p value that both succeed equally often, valid however often one looks.

    bool (N,) each, in the order in which inputs are added. If both succeed equally often, the
    probability that it is *ever* at most u, as inputs are added without end, is at most u.

    After m discordant inputs, x of them the second's, the likelihood ratio of s ~ Beta(1/2, 1/2)
    against s = 1/2 is 2^m B(x + 1/2, m - x + 1/2) / B(1/2, 1/2): a martingale at s = 1/2, and ever
    above 1/u with probability at most u (Ville). Returned is 1 over the largest so far.
    """
    won = second[first != second]
    draws, hits = np.arange(1, won.size + 1), np.cumsum(won)
    evidence = scipy.special.betaln(hits + 0.5, draws - hits + 0.5) - scipy.special.betaln(0.5, 0.5)
    return float(np.exp(-np.max(evidence + draws * math.log(2), initial=0.0)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p value, corrected for all of them: that one at most u is false, at probability <= u.

    Whatever their dependence. Source: Holm, Scandinavian Journal of Statistics 1979.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(corrected, 1.0).tolist()
