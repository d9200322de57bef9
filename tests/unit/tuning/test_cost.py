"""The cost of a search: targets met, worst settings covered, held-out records paid once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

from dpdist.config.search import TuneRecipe
from dpdist.core.errors import UserError
from dpdist.privacy import accounting
from dpdist.privacy.calibration import search_guarantee
from dpdist.privacy.phases import (
    GaussianReleases,
    GaussianSteps,
    NonPrivate,
    ParallelParts,
    RepeatAndSelect,
    WorstOf,
)
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import plan_with_noise
from dpdist.tuning.space import (
    RecordCounts,
    SearchCost,
    TrialLimit,
    apply_values,
    check_space,
    draw_values,
)

pytestmark = pytest.mark.usefixtures("coarse_grid")

LAWS = [
    {"name": "geometric", "mean": 4.0},
    {"name": "negative-binomial", "shape": -0.5, "mean": 4.0},
    {"name": "poisson", "mean": 4.0},
    {"name": "fixed", "runs": 4},
]
SIZES = RecordCounts(10_000, 0.1)
TARGET = {"epsilon": 2.0, "noise_multiplier": None, "delta": 1e-5}


def cost_of(asked) -> SearchCost:
    return SearchCost(asked, SIZES, asked.tune.num_trials, "r.yaml")


@pytest.fixture
def searched(recipe):
    """A recipe with this distribution and space (replacing the usual ones)."""

    def make(num_trials, space=None, tune=None, **sections):
        asked = recipe(training={"batch_size": 200, "steps": 100}, **sections)
        raw = asked.tune.model_dump(mode="json", exclude_none=True)
        raw |= {"num_trials": num_trials, "space": space or raw["space"], **(tune or {})}
        return asked.model_copy(update={"tune": TuneRecipe.model_validate(raw)})

    return make


@pytest.mark.slow
@pytest.mark.parametrize("num_trials", [LAWS[1], LAWS[3]], ids=lambda law: law["name"])
def test_training_and_search_together_meet_the_target(searched, num_trials):
    cost = cost_of(searched(num_trials, privacy=TARGET))
    assert 0.997 * 2.0 <= cost.guarantee.epsilon <= 2.0
    # Both kinds of record pay about the target; taken for one record's both, they pay more.
    parts = cost.plan.phases[0]
    parts = parts if isinstance(parts, ParallelParts) else parts.phases[0]
    assert [type(part[0]) for part in parts.parts] == [GaussianSteps, GaussianReleases]

    def paid(phases) -> float:
        """For this part of the trials, by the distribution itself."""
        if num_trials["name"] == "fixed":
            return PrivacyPlan(9000, phases, 1e-5).guarantee().epsilon
        law = cost.num_trials.secret_distribution
        return search_guarantee(phases, law, records=9000, delta=1e-5).epsilon

    assert 0.99 * 2.0 <= paid(parts.parts[0]) <= 2.0
    assert 0.98 * 2.0 <= paid(parts.parts[1]) <= 2.0
    assert paid((*parts.parts[0], *parts.parts[1])) > 1.2 * 2.0


def test_public_scores_are_free(searched):
    num_trials = {"name": "poisson", "mean": 4.0}
    free = cost_of(searched(num_trials, tune={"score": {"public": {"name": "digits"}}}))
    paid = cost_of(searched(num_trials, tune={"score": {"noise": 1.0}}))
    assert free.score_noise is None and free.guarantee.epsilon < paid.guarantee.epsilon


def curve(phases, orders) -> np.ndarray:
    event = PrivacyPlan(10_000, tuple(phases), 1e-5).event()
    return accounting.compose_rdp(event, "add-or-remove-one", orders).rdp


ORDERS = (1.5, 2, 4, 8, 16, 32, 64)


@pytest.mark.slow
def test_with_a_target_each_setting_gets_noise_of_its_own(searched):
    """Never above the accounted profile or its floor; less noise for cheaper settings."""
    space = {"training.batch_size": {"choice": [100, 200, 400]}}
    cost = cost_of(searched(LAWS[0], space, privacy=TARGET))
    assert cost.guarantee.epsilon <= 2.0
    floor = 1e-3 * cost.recipe.privacy.delta / LAWS[0]["mean"]

    def profile(recipe, noise) -> np.ndarray:
        """Of a removal and of an addition, by the library: other trials, other tails."""
        rate, steps = recipe.training.batch_size / 9000, recipe.training.steps
        one = from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-3)
        loss = one.self_compose(steps)
        sides = (loss._pmf_remove, loss._pmf_add)
        return np.array([side.get_delta_for_epsilon(np.arange(0, 3, 0.1)) for side in sides])

    accounted = np.maximum(profile(cost.recipe, cost.noise_multiplier), floor)
    noises = []
    for batch in (100, 200, 400):
        trial = apply_values(cost.recipe, {"training.batch_size": batch}, "r.yaml")
        noises.append(cost.trial_noise_multiplier(trial))
        assert (profile(trial, noises[-1]) <= accounted * (1 + 1e-3)).all()
        assert (profile(trial, 0.98 * noises[-1]) > accounted).any()
    assert noises[0] < noises[1] < noises[2]
    assert noises[1] == pytest.approx(cost.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize(
    "privacy", [{"batch_cap": 250}, {"adjacency": "replace-one"}], ids=lambda p: next(iter(p))
)
def test_what_only_loss_distributions_price_is_searched(searched, privacy):
    """A secret number of trials, public scores; one trial costs less, four shown ones more."""
    public = {"score": {"public": {"name": "digits"}}}
    asked = searched(LAWS[2], tune=public, privacy={"noise_multiplier": 8.0, **privacy})
    short = asked.training.model_copy(update={"steps": 10})
    cost = cost_of(asked.model_copy(update={"training": short}))
    assert cost.guarantee.source.startswith("PLD of best-of-K")
    assert cost.one_training_guarantee.epsilon < cost.guarantee.epsilon


PUBLIC = {"score": {"public": {"name": "digits"}}}


def paid_shares(*noises: float) -> list[dict]:
    return [
        {"name": "secure-sgd", "redistribution": {"source": "paid", "noise_multiplier": s}}
        for s in noises
    ]


def test_the_worst_split_is_what_a_search_over_splits_costs(searched):
    """At a noise that is given: Secure-SGD's paid shares r at noise 3 and 6 are priced as at 3."""

    def price(*noises: float, **method) -> float:
        space = {"method": {"choice": paid_shares(*noises)}}
        return cost_of(searched(LAWS[0], space, PUBLIC)).guarantee.epsilon

    assert price(3.0, 6.0) == pytest.approx(price(3.0), rel=1e-9)
    assert price(3.0) > 1.05 * price(6.0)


