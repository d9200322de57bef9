"""Whole curves compared: bounds at every size at once, against populations that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dpdist.certification.statistics import CurveDifference, curve_difference

# One input's certified sizes by both runs; most lie within the cells (0, .5] and (.5, 1].
KINDS = np.array([[0.3, 0.8], [0.9, -1.0], [0.6, 0.7], [-1.0, 0.2]])
SIZES = (1e-9, 0.2, 0.25, 0.3, 0.5, 0.55, 0.65, 0.7, 0.75, 0.9, 1.0)


def difference(shares: np.ndarray, size: float) -> float:
    return float(shares @ (KINDS[:, 1] >= size) - shares @ (KINDS[:, 0] >= size))


def misses(found: CurveDifference, shares: np.ndarray) -> bool:
    for size in SIZES:
        cell = int(np.searchsorted(found.knots[1:], size))
        true = difference(shares, size)
        if not found.low[cell] - 1e-12 <= true <= found.high[cell] + 1e-12:
            return True
    return False


def test_no_size_is_missed_more_often_than_allowed() -> None:
    """Exact: every outcome of 7 inputs of four kinds, at many populations."""
    inputs, cells, error = 7, 2, 0.4
    counts = [c for c in itertools.product(range(inputs + 1), repeat=4) if sum(c) == inputs]
    found = []
    for count in counts:
        first, second = np.repeat(KINDS, count, axis=0).T
        found.append(curve_difference(first, second, 1.0, error, cells))
    worst = 0.0
    grid = [s for s in itertools.product((0.0, 0.1, 0.5, 0.9), repeat=3) if sum(s) <= 1]
    for shares in (np.array([*s, max(0.0, 1 - sum(s))]) for s in grid):
        wrong = [misses(each, shares) for each in found]
        worst = max(worst, float(stats.multinomial.pmf(counts, inputs, shares)[wrong].sum()))
    assert error / 50 < worst <= error  # conservative, but not vacuous


def test_a_certificate_of_size_0_is_one() -> None:
    """Of 200 inputs the first run certifies all, at 0 alone; the later one none."""
    first, second = np.zeros(200), np.full(200, -1.0)
    for ahead, found in enumerate((curve_difference(first, second, 1.0, cells=4),
                                   curve_difference(second, first, 1.0, cells=4))):  # fmt: skip
        true = 1.0 if ahead else -1.0
        assert found.low[0] <= true <= found.high[0] and (abs(found.low[1:]) < 0.1).all()


def test_who_is_better_where() -> None:
    # The later run certifies 300 inputs up to 0.4 where the first does up to 0.1; of 200 others
    # the first certifies up to 0.9, the later none.
    first = np.array([0.1] * 300 + [0.9] * 200 + [-1.0] * 100)
    second = np.array([0.4] * 300 + [-1.0] * 200 + [-1.0] * 100)
    found = curve_difference(first, second, 1.0, cells=20)
    assert found.better_ranges == [pytest.approx((0.1, 0.4))]
    assert found.worse_ranges == [pytest.approx((0.0, 0.1)), pytest.approx((0.4, 0.9))]
    back = curve_difference(second, first, 1.0, cells=20)
    assert back.better_ranges == found.worse_ranges and back.worse_ranges == found.better_ranges
    assert (back.low == -found.high).all()
    alike = curve_difference(first, first, 1.0)
    assert alike.better_ranges == [] and alike.worse_ranges == []
