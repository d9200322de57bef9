from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dpdist.certification.statistics import (
    anytime_p_value,
    compare,
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


def test_interval_and_p_value_agree_about_zero() -> None:
    for a, b in outcomes(25):
        low, high = difference_interval(a, b, 40, 0.05)
        assert (low > 0 or high < 0) == (mcnemar_p_value(a, b) < 0.045)
        assert difference_interval(b, a, 40, 0.05) == pytest.approx((-high, -low))


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
