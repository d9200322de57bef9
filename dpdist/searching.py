"""Search privately from Python: the values of a recipe, or of a function that builds a training.

A search over a function is the search of a recipe (`dpdist.tuning.search`): the same sampling,
privacy cost, folder, budget and winner. Only the execution of a trial differs: by its own workers,
new processes, each of which calls `train(config)` once. The function is also called before anything
is released, so that the privacy cost is that of the trainings it builds.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from pydantic import BaseModel

from dpdist.cluster.executor import Executor, ExecutorName, require_one_process
from dpdist.config.search import FunctionScore, TuneRecipe
from dpdist.config.sections import PrivacyRecipe, as_privacy
from dpdist.config.training import ResourcesRecipe
from dpdist.core.errors import UserError
from dpdist.core.files import error_text, read_json, write_atomic, write_json
from dpdist.core.script_errors import warn
from dpdist.data.adapters import as_records
from dpdist.data.protocol import Records, UserRecords, Users, count_common, single_records
from dpdist.evaluation import evaluate_stage
from dpdist.pipeline import run_session, search_stage
from dpdist.pipeline import tune as tune_recipe
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import PrivacyPlan
from dpdist.private_training import PrivateTraining
from dpdist.reports.plots import plot_trials
from dpdist.reports.results import load_results
from dpdist.runs.accounting import PublishedTrial, SearchTerms
from dpdist.runs.charging import Hashed
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe, parse_section, plan_with_noise, resolve_recipe
from dpdist.searched_function import (
    Explorer,
    TrainFunction,
    TrainRaisedError,
    TrialConfig,
    continue_by_workers,
    descriptions_file,
    key_of,
    keyed_data,
    salt_of,
    sent_file,
    settings_of_function,
    take_step,
)
from dpdist.training.private_score import (
    ASSUMED_OF_VALUE,
    Value,
    check_apart,
    check_scored_targets,
    value_name,
)
from dpdist.training.script_checks import (
    EVAL_DATA,
    HashedRecords,
    check_scored_users,
    check_units_apart,
    refuse_budget_of_features,
    scored_by_unit,
    units_of,
)
from dpdist.training.script_state import keep_module_record
from dpdist.tuning.manifest import (
    SearchFolder,
    read_scores,
    read_settings,
    read_terms,
    read_trials,
    read_winner,
)
from dpdist.tuning.public import NOT_PRIVATE, recipe_trainable
from dpdist.tuning.search import Search, check_same_search
from dpdist.tuning.space import RecordCounts, SearchCost, TrialValues, iter_probe_values
from dpdist.tuning.trial import ContinueTrial

ASSUMED = (
    "train, and the model, loss and optimizer that it makes, change nothing of dpdist and read "
    "private records only through the PrivateTraining that it returns",
    "config, space, distribution and score were chosen without private records",
    "train is a deterministic function of config: it keeps nothing from one trial to the next, in "
    "files, the environment or elsewhere",
    "whether train, model, loss or optimizer raises an error depends on no private record",
)
ASSUMED_PUBLIC = "the records that trials are scored on are public"

# --- the search -------------------------------------------------------------------------------


class FunctionSearch(Search):
    """Hold a prepared search over a function, from `_check_function_search`.

    explorer: of the function. sent: function and records for the processes of trials.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        cost: SearchCost,
        data_fingerprint: str,
        explorer: Explorer,
        sent: bytes,
    ) -> None:
        super().__init__(recipe, folder, cost, data_fingerprint)
        self._explorer, self._sent = explorer, sent
        self.way_out = "give another folder"

    def plan_trial(self, values: TrialValues) -> tuple[Recipe, PrivacyPlan]:
        """Return the recipe of a trial and the plan that it executes.

        Raises:
            TrainRaisedError: the function raised an error.
            UserError: it builds no training, or one beyond the accounted privacy cost.
        """
        recipe = self._explorer.recipe_of(values)
        noise = self.cost.trial_noise_multiplier(recipe)
        plan = plan_with_noise(recipe, self.cost.plan.records, noise)
        self.cost.trial_limit.check(plan, "tune: space")
        update = {"epsilon": None, "noise_multiplier": noise}
        privacy = recipe.privacy.model_copy(update=update)
        return recipe.model_copy(update={"privacy": privacy}), plan

    def trial_noise_multiplier(self, values: TrialValues) -> float:
        """Return the noise multiplier of a trial; if the function fails, that of the search."""
        try:
            noise = super().trial_noise_multiplier(values)
        except TrainRaisedError:
            noise = self.cost.noise_multiplier
        if self.folder.terms.exists():
            self._keep_descriptions([values])
        return noise

    def check_unchanged(self) -> None:
        """Raise UserError if records, privacy cost or function changed since the start."""
        super().check_unchanged()
        path = descriptions_file(self.folder)
        if not self.folder.terms.exists():
            return
        built, winner = read_json(path), None
        if self.run_folder.training_summary.exists():
            if read_terms(self.folder)["data"] != self.data_fingerprint:
                raise UserError(
                    f"{self.run_folder.path}: the finished search was on other private records; "
                    f"restore them, or {self.way_out}"
                )
            winner = read_winner(self.folder)
        if winner is not None:
            own = key_of(read_settings(self.folder, winner)["values"])
            built = {own: built[own]}
        for values, known in built.items():
            if self._explorer.description_of(json.loads(values)) != known:
                raise UserError(
                    f"{self.run_folder.path}: train: must build the model, optimizer and settings "
                    f"that this search was begun with; restore it, or {self.way_out}"
                )

    def budget_records(self) -> Hashed:
        """Return the private records of the search, in the form for a budget."""
        function = self._explorer.function
        private = [function.records]
        if not function.public:
            private.append(single_records(function.scored))
        return HashedRecords(*private)

    def _keep_checked(self) -> None:
        drawn = [trial.values for trial in read_trials(self.folder) if trial.values is not None]
        self._keep_descriptions(drawn)

    def _keep_descriptions(self, drawn: list[TrialValues]) -> None:
        """Write digests of the trainings for these values, unless they are written."""
        path = descriptions_file(self.folder)
        known = read_json(path) if path.exists() else {}
        for values in drawn:
            known.setdefault(key_of(values), self._explorer.description_of(values))
        write_json(path, known)

    def _run_trials(self, executor: Executor, concurrent: int) -> None:
        path = sent_file(self.folder)
        write_atomic(path, self._sent)
        try:
            super()._run_trials(executor, concurrent)
        finally:
            path.unlink(missing_ok=True)

    @property
    def _continue_trial(self) -> ContinueTrial:
        return continue_by_workers

    def _take_along(self, source: RunFolder, target: RunFolder) -> Recipe:
        """Copy the winner's public records and module description; return its recipe."""
        keep_module_record(source.checkpoints, target.checkpoints, Ledger.read(source.ledger))
        recipe = source.read_recipe()
        if recipe.data.root is None:
            return recipe
        shutil.rmtree(target.path / EVAL_DATA, ignore_errors=True)
        shutil.copytree(source.path / EVAL_DATA, target.path / EVAL_DATA)
        data = recipe.data.model_copy(update={"root": target.path / EVAL_DATA})
        return recipe.model_copy(update={"data": data})

    def _search_record(self, winner: int) -> dict[str, Any]:
        values = read_settings(self.folder, winner)["values"]
        return {**super()._search_record(winner), "chosen": values}

    def _trial_rows(self, winner: int) -> list[dict[str, Any]]:
        rows = []
        for trial in read_trials(self.folder):
            state = read_scores(self.folder, trial.number)
            # The text of an error of the user's could hold a record.
            failed = None if state["failed"] is None else "failed"
            told = {"scores": state["scores"], "failed": failed, "chosen": trial.number == winner}
            rows.append(read_settings(self.folder, trial.number) | told)
        return rows

    def make_loadable(self) -> None:
        """Let this process load the winner's model, which the function builds."""
        winner = read_winner(self.folder)
        if winner is not None:
            self._explorer.recipe_of(read_settings(self.folder, winner)["values"])