@pytest.mark.parametrize(
    ("space", "privacy"),
    [
        ({"method.redistribution.noise_multiplier": {"uniform": [4.0, 12.0]}}, TARGET),
        ({"training.batch_size": {"integer": [100, 400]}}, TARGET),
        ({"method": {"choice": paid_shares(6.0, 0.2)}}, TARGET),
        (
            {"method.redistribution.noise_multiplier": {"uniform": [4.0, 12.0]}},
            {"noise_multiplier": 4.0, "delta": 1e-5},
        ),
    ],
)
def test_splits_that_cannot_be_priced_are_refused(searched, space, privacy):
    asked = searched(LAWS[0], space, PUBLIC, privacy=privacy, method=paid_shares(6.0)[0])
    with pytest.raises(UserError, match=r"tune\.space"):
        cost_of(asked).plan  # noqa: B018


def generated_space(rng: np.random.Generator, target: bool) -> dict:
    """A space that searches costly fields as fields, as sections, by `linked`, or by several."""

    def training() -> dict:
        length = {"steps": int(rng.integers(20, 300))}
        if rng.random() < 0.3:
            length = {"epochs": int(rng.integers(1, 6))}
        return {"batch_size": int(rng.integers(20, 800)), "learning_rate": 0.5, **length}

    def privacy() -> dict:
        noise = {"epsilon": 2.0} if target else {"noise_multiplier": float(rng.uniform(1, 8))}
        return {"delta": 1e-5, "clip_norm": float(rng.uniform(0.5, 2)), **noise}

    space: dict = {}
    if rng.random() < 0.5:
        space["training"] = {"choice": [training() for _ in range(rng.integers(1, 4))]}
    elif rng.random() < 0.5:
        space["training.batch_size"] = {"choice": [30, int(rng.integers(31, 500))]}
        space["training.steps"] = {"choice": [50, 250], "linked": ["training.init_seed"]}
    else:
        space["training.init_seed"] = {"choice": [60, 200], "linked": ["training.steps"]}
    if rng.random() < 0.5:
        space["privacy"] = {"choice": [privacy() for _ in range(2)]}
    elif not target:
        space["privacy.noise_multiplier"] = {"choice": [1.0, 2.5, 4.0]}
    if rng.random() < 0.3:
        space["data.fraction"] = {"choice": [0.4, 1.0]}
    return space


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "target"), [*((seed, False) for seed in range(4)), (0, True)])
def test_every_trial_of_every_space_is_covered(searched, seed, target):
    """Trials drawn from generated spaces: the search is priced at least as high as the same search
    over that one training, computed here from the trial's own numbers."""
    rng = np.random.default_rng(100 * seed + target)
    num_trials = LAWS[seed % 4]
    privacy = TARGET if target else {"noise_multiplier": 2.0, "delta": 1e-5}
    asked = searched(num_trials, generated_space(rng, target), PUBLIC, privacy=privacy)
    check_space(asked, "r.yaml")
    cost = cost_of(asked)
    assert not target or cost.guarantee.epsilon <= 2.0
    for _ in range(1 if target else 4):
        trial = apply_values(asked, draw_values(asked.tune, rng.random), "r.yaml")
        records = SIZES.training_records(trial.data.fraction)
        noise = cost.trial_noise_multiplier(trial)
        cost.trial_limit.check(plan_with_noise(trial, records, noise), "r.yaml")
        rate = trial.training.batch_size / records
        steps = trial.training.steps or trial.training.epochs * records // trial.training.batch_size
        if num_trials["name"] == "fixed":
            own = (GaussianSteps(4 * steps, noise, rate),)
        else:
            shape = cost.num_trials.secret_distribution.shape
            own = (RepeatAndSelect((GaussianSteps(steps, noise, rate),), 4.0, shape),)
        alone = PrivacyPlan(records, own, 1e-5).guarantee().epsilon
        assert alone <= cost.guarantee.epsilon * (1 + 1e-9)


