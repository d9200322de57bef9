"""The cost of a search: targets met, worst settings covered, held-out records paid once."""

from __future__ import annotations

import itertools
import math
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
from dpdist.runs.recipe import make_plan, plan_with_noise
from dpdist.tuning import preview
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
@pytest.mark.parametrize("num_trials", LAWS, ids=lambda num_trials: num_trials["name"])
def test_training_and_search_together_meet_the_target(searched, num_trials):
    cost = cost_of(searched(num_trials, privacy=TARGET))
    assert 0.997 * 2.0 <= cost.guarantee.epsilon <= 2.0
    assert cost.one_training_guarantee.epsilon < 0.9 * 2.0
    # Both kinds of record pay about the target; taken for one record's both, they pay more.
    parts = cost.plan.phases[0]
    parts = parts if isinstance(parts, ParallelParts) else parts.phases[0]
    assert [type(part[0]) for part in parts.parts] == [GaussianSteps, GaussianReleases]

    def paid(phases) -> float:
        """For this part of the trials, by the distribution itself."""
        if num_trials["name"] == "fixed":
            return PrivacyPlan(9000, phases, 1e-5).guarantee().epsilon
        return search_guarantee(
            phases, cost.num_trials.secret_distribution, records=9000, delta=1e-5
        ).epsilon

    assert 0.99 * 2.0 <= paid(parts.parts[0]) <= 2.0
    assert 0.98 * 2.0 <= paid(parts.parts[1]) <= 2.0
    assert paid((*parts.parts[0], *parts.parts[1])) > 1.2 * 2.0


def test_the_target_is_met_where_settings_cost_differently(searched):
    space = {"training.steps": {"choice": [2, 5, 8]}}
    asked = searched({"name": "fixed", "runs": 3}, space, privacy=TARGET)
    full = asked.training.model_copy(update={"batch_size": 9000})  # its curve is quickly computed
    cost = cost_of(asked.model_copy(update={"training": full}))
    assert 0.99 * 2.0 <= cost.guarantee.epsilon <= 2.0


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
@pytest.mark.parametrize("length", [{"steps": 100}, {"steps": None, "epochs": 3}], ids=str)
def test_the_bound_lies_above_every_setting(searched, length):
    """At each setting of the space, the steps of the loop cost at most what was accounted."""
    space = {
        "privacy.noise_multiplier": {"choice": [1.0, 1.7, 3.0]},
        "training.batch_size": {"choice": [100, 220, 400]},
        "data.fraction": {"choice": [0.5, 0.83, 1.0]},
    }
    if length["steps"] is not None:
        space["training.steps"] = {"choice": [50, 100]}
    asked = searched(LAWS[0], space, tune={"score": {"noise": 5.0}})
    asked = asked.model_copy(update={"training": asked.training.model_copy(update=length)})
    cost = cost_of(asked)
    bound = curve(cost.plan.phases[0].phases[0].parts[0], ORDERS)
    for listed in itertools.product(*(domain["choice"] for domain in space.values())):
        values = dict(zip(space, listed, strict=True))
        trial = apply_values(asked, values, "r.yaml")
        records = SIZES.training_records(trial.data.fraction)
        ratio = bound / curve(
            plan_with_noise(trial, records, cost.trial_noise_multiplier(trial)).phases, ORDERS
        )
        assert (ratio >= 1 - 1e-12).all(), values
    corner = {"privacy.noise_multiplier": 1.0, "data.fraction": 0.5, "training.batch_size": 400}
    longest = {"training.steps": 100} if "training.steps" in space else {}
    trial = apply_values(asked, corner | longest, "r.yaml")
    tight = bound / curve(plan_with_noise(trial, SIZES.training_records(0.5), 1.0).phases, ORDERS)
    assert 1 - 1e-12 <= tight.min() < (1.01 if "epochs" not in length else 2.3)


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


# --- noise splits: how a method shares its budget out

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


# --- no name, no nesting, no combination of entries hides what a trial costs