# --- checks before a search -------------------------------------------------------------------


def _check_function_search(
    train: Callable[[TrialConfig], Any],
    data: Any,
    score: Any,
    privacy: Any,
    folder: RunFolder,
    section: Mapping[str, Any],
    resources: Any,
) -> FunctionSearch:
    """Return the checked and accounted search; write nothing. Raises UserError.

    section: of a recipe, `tune` without its score.
    """
    records, asked = as_records(data), as_privacy(privacy, "tune")
    scored, value, terms = _parse_score(score, asked)
    tune = parse_section(TuneRecipe, {**section, "score": terms}, "tune")
    public = tune.score.is_public
    refuse_budget_of_features(asked, records)
    function = TrainFunction(train, records, scored, value, public, asked.epsilon is None)
    sent = _send(function)
    begun = SearchFolder(folder)
    salt = salt_of(read_terms(begun)) if begun.terms.exists() else secrets.token_hex(32)
    fingerprint = keyed_data(function, salt)
    explorer = Explorer(function, tune, asked)
    recipe = _search_recipe(explorer, tune, asked, folder, resources)
    _refuse_common(function, recipe)
    continued = check_same_search(recipe, folder)
    units = len(Users.from_values(units_of(records), 1)) if recipe.user_unit else len(records)
    counts = RecordCounts(units, 0.0, lambda fraction: units)
    settings = settings_of_function(tune, explorer.recipe_of)
    cost = SearchCost(recipe, counts, tune.num_trials, "tune", settings)
    search = FunctionSearch(recipe, folder, cost, fingerprint, explorer, sent)
    if not (continued and begun.terms.exists()):
        for values in iter_probe_values(tune):
            search.plan_trial(values)
        search.assumptions = [*ASSUMED, *_assumed_of_score(function)]
    search.check_unchanged()
    if keyed_data(function, salt) != fingerprint:
        raise UserError(
            "train: must not change config.data or the records to score on: scale them before "
            "dpdist.tune, by public numbers"
        )
    return search


