"""Sweep recipes: the settings of a sweep, and how a recipe with privacy on is swept.

A recipe with privacy on is swept as a search with a fixed number of trials whose scores are public
(`private_sweep_recipe`): before the first step all trainings are composed over the same records,
and afterwards the ledgers say what was released (`count_releases`), also by trials that failed or
were stopped. `dpdist.tuning.sweep` runs recipes and functions without privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dpdist.config.search import Domain
from dpdist.core.errors import UserError
from dpdist.core.fields import Keys, TrialCount, iter_errors, validation_message
from dpdist.core.files import quoted, read_yaml
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.privacy.phases import GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan, parse_plan
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.tuning.manifest import SearchFolder, read_terms, read_trials
from dpdist.tuning.space import TrialValues, apply_values, iter_probe_values

CROSS_ENTROPY = "cross-entropy"
OPTIONS = ("num_samples", "searcher", "scheduler", "concurrent", "seed")  # of `SweepSettings`
RUNGS, FACTOR = 3, 3  # of trials that a scheduler may stop, as of the recipe's section tune.asha


# --- settings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepSettings:
    """The settings of a sweep of a recipe or of a function.

    Args:
        metric: the reported number by which trials are compared.
        mode: "max" or "min".
        num_samples: number of trials.
        searcher: None or "random", "optuna", "hyperopt", or a searcher of Ray Tune.
        scheduler: None, "asha", "median", "pbt" (of functions), or a scheduler of Ray Tune.
        concurrent: trials at once, at most; None for as many as fit.
        seed: of the named searchers' draws.

    Raises:
        UserError: a setting is out of range.
    """

    metric: str
    mode: str = "max"
    num_samples: int = 8
    searcher: Any = None
    scheduler: Any = None
    concurrent: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UserError(f"mode: must be max or min, got {quoted(self.mode)}")
        for key, value in (("samples", self.num_samples), ("concurrent", self.concurrent)):
            if value is not None:
                validated(TypeAdapter(TrialCount), value, key)

    @property
    def rungs(self) -> int:
        """Return how often a trial of a recipe is scored."""
        return 1 if self.scheduler is None else RUNGS

    def to_dict(self) -> Keys:
        """Return the settings as plain JSON types; searchers and schedulers by their class."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "num_samples": self.num_samples,
            "searcher": name_of(self.searcher),
            "scheduler": name_of(self.scheduler),
            "seed": self.seed,
        }


def name_of(given: Any) -> str | None:
    return given if given is None or isinstance(given, str) else type(given).__name__


