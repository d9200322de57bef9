"""Search privately from Python: the values of a recipe, or of a function that builds a training.

A search over a function is the search of a recipe (`dpdist.tuning.search`): the same draws, price,
folder, budget and winner. Another is how a trial is executed: by workers of its own, new processes,
of which each calls `train(config)` once. The function is called before anything is released too, so
that the price is that of the trainings which it builds.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import random
import secrets
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from pydantic import BaseModel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpdist import models
from dpdist.cluster.executor import Executor, ExecutorName, require_one_process
from dpdist.cluster.versions import package_fingerprints
from dpdist.cluster.work import WorkerGroup, WorkerPlace, WorkersFailedError
from dpdist.config.search import FunctionScore, TuneRecipe
from dpdist.config.sections import Privacy, PrivacyRecipe
from dpdist.config.training import ResourcesRecipe
from dpdist.core.errors import UserError, is_disk_full
from dpdist.core.files import (
    error_text,
    make_private_folder,
    read_json,
    write_atomic,
    write_json,
)
from dpdist.data.adapters import as_records
from dpdist.data.overlap import count_common, single_records
from dpdist.data.protocol import UNITS, Records, UserRecords, Users
from dpdist.evaluation import evaluate_stage
from dpdist.gradients.noise import add_noise
from dpdist.methods.base import Method
from dpdist.pipeline import run_session, search_stage
from dpdist.pipeline import tune as tune_recipe
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.ledger import JournalBusy, Ledger, LedgerError
from dpdist.privacy.plan import PrivacyPlan
from dpdist.private_training import (
    PrivateTraining,
    RunBusyError,
    watch_made,
)
from dpdist.randomness.keys import derive_key
from dpdist.reports.plots import plot_trials
from dpdist.reports.results import load_results
from dpdist.runs.accounting import PublishedTrial, SearchTerms
from dpdist.runs.charging import Hashed
from dpdist.runs.folder import DifferentRecipeError, RunFolder, read_verified_ledger
from dpdist.runs.recipe import (
    Recipe,
    parse_recipe,
    parse_section,
    plan_with_noise,
    resolve_recipe,
)
from dpdist.training.collectives import Workers
from dpdist.training.job import PACKAGES
from dpdist.training.private_score import (
    ASSUMED_OF_VALUE,
    RecordValues,
    Value,
    check_apart,
    value_name,
)
from dpdist.training.script_checks import (
    EVAL_DATA,
    HashedRecords,
    check_scored_users,
    check_units_apart,
    scored_by_unit,
)
from dpdist.training.script_state import code_digest_of, keep_module_record
from dpdist.training.trainer import torch_config
from dpdist.tuning.manifest import (
    SearchFolder,
    read_scores,
    read_settings,
    read_terms,
    read_trial_limit,
    read_trials,
    read_winner,
)
from dpdist.tuning.public import NOT_PRIVATE, recipe_trainable
from dpdist.tuning.search import Search, check_same_search
from dpdist.tuning.space import (
    CostBox,
    RecordCounts,
    SearchCost,
    TrialValues,
    domain_value,
    iter_probe_values,
    iter_searched_fields,
    recipe_cost_box,
)
from dpdist.tuning.trial import (
    ContinueTrial,
    ScoreReporter,
    TrialExecutor,
    begin_trial_folder,
    run_trial,
)

ASSUMED = (
    "train, and the model, loss and optimizer that it makes, change nothing of dpdist and read "
    "private records only through the PrivateTraining that it returns",
    "config, space, distribution and score were chosen without private records",
    "train is a deterministic function of config: it keeps nothing from one trial to the next, in "
    "files, the environment or elsewhere",
    "whether train, model, loss or optimizer raises an error depends on no private record",
)
ASSUMED_PUBLIC = "the records that trials are scored on are public"

# --- the function -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrialConfig(Mapping[str, Any]):
    """Hold the values of one trial, as `train(config)` is given them.

    Attributes:
        searched: the searched values by name; `config["lr"]` reads one.
        data: the private records to train on, `Records`.
        privacy: the section for `PrivateTraining`, with the noise of this trial.
        folder: the folder of the trial's run, a `Path`.
    """

    searched: Mapping[str, Any]
    data: Records = field(repr=False)
    privacy: PrivacyRecipe
    folder: Path

    def __getitem__(self, name: str) -> Any:
        return copy.deepcopy(self.searched[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.searched)

    def __len__(self) -> int:
        return len(self.searched)


class TrainRaisedError(UserError):
    """The function raised an error, which makes its trial a failed one."""


@dataclass(frozen=True)
class TrainFunction:
    """Hold a function that builds trainings, and the records of the search.

    train: the function. records: to train on, private. scored: to score on, by unit where they are
    private and a user is the unit. value: of a record. public: whether the scored ones are public.
    noise_given: whether the noise multiplier may be one of the searched values; else it is found
    for a target epsilon.
    """

    train: Callable[[TrialConfig], Any]
    records: Records
    scored: Records
    value: Value | None
    public: bool
    noise_given: bool

    def build(
        self, values: Mapping[str, Any], privacy: PrivacyRecipe, folder: Path
    ) -> PrivateTraining:
        """Return the training that the function builds of these values, checked.

        Raises:
            TrainRaisedError: the function raised an error.
            UserError: it returned anything but the one training that it made.
        """
        config = TrialConfig(values, self.records, privacy, folder)
        begun = RunFolder(folder).plan.exists()
        with watch_made() as made, _seeded():
            try:
                training = self.train(config)
            except RunBusyError:
                raise
            except UserError as error:
                raise TrainRaisedError(str(error)) from error
            except (Exception, SystemExit) as error:
                if is_disk_full(error):
                    raise
                said = f"train: raised {type(error).__name__} for {dict(values)}: "
                said += error_text(error)
                raise TrainRaisedError(said) from error
        if type(training) is not PrivateTraining:
            raise UserError(
                "train: must return the dpdist.PrivateTraining that it makes, not stepped yet, and "
                f"no score, model or subclass, got {type(training).__name__}; scores come from "
                "score=, and the search takes the steps"
            )
        if made != [training]:
            raise UserError(
                "train: must make exactly one PrivateTraining, the one that it returns, made "
                f"{len(made)}"
            )
        self._check(training, config, begun)
        return training

    def _check(self, training: PrivateTraining, config: TrialConfig, begun: bool) -> None:
        """Raise UserError where a training is not about these records, terms and folder.

        begun: whether its folder was there before, from which it goes on.
        """
        if training.run.path != config.folder.resolve():
            raise UserError(f"train: folder: must be config.folder, got {training.run.path}")
        if training.steps_taken and not begun:
            raise UserError(
                "train: must return the training before its first step: the search takes the steps"
            )
        if any(isinstance(each, ReduceLROnPlateau) for each in training.state):
            raise UserError(
                "train: state: must hold no ReduceLROnPlateau, which follows a measured value; "
                "take another scheduler"
            )
        if training.recipe.score is not None:
            raise UserError("train: score: must be given to dpdist.tune, which pays for it")
        free = {"clip_norm", "clipping"}
        free |= {"noise_multiplier"} if self.noise_given else set()
        given = training.recipe.privacy.model_dump(mode="json", exclude=free)
        for key, wanted in config.privacy.model_dump(mode="json", exclude=free).items():
            if given.get(key) != wanted:
                values = f", {wanted}, got {given.get(key)}" if key != "run_key" else ""
                raise UserError(
                    f"train: privacy.{key}: must be that of config.privacy{values}: pass "
                    "privacy=config.privacy on; what is promised is said to dpdist.tune"
                )
        if single_records(training.records) is not self.records:
            raise UserError(
                "train: data: must be config.data itself, the records given to dpdist.tune"
            )

    def fingerprint(self, key: bytes) -> str:
        """Return the keyed fingerprint of all records of the search."""
        both = {"trained": self.records, "scored": self.scored}
        made = [each.keyed_fingerprint(derive_key(key, name)) for name, each in both.items()]
        return hashlib.blake2b(" ".join(made).encode(), digest_size=16).hexdigest()

    def values_on(self, training: PrivateTraining) -> RecordValues:
        """Return the values of the scored records by the model of a training."""
        device = next(training.model.parameters()).device
        return RecordValues(self.scored, self.value, device)

    def check_score(self, training: PrivateTraining) -> None:
        """Raise UserError where a record cannot be scored, or not between 0 and 1 in private."""
        training.model.eval()
        values = self.values_on(training).check(training.model)
        if not self.public and not all(0 <= value <= 1 for value in values):
            raise UserError(
                "score.value: must return a value in [0, 1] for each private record, got "
                f"{next(v for v in values if not 0 <= v <= 1):.4g} on an invented one: scale it"
            )


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw the same random numbers in each block; afterwards all generators go on as before."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


def _description(training: PrivateTraining) -> str:
    """Return a digest of all that a training begins with, but for keys, noise, name and folder."""
    told = training.recipe.model_dump(mode="json", exclude={"name", "resources"})
    told["data"]["root"] = None
    told["script"].pop("unit")  # words
    for key in ("noise_multiplier", "epsilon", "run_key"):
        told["privacy"][key] = None
    text = json.dumps([told, training.state_digest()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# --- its price --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionCost(SearchCost):
    """Compute the cost of a search over a function.

    settings: recipes of trainings that it builds, one for each cost at least.
    """

    settings: tuple[Recipe, ...] = ()

    @cached_property
    def _cost_boxes(self) -> list[CostBox]:
        boxes = [recipe_cost_box(each) for each in (self.recipe, *self.settings)]
        return [box for place, box in enumerate(boxes) if box not in boxes[:place]]

    @cached_property
    def _methods(self) -> list[Method]:
        return [self.recipe.method]


def _settings_of_space(
    tune: TuneRecipe, recipe_of: Callable[[TrialValues], Recipe]
) -> tuple[Recipe, ...]:
    """Return the recipes that the space's values make, one for each cost.

    Listed values that change a trial's cost are combined with each other. Raises UserError for a
    range of such values, since what lies between its ends is not known, and for rates by class
    that are not those of all trials, by which the search is priced.
    """
    found = [recipe_of(values) for values in iter_probe_values(tune)]
    class_sampling, *others = ((each.data.class_sampling, each.data.class_counts) for each in found)
    if any(each != class_sampling for each in others):
        raise UserError(
            "train: class_sampling and class_counts must be the same in every trial, got others "
            "for other "
            "values of the space: give them outside of it"
        )
    first = {key: domain.values_or_bounds[0] for key, domain in tune.space.items()}
    own, costly = recipe_cost_box(found[0]), dict[str, tuple[Any, ...]]()
    for key, domain in tune.space.items():
        others = list(domain.values_or_bounds[1:])
        if domain.choice is None:
            others.append(domain_value(domain, 0.5))
        if all(recipe_cost_box(recipe_of({**first, key: each})) == own for each in others):
            continue
        if domain.choice is None:
            raise UserError(
                f"tune: space.{key}: changes what a trial costs; list its values (choice) in place "
                "of a range"
            )
        costly[key] = domain.choice
    for listed in product(*costly.values()):
        found.append(recipe_of({**first, **dict(zip(costly, listed, strict=True))}))
    return tuple(found)


# --- the search -------------------------------------------------------------------------------

_NEUTRAL_NOISE = 1.0  # of a training that is built to be looked at, where noise is still sought


class FunctionSearch(Search):
    """Hold a prepared search over a function. `_check_function_search` makes it."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        cost: SearchCost,
        data_fingerprint: str,
        explorer: Explorer,
        sent: bytes,
    ) -> None:
        """explorer: of the function. sent: function and records, as trials' processes get them."""
        super().__init__(recipe, folder, cost, data_fingerprint)
        self._explorer, self._sent = explorer, sent
        self.way_out = "give another folder"

    def plan_trial(self, values: TrialValues) -> tuple[Recipe, PrivacyPlan]:
        """Return the recipe of a trial and the plan that it executes.

        Raises:
            TrainRaisedError: the function raised an error.
            UserError: it builds no training, or one that costs more than what was accounted.
        """
        recipe = self._explorer.recipe_of(values)
        noise = self.cost.trial_noise_multiplier(recipe)
        plan = plan_with_noise(recipe, self.cost.plan.records, noise)
        self.cost.trial_limit.check(plan, "tune: space")
        update = {"epsilon": None, "noise_multiplier": noise}
        privacy = recipe.privacy.model_copy(update=update)
        return recipe.model_copy(update={"privacy": privacy}), plan

    def trial_noise_multiplier(self, values: TrialValues) -> float:
        """Return the noise multiplier of a trial; where the function fails, so will the trial."""
        try:
            noise = super().trial_noise_multiplier(values)
        except TrainRaisedError:
            noise = self.cost.noise_multiplier
        if self.folder.terms.exists():
            self._keep_descriptions([values])
        return noise

    def check_unchanged(self) -> None:
        """Raise UserError where records, price or function are others than at the beginning."""
        super().check_unchanged()
        path = _descriptions_file(self.folder)
        if not self.folder.terms.exists():
            return
        built, winner = read_json(path), None
        if self.run_folder.training_summary.exists():
            if read_terms(self.folder)["data"] != self.data_fingerprint:
                raise UserError(
                    f"{self.run_folder.path}: the search ended, and was on other private records; "
                    f"restore them, or {self.way_out}"
                )
            winner = read_winner(self.folder)
        if winner is not None:
            own = _key_of(read_settings(self.folder, winner)["values"])
            built = {own: built[own]}
        for values, known in built.items():
            if self._explorer.description_of(json.loads(values)) != known:
                raise UserError(
                    f"{self.run_folder.path}: train: must build the model, optimizer and settings "
                    f"that this search was begun with; restore it, or {self.way_out}"
                )

    def budget_records(self) -> Hashed:
        """Return the private records of the search, as a budget knows them."""
        function = self._explorer.function
        private = [function.records]
        if not function.public:
            private.append(single_records(function.scored))
        return _AllHashed([HashedRecords(each).hashes for each in private])

    def _keep_checked(self) -> None:
        drawn = [trial.values for trial in read_trials(self.folder) if trial.values is not None]
        for values in drawn:
            self.trial_noise_multiplier(values)
        self._keep_descriptions(drawn)

    def _keep_descriptions(self, drawn: list[TrialValues]) -> None:
        """Write down digests of the trainings built of values, unless that was done before."""
        path = _descriptions_file(self.folder)
        known = read_json(path) if path.exists() else {}
        for values in drawn:
            known.setdefault(_key_of(values), self._explorer.description_of(values))
        write_json(path, known)

    def _run_trials(self, executor: Executor, concurrent: int) -> None:
        path = _sent_file(self.folder)
        write_atomic(path, self._sent)
        path.chmod(0o600)
        try:
            super()._run_trials(executor, concurrent)
        finally:
            path.unlink(missing_ok=True)

    @property
    def _continue_trial(self) -> ContinueTrial:
        return _continue_by_workers

    def _take_along(self, source: RunFolder, target: RunFolder) -> Recipe:
        """Take the public records of the winner along, and what a factory of it is held against."""
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
        code = self._explorer.code_of(values)
        return {**super()._search_record(winner), "chosen": values, "function": code}

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


