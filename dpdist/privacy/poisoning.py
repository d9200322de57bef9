"""How likely an answer must be so that changed training records cannot make it unlikely.

A trainer that is differentially private gives every set S of outcomes at least B_k(x) under any
data set that differs in k records, where it has probability x under its own: B_k is a lower bound
of the trade-off curve of k changes. So an answer that a freshly trained model gives with
probability x is still given with more than 1/2 where B_k(x) > 1/2, whoever chose the k records and
however (they must not know the secret keys). Ma, Zhu and Hsu 2019 bound the same by k epsilon.

k counts insertions and removals together. From the data set held to any other: first remove a
records, then insert b. With R_a and I_b the curves of each direction alone, exact for groups where
a phase has them (mixtures of Gaussians), the answer keeps at least I_b(R_a(x)), so
B_k = min over a + b = k of I_b(R_a(x)): one direction's group curve alone would not do, since it
says nothing of mixtures. The curve of one record in either order, k times over, holds as well; the
larger of both is taken, and large k are made of exact groups of 16. Under replace-one k counts
replaced records, and only the curve of one is known.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dpdist.privacy import trade_off
from dpdist.privacy.group import group_pld
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.trade_off import Curve

_POINTS, _ROUNDS = 1025, 6  # of a search in [0, 1]: 60 bits
_LARGEST = 16  # of groups whose exact loss is computed, which takes time in proportion
_MOST = 1000  # changes that are looked for


class Poisoned:
    """Of one training by a plan. Raises ValueError where no trade-off curve is proved for it."""

    def __init__(self, plan: PrivacyPlan) -> None:
        one = trade_off.of_plan(plan)
        if one is None:
            raise ValueError("no trade-off curve is proved of its training, so nothing of poison")
        self._plan, self._one = plan, one
        self._exact = plan.neighbours == "add-or-remove-one"
        self._groups: dict[int, tuple[Curve, Curve] | None] = {}
        self._needed: dict[float, list[float]] = {}

    def needed(self, changes: int, target: float = 0.5) -> float:
        """The probability from which on more than `target` is left after so many changes, or fewer;
        infinity where none is enough. Rounded up."""
        found = self._needed.setdefault(target, [target])
        while len(found) <= changes:
            found.append(max(found[-1], self._after(len(found), found)))
        return found[changes]

    def changes(self, probability: float, target: float = 0.5) -> int:
        """The largest number of changes, up to 1,000, after which an answer of at least this
        probability keeps more than `target`; -1 where it has no more than that to begin with."""
        if probability <= target:
            return -1
        most = 0
        while most < _MOST and self.needed(most + 1, target) <= probability:
            most += 1
        return most

    def _after(self, changes: int, fewer: list[float]) -> float:
        """fewer: what 0 to changes - 1 need. One change, or a group, must keep what the others
        need."""
        stepwise, group = _inverse(self._one, fewer[-1]), min(changes, _LARGEST)
        if self._both(group) is None:
            return stepwise
        worst = 0.0
        for removed in range(group + 1):
            kept = fewer[changes - group]
            if inserted := group - removed:
                kept = _inverse(self._pair(inserted)[1], kept)
            if removed:
                kept = _inverse(self._pair(removed)[0], kept)
            worst = max(worst, kept)
        return min(stepwise, worst)

    def _pair(self, size: int) -> tuple[Curve, Curve]:
        found = self._both(size)
        assert found is not None  # a phase has exact groups of all sizes, or of none
        return found

    def _both(self, size: int) -> tuple[Curve, Curve] | None:
        """Of so many removed, and of so many inserted; None where no exact one is known."""
        if size not in self._groups:
            found = group_pld(self._plan, size) if self._exact else None
            self._groups[size] = None if found is None else trade_off.by_direction(*found)
        return self._groups[size]


def _inverse(curve: Curve, target: float) -> float:
    """An x with curve(x) > target, above the least by rounding; infinity where there is none.

    Curves do not decrease, so whatever lies above x keeps more than the target as well.
    """
    low, high = target, 1.0  # curve(x) <= x
    if not low < high or not curve(np.array(high)) > target:
        return math.inf
    for _ in range(_ROUNDS):
        x = np.linspace(low, high, _POINTS)
        first = int(np.argmax(curve(x) > target))
        low, high = float(x[max(first - 1, 0)]), float(x[first])
    return high


def cost_of_votes(plan: PrivacyPlan, models: int) -> PrivacyPlan:
    """What all votes of so many trainings by the plan cost together, queried or not."""
    return replace(plan, phases=tuple(p for each in plan.phases for p in each.times(models)))