def _refuse_common(function: TrainFunction, recipe: Recipe) -> None:
    """Raise UserError if records to score on, or their units, are among those to train on."""
    scored, records = function.scored, function.records
    if function.public:
        check_units_apart(scored, records)
        if common := count_common(scored, records):
            raise UserError(
                f"tune: score.public: must share no record with data, got {common:,} in common: "
                "scores on them would be used as if they were public"
            )
        return
    if recipe.user_unit is None:
        check_scored_users(recipe, records, scored)
    else:
        scored_by_unit(recipe, records, single_records(scored))
    check_apart(scored, {"data": records})


def _assumed_of_score(function: TrainFunction) -> list[str]:
    """Return the assumptions about the scored records, which are not checked."""
    if function.public:
        return [ASSUMED_PUBLIC]
    own = [] if function.value is None else [ASSUMED_OF_VALUE]
    units = "users" if isinstance(function.scored, UserRecords) else "records"
    return [f"the number of held-out {units} ({len(function.scored):,}) is public", *own]


_RESOURCES = ("workers", "cpus_per_worker", "gpus_per_worker", "max_failures")


def _search_recipe(
    explorer: Explorer, tune: TuneRecipe, privacy: PrivacyRecipe, folder: RunFolder, resources: Any
) -> Recipe:
    """Return the recipe of the search: that of the first values, with the section `tune`."""
    first = explorer.recipe_of(next(iter_probe_values(tune)))
    raw = first.model_dump(mode="json")
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.name)
    own = parse_section(ResourcesRecipe, _plain(resources or {}), "tune: resources")
    for key, value in own.model_dump(exclude_defaults=True).items():
        if key not in _RESOURCES:
            raise UserError(
                f"tune: resources.{key}: must be left out with a function, got {value}; give only "
                f"{', '.join(_RESOURCES)}"
            )
    if own.is_elastic:
        raise UserError(f"tune: resources.workers: must be one number, got {own.workers}")
    raw |= {
        "name": name.strip("-._") or "search",
        "privacy": {**raw["privacy"], "run_key": privacy.run_key},
        "tune": tune.model_dump(mode="json"),
        "resources": own.model_dump(mode="json"),
    }
    raw["data"]["root"] = None
    return parse_recipe(raw, "tune")