@dataclass(frozen=True)
class _AllHashed:
    """Hold the hashes of several sets of records, as a budget reads them."""

    parts: list[np.ndarray]

    @property
    def hashes(self) -> np.ndarray:
        return np.concatenate(self.parts)


@dataclass(frozen=True)
class _Look:
    """Hold what is kept of a training that was built to be looked at.

    recipe: with the noise and epsilon asked for. description: its digest. code: of its code.
    """

    recipe: Recipe
    description: str
    code: str


class Explorer:
    """Build trainings in this process to look at them; none of them takes a step.

    Args:
        function: that builds them.
        tune: the section of the search.
        privacy: as it was asked for, of training and search together.
    """

    def __init__(self, function: TrainFunction, tune: TuneRecipe, privacy: PrivacyRecipe) -> None:
        self.function, self._tune, self._privacy = function, tune, privacy
        self._found: dict[str, _Look] = {}

    def recipe_of(self, values: TrialValues) -> Recipe:
        """Return the recipe of the training that is built, with the noise and epsilon asked for.

        Raises:
            TrainRaisedError: the function raised an error.
            UserError: what it built cannot be searched.
        """
        return self._look_at(values).recipe

    def code_of(self, values: TrialValues) -> str:
        """Return a digest of the code of the function, its model and the value of a record."""
        return self._look_at(values).code

    def description_of(self, values: TrialValues) -> str | None:
        """Return the digest of the training that is built; None where that raises an error."""
        try:
            return self._look_at(values).description
        except TrainRaisedError:
            return None

    def _look_at(self, values: TrialValues) -> _Look:
        key = _key_of(values)
        if key not in self._found:
            training = self._build(values)
            told = _description(training)
            if not self._found:
                self.function.check_score(training)
                if _description(self._build(values)) != told:
                    raise UserError(
                        "train: must build the same model, optimizer and settings whenever it is "
                        "called with the same config, built others the second time: let it keep "
                        "nothing between calls, and seed what it draws",
                        see="how-to/tuning.md#from-a-ray-tune-script-to-a-private-search",
                    )
            code = code_digest_of(training.model, self.function.train, self.function.value)
            self._found[key] = _Look(self._as_asked(training.recipe), told, code)
        return self._found[key]

    def _build(self, values: TrialValues) -> PrivateTraining:
        privacy = _trial_privacy(self._privacy, _NEUTRAL_NOISE, None)
        with ExitStack() as after:
            folder = Path(after.enter_context(tempfile.TemporaryDirectory())) / "run"
            for block in (redirect_stdout(StringIO()), redirect_stderr(StringIO())):
                after.enter_context(block)
            after.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            return self.function.build(_all_values(self._tune, values), privacy, folder)

    def _as_asked(self, recipe: Recipe) -> Recipe:
        """Return a training's recipe with the noise, epsilon and budget that were asked for."""
        own, asked = recipe.privacy, self._privacy
        update = {key: getattr(asked, key) for key in ("epsilon", *_BUDGET)}
        update["noise_multiplier"] = own.noise_multiplier if asked.epsilon is None else None
        return recipe.model_copy(update={"privacy": own.model_copy(update=update)})


