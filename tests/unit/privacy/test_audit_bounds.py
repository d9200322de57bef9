"""Audits against printed values, exact enumerations and mechanisms whose truth is known."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm

from dpdist.privacy import audit_bounds
from dpdist.privacy.audit_bounds import CanaryScores, OneRunGuesses, ThresholdCounts
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.plan import PrivacyPlan

ALPHA = 0.05


# --- many runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "epsilon"), [(100, 3.28), (5000, 7.21)])
def test_perfect_separation(runs, epsilon):
    assert ThresholdCounts(runs, runs, 0, runs).epsilon() == pytest.approx(epsilon, abs=0.005)


def test_counts_give_the_two_formulas():
    audit = ThresholdCounts(500, 1000, 10, 1000)
    assert audit.epsilon(1e-5) == pytest.approx(3.242, abs=5e-4)
    low, high = audit.rate_bounds
    assert audit.mu() == pytest.approx(norm.ppf(low) - norm.ppf(high))
    assert audit.rejects(audit_bounds.gaussian_tradeoff(audit.mu() - 1e-6))
    assert not audit.rejects(audit_bounds.gaussian_tradeoff(audit.mu() + 1e-6))
    mirrored = ThresholdCounts(990, 1000, 500, 1000)  # the complements tell as much
    assert mirrored.epsilon(1e-5) == pytest.approx(3.242, abs=5e-4)
    backwards = ThresholdCounts(10, 1000, 500, 1000)
    assert backwards.epsilon() == backwards.mu() == 0


def test_copies_of_a_canary_are_paid_for():
    audit = ThresholdCounts(500, 1000, 10, 1000)
    assert audit.epsilon(0.0, copies=4) == pytest.approx(audit.epsilon() / 4, rel=1e-9)
    assert audit.mu(4) == pytest.approx(audit.mu() / 4)
    low, high = audit.rate_bounds
    k, x = 3, audit.epsilon(1e-3, copies=3)
    lost = 1e-3 * math.expm1(k * x) / math.expm1(x)
    assert math.exp(k * x) * high + lost == pytest.approx(low, rel=1e-6)


def test_the_threshold_comes_from_other_runs():
    rng = np.random.default_rng(1)
    inside, outside = rng.normal(2, 1, 600), rng.normal(0, 1, 600)
    found = ThresholdCounts.from_scores(CanaryScores.from_scores(inside, outside), ALPHA)
    assert (found.num_with_canary, found.num_without_canary) == (300, 300)
    assert found.true_positives == (inside[300:] > found.threshold).sum()
    assert found.false_positives == (outside[300:] > found.threshold).sum()
    inside[300:], outside[300:] = 0, 0
    changed = ThresholdCounts.from_scores(CanaryScores.from_scores(inside, outside), ALPHA)
    assert changed.threshold == found.threshold


def test_pooled_canaries_of_one_run_are_refused():
    with pytest.raises(ValueError):
        CanaryScores(np.zeros(4), np.array([True, True, False, False]), np.arange(4.0))
    for inside, outside in (([1.0, 2.0], [1.0]), ([1.0, np.nan], [1.0, 2.0])):
        with pytest.raises(ValueError):
            CanaryScores.from_scores(inside, outside)


def test_several_audits_share_alpha():
    assert audit_bounds.bonferroni_alpha(0.05, 5) == pytest.approx(0.01)
    with pytest.raises(ValueError):
        audit_bounds.bonferroni_alpha(0.05, 0)


# --- one run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "epsilon"), [(95, 2.165), (100, 3.465)])
def test_counting_gives_the_printed_values(right, epsilon):
    assert OneRunGuesses(1000, 100, right).epsilon(1e-5) == pytest.approx(epsilon, abs=5e-4)
    assert OneRunGuesses(1000, 100, right).epsilon(copies=2) == pytest.approx(
        OneRunGuesses(1000, 100, right).epsilon() / 2, rel=1e-6
    )


def test_the_p_value_by_enumeration():
    m, r, v, delta = 40, 12, 10, Fraction(1, 1000)
    q = Fraction(3, 4)  # e^epsilon = 3
    distribution = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    worst = max(sum(distribution[v - i : v]) / i for i in range(1, v + 1))
    expected = sum(distribution[v:]) + 2 * m * delta * worst
    audit = OneRunGuesses(m, r, v)
    assert audit.p_values(math.log(3), 1e-3) == pytest.approx([float(expected)], rel=1e-12)
    assert audit.p_values(math.log(3)) == pytest.approx([float(sum(distribution[v:]))], rel=1e-12)
    assert OneRunGuesses(m, r, 0).p_values(1.0, 1e-3) == [1.0]


def test_the_p_value_of_copies_by_enumeration():
    """k copies are a group: k epsilon, and delta (e^(k epsilon) - 1) / (e^epsilon - 1)."""
    m, r, v, delta, copies, growth = 40, 12, 11, Fraction(1, 10_000), 3, 2  # e^epsilon = 2
    q = Fraction(growth**copies, 1 + growth**copies)
    lost = delta * Fraction(growth**copies - 1, growth - 1)
    distribution = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    worst = max(sum(distribution[v - i : v]) / i for i in range(1, v + 1))
    expected = sum(distribution[v:]) + 2 * m * lost * worst
    audit = OneRunGuesses(m, r, v)
    assert expected < 1
    found = audit.p_values(math.log(growth), float(delta), copies)
    assert found == pytest.approx([float(expected)], rel=1e-12)


def by_the_book(m: int, r: int, v: int, alpha: float, curve) -> bool:
    """The recursion as the paper lists it, on plain numbers."""
    right, wrong = {v: alpha * v / m}, {v: alpha * (r - v) / m}
    for i in reversed(range(v)):
        wrong[i] = max(wrong[i + 1], float(curve(np.array(right[i + 1]))))
        right[i] = right[i + 1] + i / (r - i) * (wrong[i] - wrong[i + 1])
    return right[0] + wrong[0] > r / m


def test_trade_off_audits_of_many_runs_at_once_are_those_of_each():
    for m, r in ((200, 40), (30, 30)):
        rights = np.arange(r + 1)
        for curve in (
            audit_bounds.gaussian_tradeoff(0.8),
            audit_bounds.approximate_dp_tradeoff(0.7, 1e-3),
        ):
            got = audit_bounds.is_improbable(m, r, rights, ALPHA, curve)
            assert got.tolist() == [by_the_book(m, r, v, ALPHA, curve) for v in rights]
        found = audit_bounds.one_run_mu(m, r, rights, ALPHA)
        assert found[[0, r // 2, r]] == pytest.approx(
            [OneRunGuesses(m, r, v).mu() for v in (0, r // 2, r)]
        )
        assert (np.diff(found) >= 0).all() and found[0] == 0 < found[-1]


def leaky_responses(m: int, r: int, epsilon: float, delta: float) -> np.ndarray:
    """Exact distribution of right guesses when every coin is told with probability delta and
    answered by randomized response otherwise: the (epsilon, delta)-DP mechanism of the theorems.
    Told coins are guessed first."""
    distribution = np.zeros(r + 1)
    for told, weight in enumerate(binom.pmf(np.arange(m + 1), m, delta)):
        sure = min(told, r)
        distribution[sure:] += weight * binom.pmf(
            np.arange(r - sure + 1), r - sure, 1 / (1 + math.exp(-epsilon))
        )
    return distribution


@pytest.mark.parametrize(
    ("m", "r", "epsilon", "delta"),
    [(100, 60, 0.5, 0.0), (60, 10, 1.0, 0.02), (60, 60, 2.0, 0.005)],
)
def test_the_worst_mechanism_is_accused_no_more_than_alpha(m, r, epsilon, delta):
    distribution = leaky_responses(m, r, epsilon, delta)
    assert distribution.sum() == pytest.approx(1)
    for alpha in (0.05, 1e-6):
        counting = [
            OneRunGuesses(m, r, v, alpha).p_values(epsilon, delta)[0] <= alpha for v in range(r + 1)
        ]
        curve = audit_bounds.approximate_dp_tradeoff(epsilon, delta)
        curved = audit_bounds.is_improbable(m, r, np.arange(r + 1), alpha, curve)
        assert distribution[counting].sum() <= alpha and distribution[curved].sum() <= alpha
    # and not out of timidity
    none = audit_bounds.is_improbable(
        m, r, np.arange(r + 1), ALPHA, audit_bounds.approximate_dp_tradeoff(0.0)
    )
    assert distribution[none].sum() > 0.2


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_one_run_audits_of_a_gaussian_mechanism_exceed_the_truth_as_seldom_as_stated(mu):
    rng = np.random.default_rng(20)
    times, m, guesses, delta = 400, 500, 40, 1e-5
    truth = float(gaussian_epsilon(delta, 1.0, mu))
    coins = rng.random((times, m)) < 0.5
    seen = mu * coins + rng.standard_normal((times, m))
    audits = [
        OneRunGuesses.from_scores(s, c, guesses, ALPHA) for s, c in zip(seen, coins, strict=True)
    ]
    right = np.array([audit.correct for audit in audits])
    curved = int((audit_bounds.one_run_mu(m, guesses, right, ALPHA) > mu).sum())
    counted = sum(audit.p_values(truth, delta)[0] <= ALPHA for audit in audits)
    for exceeded in (curved, counted):
        assert binomtest(exceeded, times, ALPHA, alternative="greater").pvalue > 1e-3


def test_a_plans_own_curve():
    def plan(noise):
        return PrivacyPlan.dp_sgd(
            records=1000, batch_size=1000, noise_multiplier=noise, steps=1, delta=1e-5
        )

    rng = np.random.default_rng(5)
    coins = rng.random(2000) < 0.5
    # sigma 0.5 was run
    audit = OneRunGuesses.from_scores(coins / 0.5 + rng.standard_normal(2000), coins, 160)
    assert not audit.rejects(audit_bounds.plan_tradeoff(plan(0.5)))
    assert audit.rejects(audit_bounds.plan_tradeoff(plan(1.0)))  # where 1.0 was promised: a bug


@pytest.mark.parametrize(
    "make",
    [
        lambda: OneRunGuesses(10, 11, 5),
        lambda: OneRunGuesses(10, 5, 6),
        lambda: OneRunGuesses(10, 5, 5, 0.0),
        lambda: OneRunGuesses.from_scores([1.0, 2.0], [True], 2),
        lambda: OneRunGuesses.from_scores([1.0, 2.0], [True, False], 4),
    ],
)
def test_what_cannot_be_audited_is_refused(make):
    with pytest.raises(ValueError):
        make()