_SCORE_KEYS = ("private_eval_data", "public", "value", "noise")


def _parse_score(
    score: Any, privacy: PrivacyRecipe
) -> tuple[Records, Value | None, dict[str, Any]]:
    """Return the records that trials are scored on, their value, and the section `score`.

    Private records are by unit if a user is the unit.
    """
    keys = set(score) if isinstance(score, Mapping) else set()
    given = [key for key in ("private_eval_data", "public") if key in keys]
    if len(given) != 1 or keys - set(_SCORE_KEYS):
        raise UserError(
            'tune: score: must be {"private_eval_data": private records} or {"public": records}; '
            'only "value" (a function of model and batch to one value per record) and "noise" may '
            "be added"
        )
    value = score.get("value")
    name = value_name(value, "tune: score.value")
    records = as_records(score[given[0]])
    check_scored_targets(records, value, "tune: score")
    public = given == ["public"]
    if privacy.max_records_per_user is not None and not public:
        users = Users.from_values(units_of(records), privacy.max_records_per_user)
        records = UserRecords(records, users)
    told = FunctionScore(value=name, records=len(records), public=public)
    terms = {"function": told.model_dump(), "noise": score.get("noise")}
    return records, value, terms


def _send(function: TrainFunction) -> bytes:
    """Return the function as bytes for the processes of trials. Raises UserError."""
    try:
        blob = cloudpickle.dumps(function)
    except Exception as error:
        raise UserError(
            "train: must be a function that can be sent to another process, with its data and "
            f"score: {error_text(error)}"
        ) from error
    path = [each for each in sys.path if each]
    return pickle.dumps({"function": blob, "path": path, "here": os.getcwd()})


def _plain(section: Any) -> Any:
    """Return a section of a recipe, or a mapping of them, as plain data."""
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json")
    if isinstance(section, Mapping):
        return {key: _plain(each) for key, each in section.items()}
    return section


