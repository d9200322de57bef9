"""Group privacy: exact mixtures against sampling, the lemma against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from dpdist.privacy.mechanisms import gaussian_delta, gaussian_epsilon
from dpdist.privacy.phases import GaussianSteps, LaplaceReleases
from dpdist.privacy.plan import (
    PrivacyPlan,
    group_delta_by_lemma,
    group_epsilon_by_lemma,
    group_guarantee,
)

pytestmark = pytest.mark.guarantee


def plan(*phases, **setting) -> PrivacyPlan:
    return PrivacyPlan(1000, phases, 1e-4, **setting)


def test_one_record_is_the_plan_itself():
    one = plan(GaussianSteps(50, 1.0, 0.05))
    assert group_guarantee(one, 1) == one.guarantee()


@pytest.mark.parametrize("size", [2, 5])
def test_full_batches_scale_the_sensitivity(size):
    found = group_guarantee(plan(GaussianSteps(4, 8.0, 1.0)), size)
    exact = float(gaussian_epsilon(1e-4, 8.0 / math.sqrt(4), float(size)))
    assert found.epsilon == pytest.approx(exact, rel=5e-3)
    assert found.epsilon >= exact
    assert any(f"up to {size} records" in line for line in found.assumptions)


def test_laplace_scales_the_sensitivity():
    found = group_guarantee(plan(LaplaceReleases(12.0)), 3, delta=1e-9)
    assert found.epsilon == pytest.approx(0.25, abs=2e-3)


@pytest.mark.long
def test_sampled_groups_by_sampling_the_privacy_loss():
    """Three records joining independently, 5 steps; 5 standard errors: once in 1.7e6 runs."""
    rng = np.random.default_rng(3)
    size, rate, noise, steps, runs = 3, 0.2, 4.0, 5, 300_000
    found = group_guarantee(plan(GaussianSteps(steps, noise, rate)), size, delta=0.01).epsilon
    chances = binom.pmf(range(size + 1), size, rate)
    loss = np.zeros(runs)
    for _ in range(steps):
        x = rng.normal(0, noise, runs) + rng.binomial(size, rate, runs)
        ratio = sum(p * np.exp((2 * x * j - j * j) / (2 * noise**2)) for j, p in enumerate(chances))
        loss += np.log(ratio)
    gain = np.maximum(0.0, -np.expm1(found - loss))
    error = gain.std() / math.sqrt(runs)
    assert abs(gain.mean() - 0.01) < 5 * error + 2e-4
    assert found < group_guarantee(plan(GaussianSteps(steps, noise, rate)), 4, delta=0.01).epsilon


def test_lemma_is_sound_for_the_gaussian():
    """Against the exact profile of a group of three: sensitivity 3."""
    epsilon = group_epsilon_by_lemma(lambda at: float(gaussian_delta(at, 3.0)), 1e-5, 3)
    assert epsilon > float(gaussian_epsilon(1e-5, 3.0, 3.0))
    assert group_delta_by_lemma(0.0, 1e-6, 4) == pytest.approx(4e-6)
    assert group_delta_by_lemma(0.5, 1e-6, 2) == pytest.approx(
        1e-6 * (math.e - 1) / math.expm1(0.5)
    )
    assert group_delta_by_lemma(50.0, 1e-6, 100) == 1.0
    assert group_epsilon_by_lemma(lambda at: 0.5, 1e-5, 2) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "setting"),
    [
        (GaussianSteps(20, 2.0, 0.02), {"neighbours": "replace-one"}),
        (GaussianSteps(20, 2.0, 0.02, 40), {}),
    ],
)
def test_other_plans_use_the_lemma(phase, setting):
    one = plan(phase, **setting)
    found = group_guarantee(one, 2)
    assert found.source.startswith("group-privacy lemma")
    assert 2 * one.guarantee().epsilon < found.epsilon < math.inf


@pytest.mark.parametrize("nominal", [False, True])
def test_a_group_is_of_the_relation_that_its_records_are(nominal):
    found = group_guarantee(plan(GaussianSteps(4, 8.0, 1.0), nominal=nominal), 2)
    assert found.size_public is not nominal
    assert ("zero-out" in found.relation) is not nominal


def test_the_lemma_s_epsilon_is_rounded_up():
    """Down to the last bit it is one at which delta holds."""
    for delta, size in ((1e-5, 2), (1e-7, 3), (1e-4, 7)):
        found = (
            group_epsilon_by_lemma(lambda at: float(gaussian_delta(at, 3.0)), delta, size) / size
        )
        assert group_delta_by_lemma(found, float(gaussian_delta(found, 3.0)), size) <= delta


def test_bad_sizes():
    with pytest.raises(ValueError):
        group_guarantee(plan(GaussianSteps(1, 1.0, 0.1)), 0)
    assert group_guarantee(plan(GaussianSteps(1, 0.0, 0.1)), 2).epsilon == math.inf