_BUDGET = ("budget", "budget_ceiling", "budget_delta", "budget_composition")


def _trial_privacy(asked: PrivacyRecipe, noise: float, run_key: str | None) -> PrivacyRecipe:
    """Return the section that a trial trains under, whose budget is charged for the whole search.

    noise: where epsilon is asked for.
    """
    given = noise if asked.noise_multiplier is None else asked.noise_multiplier
    usual = {key: PrivacyRecipe.model_fields[key].default for key in _BUDGET}
    update = {"epsilon": None, "noise_multiplier": given, "run_key": run_key, **usual}
    return asked.model_copy(update=update)


def _all_values(tune: TuneRecipe, values: TrialValues) -> dict[str, Any]:
    """Return the values of all names, those that take the value of another included."""
    return {name: values[key] for name, key in iter_searched_fields(tune)}


def _key_of(values: TrialValues) -> str:
    return json.dumps(values, sort_keys=True)


def _descriptions_file(folder: SearchFolder) -> Path:
    return folder.path / "built.json"


def _sent_file(folder: SearchFolder) -> Path:
    return folder.path / "function.pickle"


# --- a trial, by workers of its own -----------------------------------------------------------


def _continue_by_workers(
    folder: SearchFolder, number: int, state: dict[str, Any], report: ScoreReporter
) -> None:
    """Train and score a trial by new processes, whose output stays in private/.

    Raises:
        WorkersFailedError: they ended before the trial did.
    """
    resources = folder.run.read_search_recipe().resources
    user = WorkerGroup(
        _work_on_trial,
        (folder.run.path, number, package_fingerprints(PACKAGES)),
        resources.max_workers,
        resources.cpus_per_worker,
        resources.gpus_per_worker,
        make_private_folder(folder.ray_folder),
        torch_config,
        log=make_private_folder(folder.path / "logs") / f"{number:05d}.txt",
    )
    try:
        TrialExecutor().run_workers(user)
    except WorkersFailedError:  # where the first worker wrote an end down, the others may fail
        if not read_scores(folder, number)["done"]:
            raise
    for score in read_scores(folder, number)["scores"]:
        report(1, score)


