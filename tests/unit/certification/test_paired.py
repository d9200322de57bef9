from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dpdist.certification.statistics import (
    CurveDifference,
    anytime_p_value,
    compare,
    curve_difference,
    difference_interval,
    holm,
    mcnemar_p_value,
)


@pytest.mark.parametrize("counts", [(0, 0), (0, 5), (5, 0), (3, 9), (10, 10), (130, 180), (1, 0)])
def test_mcnemar_is_the_two_sided_binomial_test(counts: tuple[int, int]) -> None:
    expected = stats.binomtest(counts[1], sum(counts), 0.5).pvalue if sum(counts) else 1.0
    assert mcnemar_p_value(*counts) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_p_value(*counts) == mcnemar_p_value(*counts[::-1])


def outcomes(inputs: int) -> list[tuple[int, int]]:
    """All counts (only first, only second)."""
    return [(a, b) for a in range(inputs + 1) for b in range(inputs + 1 - a)]


def test_interval_covers_at_every_pair_of_shares() -> None:
    # Exact: every outcome of 14 inputs, its probability summed where the interval misses.
    inputs = 14
    tables = np.array(outcomes(inputs))
    rest = inputs - tables.sum(1)
    error, worst = 0.3, 0.0
    found = np.array([difference_interval(a, b, inputs, error) for a, b in tables.tolist()])
    for p, q in itertools.product(np.linspace(0, 1, 21), repeat=2):
        if p + q > 1 + 1e-12:
            continue
        last = max(0.0, 1 - p - q)
        chance = stats.multinomial.pmf(np.column_stack([tables, rest]), inputs, [p, q, last])
        missed = (found[:, 0] > q - p + 1e-12) | (found[:, 1] < q - p - 1e-12)
        worst = max(worst, float(chance[missed].sum()))
    assert error / 20 < worst <= error  # conservative, but no interval of everything


@pytest.mark.parametrize(("inputs", "error"), [(30, 0.05), (8, 0.3)])
def test_the_error_is_shared_by_all_parts_of_a_statement(inputs: int, error: float) -> None:
    """All inputs are the second's alone, where Clopper-Pearson's bounds are roots."""

    def least(side: float) -> float:
        return (2 * (0.9 * side) ** (1 / inputs) - 1) * (0.1 * side / 2) ** (1 / inputs)

    found = difference_interval(0, inputs, inputs, error)
    split, fewest = (0.45 * error) ** (1 / inputs), (0.05 * error) ** (1 / inputs)
    assert found == pytest.approx(((2 * split - 1) * fewest, 1.0), rel=1e-9)
    none, all_of = np.full(inputs, -1.0), np.full(inputs, 2.0)
    for cells in (1, 4):
        band = curve_difference(none, all_of, 1.0, error, cells)
        assert band.low == pytest.approx(least(error / (2 * cells)), rel=1e-9)
        assert band.high == pytest.approx(1.0, rel=1e-9)
        back = curve_difference(all_of, none, 1.0, error, cells)
        assert (back.low == -band.high).all() and (back.high == -band.low).all()


def pairs(only_first: int, only_second: int, both: int = 0) -> tuple[np.ndarray, np.ndarray]:
    first = [True] * only_first + [False] * only_second + [True] * both
    second = [False] * only_first + [True] * only_second + [True] * both
    return np.array(first, dtype=bool), np.array(second, dtype=bool)


def test_error_at_any_time_is_near_what_is_allowed() -> None:
    """Exact, by recursion over 400 discordant inputs that are each the second's with probability
    1/2: that p <= 1/2 ever happens has at most this probability, and more than half of it."""
    alive, ever, needed = np.array([1.0]), 0.0, 1  # alive: by how many are the second's
    for m in range(1, 401):
        alive = (np.append(alive, 0.0) + np.append(0.0, alive)) / 2
        while needed <= m and not says_no(m, needed):
            needed += 1
        counts = np.arange(m + 1)
        over = np.maximum(counts, m - counts) >= needed
        ever += float(alive[over].sum())
        alive[over] = 0.0
    assert 0.25 < ever <= 0.5


def says_no(m: int, larger: int) -> bool:
    """Whether p <= 1/2 after m discordant inputs, the larger count of which came last."""
    if 2 * larger < m:
        return False
    second = np.array([False, True] * (m - larger) + [True] * (2 * larger - m))
    return anytime_p_value(~second, second) <= 0.5


def test_holm_against_its_definition() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 5, 12):
        p = rng.uniform(size=size) ** 3
        found = holm(p.tolist())
        for level in (0.01, 0.05, 0.2):
            rejected = set()
            for place, index in enumerate(np.argsort(p)):
                if p[index] > level / (size - place):
                    break
                rejected.add(int(index))
            assert {i for i, value in enumerate(found) if value <= level} == rejected
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_comparison_names_the_second_as_the_better() -> None:
    first, second = pairs(2, 12, both=6)
    it = compare(first, second)
    assert (it.inputs, it.only_first, it.only_second) == (20, 2, 12)
    assert (it.first, it.second, it.difference) == (0.4, 0.9, 0.5)
    assert 0 < it.low < it.difference < it.high
    assert it.p_value == pytest.approx(stats.binomtest(2, 14, 0.5).pvalue)
    assert it.anytime == anytime_p_value(first, second) == anytime_p_value(second, first)
    back = compare(second, first)
    assert (back.difference, back.p_value) == (-0.5, it.p_value)
    with pytest.raises(ValueError):
        compare(first, second[:5])


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
    """One run certifies all 200 inputs, only at radius 0; the other one certifies none."""
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
