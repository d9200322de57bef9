from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpdist.certification import score_bounds
from dpdist.certification.score_bounds import ScoreBounds
from dpdist.privacy import mechanisms


def of(p_a: float, p_b: float) -> ScoreBounds:
    return ScoreBounds(np.array([p_a, 0.0, 0.0]), np.array([1.0, p_b, p_b / 2]))


@pytest.mark.parametrize(("p_a", "p_b"), [(0.99, 0.005), (0.7, 0.2), (0.999, 1e-6)])
def test_every_size_satisfies_the_condition_by_exact_profile(p_a: float, p_b: float) -> None:
    # Independent check: at the certified size some epsilon must satisfy the condition with the
    # exact delta of the noise; 1 % beyond the analytic one no epsilon may.
    bounds, std, sensitivity = of(p_a, p_b), 0.5, 3.0

    def holds(size: float) -> bool:
        epsilon = np.geomspace(1e-6, 30, 20_000)
        delta = mechanisms.gaussian_delta(epsilon, std, sensitivity * size)
        return bool(np.any(p_a > np.exp(2 * epsilon) * p_b + (1 + np.exp(epsilon)) * delta))

    analytic = score_bounds.analytic_gaussian_size(bounds, std, sensitivity)
    assert holds(analytic * 0.999) and not holds(analytic * 1.01)
    for smaller in (score_bounds.classical_gaussian_size, score_bounds.extended_gaussian_size):
        size = smaller(bounds, std, sensitivity)
        assert 0 < size <= analytic * (1 + 1e-9)
    exact = score_bounds.exact_gaussian_size(bounds, std, sensitivity)
    apart = stats.norm.ppf(p_a) - stats.norm.ppf(p_b)
    assert analytic <= exact == pytest.approx(std / sensitivity / 2 * apart)


def test_hgm_as_printed_overstates() -> None:
    confident = of(1 - 1e-6, 1e-7)
    sound = score_bounds.extended_gaussian_size(confident, 1.0, 1.0)
    printed = score_bounds.hgm_size_as_printed(confident, 1.0, 1.0)
    assert printed > 2 * sound
    # It exceeds what can be true of any classifier with these scores.
    assert printed > score_bounds.exact_gaussian_size(confident, 1.0, 1.0)


def test_bounds_pay_for_all_classes_and_both_sides() -> None:
    sums, draws, k = np.array([900.0, 60.0, 40.0]), 1000, 3
    sound = score_bounds.score_bounds_hoeffding(sums, draws, 0.95)
    printed = score_bounds.score_bounds_hoeffding(sums, draws, 0.95, paper_faithful=True)
    half = np.sqrt(np.log(2 * k / 0.05) / 2000)
    assert sound.p_a == pytest.approx(0.9 - half) and sound.label == 0
    assert sound.p_b == pytest.approx(0.06 + half)
    assert printed.p_a == pytest.approx(0.9 - np.sqrt(np.log(k / 0.05) / 2000))
    assert printed.p_a > sound.p_a
    bernstein = score_bounds.score_bounds_bernstein(sums, sums, draws, 0.95)
    assert bernstein.p_b < sound.p_b
    each = np.repeat([1.0, 0.0], [60, 940])  # the scores that these sums are of
    log_two = np.log(2 * 2 * k / 0.05)
    half = np.sqrt(2 * each.var(ddof=1) * log_two / draws) + 7 * log_two / (3 * (draws - 1))
    assert bernstein.p_b == pytest.approx(0.06 + half)
    counts = score_bounds.score_bounds_counts(np.array([900, 60, 40]), 0.95)
    assert counts.p_a == pytest.approx(stats.beta.ppf(0.05 / 6, 900, 101))
    assert counts.p_b == pytest.approx(stats.beta.ppf(1 - 0.05 / 6, 61, 940))
    with pytest.raises(ValueError):
        score_bounds.score_bounds_counts(np.array([5, 5]), 1.0)
