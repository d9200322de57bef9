"""Calibration: never above the target, within one percent of it, and known values."""

from __future__ import annotations

import math

import pytest

from dpdist.privacy.calibration import (
    UnreachableTargetError,
    _largest_within_target,
    batch_size_for,
    calibrate_noise,
    noise_multiplier_for,
    steps_for,
)
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, RepeatAndSelect
from dpdist.privacy.plan import PrivacyPlan

DATA = {"records": 60_000, "delta": 1e-5}


def epsilon(**setting) -> float:
    return PrivacyPlan.dp_sgd(**{**DATA, **setting}).guarantee().epsilon


def assert_met(value: float, target: float) -> None:
    assert 0.99 * target <= value <= target


@pytest.mark.parametrize("target", [1e-3, 1.0, 50.0])
def test_noise_meets_the_target(target):
    setting = {"batch_size": 256, "steps": 3516}
    noise = noise_multiplier_for(target, **DATA, **setting)
    assert_met(epsilon(noise_multiplier=noise, **setting), target)


def test_known_noise_for_epsilon_one_with_a_poisson_search():
    def plan_with(noise: float) -> PrivacyPlan:
        steps = GaussianSteps(3516, noise, 256 / 60_000)
        return PrivacyPlan(60_000, (RepeatAndSelect((steps,), 10, math.inf),), 1e-5)

    noise = calibrate_noise(plan_with, 1.0)
    assert noise == pytest.approx(1.931, abs=3e-3)  # by Renyi DP alone 2.402
    assert_met(plan_with(noise).guarantee().epsilon, 1.0)


def test_noise_of_full_batches_is_the_analytic_gaussian():
    noise = noise_multiplier_for(1.0, records=500, batch_size=500, steps=1, delta=1e-5)
    assert noise == pytest.approx(3.7306, rel=2e-3)


def test_steps_meet_the_target():
    target, setting = 2.0, {"batch_size": 256, "noise_multiplier": 1.1}
    steps = steps_for(target, **DATA, **setting)
    assert_met(epsilon(steps=steps, **setting), target)
    assert epsilon(steps=round(steps * 1.02), **setting) > target


def test_batch_size_meets_the_target():
    setting = {"steps": 3516, "noise_multiplier": 1.1}
    size = batch_size_for(2.0, **DATA, **setting)
    assert epsilon(batch_size=size, **setting) <= 2.0 < epsilon(batch_size=size + 3, **setting)


def test_everything_fits_when_noise_is_large():
    assert batch_size_for(100.0, **DATA, noise_multiplier=30.0, steps=100) == 60_000
    assert steps_for(5.0, **DATA, batch_size=10, noise_multiplier=50.0, max_steps=1000) == 1000


def test_unreachable_targets_are_refused():
    with pytest.raises(UnreachableTargetError):
        steps_for(0.1, records=1000, batch_size=500, noise_multiplier=0.5, delta=1e-5)
    with pytest.raises(UnreachableTargetError):
        batch_size_for(0.01, **DATA, noise_multiplier=0.5, steps=3516)

    def plan_with(noise: float) -> PrivacyPlan:
        return PrivacyPlan(100, (GaussianSteps(10, noise, 0.1), GaussianReleases(0.5)), 1e-5)

    with pytest.raises(UnreachableTargetError):
        calibrate_noise(plan_with, 1.0)


def test_a_cost_that_jumps_is_not_exceeded():
    """Nor by half a percent, though that is all that is missing."""
    x = _largest_within_target(
        lambda x: 0.5 if x < 2 else 1.005, 1.0, 1.0, (1e-3, 1e3), whole=False
    )
    assert x == pytest.approx(2.0, rel=1e-6) and x < 2


@pytest.mark.parametrize("target", [0.0, math.nan])
def test_bad_targets(target):
    with pytest.raises(ValueError):
        noise_multiplier_for(target, **DATA, batch_size=256, steps=10)
