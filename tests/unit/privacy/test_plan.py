"""The privacy plan against published figures and exact profiles."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from dpdist.privacy import accounting
from dpdist.privacy.accounting import rdp_epsilon
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.phases import (
    GaussianReleases,
    GaussianSteps,
    ParallelParts,
    RepeatAndSelect,
    WorstOf,
    sequence_path_events,
)
from dpdist.privacy.plan import PrivacyPlan

MNIST = {
    "records": 60_000,
    "batch_size": 256,
    "noise_multiplier": 1.1,
    "steps": 3516,
    "delta": 1e-5,
}


def test_mnist_cnn_setting_gives_the_known_epsilon():
    plan = PrivacyPlan.dp_sgd(**MNIST)
    guarantee = plan.guarantee()
    assert guarantee.epsilon == pytest.approx(1.134, abs=5e-4)
    assert guarantee.kind == "proved"
    assert guarantee.adjacency == "add-or-remove-one"


@pytest.mark.parametrize(
    ("shape", "by_renyi", "expected"),
    [(math.inf, 2.807, 2.160), (1.0, 2.662, 1.712), (0.5, 2.464, 1.672), (0.0, 2.241, 1.622)],
)
def test_repeat_and_select_with_mean_ten(shape, by_renyi, expected):
    steps = PrivacyPlan.dp_sgd(**MNIST).phases
    plan = PrivacyPlan(60_000, (RepeatAndSelect(steps, 10, shape),), 1e-5)
    paths = plan.path_events(plan.phases)
    assert rdp_epsilon(paths, 1e-5, plan.adjacency) == pytest.approx(by_renyi, abs=1e-3)
    guarantee = plan.guarantee()
    assert guarantee.epsilon == pytest.approx(expected, abs=2e-3)
    assert guarantee.source.startswith("PLD of best-of-K")


@pytest.mark.slow
def test_truncated_sampling():
    setting = MNIST | {"batch_size": 512, "noise_multiplier": 1.0, "steps": 4687}
    free = PrivacyPlan.dp_sgd(**setting).guarantee().epsilon
    loose = PrivacyPlan.dp_sgd(**setting, batch_cap=640).guarantee().epsilon
    tight = PrivacyPlan.dp_sgd(**setting, batch_cap=600).guarantee().epsilon
    assert free == pytest.approx(3.3906, abs=2e-3)
    assert loose == pytest.approx(3.3907, abs=2e-3)
    assert tight == pytest.approx(3.49, abs=0.01)
    assert free <= loose < tight


def test_prefix_and_curve_agree_and_rise():
    plan = PrivacyPlan.dp_sgd(**MNIST)
    curve = plan.epsilon_curve(10)
    assert len(curve) == 10
    assert curve[-1] == (3516, plan.guarantee().epsilon)
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(curve))
    step, value = curve[4]
    exact = plan.guarantee(steps=step).epsilon
    assert exact <= value <= 1.01 * exact
    assert plan.guarantee(steps=0).epsilon == 0


def test_every_point_of_the_curve_is_above_the_exact_price_of_its_steps():
    """Full batches: n steps are one Gaussian of mu = sqrt(n) / noise, whose profile is known."""
    plan = PrivacyPlan.dp_sgd(
        records=100, batch_size=100, noise_multiplier=4.0, steps=6, delta=1e-5
    )
    curve = plan.epsilon_curve()
    assert [steps for steps, _ in curve] == [1, 2, 3, 4, 5, 6]
    for steps, value in curve:
        exact = float(gaussian_epsilon(1e-5, 4.0, math.sqrt(steps)))
        assert exact <= value <= 1.01 * exact


@pytest.mark.parametrize(
    "inside",
    [
        lambda steps: ParallelParts(((steps,),)),
        lambda steps: WorstOf(((steps,),)),
        lambda steps: RepeatAndSelect((steps,), 1.0, 1.0),
    ],
    ids=["parallel parts", "worst of", "one run of a search"],
)
def test_a_cap_inside_another_phase_costs_what_it_costs_alone(inside):
    """Where a record is added, all the others may fill the cap: one more than where one goes."""
    steps = GaussianSteps(1, 1.5, 0.2, 3)
    alone = PrivacyPlan(10, (steps,), 1e-3).guarantee().epsilon
    assert PrivacyPlan(10, (inside(steps),), 1e-3).guarantee().epsilon >= alone * (1 - 1e-9)
    removal = accounting.compute_epsilon(steps.events(10), 1e-3, "add-or-remove-one")[0]
    assert removal < alone * 0.99  # else nothing is shown


def test_steps_follow_their_phases():
    phases = (GaussianSteps(3, 2.0, 0.1), GaussianReleases(4.0), GaussianSteps(2, 1.0, 1.0, 200))
    plan = PrivacyPlan(100, phases, 1e-4, clip_norm=0.5)
    assert plan.steps == 5
    assert [plan.step(t).noise_multiplier for t in range(5)] == [2, 2, 2, 1, 1]
    assert plan.step(0).expected_batch == 10
    assert plan.step(4).expected_batch == plan.max_expected_batch == 100
    assert plan.step(4).batch_cap == 200
    assert plan.step(0).clip_norm == 0.5
    for outside in (-1, 5):
        with pytest.raises(ValueError):
            plan.step(outside)


def test_the_divisor_is_the_batch_that_was_asked_for():
    """Exactly, also where rate times records, rounded down, is one less; and it is no whole number
    where the rate makes none."""
    floored = [
        (n, size) for n in range(2, 200) for size in range(1, n) if int(size / n * n) != size
    ]
    assert len(floored) > 100
    for records, size in [*floored, (60_000, 256), (1439, 512), (7, 7)]:
        setting = MNIST | {"records": records, "batch_size": size}
        assert PrivacyPlan.dp_sgd(**setting).step(0).expected_batch == size
    plan = PrivacyPlan(101, (GaussianSteps(3, 1.0, 0.125),), 1e-5)
    assert plan.step(0).expected_batch == 12.625


def test_releases_beside_the_steps_are_charged_before_the_first_one():
    phases = (GaussianSteps(3, 2.0, 0.1), GaussianReleases(4.0))
    plan = PrivacyPlan(100, phases, 1e-6)
    alone = PrivacyPlan(100, phases[1:], 1e-6).guarantee().epsilon
    assert plan.guarantee(steps=0).epsilon == alone > 0.5


def test_parallel_parts_cost_their_worst_part_only():
    cheap, dear = GaussianSteps(10, 4.0, 0.1), GaussianSteps(10, 2.0, 0.1)
    tail = GaussianReleases(5.0)
    parallel = PrivacyPlan(1000, (ParallelParts(((cheap,), (dear,))), tail), 1e-5)
    alone = PrivacyPlan(1000, (dear, tail), 1e-5)
    both = PrivacyPlan(1000, (cheap, dear, tail), 1e-5)
    assert parallel.guarantee().epsilon == alone.guarantee().epsilon
    assert parallel.guarantee().epsilon < both.guarantee().epsilon
    assert parallel.event() == alone.event()


def test_round_trip_and_fingerprint():
    phases = (GaussianSteps(7, 1.1, 256 / 60_000, 300), GaussianReleases(3.0, 2))
    plan = PrivacyPlan(60_000, phases, 1e-5, 0.7)
    again = PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.fingerprint() == plan.fingerprint()
    assert replace(plan, clip_norm=0.71).fingerprint() != plan.fingerprint()


BAD = {
    "records": 0,
    "batch_size": 60_001,
    "noise_multiplier": math.nan,
    "steps": 2.5,
    "delta": 1.0,
    "clip_norm": 0.0,
    "adjacency": "substitute",
    "batch_cap": 0,
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused(name):
    with pytest.raises(ValueError):
        PrivacyPlan.dp_sgd(**{**MNIST, name: BAD[name]})


def test_no_noise_is_no_privacy():
    assert PrivacyPlan.dp_sgd(**{**MNIST, "noise_multiplier": 0.0}).guarantee().epsilon == math.inf


@pytest.mark.slow
def test_capped_batches_cover_an_added_and_a_removed_record():
    step = GaussianSteps(30, 0.8, 0.1, 12)
    plan = PrivacyPlan(100, (step,), 1e-4)
    worst = plan.guarantee().epsilon
    alone = [
        plan.guarantee_for_events(sequence_path_events((step,), records)).epsilon
        for records in (100, 101)
    ]
    assert alone[0] < alone[1] and worst == pytest.approx(max(alone), rel=1e-9)
    assert len(plan.path_events((step,))) == 2
    assert len(replace(plan, adjacency="replace-one").path_events((step,))) == 1


def test_full_batches_cannot_be_capped():
    with pytest.raises(ValueError):
        PrivacyPlan(100, (GaussianSteps(1, 1.0, 1.0, 50),), 1e-5).guarantee()


def test_parallel_parts_under_replace_one_are_refused():
    parts = ParallelParts(((GaussianReleases(1.0),), (GaussianReleases(2.0),)))
    with pytest.raises(ValueError):
        PrivacyPlan(10, (parts,), 1e-5, adjacency="replace-one")
