"""Models on few records drawn at random: what their certificates say, against every subset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from scipy import stats

from dpdist.poisoning.certificates import BaggingPoisoningBound, draw_subset


def kept(p: float, common: int, removed: int, inserted: int, size: int) -> float:
    """The least that an answer of probability p can have afterwards, over all answers: subsets are
    given to it one by one, those first that cost least afterwards."""
    before = range(common + removed)
    after = (*range(common), *range(-inserted, 0))
    old = {frozenset(s) for s in itertools.combinations(before, size)}
    new = {frozenset(s) for s in itertools.combinations(after, size)}
    costs = sorted(1 / len(new) if subset in new else 0.0 for subset in old)
    total, left = 0.0, p * len(old)
    for cost in costs:
        total += cost * min(1.0, left)
        left -= min(1.0, left)
    return total


@pytest.mark.parametrize("target", [0.2, 0.5, 0.7])  # at 0.2 removals cost most
def test_what_is_needed_is_the_worst_over_all_changes(target: float) -> None:
    records, size = 7, 2
    found = BaggingPoisoningBound(records, size)
    for changes in range(7):  # after 5 one bag is left to be drawn, after 6 none
        needed = found.required_probability(changes, target)
        splits = [(a, changes - a) for a in range(changes + 1)]

        def least(p: float, splits: Iterable[tuple[int, int]] = splits) -> float:
            return min(kept(p, records - a, a, b, size) for a, b in splits)

        if needed == math.inf:
            assert least(1.0) <= target + 1e-9
            continue
        assert least(needed + 1e-7) > target
        assert least(needed - 1e-7) <= target
        assert (
            found.max_changes(needed, target) >= changes > found.max_changes(needed - 1e-6, target)
        )


def test_few_records_of_many_withstand_many_changes() -> None:
    # Insertions alone thin an answer by (n / n')^s: of p = 1 more than half is left for n (2^(1/s)
    # - 1) of them, and removals or both leave more.
    found = BaggingPoisoningBound(60_000, 30)
    assert found.max_changes(1.0) == pytest.approx(60_000 * (2 ** (1 / 30) - 1), abs=2)
    assert found.max_changes(0.5) == -1 and found.max_changes(0.5001) == 0
    assert found.max_changes(0.99, 0.8) < found.max_changes(0.99, 0.6)
    # a removed record leaves none to draw
    assert BaggingPoisoningBound(20, 20).max_changes(1.0) == 0


def test_every_subset_is_drawn_alike() -> None:
    # 2,000 keys, 10 subsets of 2 of 5: a chi-square beyond 34 has probability 1e-4.
    seen: dict[tuple[int, ...], int] = {}
    for number in range(2000):
        members = draw_subset(number.to_bytes(32, "little"), 5, 2)
        places = tuple(np.flatnonzero(members).tolist())
        seen[places] = seen.get(places, 0) + 1
    assert len(seen) == 10
    assert stats.chisquare(list(seen.values())).statistic < 34
    assert (draw_subset(bytes(32), 50, 7) == draw_subset(bytes(32), 50, 7)).all()
