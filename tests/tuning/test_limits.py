"""What a search is charged and what its trials may cost: every part, relation, path and grid."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dpdist.base.errors import UserError
from dpdist.privacy import accounting
from dpdist.privacy.combined import ParallelParts, WorstOf
from dpdist.privacy.phases import walk
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.releases import GaussianReleases, GaussianSteps, NonPrivate
from dpdist.privacy.searches import search_guarantee
from dpdist.sections.search import TuneRecipe
from dpdist.training.planning import plan_at
from dpdist.tuning.cost import Limit, SearchCost, Sizes
from dpdist.tuning.space import with_values

SIZES = Sizes(10_000, 0.1)


@pytest.fixture(autouse=True)
def _coarse_grid(monkeypatch):
    """Ten times coarser: still upper bounds, and what is said of them here depends on no grid."""
    monkeypatch.setattr(accounting, "FINEST_GRID", 1e-3)
    accounting._epsilon.cache_clear()
    accounting._coarse_epsilon.cache_clear()
    yield
    accounting._epsilon.cache_clear()
    accounting._coarse_epsilon.cache_clear()


@pytest.fixture
def cost_of(recipe):
    """The cost of a search by this law, and of what it scores by."""

    def make(law, *, space=None, score=None, **sections) -> SearchCost:
        asked = recipe(training={"batch_size": 200, "steps": 100}, **sections)
        raw = asked.tune.model_dump(mode="json", exclude_none=True)
        raw |= {"law": law, "space": space or raw["space"], "score": raw["score"] | (score or {})}
        asked = asked.model_copy(update={"tune": TuneRecipe.model_validate(raw)})
        return SearchCost(asked, SIZES, asked.tune.law, "r.yaml")

    return make


LAWS = [{"name": "geometric", "mean": 4.0}, {"name": "poisson", "mean": 4.0}]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law["name"])
def test_every_trial_s_score_is_paid_for(cost_of, law):
    """Scores with little noise are what costs: a held-out record is in every trial's."""
    cost = cost_of(law, score={"noise": 2.0})
    (releases,) = [p for p in walk(cost.plan.phases) if isinstance(p, GaussianReleases)]
    assert releases.noise_multiplier == 2.0
    secret = cost.law.secret
    scored = search_guarantee((releases,), secret, records=9000, delta=1e-4).epsilon
    once = PrivacyPlan(9000, (releases,), 1e-4).guarantee().epsilon
    assert cost.guarantee.epsilon >= scored * (1 - 1e-6) > 1.3 * once
    trained = search_guarantee(
        cost.plan.phases[0].phases[0].parts[0], secret, records=9000, delta=1e-4
    ).epsilon
    assert trained < scored  # else this test shows nothing


def test_a_fixed_number_of_scores_is_paid_for(cost_of):
    cost = cost_of({"name": "fixed", "runs": 4}, score={"noise": 2.0})
    four = PrivacyPlan(9000, (GaussianReleases(2.0, 4),), 1e-4).guarantee().epsilon
    assert cost.guarantee.epsilon >= four * (1 - 1e-6)


def test_private_scores_are_not_priced_where_a_record_may_change_sides(cost_of):
    for law in (LAWS[0], {"name": "fixed", "runs": 4}):
        replaced = cost_of(law, score={"noise": 8.0}, privacy={"neighbours": "replace-one"})
        with pytest.raises(UserError, match="add-or-remove-one only"):
            replaced.plan  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("mean", [2.0, 10.0])
def test_all_trials_together_give_up_a_thousandth_of_delta(cost_of, mean):
    """To the floor below which no trial's profile counts: it is charged E[K] times."""
    cost = cost_of(
        {"name": "geometric", "mean": mean},
        space={"training.batch_size": {"integer": [100, 300]}},
        privacy={"epsilon": 3.0, "noise_multiplier": None},
        score={"public": {"name": "digits"}},
    )
    (worst,) = cost.limit.base.phases
    assert isinstance(worst, WorstOf) and worst.floor > 0
    assert worst.floor * cost.law.expected <= 1e-3 * cost.limit.base.delta * (1 + 1e-12)


# --- trials

STEPS = (GaussianSteps(100, 2.0, 0.1),)
BASE = PrivacyPlan(1000, (WorstOf((STEPS,), 1e-9),), 1e-5)  # priced by its profile alone


def allowed(*phases, **more) -> bool:
    return Limit(BASE).allows(replace(BASE, phases=phases, **more))


def test_a_trial_is_of_the_relation_and_delta_that_were_accounted():
    cheap = (GaussianSteps(50, 4.0, 0.1),)
    assert allowed(*cheap)
    assert not allowed(*cheap, neighbours="replace-one")
    assert not allowed(*cheap, delta=1e-6)
    replaced = replace(BASE, neighbours="replace-one")
    assert not Limit(replaced).allows(replace(BASE, phases=cheap))
    assert Limit(replaced).allows(replace(replaced, phases=cheap))


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
def test_a_trial_s_noise_is_what_the_price_s_own_grid_needs(cost_of, monkeypatch):
    """Also where a coarser grid, which is looked at first, would let less noise pass."""
    cost = cost_of(
        LAWS[0],
        space={"training.batch_size": {"integer": [100, 300]}},
        privacy={"epsilon": 3.0, "noise_multiplier": None},
        score={"public": {"name": "digits"}},
    )
    trial = with_values(cost.recipe, {"training.batch_size": 300}, "r.yaml")
    real, slack = Limit.allows, 1.05

    def allows(self, plan: PrivacyPlan, coarser: int = 1) -> bool:
        if coarser > 1:  # as a plan with a little more noise
            (steps,) = plan.phases
            plan = replace(
                plan, phases=(replace(steps, noise_multiplier=slack * steps.noise_multiplier),)
            )
        return real(self, plan, coarser)

    monkeypatch.setattr(Limit, "allows", allows)
    noise = cost.trial_noise(trial)
    plan = plan_at(trial, SIZES.train(trial.data.fraction), noise)
    assert real(cost.limit, plan) and math.isfinite(noise)
    assert not real(cost.limit, plan_at(trial, SIZES.train(1.0), 0.97 * noise))