def test_a_plain_base_covers_only_what_can_be_made_from_it():
    """Its price may come from loss distributions, which Renyi curves do not order: two curves that
    lie one below the other are no proof, less of the same is."""
    base = PrivacyPlan(1000, STEPS, 1e-5)

    def allowed(base_phases, *phases, **more) -> bool:
        limit = TrialLimit(replace(base, phases=base_phases))
        return limit.allows(replace(base, phases=phases, **more))

    for fewer in ((100, 2.0, 0.1), (90, 2.0, 0.1), (100, 2.5, 0.1), (100, 2.0, 0.05)):
        assert allowed(STEPS, GaussianSteps(*fewer))
    for more in ((101, 2.0, 0.1), (100, 1.99, 0.1), (100, 2.0, 0.11), (100, 2.0, 0.1, 150)):
        assert not allowed(STEPS, GaussianSteps(*more))
    assert not allowed(STEPS, GaussianReleases(50.0), *STEPS)
    assert not allowed(STEPS, *STEPS, delta=1e-6)
    below = GaussianSteps(90, 2.2, 0.11)
    assert (curve((below,), ORDERS) < curve(STEPS, ORDERS)).all()
    assert not allowed(STEPS, below)
    # Without a floor Renyi's bound may be the price, and the profile is no proof either.
    assert not allowed((WorstOf((STEPS,)),), below)
    whole, one = (GaussianSteps(4, 2.0, 1.0),), GaussianSteps(1, 1.5, 1.0)  # whole: one at noise 1
    assert not allowed(whole, one) and allowed((WorstOf((whole,), 1e-9),), one)
    maximum = (WorstOf((STEPS,), 1e-9),)
    assert allowed(maximum, below)  # that price is made of the profile alone
    assert not allowed(maximum, GaussianSteps(101, 2.0, 0.1))
    assert not allowed(maximum, GaussianSteps(5, 0.5, 0.02))  # less delta at small epsilon alone


def test_the_rounding_of_a_trial_s_own_loss_counts():
    """5,000 steps may be off by 5e-12: too much below a floor of 1e-12, on which only the base's
    own rounding is charged, though the profile as computed lies below everywhere."""
    base = PrivacyPlan(10_000, (WorstOf(((GaussianSteps(1, 1.0, 1.0),),), 1e-12),), 1e-5)
    for steps, covered in ((500, True), (5000, False)):
        trial = replace(base, phases=(GaussianSteps(steps, 50.0, 1e-3),))
        assert TrialLimit(base).allows(trial) is covered


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
        (GaussianSteps(1, 9.0, 0.1), NonPrivate("statistics of the batch")),
        (WorstOf(((GaussianSteps(1, 9.0, 0.1),), (GaussianSteps(1, 0.0, 0.1),))),),
        # Other paths: there is nothing to compare with, whatever the first one costs.
        (GaussianSteps(2, 9.0, 0.1, 150),),
        (ParallelParts(((GaussianSteps(2, 9.0, 0.1),), (GaussianReleases(20.0),))),),
    ],
)
def test_no_trial_without_privacy_or_with_other_paths_is_covered(phases):
    assert not allowed(*phases)


def test_each_way_to_share_a_budget_out_gets_the_same_noise_in_all(searched):
    """Functional: the noise on each sum follows from the center, that of all together does not."""
    space = {"method.center": {"choice": [0.02, 0.2]}}
    method = {"name": "functional", "rounds": 2}
    cost = cost_of(searched(LAWS[0], space, PUBLIC, privacy=TARGET, method=method))
    assert cost.guarantee.epsilon <= 2.0
    for center in (0.02, 0.2):
        trial = apply_values(cost.recipe, {"method.center": center}, "r.yaml")
        records = SIZES.training_records(trial.data.fraction)
        plan = plan_with_noise(trial, records, cost.trial_noise_multiplier(trial))
        shares = np.array([plan.step(t).noise_multiplier ** -2 for t in range(plan.steps)])
        assert shares[0] / shares.sum() == pytest.approx(center)
        assert shares.sum() ** -0.5 == pytest.approx(cost.noise_multiplier, rel=2e-3)
        less = plan_with_noise(trial, records, 0.98 * cost.noise_multiplier)
        with pytest.raises(UserError):
            cost.trial_limit.check(less, "here")