@pytest.mark.parametrize(
    ("space", "privacy", "words"),
    [
        (
            {"method.redistribution.noise_multiplier": {"uniform": [4.0, 12.0]}},
            TARGET,
            "list its values",
        ),
        ({"training.batch_size": {"integer": [100, 400]}}, TARGET, "list its values"),
        ({"method": {"choice": paid_shares(6.0, 0.2)}}, TARGET, "costs more than the recipe's own"),
        (
            {"method.redistribution.noise_multiplier": {"uniform": [4.0, 12.0]}},
            {"noise_multiplier": 4.0, "delta": 1e-5},
            "list its values",
        ),
    ],
)
def test_splits_that_cannot_be_priced_are_refused(searched, space, privacy, words):
    asked = searched(LAWS[0], space, PUBLIC, privacy=privacy, method=paid_shares(6.0)[0])
    with pytest.raises(UserError, match=words) as found:
        cost_of(asked).plan  # noqa: B018
    assert "tune.space" in str(found.value)


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
@pytest.mark.parametrize(("seed", "target"), [*((seed, False) for seed in range(8)), (0, True)])
def test_every_trial_of_every_space_is_covered(searched, seed, target):
    """Trials drawn from generated spaces: the search is priced at least as high as the same search
    over that one training, computed here from the trial's own numbers."""
    rng = np.random.default_rng(100 * seed + target)
    num_trials = LAWS[seed % 4]
    privacy = TARGET if target else {"noise_multiplier": 2.0, "delta": 1e-5}
    public = {"score": {"public": {"name": "digits"}}}
    asked = searched(num_trials, generated_space(rng, target), tune=public, privacy=privacy)
    check_space(asked, "r.yaml")
    cost = cost_of(asked)
    assert not target or cost.guarantee.epsilon <= 2.0
    for _ in range(1 if target else 4):
        trial = apply_values(asked, draw_values(asked.tune, rng.random), "r.yaml")
        records = SIZES.training_records(trial.data.fraction)
        noise = cost.trial_noise_multiplier(trial)
        plan = plan_with_noise(trial, records, noise)
        cost.trial_limit.check(plan, "r.yaml")
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
    base = PrivacyPlan(1000, (GaussianSteps(100, 2.0, 0.1),), 1e-5)
    limit = TrialLimit(base)

    def allowed(phases, **more) -> bool:
        return limit.allows(replace(base, phases=phases, **more))

    for fewer in ((100, 2.0, 0.1), (90, 2.0, 0.1), (100, 2.5, 0.1), (100, 2.0, 0.05)):
        assert allowed((GaussianSteps(*fewer),))
    for more in ((101, 2.0, 0.1), (100, 1.99, 0.1), (100, 2.0, 0.11), (100, 2.0, 0.1, 150)):
        assert not allowed((GaussianSteps(*more),))
    assert not allowed((GaussianReleases(50.0), *base.phases))
    assert not allowed(base.phases, delta=1e-6)
    below = (GaussianSteps(90, 2.2, 0.11),)
    assert (curve(below, ORDERS) < curve(base.phases, ORDERS)).all()
    assert not allowed(below)
    # Without a floor Renyi's bound may be the price, and the profile is no proof either.
    assert not TrialLimit(replace(base, phases=(WorstOf((base.phases,)),))).allows(
        replace(base, phases=below)
    )
    whole = replace(base, phases=(GaussianSteps(4, 2.0, 1.0),))  # as one at noise 1
    one, floored = (
        replace(base, phases=(GaussianSteps(1, 1.5, 1.0),)),
        WorstOf((whole.phases,), 1e-9),
    )
    assert not TrialLimit(whole).allows(one) and TrialLimit(
        replace(base, phases=(floored,))
    ).allows(one)
    maximum = TrialLimit(replace(base, phases=(WorstOf((base.phases,), 1e-9),)))
    assert maximum.allows(replace(base, phases=below))  # that price is made of the profile alone
    assert not maximum.allows(replace(base, phases=(GaussianSteps(101, 2.0, 0.1),)))
    crossing = (GaussianSteps(5, 0.5, 0.02),)  # less delta at small epsilon, more in the tail
    assert not maximum.allows(replace(base, phases=crossing))
    with pytest.raises(UserError, match="trial 3"):
        maximum.check(replace(base, phases=(GaussianSteps(200, 2.0, 0.1),)), "trial 3")


