"""What a trial of a search may cost: its relation, its paths, what is not private, and the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpdist.privacy.phases import (
    GaussianReleases,
    GaussianSteps,
    NonPrivate,
    ParallelParts,
    WorstOf,
)
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import plan_with_noise
from dpdist.tuning.space import RecordCounts, SearchCost, TrialLimit, apply_values

pytestmark = pytest.mark.usefixtures("coarse_grid")

STEPS = (GaussianSteps(100, 2.0, 0.1),)
BASE = PrivacyPlan(1000, (WorstOf((STEPS,), 1e-9),), 1e-5)  # priced by its profile alone


def allowed(*phases, **more) -> bool:
    return TrialLimit(BASE).allows(replace(BASE, phases=phases, **more))


def test_a_trial_is_of_the_relation_and_delta_that_were_accounted():
    cheap = (GaussianSteps(50, 4.0, 0.1),)
    assert allowed(*cheap)
    assert not allowed(*cheap, adjacency="replace-one")
    assert not allowed(*cheap, delta=1e-6)
    replaced = replace(BASE, adjacency="replace-one")
    assert not TrialLimit(replaced).allows(replace(BASE, phases=cheap))
    assert TrialLimit(replaced).allows(replace(replaced, phases=cheap))


@pytest.mark.parametrize(
    "phases",
    [
        (GaussianSteps(1, 0.0, 0.1),),
        (GaussianReleases(0.0),),
        (NonPrivate("statistics of the batch"),),
        (GaussianSteps(1, 9.0, 0.1), NonPrivate("statistics of the batch")),
        (WorstOf(((GaussianSteps(1, 9.0, 0.1),), (GaussianSteps(1, 0.0, 0.1),))),),
    ],
    ids=lambda phases: phases[-1].kind,
)
def test_no_trial_without_privacy_is_covered_by_a_private_one(phases):
    assert not allowed(*phases)


@pytest.mark.parametrize(
    "phases",
    [
        (GaussianSteps(2, 9.0, 0.1, 150),),  # capped: paths of the smaller and the larger data
        (ParallelParts(((GaussianSteps(2, 9.0, 0.1),), (GaussianReleases(20.0),))),),
        (ParallelParts(((GaussianSteps(2, 9.0, 0.1),), (GaussianReleases(0.1),))),),
    ],
    ids=["capped", "parallel", "parallel and dear"],
)
def test_a_trial_with_other_paths_is_not_covered(phases):
    """Path by path there is nothing to compare with, whatever the first one costs."""
    assert not allowed(*phases)


@pytest.mark.slow
def test_a_trial_s_noise_is_what_the_price_s_own_grid_needs(recipe, monkeypatch):
    """Also where a coarser grid, which is looked at first, would let less noise pass."""
    sizes = RecordCounts(10_000, 0.1)
    asked = recipe(
        privacy={"epsilon": 3.0, "noise_multiplier": None},
        training={"batch_size": 200, "steps": 100},
        tune={
            "space": {"training.batch_size": {"integer": [100, 300]}},
            "score": {"public": {"name": "digits"}},
        },
    )
    cost = SearchCost(asked, sizes, asked.tune.num_trials, "r.yaml")
    trial = apply_values(
        asked, {"training.batch_size": 300, "training.learning_rate": 0.1}, "r.yaml"
    )
    real = TrialLimit.allows

    def allows(self, plan: PrivacyPlan, coarser: int = 1) -> bool:
        if coarser > 1:  # as a plan with a little more noise
            (steps,) = plan.phases
            more = replace(steps, noise_multiplier=1.05 * steps.noise_multiplier)
            plan = replace(plan, phases=(more,))
        return real(self, plan, coarser)

    monkeypatch.setattr(TrialLimit, "allows", allows)
    noise = cost.trial_noise_multiplier(trial)
    records = sizes.training_records(trial.data.fraction)
    assert real(cost.trial_limit, plan_with_noise(trial, records, noise))
    assert not real(cost.trial_limit, plan_with_noise(trial, records, 0.97 * noise))