def _work_on_trial(argument: tuple[Path, int, dict[str, str]], place: WorkerPlace) -> None:
    """Do one worker's part of a trial; the first writes down how it ends."""
    path, number, packages = argument
    folder = SearchFolder(RunFolder(path))
    sent = pickle.loads(_sent_file(folder).read_bytes())
    sys.path[:] = [*sent["path"], *(each for each in sys.path if each not in sent["path"])]
    if os.path.isdir(sent["here"]):
        os.chdir(sent["here"])
    function: TrainFunction = cloudpickle.loads(sent["function"])
    asked = folder.run.read_search_recipe()
    torch.set_num_threads(max(1, int(asked.resources.cpus_per_worker)))
    own = partial(_train_and_score, function, asked)
    if place.rank:
        own(folder, number, read_scores(folder, number), lambda rung, score: None)
    else:
        run_trial(path, packages, number, lambda rung, score: None, own)


def _train_and_score(
    function: TrainFunction,
    asked: Recipe,
    folder: SearchFolder,
    number: int,
    state: dict[str, Any],
    report: ScoreReporter,
) -> None:
    """Train and score a trial, from where it stands. Raises UserError where it has failed."""
    try:
        training = _build_trial(function, asked, folder, number)
        _train(training)
        score = _score(function, training, folder, number)
    except RunBusyError as error:
        raise JournalBusy(str(error)) from error
    except (UserError, LedgerError):
        raise
    except Exception as error:
        if isinstance(error, OSError) or is_disk_full(error):
            raise
        raise UserError(f"{type(error).__name__}: {error_text(error)}") from error
    if score is not None:
        write_json(folder.scores_file(number), {**state, "scores": [score], "done": True})
        report(1, score)


