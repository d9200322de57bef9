"""How well scores tell members from others: the ROC curve and numbers read from it, with intervals.

All intervals have confidence 95 % and describe the one model that was attacked: records are drawn
anew in them, training is not. So they say nothing about a guarantee (`dpdist.audits.ceilings`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit
from scipy.stats import norm, rankdata

from dpdist.base.binomial import clopper_pearson_interval
from dpdist.base.rounding import bound

ALPHA = 0.05  # of every interval


@dataclass(frozen=True)
class Estimate:
    """A number and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value = "-" if math.isnan(self.value) else f"{self.value:.3f}"
        return f"{value} [{bound(self.low)}, {bound(self.high, up=True)}]"

    @classmethod
    def rate(cls, hits: int, of: int, alpha: float = ALPHA) -> Estimate:
        """A share with its Clopper-Pearson interval; of nothing, anything is possible."""
        if of == 0:
            return cls(math.nan, 0.0, 1.0)
        low, high = clopper_pearson_interval(hits, of, alpha)
        return cls(hits / of, float(low), float(high))

    @classmethod
    def mean(cls, values: ArrayLike, alpha: float = ALPHA) -> Estimate:
        """The mean of independent values, one for each model, with Student's interval."""
        each = np.asarray(values, float)
        if len(each) < 2:
            return cls(float(each.mean()), -math.inf, math.inf)
        error = each.std(ddof=1) / math.sqrt(len(each))
        reach = float(stdtrit(len(each) - 1, 1 - alpha / 2)) * error
        return cls(float(each.mean()), float(each.mean() - reach), float(each.mean() + reach))


@dataclass(frozen=True, eq=False)
class Roc:
    """Scores of members and of others, one of each kind at least; larger: more likely a member.

    Raises ValueError where a kind is missing or a score is not a number.
    """

    members: NDArray[np.float64]
    others: NDArray[np.float64]

    @classmethod
    def of(cls, scores: ArrayLike, member: ArrayLike) -> Roc:
        """scores (n,), member (n,) bool."""
        values, inside = np.asarray(scores, float), np.asarray(member, bool)
        return cls(np.sort(values[inside]), np.sort(values[~inside]))

    def __post_init__(self) -> None:
        if not (len(self.members) and len(self.others)):
            raise ValueError("members and others are needed, at least one of each")
        if np.isnan(self.members).any() or np.isnan(self.others).any():
            raise ValueError("a score is not a number")

    @cached_property
    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """False and true positive rates of every threshold, from (0, 0) to (1, 1): (k,) each."""
        values = np.unique(np.concatenate([self.members, self.others]))[::-1]
        false, true = (
            1 - np.searchsorted(scores, values, side="left") / len(scores)
            for scores in (self.others, self.members)
        )
        return np.append(0.0, false), np.append(0.0, true)

    def at_rates(self, false_positives: NDArray[np.float64]) -> NDArray[np.float64]:
        """True positive rates; between two thresholds by choosing one of them at random."""
        return np.interp(false_positives, *self.curve)

    @cached_property
    def auc(self) -> Estimate:
        """The probability that a member scores higher than another record, ties by half.

        DeLong's interval (DeLong, DeLong and Clarke-Pearson 1988). Where nothing overlaps its
        variance is 0: then by the largest variance possible, A (1 - A) / min(m, n) (Birnbaum and
        Klose 1957), as Wilson inverts it.
        """
        m, n = len(self.members), len(self.others)
        ranks = rankdata(np.concatenate([self.members, self.others]))
        above = (ranks[:m] - rankdata(self.members)) / n  # of others, for each member
        below = 1 - (ranks[m:] - rankdata(self.others)) / m
        area, z = float(above.mean()), float(norm.isf(ALPHA / 2))
        variance = sum(x.var(ddof=1) / len(x) if len(x) > 1 else math.inf for x in (above, below))
        if 0 < variance < math.inf:
            reach = z * math.sqrt(variance)
            return Estimate(area, max(0.0, area - reach), min(1.0, area + reach))
        count = min(m, n)
        middle, shrink = (area + z * z / (2 * count)), 1 + z * z / count
        reach = z * math.sqrt(area * (1 - area) / count + z * z / (4 * count * count))
        low, high = (middle - reach) / shrink, (middle + reach) / shrink
        return Estimate(area, max(0.0, min(low, area)), min(1.0, max(high, area)))

    @property
    def advantage(self) -> float:
        """The largest difference of true and false positive rate."""
        false, true = self.curve
        return float(np.max(true - false))

    def threshold(self, false_positives: float) -> float:
        """The lowest score above which at most this share of the others lies."""
        allowed = math.floor(false_positives * len(self.others) + 1e-9)
        return float(self.others[-1 - allowed]) if allowed < len(self.others) else -math.inf

    def counts(self, threshold: float) -> tuple[int, int]:
        """Members and others whose score is above the threshold."""
        true, false = (
            len(scores) - int(np.searchsorted(scores, threshold, side="right"))
            for scores in (self.members, self.others)
        )
        return true, false

    def at(self, false_positives: float, alpha: float = ALPHA) -> tuple[Estimate, Estimate]:
        """True and realised false positive rate where at most so many others are taken."""
        true, false = self.counts(self.threshold(false_positives))
        return (
            Estimate.rate(true, len(self.members), alpha),
            Estimate.rate(false, len(self.others), alpha),
        )

    def precision_recall(self, threshold: float) -> tuple[Estimate, Estimate]:
        """Of what scores above the threshold the share of members; of members, the share that
        does."""
        true, false = self.counts(threshold)
        return Estimate.rate(true, true + false), Estimate.rate(true, len(self.members))

    @property
    def median(self) -> float:
        """The threshold that takes half of all."""
        return float(np.median(np.concatenate([self.members, self.others])))
