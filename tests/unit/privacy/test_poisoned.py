"""What k changed training records leave of an answer: closed forms, and explicit worst cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpdist.poisoning import certificates
from dpdist.poisoning.certificates import PrivatePoisoningBound, compose_vote_plans
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan

NORMAL = stats.norm

# Whoever is first composes the losses that all of them read.


def gaussian(mu: float, **more: object) -> PrivacyPlan:
    """Full batches, in two phases that add up to mu."""
    parts = (GaussianSteps(1, math.sqrt(4 / 1) / mu, 1.0), GaussianSteps(3, 2 / mu, 1.0))
    return PrivacyPlan(1000, parts, 1e-5, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_full_batches_need_what_a_gaussian_needs(target: float) -> None:
    poisoned = PrivatePoisoningBound(gaussian(0.25))
    for changes in (0, 1, 2, 5):
        exact = NORMAL.cdf(NORMAL.ppf(target) + 0.25 * changes)
        found = poisoned.required_probability(changes, target)
        assert exact - 1e-12 <= found <= exact + 2e-3, changes


RATE, NOISE = 0.3, 4.0
SAMPLED = PrivacyPlan(1000, (GaussianSteps(1, NOISE, RATE),), 1e-5)


@pytest.fixture(scope="module")
def sampled() -> PrivatePoisoningBound:
    """Its groups take seconds to build; they are kept."""
    return PrivatePoisoningBound(SAMPLED)


def above(threshold: np.ndarray, records: int, at: float) -> np.ndarray:
    """Probability that a noisy sum, which each record joins by a coin, exceeds the threshold."""
    joined = np.arange(records + 1)
    shifted = (threshold - at * joined[:, None]) / NOISE
    return stats.binom.pmf(joined, records, RATE) @ NORMAL.sf(shifted)


@pytest.mark.slow
def test_no_sampled_attack_leaves_less(sampled: PrivatePoisoningBound) -> None:
    # a records that pull up are removed, b that pull down are inserted.
    poisoned, threshold = sampled, np.linspace(-12, 12, 4000)
    for changes in (1, 2, 3):
        worst = 1.0
        for removed in range(changes + 1):
            before = above(threshold, removed, 1.0)
            after = above(threshold, changes - removed, -1.0)
            # Below 1/2 removals are the worse ones, above it insertions.
            for target in (0.3, 0.5, 0.7):
                enough = before >= poisoned.required_probability(changes, target)
                assert (after[enough] > target).all(), (changes, removed)
            worst = min(
                worst, after[before >= poisoned.required_probability(changes)].min(initial=1.0)
            )
        assert worst <= 0.51  # and none could be claimed much earlier


def test_what_is_needed_leaves_more_than_the_target(sampled: PrivatePoisoningBound) -> None:
    # To the last bit, by one record's curve or by both directions; 1e-9 less does not.
    pair = sampled._find_group_curves(1)
    assert pair is not None

    def left(x: float) -> float:
        ways = [float(curve(np.array(x))) for curve in (sampled._one, *pair)]
        return max(ways[0], min(ways[1:]))

    for target in (0.3, 0.5, 0.7):
        needed = sampled.required_probability(1, target)
        assert left(needed) > target >= left(needed - 1e-9)


def test_where_nothing_is_proved_nothing_is_withstood(sampled: PrivatePoisoningBound) -> None:
    free = PrivacyPlan(1000, (GaussianSteps(5, 0.0, 0.1),), 1e-5)
    with pytest.raises(ValueError):
        PrivatePoisoningBound(free)
    poisoned = sampled
    assert poisoned.max_changes(0.5) == -1 and poisoned.max_changes(0.49) == -1
    assert poisoned.max_changes(0.5 + 1e-9) == 0


def test_votes_cost_all_their_trainings() -> None:
    plan = gaussian(0.25)
    whole = compose_vote_plans(plan, 9)
    assert whole.guarantee().epsilon == pytest.approx(gaussian(0.75).guarantee().epsilon, rel=1e-3)


def test_large_groups_are_made_of_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_LARGEST", 2)
    poisoned = PrivatePoisoningBound(gaussian(0.25))
    for changes in (3, 4, 5):
        exact = NORMAL.cdf(NORMAL.ppf(0.5) + 0.25 * changes)
        assert exact - 1e-12 <= poisoned.required_probability(changes) <= exact + 4e-3, changes
    assert set(poisoned._groups) == {1, 2}