def _build_trial(
    function: TrainFunction, asked: Recipe, folder: SearchFolder, number: int
) -> PrivateTraining:
    """Return a trial's training, in its folder, as it was built before the search began.

    Raises:
        UserError: the function built another one, or one that was not paid for.
    """
    assert asked.tune is not None
    trial, settings = read_trials(folder)[number], read_settings(folder, number)
    noise = settings["noise_multiplier"]
    fixed = asked.privacy.run_key is not None  # of tests: every trial is then repeatable
    run_key = derive_key(trial.key, "fixed").hex() if fixed else None
    privacy = _trial_privacy(asked.privacy, noise, run_key)
    values = _all_values(asked.tune, settings["values"])
    own, end = folder.trial_folder(number), time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            training = function.build(values, privacy, own.path)
            break
        except RunBusyError:  # its process ends with its parent, but not at once
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    terms = read_terms(folder)
    if terms["data"] != _keyed_data(function, _salt_of(terms)):
        raise UserError("data: other records than those that the search was begun with")
    # One that goes on has the weights of its checkpoint, and the settings that it was begun with.
    known = read_json(_descriptions_file(folder))[_key_of(settings["values"])]
    if not training.steps_taken and _description(training) != known:
        raise UserError("train: built another model, optimizer or settings than before the search")
    if training.plan != plan_with_noise(training.recipe, len(training.records), noise):
        raise UserError("train: made another plan than the one that was accounted")
    read_trial_limit(folder).check(training.plan, f"trial {number}")
    workers = Workers.of_this_process()
    if workers.first:
        begin_trial_folder(own, training.recipe, trial)
    workers.agree()  # worker 0 has written the drawn key
    return training


_WAIT_SECONDS = 30.0


def _train(training: PrivateTraining) -> None:
    """Take all steps of a trial that are left; schedulers follow after each of them.

    Raises:
        UserError: it could not be replayed exactly, or something else changed the model.
    """
    while training.remaining_steps:
        _step(training, last=training.remaining_steps == 1)
    ledger = read_verified_ledger(training.run).ledger
    if ledger.num_superseded:
        raise UserError("the training could not be replayed exactly")
    if ledger.changes:
        raise UserError(f"{' and '.join(ledger.changes)} changed between steps")


def _step(training: PrivateTraining, *, last: bool) -> None:
    """Take a step of a training, which its schedulers follow but for the last."""
    training.step()
    for scheduler in () if last else training.state:
        if isinstance(scheduler, LRScheduler):
            scheduler.step()


