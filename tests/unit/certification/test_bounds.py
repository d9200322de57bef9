from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

from dpdist.core import binomial


def exact_upper_tail(hits: int, draws: int, p: float) -> mp.mpf:
    """Pr[Binomial(draws, p) >= hits] by summation from the mode's side with 50 digits."""
    mp.mp.dps = 50
    p = mp.mpf(p)
    if hits == 0:
        return mp.mpf(1)
    term = mp.exp(
        mp.loggamma(draws + 1)
        - mp.loggamma(hits + 1)
        - mp.loggamma(draws - hits + 1)
        + hits * mp.log(p)
        + (draws - hits) * mp.log1p(-p)
    )
    total = mp.mpf(0)
    for k in range(hits, draws + 1):
        total += term
        if term < total * mp.mpf(10) ** -30:
            break
        term *= mp.mpf(draws - k) / (k + 1) * p / (1 - p)
    return total


COUNTS = [
    (1, 10, 0.05),
    (50500, 100000, 1e-3),
    (99999, 100000, 1e-3),
    (3, 10**9, 1e-3),
    (10**9 - 5, 10**9, 1e-3),
    (999, 1000, 1e-12),
]


@pytest.mark.parametrize(("hits", "draws", "alpha"), COUNTS)
def test_lower_bound_is_exact_and_rounded_down(hits: int, draws: int, alpha: float) -> None:
    p = binomial.clopper_pearson_lower(hits, draws, alpha)
    tail = exact_upper_tail(hits, draws, p)
    assert tail <= alpha
    assert tail == pytest.approx(alpha, rel=1e-6, abs=0)


@pytest.mark.parametrize(("hits", "draws", "alpha"), COUNTS)
def test_upper_bound_mirrors_the_lower_one(hits: int, draws: int, alpha: float) -> None:
    upper = binomial.clopper_pearson_upper(draws - hits, draws, alpha)
    lower = binomial.clopper_pearson_lower(hits, draws, alpha)
    assert upper >= 1 - lower - 3e-16
    assert upper == pytest.approx(1 - lower, rel=1e-6)


@pytest.mark.parametrize(
    ("hits", "draws", "alpha"),
    [(0, 0, 0.1), (0, np.nan, 0.1), (-1, 9, 0.1), (10, 9, 0.1), (0.5, 9, 0.1), (1, 9.5, 0.1),
     (1, 9, 0.0), (1, 9, 1.0), (1, 9, np.nan), ([1, 10], 9, 0.1), (1, [9, 0], 0.1),
     (1, 9, [0.1, 1.0])],
)  # fmt: skip
def test_counts_that_no_experiment_has_are_refused(hits, draws, alpha) -> None:
    bounds = (binomial.clopper_pearson_lower, binomial.clopper_pearson_upper)
    for bound in (*bounds, binomial.hoeffding_lower):
        with pytest.raises(ValueError, match=r"must (be|lie)"):
            bound(hits, draws, alpha)


# With a large alpha the complement of a bound is small, where other formulas take over.
@pytest.mark.parametrize(
    ("draws", "alpha"), [(1, 1e-9), (1, 0.9), (10, 1e-3), (10**5, 1e-3), (10**9, 1e-3)]
)
def test_edges_have_their_closed_forms(draws: int, alpha: float) -> None:
    mp.mp.dps = 40
    assert binomial.clopper_pearson_lower(0, draws, alpha) == 0.0
    assert binomial.clopper_pearson_upper(draws, draws, alpha) == 1.0
    all_hits = mp.mpf(alpha) ** (mp.mpf(1) / draws)
    p = binomial.clopper_pearson_lower(draws, draws, alpha)
    assert p <= all_hits
    assert 1 - p == pytest.approx(float(1 - all_hits), rel=1e-7)
    none = binomial.clopper_pearson_upper(0, draws, alpha)
    assert none == pytest.approx(float(1 - all_hits), rel=1e-12, abs=0)


def test_vectorized_equals_scalar_and_scipy() -> None:
    hits = np.array([0, 1, 50, 99, 100])
    got = binomial.clopper_pearson_lower(hits, 100, 0.001)
    expected = [0.0, *stats.beta.ppf(0.001, hits[1:], 100 - hits[1:] + 1)]
    assert got == pytest.approx(expected, rel=1e-12)
    assert [binomial.clopper_pearson_lower(int(k), 100, 0.001) for k in hits] == list(got)
    low, high = binomial.clopper_pearson_interval(50, 100, 0.05)
    reference = stats.binomtest(50, 100).proportion_ci(0.95, method="exact")
    assert (low, high) == pytest.approx((reference.low, reference.high), rel=1e-9)


@pytest.mark.parametrize(("draws", "alpha"), [(500, 1e-3), (1000, 1e-7), (100_000, 1e-11)])
def test_bounds_of_few_hits_have_no_jump(draws: int, alpha: float) -> None:
    """Elsewhere 0 of 1,000 at 1e-7 has been bounded by 0.9999998 in place of 0.016."""
    hits = np.array([0, 1, 2, 3, 10, 30, 100])
    upper = binomial.clopper_pearson_upper(hits, draws, alpha)
    assert (np.diff(upper) > 0).all()
    mp.mp.dps = 40
    none = 1 - mp.mpf(alpha) ** (mp.mpf(1) / draws)
    assert upper[0] == pytest.approx(float(none), rel=1e-9) and upper[0] >= float(none)
    for k, bound in zip(hits[1:], upper[1:], strict=True):
        missed = 1 - exact_upper_tail(int(k) + 1, draws, bound)  # Pr[at most k hits] at the bound
        assert missed == pytest.approx(alpha, rel=1e-6)