def validated(adapter: TypeAdapter[Any], value: Any, context: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        item = next(iter_errors(error))
        key = ": ".join([context, *filter(None, [".".join(map(str, item["loc"]))])])
        told = item["type"] in ("extra_forbidden", "missing") or isinstance(item["input"], dict)
        got = "" if told else f", got {quoted(item['input'])}"
        raise UserError(f"{key}: {validation_message(item)}{got}") from None


def read_space(space: str | Path | Mapping[str, Any]) -> dict[str, Domain]:
    """Return the domain of each swept field of a recipe, as in its section `tune.space`.

    space: a mapping, or the path of a YAML file that holds one. Raises UserError.
    """
    context = "space"
    if isinstance(space, str | Path):
        context = str(space)
        documents = read_yaml(space)
        space = documents[0] if len(documents) == 1 else {}
    if not isinstance(space, Mapping) or not space:
        raise UserError(
            f"{context}: must map fields of the recipe to their values, such as "
            "training.learning_rate: {log_uniform: [0.05, 2]}"
        )
    found: dict[str, Domain] = validated(TypeAdapter(dict[str, Domain]), dict(space), context)
    return found


_PARAMETERS = {"certified-accuracy": "radius", "average-radius": "radius_cap"}


def parse_metric(metric: str) -> Keys | None:
    """Return a metric as keys of a recipe's section `tune.score`; None for cross-entropy.

    metric: accuracy, cross-entropy, certified-accuracy@RADIUS or average-radius@CAP. Raises
    UserError.
    """
    name, _, number = metric.partition("@")
    parameter = _PARAMETERS.get(name)
    if metric == CROSS_ENTROPY:
        return None
    if metric == "accuracy":
        return {"objectives": {"accuracy": 1.0}}
    try:
        if parameter is None:
            raise ValueError
        value = float(number)
    except ValueError:
        raise UserError(
            f"metric: must be accuracy, {CROSS_ENTROPY}, certified-accuracy@RADIUS or "
            f"average-radius@CAP, got {quoted(metric)}"
        ) from None
    return {"objectives": {name: 1.0}, parameter: value}


def parse_public(name: str) -> Keys:
    """Return the section of public records by NAME or NAME/SPLIT."""
    known, _, split = name.rpartition("/")
    return {"name": known, "split": split} if split in ("train", "test") and known else {
        "name": name
    }  # fmt: skip


def with_space(recipe: Recipe, space: Mapping[str, Domain], context: str, **tune: Any) -> Recipe:
    """Return the recipe with the space in place of its own search, validated."""
    raw = recipe.model_dump(mode="json")
    domains = {key: d.model_dump(mode="json", exclude_none=True) for key, d in space.items()}
    raw["tune"] = {"space": domains, **tune}
    return parse_recipe(raw, context)


def _promises_nothing(recipe: Recipe) -> bool:
    """Return whether no epsilon is finite for one step of the recipe's training."""
    privacy, noise = recipe.privacy, recipe.privacy.noise_multiplier
    step = GaussianSteps(1, 1.0 if noise is None else noise, 1.0)
    plan = PrivacyPlan(
        2, recipe.method.cost(step), privacy.delta, privacy.sensitivity, privacy.neighbours
    )
    try:
        return math.isinf(plan.guarantee().epsilon)
    except ValueError:  # no theorem
        return True


def is_public_recipe(recipe: Recipe) -> bool:
    """Return whether a recipe declares that its records are public, by training without privacy."""
    return recipe.privacy.noise_multiplier == 0 and _promises_nothing(recipe)


# --- recipes with privacy on ------------------------------------------------------------------


def private_sweep_recipe(
    recipe: Recipe,
    space: Mapping[str, Domain],
    settings: SweepSettings,
    public_scores: str | None,
    context: str,
) -> Recipe:
    """Return the search that sweeps a recipe with privacy on: a fixed number of trials.

    Guarantee: the search's price is the composition of all `num_samples` trainings over the same
    records, known before the first step, and its scores are of public records. A target epsilon is
    then that of all trainings together.

    Args:
        recipe: with privacy on.
        space: the swept fields.
        settings: of the sweep.
        public_scores: NAME or NAME/SPLIT of public records that trials are scored on.
        context: begins complaints.

    Raises:
        UserError: in one line, for trainings that cannot be composed.
    """
    objective = parse_metric(settings.metric)
    if settings.searcher not in (None, "random", "optuna"):
        raise _refused(context, "searcher", "random or optuna", settings.searcher)
    if settings.scheduler not in (None, "asha"):
        raise _refused(context, "scheduler", "asha, or left out", settings.scheduler)
    if objective is None or settings.mode != "max":
        raise UserError(
            f"{context}: metric: must be accuracy, certified-accuracy@RADIUS or average-radius@CAP "
            f"with mode max where privacy is on, got {settings.metric} with mode {settings.mode}"
        )
    if settings.seed is not None:
        raise UserError(
            f"{context}: seed: must be left out where privacy is on: keys and values are drawn in "
            "secret"
        )
    if public_scores is None:
        raise UserError(
            f"{context}: public scores: required where privacy is on: name public records to score "
            "on (--public-scores NAME/SPLIT), or say `privacy: none` in a recipe of public "
            "records; scores on private ones are noised and paid for by `dpdist tune`",
            see="how-to/tuning.md#an-ordinary-sweep",
        )
    asked = with_space(
        recipe,
        space,
        context,
        law={"name": "fixed", "runs": settings.num_samples},
        score={"public": parse_public(public_scores), **objective},
        searcher=settings.searcher or "random",
        asha=None if settings.scheduler is None else {},
        concurrent=settings.concurrent,
    )
    assert asked.tune is not None
    for values in iter_probe_values(asked.tune):
        trial = apply_values(asked, values, context)
        if _promises_nothing(trial):
            raise UserError(
                f"{context}: privacy: must promise something in every trial of a sweep, and with "
                f"{shown_values(values)} nothing is proved, so nothing of all runs together; leave "
                "that out, or declare the records public by privacy: none"
            )
    return asked


def _refused(context: str, key: str, rule: str, got: Any) -> UserError:
    return UserError(
        f"{context}: {key}: must be {rule} where privacy is on, whose trials are fixed and paid "
        f"for in advance, got {name_of(got)}; any other is for privacy: none"
    )


def shown_values(values: TrialValues) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def count_releases(folder: RunFolder) -> tuple[int, Guarantee]:
    """Return the number of trainings of a search and the guarantee of all that they released.

    Counted from the ledger of every trial, also of one that failed or was stopped, and of all
    attempts of each: their releases are composed over the same records.

    Args:
        folder: the run folder of a search with a fixed number of trials and public scores.

    Raises:
        UserError: a ledger is damaged, or was written under another plan.
    """
    search = SearchFolder(folder)
    whole = parse_plan(read_terms(search)["plan"], f"{search.terms}: plan")
    phases: list[Phase] = []
    begun = 0
    for trial in read_trials(search):
        own = search.trial_folder(trial.number)
        if own.ledger.exists():
            by_run = read_verified_ledger(own)
            released = by_run.ledger.released_phases(by_run.plan)
            phases += released
            begun += bool(released)
    return begun, replace(whole, phases=tuple(phases)).guarantee()


def describe_releases(folder: RunFolder) -> list[tuple[str, str]]:
    """Return name and value of the releases of a sweep with privacy on.

    The run's own epsilon is never below: it is that of all planned steps, and of those that a lost
    training made twice. Raises as `count_releases`.
    """
    begun, counted = count_releases(folder)
    trainings = len(read_trials(SearchFolder(folder)))
    said = f"epsilon = {format_epsilon(counted.epsilon)} for what {begun} of {trainings} released"
    return [("by the ledgers", said)]
