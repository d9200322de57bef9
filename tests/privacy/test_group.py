"""Users of records: exact mixtures against sampling, the lemma against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan, group_delta_by_lemma, group_pld
from dpdist.privacy.pld import PrivacyLoss


def plan(*phases, **setting) -> PrivacyPlan:
    return PrivacyPlan(1000, phases, 1e-4, **setting)


def user_epsilon(of: PrivacyPlan, size: int, delta: float = 1e-4) -> float:
    """Return the exact epsilon of `size` records that come or go together."""
    found = group_pld(of, size)
    assert found is not None
    return PrivacyLoss(*found).epsilon(delta)


def test_a_user_of_one_record_costs_what_the_record_does():
    one = plan(GaussianSteps(50, 1.0, 0.05))
    assert user_epsilon(one, 1) == pytest.approx(one.guarantee().epsilon, rel=1e-3)


@pytest.mark.parametrize("size", [2, 5])
def test_full_batches_scale_the_sensitivity(size):
    found = user_epsilon(plan(GaussianSteps(4, 8.0, 1.0)), size)
    exact = float(gaussian_epsilon(1e-4, 8.0 / math.sqrt(4), float(size)))
    assert exact <= found == pytest.approx(exact, rel=5e-3)


@pytest.mark.slow
def test_sampled_users_by_sampling_the_privacy_loss():
    """Three records joining independently, 5 steps; 5 standard errors: once in 1.7e6 runs."""
    rng = np.random.default_rng(3)
    size, rate, noise, steps, runs = 3, 0.2, 4.0, 5, 300_000
    found = user_epsilon(plan(GaussianSteps(steps, noise, rate)), size, delta=0.01)
    chances = binom.pmf(range(size + 1), size, rate)
    loss = np.zeros(runs)
    for _ in range(steps):
        x = rng.normal(0, noise, runs) + rng.binomial(size, rate, runs)
        ratio = sum(p * np.exp((2 * x * j - j * j) / (2 * noise**2)) for j, p in enumerate(chances))
        loss += np.log(ratio)
    gain = np.maximum(0.0, -np.expm1(found - loss))
    error = gain.std() / math.sqrt(runs)
    assert abs(gain.mean() - 0.01) < 5 * error + 2e-4
    assert found < user_epsilon(plan(GaussianSteps(steps, noise, rate)), 4, delta=0.01)


def test_the_lemma_s_delta_in_closed_form():
    assert group_delta_by_lemma(0.0, 1e-6, 4) == pytest.approx(4e-6)
    assert group_delta_by_lemma(0.5, 1e-6, 2) == pytest.approx(
        1e-6 * (math.e - 1) / math.expm1(0.5)
    )
    assert group_delta_by_lemma(50.0, 1e-6, 100) == 1.0


@pytest.mark.parametrize("phase", [GaussianSteps(20, 2.0, 0.02, 40), GaussianSteps(1, 0.0, 0.1)])
def test_no_exact_loss_is_made_up_for_capped_batches_or_without_noise(phase):
    assert group_pld(plan(phase), 2) is None