def _score(
    function: TrainFunction, training: PrivateTraining, folder: SearchFolder, number: int
) -> float | None:
    """Return the score of a trained model: a noisy mean over private records, or a mean.

    Workers add up whole numbers, so their sum is that of one; only the first has the score.
    """
    model = training.model.eval()
    if not all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()):
        raise UserError("the trained parameters are not finite numbers")
    workers, terms = Workers.of_this_process(), read_terms(folder)
    values = function.values_on(training)
    if function.public:
        score = values.public_mean(model)
        if not np.isfinite(score):
            raise UserError("score.value: the mean over the records is not a finite number")
        return score if workers.first else None
    key = derive_key(read_trials(folder)[number].key, "score of a function")
    units = values.private_units(model, derive_key(key, "data"), workers.rank, workers.count)
    total = sum(each["units"] for each in workers.agree(units=units)) / UNITS
    if not workers.first:
        return None
    # No two sums, and no two models, ever get the same noise: their difference would have none.
    records = function.fingerprint(derive_key(key, "fingerprint"))
    made_of = [models.model_hash(training.run.model_folder), records, total.hex()]
    noise = terms["score_noise"]
    own = derive_key(key, "noise", json.dumps([*made_of, noise]))
    return float(add_noise(np.array([total]), own, noise)[0]) / len(function.scored)


# --- checks before a search -------------------------------------------------------------------


def _keyed_data(function: TrainFunction, salt: str) -> str:
    """Return the part of a search's terms that says which records it was begun with."""
    return f"{salt} {function.fingerprint(bytes.fromhex(salt))}"


def _salt_of(terms: Mapping[str, Any]) -> str:
    return str(terms["data"]).partition(" ")[0]


def _check_function_search(
    train: Callable[[TrialConfig], Any],
    space: Any,
    data: Any,
    num_trials: Any,
    score: Any,
    privacy: Any,
    folder: RunFolder,
    options: Mapping[str, Any],
) -> FunctionSearch:
    """Check all that can be checked, account the search, and write nothing. Raises UserError."""
    for name, given in {
        "space": space,
        "data": data,
        "num_trials": num_trials,
        "score": score,
    }.items():
        if given is None:
            raise UserError(f"tune: {name}: is required to search over a function")
    records, asked = as_records(data), _parse_privacy(privacy)
    scored, value, terms = _parse_score(score, asked)
    tune = parse_section(
        TuneRecipe,
        {
            "space": _plain(space),
            "num_trials": _plain(num_trials),
            "score": terms,
            "searcher": options["searcher"],
            "concurrent": options["concurrent"],
        },
        "tune",
    )
    public = tune.score.is_public
    if asked.budget is not None and getattr(records, "of_features", False):
        raise UserError(
            "privacy.budget: must be left out, as the records are features that a network made: "
            "whether the budget knows the same records in another form cannot be told"
        )
    function = TrainFunction(train, records, scored, value, public, asked.epsilon is None)
    sent = _send(function)
    begun = SearchFolder(folder)
    salt = _salt_of(read_terms(begun)) if begun.terms.exists() else secrets.token_hex(32)
    fingerprint = _keyed_data(function, salt)
    explorer = Explorer(function, tune, asked)
    recipe = _search_recipe(explorer, tune, asked, folder, options["resources"])
    _refuse_common(function, recipe)
    continued = _was_begun(recipe, folder)
    units = len(Users.from_values(_units_of(records), 1)) if recipe.user_unit else len(records)
    counts = RecordCounts(units, 0.0, lambda fraction: units)
    settings = _settings_of_space(tune, explorer.recipe_of)
    cost = FunctionCost(recipe, counts, tune.num_trials, "tune", settings)
    search = FunctionSearch(recipe, folder, cost, fingerprint, explorer, sent)
    if not (continued and begun.terms.exists()):
        for values in iter_probe_values(tune):
            search.plan_trial(values)
        search.assumptions = [*ASSUMED, *_assumed_of_score(function)]
    search.check_unchanged()
    if _keyed_data(function, salt) != fingerprint:
        raise UserError(
            "train: must leave config.data and the records to score on as they are, changed them: "
            "scale them before dpdist.tune, by public numbers"
        )
    return search


def _refuse_common(function: TrainFunction, recipe: Recipe) -> None:
    """Raise UserError where records to score on, or their units, are among those to train on."""
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


def _units_of(records: Records) -> list[Any]:
    return [records.unit_id(index) for index in range(len(records))]


def _was_begun(recipe: Recipe, folder: RunFolder) -> bool:
    """Return whether this search was begun before. Raises UserError for another run's folder."""
    try:
        return check_same_search(recipe, folder)
    except DifferentRecipeError as error:
        said = str(error).partition(": ")[2].partition("; choose")[0]
        raise UserError(
            f"folder: {folder.path}: {said}; give another folder, or the same arguments"
        ) from None


def _assumed_of_score(function: TrainFunction) -> list[str]:
    """Return the assumptions about the scored records that nobody can check."""
    if function.public:
        return [ASSUMED_PUBLIC]
    own = [] if function.value is None else [ASSUMED_OF_VALUE]
    units = "users" if isinstance(function.scored, UserRecords) else "records"
    return [f"the number of held-out {units} ({len(function.scored):,}) is public", *own]


_RESOURCES = ("workers", "cpus_per_worker", "gpus_per_worker", "max_failures")