# --- the public call --------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchResult:
    """Hold the result of a private search: the winner, its privacy cost and public details.

    Guarantee: with a secret number of trials only the winner, the privacy cost and the distribution
    may be shown; if the number is fixed, all trials are counted in epsilon, and `trials` lists
    them.

    Attributes:
        best: `RunFolder` of the winner's run, for `dpdist.certify`, reports and releases.

    Example:
        >>> import dpdist
        >>> search = dpdist.tune(
        ...     {
        ...         "data": {"name": "digits", "max_train": 200},
        ...         "model": {"name": "linear"},
        ...         "privacy": {"noise_multiplier": 4, "delta": 1e-4},
        ...         "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.5},
        ...     },
        ...     {"training.learning_rate": {"choice": [0.1, 1.0]}},
        ...     num_trials={"name": "fixed", "runs": 2}, folder="runs/searched", executor="local",
        ... )
        >>> list(search.config), len(search.trials)
        (['training.learning_rate'], 2)
    """

    best: RunFolder

    @cached_property
    def _terms(self) -> SearchTerms:
        search = load_results(self.best).search
        assert search is not None
        return search

    @cached_property
    def guarantee(self) -> Guarantee:
        """Return the `Guarantee` of training and search together, with `epsilon` and `delta`."""
        return load_results(self.best).guarantee

    @property
    def num_trials(self) -> str:
        """Return the distribution of the number of trials in words, a str.

        It reads like "fixed, 10 trials". If the number is secret, the text also states a number
        that is reached with high probability.
        """
        return self._terms.num_trials

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the values of the winner, a dict from searched name to value.

        A name is a dotted key such as "training.learning_rate", or an entry of `space` for a
        function.
        """
        return self._terms.values_of(self.best.read_recipe())

    @property
    def trials(self) -> tuple[PublishedTrial, ...]:
        """Return all trials, a tuple of `PublishedTrial`, if their number is fixed.

        A trial has `values` (dict by searched name), `noise_multiplier` (float), `scores` (list of
        float; the last one counts, larger is better, and those on private records have noise),
        `failed` (why it does not count, a str; None if it does) and `chosen` (bool: whether it
        won).

        Raises:
            UserError: the number of trials is secret.
        """
        if not self._terms.trials:
            raise UserError(
                f"trials: must not be shown with a secret number of trials ({self.num_trials}): "
                "the privacy cost covers only the winner; use num_trials "
                "{'name': 'fixed', 'runs': ...}",
                see="how-to/tuning.md#what-must-stay-secret",
            )
        return self._terms.trials

    def plot(self, ax: Any = None) -> Any:
        """Plot the last score of each trial that did not fail, and return the matplotlib `Axes`.

        Args:
            ax: matplotlib axes to draw into; default: the current ones.

        Raises:
            UserError: the number of trials is secret.
        """
        return plot_trials(self.trials, ax)

    def __repr__(self) -> str:
        return f"SearchResult({self.best.path}: {self.guarantee}; trials: {self.num_trials})"


def tune(
    train: Callable[[TrialConfig], Any] | Recipe | str | Path | Mapping[str, Any],
    space: Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    num_trials: Any = None,
    score: Any = None,
    privacy: PrivacyRecipe | Mapping[str, Any] | None = None,
    folder: str | Path,
    searcher: str | None = None,
    concurrent: int | None = None,
    resources: ResourcesRecipe | Mapping[str, Any] | None = None,
    executor: ExecutorName | None = None,
) -> SearchResult:
    """Search privately for the best values of a recipe, or of a function that builds a training.

    Guarantee: the winner is (epsilon, delta)-differentially private as `SearchResult.guarantee`
    states, for training and search together. It covers the trainings and the scores, which dpdist
    executes. The winner's card lists its assumptions about the function.

    A function is called as `train(config)`, in a new process for each trial, and returns one
    `PrivateTraining` before its first step, built from `config.data`, `config.privacy` and
    `config.folder`. It must build the same one whenever it is called: its random numbers are
    seeded. The search takes the steps. Schedulers in `state` follow after each. A trial that raises
    an error counts as the worst. What trials print stays in the folder's private/.

    The same call continues a search that was interrupted.

    Args:
        train: a function of a config, or a recipe: its path, name, keys as a dict, or a `Recipe`.
        space: the values to search by name: {"log_uniform": [low, high]}, uniform, integer, or
            {"choice": [...]}. In a recipe, dotted keys; None for the recipe's own section.
        data: for a function, the private records to train on: `(X, y)`, or anything that
            `dpdist.as_records` takes.
        num_trials: distribution of the number of trials, such as {"name": "poisson", "mean": 5}, a
            secret one, or {"name": "fixed", "runs": 10}.
        score: for a function, {"private_eval_data": private records}, scored with noise and counted
            in epsilon, or {"public": records}; "value": a function of model and batch that returns
            one value per record, in [0, 1] on private ones (default: accuracy); "noise": standard
            deviation on the sum. For a recipe, its section `tune.score`.
        privacy: privacy of training and search together; with epsilon, the noise is calibrated.
        folder: folder of the winner's run, created if it does not exist.
        searcher: "random", or with num_trials fixed "optuna".
        concurrent: trials at the same time; None for as many as fit.
        resources: for a function's trials: `workers` that train a trial together, on Ray,
            `cpus_per_worker`, `gpus_per_worker`, and `max_failures`, how often a trial is repeated
            whose workers were lost, before it has failed.
        executor: "local" for one trial after the other on this machine, "ray" for a session of Ray.

    Returns:
        A `SearchResult`: `best` (the winner's `RunFolder`), `config` (its values, a dict),
        `guarantee` (of training and search together), and `trials`, which raises UserError if their
        number is secret.

    Raises:
        UserError: one line that names what cannot be searched; nothing was released.
        dpdist.tuning.search.NoModelError: the search ended without a model, one of its outcomes.

    Source:
        Papernot and Steinke, ICLR 2022 (the best of a secret number of runs).

    Example:
        >>> import tempfile, torch, dpdist
        >>> inputs, labels = torch.randn(300, 4), torch.randint(2, (300,))
        >>> def train(config):
        ...     model = torch.nn.Linear(4, 2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        ...     return dpdist.PrivateTraining(
        ...         model, optimizer, config.data, loss="cross-entropy",
        ...         privacy=config.privacy, batch_size=20, steps=2, folder=config.folder,
        ...     )
        >>> search = dpdist.tune(
        ...     train, {"lr": {"log_uniform": [0.01, 1]}}, data=(inputs[:200], labels[:200]),
        ...     num_trials={"name": "fixed", "runs": 2}, score={"private_eval_data": (inputs[200:],
        ...     labels[200:])},
        ...     privacy=dpdist.Privacy(noise_multiplier=4, delta=1e-3),
        ...     folder=tempfile.mkdtemp() + "/search", executor="local",
        ... )
        >>> len(search.trials), search.guarantee.kind
        (2, 'proved')
    """
    run = RunFolder(Path(folder).resolve())
    given = {
        "space": space,
        "num_trials": num_trials,
        "searcher": searcher,
        "concurrent": concurrent,
    }
    section = {key: _plain(each) for key, each in given.items() if each is not None}
    if isinstance(train, Recipe | str | Path | Mapping):
        _refuse_for_recipes({"data": data, "resources": resources})
        changes = {f"tune.{key}": each for key, each in section.items()}
        changes |= {} if score is None else {"tune.score": _plain(score)}
        changes |= {} if privacy is None else {"privacy": _plain(privacy)}
        context = str(train) if isinstance(train, str | Path) else "recipe"
        recipe = resolve_recipe(train, changes=changes, name=run.name)
        best = tune_recipe(recipe, runs=run.path.parent, context=context, executor=executor)
        return SearchResult(best)
    if not callable(train):
        raise UserError(
            f"tune: train: must be a function of a config, or a recipe, got {type(train).__name__}"
        )
    search = _check_function_search(train, data, score, privacy, run, section, resources)
    if executor == "local":
        require_one_process(search.recipe.resources.max_workers)
    if not run.recipe_file.exists():
        search.check_budget("tune")
    search.begin()
    if search.recipe.privacy.run_key is not None:
        warn(
            "privacy.run_key: is fixed, so this search is NOT PRIVATE; leave it out outside of "
            "tests"
        )
    with run_session(run, search.recipe.resources.min_cpus, executor) as opened:
        search_stage(search, opened)
    search.make_loadable()
    chosen = run.read_recipe()
    if chosen.data.root is not None:
        evaluate_stage(chosen, run)
    return SearchResult(run)


def _refuse_for_recipes(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UserError(f"tune: {name}: must be left out with a recipe, which has its own")


# --- on public records, by Ray Tune -----------------------------------------------------------


def trainable(
    train: Callable[[TrialConfig], Any] | Recipe | str | Path | Mapping[str, Any],
    *,
    folder: str | Path,
    data: Any = None,
    score: Any = None,
    privacy: PrivacyRecipe | Mapping[str, Any] | None = None,
) -> Callable[[dict[str, Any]], None]:
    """Wrap what `tune` searches for Ray Tune's own Tuner, on public records: NOT PRIVATE.

    Guarantee: none, as the reported metric `privacy` and the trials' names state: what the
    trainings release is not composed. Use public records only.

    Any searcher, scheduler and logger of Ray Tune may follow. A trial reports `score`, `steps` and
    `privacy`. A recipe reports at each rung of `tune.asha`. A function reports ten times, each time
    with a checkpoint of model, optimizer and `state`, so that ASHA and PBT may pause, clone and
    change its trials. The run folder of such a trial is not finished: load the model's `state_dict`
    from Ray's checkpoint, where it is "model" in the file state.pt.

    Args:
        train: the same function of a config, or recipe, as for `tune`.
        folder: gets run folders, by Ray's id of the trial.
        data: for a function, the public records to train on.
        score: for a function, {"public": records, "value": as in `tune`}.
        privacy: for a function, what `config.privacy` is; default: training without noise and clip.

    Returns:
        A function of a config (dict), the trainable of a `ray.tune.Tuner`. It returns nothing: it
        reports `score`, `steps` and `privacy` to Ray Tune.

    Raises:
        UserError: the recipe trains with privacy, or an argument is missing.

    Example:
        >>> import tempfile, torch, dpdist
        >>> from ray import tune
        >>> inputs, labels = torch.randn(60, 4), torch.randint(2, (60,))
        >>> def train(config):
        ...     model = torch.nn.Linear(4, 2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        ...     return dpdist.PrivateTraining(
        ...         model, optimizer, config.data, loss="cross-entropy",
        ...         privacy=config.privacy, batch_size=20, steps=10, folder=config.folder,
        ...     )
        >>> wrapped = dpdist.trainable(
        ...     train, folder=tempfile.mkdtemp() + "/sweep", data=(inputs[:40], labels[:40]),
        ...     score={"public": (inputs[40:], labels[40:])},
        ... )
        >>> config = tune.TuneConfig(metric="score", mode="max", num_samples=20)
        >>> tuner = tune.Tuner(wrapped, param_space={"lr": tune.uniform(0, 1)}, tune_config=config)
        >>> wrapped.__name__  # tuner.fit() returns Ray Tune's ResultGrid
        'NOT_PRIVATE_train'
    """
    place = Path(folder).resolve()
    if isinstance(train, Recipe | str | Path | Mapping):
        _refuse_for_recipes({"data": data, "score": score, "privacy": privacy})
        context = str(train) if isinstance(train, str | Path) else "recipe"
        return recipe_trainable(resolve_recipe(train), place, context)
    if data is None or score is None:
        raise UserError("trainable: data and score: are required with a function")
    asked = as_privacy(privacy or {"noise_multiplier": 0, "clipping": "none"}, "trainable")
    scored, value, _ = _parse_score(score, asked)
    function = TrainFunction(train, as_records(data), scored, value, True, asked.epsilon is None)

    def run(config: dict[str, Any]) -> None:
        from ray import tune as ray_tune

        own = place / str(ray_tune.get_context().get_trial_id())
        own.mkdir(parents=True, exist_ok=True)
        start = Path(tempfile.mkdtemp(prefix="run-", dir=own))  # of a clone, another training
        training = function.build(config, asked, start)
        done, total = _load_state(training, ray_tune.get_checkpoint()), training.plan.steps
        for step in range(done + 1, total + 1):
            take_step(training, last=step == total)
            if step % max(1, total // _REPORTS) == 0 or step == total:
                model = training.model
                mode = model.training
                value = function.values_on(training).public_mean(model.eval())
                model.train(mode)
                with tempfile.TemporaryDirectory() as kept:
                    torch.save({"steps": step, **_state_of(training)}, Path(kept) / _STATE)
                    ray_tune.report(
                        {"score": value, "steps": step, "privacy": NOT_PRIVATE},
                        checkpoint=ray_tune.Checkpoint.from_directory(kept),
                    )

    run.__name__ = f"NOT_PRIVATE_{getattr(train, '__name__', 'train')}"
    return run


_REPORTS, _STATE = 10, "state.pt"  # reports per trial; file of a checkpoint


def _state_of(training: PrivateTraining) -> dict[str, Any]:
    kept = [each.state_dict() for each in training.state]
    optimizer = training.optimizer.state_dict()["state"]  # its rates are those of the config
    return {"model": training.model.state_dict(), "optimizer": optimizer, "state": kept}


def _load_state(training: PrivateTraining, checkpoint: Any) -> int:
    """Load a trial's checkpoint into a training, and return the number of steps before it."""
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as kept:
        found = torch.load(Path(kept) / _STATE, weights_only=True)
    training.model.load_state_dict(found["model"])
    settings = training.optimizer.state_dict()
    training.optimizer.load_state_dict({**settings, "state": found["optimizer"]})
    for each, state in zip(training.state, found["state"], strict=True):
        each.load_state_dict(state)
    return int(found["steps"])
