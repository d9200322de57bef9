"""Users of records and copies of a canary: each one counts, whatever the phase or the bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpdist.poisoning.certificates import PrivatePoisoningBound
from dpdist.privacy.audit_bounds import OneRunGuesses, ThresholdCounts, mu_to_epsilon
from dpdist.privacy.mechanisms import gaussian_delta, gaussian_epsilon
from dpdist.privacy.phases import GaussianAnswers, GaussianSteps, NoisyVotes
from dpdist.privacy.plan import PrivacyPlan, group_delta_by_lemma, group_pld
from dpdist.privacy.pld import PrivacyLoss

GRID, DELTA = 1e-3, 1e-4
GAUSSIAN = {  # noise of one Gaussian that they are as private as
    "full steps": (GaussianSteps(4, 24.0, 1.0), 12.0),
    "answers": (GaussianAnswers(24.0, 4), 12.0),
    "votes": (NoisyVotes(12.0, 20, 12, 0.2, 4, 0.1), 12.0),
}


@pytest.mark.parametrize("size", [2, 10])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_a_user_moves_a_gaussian_by_its_size(name, size):
    phase, noise = GAUSSIAN[name]
    found = phase.group_loss(size, GRID)
    assert found is not None
    exact = float(gaussian_epsilon(DELTA, noise, float(size)))
    assert exact <= found[0].get_epsilon_for_delta(DELTA) <= 1.02 * exact + 2e-3


@pytest.mark.slow
def test_a_sampled_user_is_a_mixture():
    """One step: the hockey stick of the mixture against the noise alone, both ways, by
    integration."""
    size, rate, noise = 3, 0.3, 4.0
    found = GaussianSteps(1, noise, rate).group_loss(size, GRID)
    assert found is not None
    x = np.linspace(-60, 60 + size, 400_001)
    base, mixed = norm.pdf(x, 0, noise), np.zeros_like(x)
    for joined in range(size + 1):
        weight = math.comb(size, joined) * rate**joined * (1 - rate) ** (size - joined)
        mixed += weight * norm.pdf(x, joined, noise)
    for epsilon in (0.0, 0.1, 0.4):
        e = math.exp(epsilon)
        exact = max(
            np.maximum(0, one - e * other).sum() * (x[1] - x[0])
            for one, other in ((base, mixed), (mixed, base))
        )
        assert exact - 1e-7 <= found[0].get_delta_for_epsilon(epsilon) <= exact + 2e-3


def test_poisoned_votes_need_what_a_gaussian_needs():
    (phase, noise), changes = GAUSSIAN["votes"], 4
    exact = norm.cdf(norm.ppf(0.5) + changes / noise)
    found = PrivatePoisoningBound(PrivacyPlan(1000, (phase,), DELTA)).required_probability(changes)
    assert exact - 1e-12 <= found <= exact + 2e-3


def test_a_user_of_one_record_costs_what_the_record_does():
    one = PrivacyPlan(1000, (GaussianSteps(50, 1.0, 0.05),), DELTA)
    found = group_pld(one, 1)
    assert found is not None
    assert PrivacyLoss(*found).epsilon(DELTA) == pytest.approx(one.guarantee().epsilon, rel=1e-3)


@pytest.mark.parametrize("phase", [GaussianSteps(20, 2.0, 0.02, 40), GaussianSteps(1, 0.0, 0.1)])
def test_capped_batches_and_steps_without_noise_have_no_exact_loss(phase):
    assert group_pld(PrivacyPlan(1000, (phase,), DELTA), 2) is None


def test_delta_by_the_lemma_in_closed_form():
    assert group_delta_by_lemma(0.0, 1e-6, 4) == pytest.approx(4e-6)
    assert group_delta_by_lemma(0.5, 1e-6, 2) == pytest.approx(
        1e-6 * (math.e - 1) / math.expm1(0.5)
    )
    assert group_delta_by_lemma(50.0, 1e-6, 100) == 1.0


# --- copies of a canary


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5])
def test_no_bound_of_one_canary_is_above_what_made_its_copies_visible(size):
    """A Gaussian mechanism of mu: `size` copies move it by size * mu. Guesses as often right as
    the best ones are on average, or a little more often."""
    mu, count = 0.4, 2000
    seen = norm.cdf(size * mu / 2)
    runs = ThresholdCounts(round(count * seen), count, round(count * (1 - seen)), count)
    one = OneRunGuesses(count, count, round(count * seen))
    for audit in (runs, one):
        assert 0 < audit.mu(size) <= mu
        assert audit.gaussian_epsilon(DELTA, size) <= mu_to_epsilon(mu, DELTA)
        assert audit.gaussian_epsilon(DELTA, size) == mu_to_epsilon(audit.mu(size), DELTA)
        epsilon = audit.epsilon(DELTA, size)
        assert epsilon > 0 and float(gaussian_delta(epsilon, 1.0, mu)) >= DELTA