def _search_recipe(
    explorer: Explorer,
    tune: TuneRecipe,
    privacy: PrivacyRecipe,
    folder: RunFolder,
    resources: Any,
) -> Recipe:
    """Return the recipe of the search: that of the first values, and the section `tune`."""
    first = explorer.recipe_of(next(iter_probe_values(tune)))
    raw = first.model_dump(mode="json")
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.name)
    own = parse_section(ResourcesRecipe, _plain(resources or {}), "tune: resources")
    for key, value in own.model_dump(exclude_defaults=True).items():
        if key not in _RESOURCES:
            raise UserError(
                f"tune: resources.{key}: must be left out with a function, got {value}; a trial "
                f"has {', '.join(_RESOURCES)}"
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
    """Return the records that trials are scored on, the value of each, and the section `score`.

    Private records are by unit where a user is the unit.
    """
    if not isinstance(score, Mapping):
        raise UserError(
            'tune: score: must be {"private_eval_data": private records} or {"public": records}, '
            "with "
            '"value": a function of model and batch to one value a record, got '
            f"{type(score).__name__}"
        )
    if unknown := sorted(score.keys() - set(_SCORE_KEYS)):
        raise UserError(f"tune: score.{unknown[0]}: must be one of {', '.join(_SCORE_KEYS)}")
    given = [key for key in ("private_eval_data", "public") if score.get(key) is not None]
    if len(given) != 1:
        raise UserError(
            "tune: score: must have exactly one of private_eval_data (private) and public"
        )
    value = score.get("value")
    name = value_name(value, "tune: score.value")
    records = as_records(score[given[0]])
    public = given == ["public"]
    if privacy.max_records_per_user is not None and not public:
        users = Users.from_values(_units_of(records), privacy.max_records_per_user)
        records = UserRecords(records, users)
    told = FunctionScore(value=name, records=len(records), public=public)
    terms = {"function": told.model_dump(), "noise": score.get("noise")}
    return records, value, terms


def _parse_privacy(privacy: Any) -> PrivacyRecipe:
    """Return the section `privacy` of training and search together. Raises UserError."""
    if isinstance(privacy, Mapping):
        privacy = Privacy(**privacy)
    if not isinstance(privacy, PrivacyRecipe):
        raise UserError(
            "tune: privacy: must be a dpdist.Privacy of training and search together, or a dict of "
            f"its fields, got {type(privacy).__name__}"
        )
    return privacy


def _send(function: TrainFunction) -> bytes:
    """Return the function as it is now, for trials' processes. Raises UserError."""
    try:
        blob = cloudpickle.dumps(function)
    except Exception as error:
        raise UserError(
            "train: must be a function that another process can be given, with its data and score: "
            f"{error_text(error)}"
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
    """Hold the end of a private search: the winner, the price and all else that may be said.

    Guarantee: with a secret number of trials only the winner, the price and the distribution may be
    shown; where the number is fixed, all trials are paid for, and `trials` shows them.

    Attributes:
        best: folder of the winner's run, for `dpdist.certify`, reports and releases.

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
        """Return the `Guarantee` of training and search together."""
        return load_results(self.best).guarantee

    @property
    def num_trials(self) -> str:
        """Return the distribution of the number of trials in words, a str."""
        return self._terms.num_trials

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the winner's values, a dict by searched name such as "training.learning_rate"."""
        return self._terms.values_of(self.best.read_recipe())

    @property
    def trials(self) -> tuple[PublishedTrial, ...]:
        """Return all trials where their number is fixed, a tuple of `PublishedTrial`.

        An entry has `values`, `noise_multiplier`, `scores`, `failed` (None or why) and `chosen`.

        Raises:
            UserError: the number of trials is secret.
        """
        if not self._terms.trials:
            raise UserError(
                f"trials: must not be shown with a secret number of trials ({self.num_trials}): "
                "the price "
                "holds for the winner alone; take distribution {'name': 'fixed', 'runs': ...}",
                see="how-to/tuning.md#what-must-stay-secret",
            )
        return self._terms.trials

    def plot(self, ax: Any = None) -> Any:
        """Draw the score of each trial, and return the matplotlib axes.

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
    executes. Its assumptions about the function stand on the winner's card.

    A function is called as `train(config)`, in a new process for each trial, and returns one
    `PrivateTraining` before its first step, made of `config.data`, `config.privacy` and
    `config.folder`. It must build the same one whenever it is called: its random numbers are
    seeded. The search takes the steps. Schedulers in `state` follow after each. A trial that raises
    an error counts as the worst. What trials print stays in the folder's private/.

    The same call continues a search that was interrupted.

    Args:
        train: a function of a config, or a recipe: its path, name, keys as a dict, or a `Recipe`.
        space: by name the values: {"log_uniform": [low, high]}, uniform, integer, or
            {"choice": [...]}. In a recipe, dotted keys; None for the recipe's own section.
        data: of a function, the private records to train on: `(X, y)`, or anything that
            `dpdist.as_records` takes.
        num_trials: of the number of trials, such as {"name": "poisson", "mean": 5}, a secret one,
            or {"name": "fixed", "runs": 10}.
        score: of a function, {"private_eval_data": private records}, scored with noise and paid
            for, or {"public": records}; "value": a function of model and batch to one value a
            record, in [0, 1] on private ones (default: accuracy); "noise": standard deviation on
            the sum. In a recipe, its section `tune.score`.
        privacy: of training and search together; with epsilon the noise is found.
        folder: of the winner's run, made where it is not there.
        searcher: "random", or with num_trials fixed "optuna".
        concurrent: trials at the same time; None for as many as fit.
        resources: of a function's trials: `workers` that train a trial together, on Ray,
            `cpus_per_worker`, `gpus_per_worker`, and `max_failures`, how often a trial is repeated
            whose workers were lost, before it has failed.
        executor: "local" for one trial after the other on this machine, "ray" for a session of Ray.

    Returns:
        A `SearchResult`: the winner's run, the guarantee, and the trials where they may be shown.

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
    if isinstance(train, Recipe | str | Path | Mapping):
        _refuse_for_recipes({"data": data, "resources": resources})
        return SearchResult(
            _search_recipe_values(
                train,
                space,
                num_trials,
                score,
                privacy,
                run,
                {"searcher": searcher, "concurrent": concurrent},
                executor,
            )
        )
    if not callable(train):
        raise UserError(
            f"tune: train: must be a function of a config, or a recipe, got {type(train).__name__}"
        )
    options = {
        "searcher": searcher or "random",
        "concurrent": concurrent,
        "resources": resources,
    }
    search = _check_function_search(train, space, data, num_trials, score, privacy, run, options)
    _run_function_search(search, executor)
    return SearchResult(run)


def _run_function_search(search: FunctionSearch, executor: ExecutorName | None) -> None:
    """Begin a search, or go on with it, to its end; the folder then holds the winner's run."""
    run = search.run_folder
    if executor == "local":
        require_one_process(search.recipe.resources.max_workers)
    if not run.recipe_file.exists():
        search.check_budget("tune")
    search.begin()
    if search.recipe.privacy.run_key is not None:
        warnings.warn(
            "privacy.run_key: is fixed, so this search is NOT PRIVATE; leave it out outside of "
            "tests",
            stacklevel=3,
        )
    with run_session(run, search.recipe.resources.min_cpus, executor) as opened:
        search_stage(search, opened)
    search.make_loadable()
    chosen = run.read_recipe()
    if chosen.data.root is not None:
        evaluate_stage(chosen, run)


def _refuse_for_recipes(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UserError(f"tune: {name}: must be left out with a recipe, which has its own")


def _search_recipe_values(
    recipe: Recipe | str | Path | Mapping[str, Any],
    space: Any,
    num_trials: Any,
    score: Any,
    privacy: Any,
    folder: RunFolder,
    options: Mapping[str, Any],
    executor: ExecutorName | None,
) -> RunFolder:
    """Run the search of a recipe, with these sections in place of its own."""
    given = {"space": space, "num_trials": num_trials, "score": score, **options}
    changes = {f"tune.{key}": _plain(each) for key, each in given.items() if each is not None}
    if privacy is not None:
        changes["privacy"] = _plain(privacy)
    context = str(recipe) if isinstance(recipe, str | Path) else "recipe"
    resolved = resolve_recipe(recipe, changes=changes, name=folder.name)
    return tune_recipe(resolved, runs=folder.path.parent, context=context, executor=executor)


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

    Guarantee: none, as the reported metric `privacy` and the trials' names state: nobody composes
    what the trainings release. Use public records only.

    Any searcher, scheduler and logger of Ray Tune may follow. A trial reports `score`, `steps` and
    `privacy`: a function ten times, with a checkpoint of model, optimizer and `state`, so that
    trials may be paused, cloned and changed (ASHA, PBT); a recipe at each rung of `tune.asha`.

    Args:
        train: the same function of a config, or recipe, as for `tune`.
        folder: gets run folders, by Ray's id of the trial.
        data: of a function, the public records to train on.
        score: of a function, {"public": records, "value": as in `tune`}.
        privacy: of a function, what `config.privacy` is; default: training without noise and clip.

    Returns:
        A function trainable, for `ray.tune.Tuner`.

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
    asked = _parse_privacy(privacy or {"noise_multiplier": 0, "clipping": "none"})
    scored, value, _ = _parse_score(score, asked)
    function = TrainFunction(train, as_records(data), scored, value, True, asked.epsilon is None)

    def run(config: dict[str, Any]) -> None:
        from ray import tune as ray_tune

        own = place / str(ray_tune.get_context().get_trial_id())
        own.mkdir(parents=True, exist_ok=True)
        start = Path(tempfile.mkdtemp(prefix="run-", dir=own))  # of a clone, another training
        training = function.build(config, asked, start)
        done, total = _take_over(training, ray_tune.get_checkpoint()), training.plan.steps
        for step in range(done + 1, total + 1):
            _step(training, last=step == total)
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


_REPORTS, _STATE = 10, "state.pt"


def _state_of(training: PrivateTraining) -> dict[str, Any]:
    kept = [each.state_dict() for each in training.state]
    optimizer = training.optimizer.state_dict()["state"]  # its rates are those of the config
    return {"model": training.model.state_dict(), "optimizer": optimizer, "state": kept}


def _take_over(training: PrivateTraining, checkpoint: Any) -> int:
    """Give a training what a trial had learned, and return how many steps that took."""
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