def test_the_rounding_of_a_trial_s_own_loss_counts():
    """5,000 steps may be off by 5e-12: too much below a floor of 1e-12, on which only the base's
    own rounding is charged, though the profile as computed lies below everywhere."""
    base = PrivacyPlan(10_000, (WorstOf(((GaussianSteps(1, 1.0, 1.0),),), 1e-12),), 1e-5)
    for steps, covered in ((500, True), (5000, False)):
        trial = replace(base, phases=(GaussianSteps(steps, 50.0, 1e-3),))
        assert TrialLimit(base).allows(trial) is covered


# --- a trial's relation, its paths, what is not private, and the grid

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
            "space": {"training.batch_size": {"choice": [100, 300]}},
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


# --- what a method costs is said once

ONE_RUN = {"name": "fixed", "runs": 1, "mean": None}
OPEN = {"noise_multiplier": 0.0, "clipping": "none", "delta": 1e-4}
OF_EACH = [
    ("dp-sgd", {}, TARGET),
    ("dplis", {}, TARGET),
    ("input-noise", {"sigma": 0.25}, TARGET),
    ("pixeldp", {}, OPEN),
    ("hgm-pixeldp", {}, OPEN),
    ("secure-sgd", {"redistribution": {"source": "public"}}, TARGET),
    ("secure-sgd", {"redistribution": {"source": "paid", "noise_multiplier": 6.0}}, TARGET),
    ("transdenoiser", {"variant": "separate-dp"}, TARGET),
    ("transdenoiser", {"variant": "full"}, {**OPEN, "clipping": "flat"}),
    ("residual", {"gamma": 0.1}, TARGET),
    ("residual", {"gamma": 0.1}, OPEN),
    ("functional", {"center": 0.2, "rounds": 3}, TARGET),
    ("stobatch", {}, TARGET),
    ("dpal", {}, OPEN),
    (
        "pate",
        {
            "teachers": 5,
            "public": {"data": "digits"},
            "queries": 10,
            "answers": 5,
            "threshold": 3.0,
            "screening": 0.2,
        },
        TARGET,
    ),
]
MODELS = {
    "transdenoiser": {"name": "small-unet", "classifier": "/nowhere"},
    "residual": "resnet-rp",
    "dpal": {"name": "dpal-cnn", "mean": [0.5], "std": [0.5]},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "privacy"), OF_EACH)
def test_the_preview_of_every_method_is_the_plan_of_its_run(recipe, name, options, privacy):
    """Noise and epsilon before any data are read are those that the run executes and states."""
    model = MODELS.get(name, "mlp")
    asked = recipe(
        data={"name": "mine", "root": "/nowhere"}, model=model, method={"name": name, **options},
        privacy=privacy, training={"batch_size": 200, "steps": 100},
        tune={"score": {"public": {"name": "digits"}}, "num_trials": ONE_RUN},
        certify={"sigma": 0.25},
    )  # fmt: skip
    sizes = preview.sizes_without_data(asked, 2000, "r.yaml")
    (noise, shown), run = (
        preview.untuned_run(asked, sizes, "r.yaml"),
        make_plan(asked, 2000, "r.yaml"),
    )
    assert shown == run
    assert run.phases == asked.method.cost(GaussianSteps(100, noise, 200 / 2000))
    assert shown.guarantee().epsilon <= (asked.privacy.epsilon or math.inf)
    row = preview.distribution_cost(asked, asked.tune.num_trials, True, sizes, noise, "r.yaml")
    assert row.epsilon == run.guarantee().epsilon  # a search of one trial is the run
    if asked.privacy.epsilon is not None:
        assert row.noise_multiplier == pytest.approx(noise, rel=1e-3)
