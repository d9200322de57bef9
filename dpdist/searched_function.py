"""Build private trainings by a function of a search: to account for them, and in trials.

The function is called before anything is released, so that the search's privacy cost is that of the
trainings it builds (`Explorer`). A trial calls it once, in its own new processes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpdist import models
from dpdist.cluster.versions import PACKAGES, package_fingerprints
from dpdist.cluster.work import WorkerGroup, WorkerPlace, WorkersFailedError
from dpdist.config.search import TuneRecipe
from dpdist.config.sections import PrivacyRecipe
from dpdist.core.errors import UserError, is_disk_full
from dpdist.core.files import (
    error_text,
    make_private_folder,
    read_json,
    write_json,
)
from dpdist.data.protocol import UNITS, Records, kept_generators, single_records
from dpdist.gradients.noise import add_noise
from dpdist.privacy.ledger import JournalBusy, LedgerError
from dpdist.private_training import IN_SEARCH, PrivateTraining, RunBusyError
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe, plan_with_noise
from dpdist.training.collectives import Workers
from dpdist.training.private_score import RecordValues, Value
from dpdist.training.trainer import torch_config
from dpdist.tuning.manifest import (
    SearchFolder,
    read_scores,
    read_settings,
    read_terms,
    read_trial_limit,
    read_trials,
)
from dpdist.tuning.space import (
    TrialValues,
    iter_probe_values,
    iter_searched_fields,
    settings_of_space,
    trial_cost,
)
from dpdist.tuning.trial import ScoreReporter, TrialExecutor, begin_trial_folder, run_trial

# --- the function -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrialConfig(Mapping[str, Any]):
    """Hold the values of one trial, the argument of `train(config)`.

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
    """The function raised an error, so its trial failed."""


@dataclass(frozen=True)
class TrainFunction:
    """Hold a function that builds trainings, and the records of the search.

    train: the function. records: to train on, private. scored: to score on, by unit if they are
    private and a group is the unit. value: of a record. public: whether the scored ones are public.
    noise_given: whether the noise multiplier may be a searched value; else it is calibrated for a
    target epsilon.
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
        """Return the checked training that the function builds from these values.

        Raises:
            TrainRaisedError: the function raised an error.
            UserError: it did not return the one training that it built.
        """
        config = TrialConfig(values, self.records, privacy, folder)
        begun = RunFolder(folder).plan.exists()
        with of_a_search():
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
                "train: must return the dpdist.PrivateTraining that it builds, before its first "
                f"step, got {type(training).__name__}"
            )
        self._check(training, config, begun)
        return training

    def _check(self, training: PrivateTraining, config: TrialConfig, begun: bool) -> None:
        """Raise UserError for a training with other records, terms or folder.

        begun: whether it continues from its folder.
        """
        if training.run.path != config.folder.resolve():
            raise UserError(f"train: folder: must be config.folder, got {training.run.path}")
        if training.steps_taken and not begun:
            raise UserError(
                "train: must return the training before its first step: the search takes the steps"
            )
        if any(isinstance(each, ReduceLROnPlateau) for each in training.state):
            raise UserError(
                "train: state: must have no ReduceLROnPlateau, which follows a measured value; "
                "use another scheduler"
            )
        if training.recipe.score is not None:
            raise UserError("train: score: must be given to dpdist.tune, which counts it")
        if training.trackers:
            raise UserError(
                "trackers: must be left out in a search, whose trials are not published; send the "
                "winner's run afterwards by `dpdist report RUN --log KIND:PLACE`"
            )
        free = {"clip_norm", "clipping"}
        free |= {"noise_multiplier"} if self.noise_given else set()
        given = training.recipe.privacy.model_dump(mode="json", exclude=free)
        for key, wanted in config.privacy.model_dump(mode="json", exclude=free).items():
            if given.get(key) != wanted:
                values = f", {wanted}, got {given.get(key)}" if key != "run_key" else ""
                raise UserError(
                    f"train: privacy.{key}: must be that of config.privacy{values}: pass on "
                    "privacy=config.privacy, and give the search's privacy to dpdist.tune"
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
        return RecordValues(self.scored, self.value, device, training._learner.spec.signature)

    def check_score(self, training: PrivateTraining) -> None:
        """Raise UserError if a record cannot be scored, for private ones in [0, 1]."""
        training.model.eval()
        values = self.values_on(training).check(training.model)
        if not self.public and not all(0 <= value <= 1 for value in values):
            raise UserError(
                "score.value: must return a value in [0, 1] for each private record, got "
                f"{next(v for v in values if not 0 <= v <= 1):.4g} on an invented one: scale it"
            )


@contextmanager
def of_a_search() -> Iterator[None]:
    """Allow trainings in a search's folders, with the same random numbers in each block.

    Afterwards all generators have their state from before.
    """
    inside = IN_SEARCH.set(True)
    with torch.random.fork_rng(range(torch.cuda.device_count())), kept_generators():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            IN_SEARCH.reset(inside)


def _description(training: PrivateTraining) -> str:
    """Return a digest of a training's initial state, without keys, noise, name and folder."""
    told = training.recipe.model_dump(mode="json", exclude={"name", "resources"})
    told["data"]["root"] = None
    told["script"].pop("unit")  # words
    for key in ("noise_multiplier", "epsilon", "run_key"):
        told["privacy"][key] = None
    text = json.dumps([told, training.state_digest()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# --- its privacy cost -------------------------------------------------------------------------


def settings_of_function(
    tune: TuneRecipe, recipe_of: Callable[[TrialValues], Recipe]
) -> tuple[Recipe, ...]:
    """Return the recipes that the space's values give, one for each privacy cost.

    Raises UserError for a range of values that change a trial's cost, and for rates by class that
    differ between trials, since the search is accounted for with one set of rates.
    """
    probes = list(iter_probe_values(tune))
    found = [recipe_of(values) for values in probes]
    rates, *others = ((each.data.class_sampling, each.data.class_counts) for each in found)
    if any(each != rates for each in others):
        raise UserError(
            "train: rates and class_counts must be the same in every trial, got others for other "
            "values of the space: give them outside of it"
        )
    costly = [
        key
        for key in tune.space
        if any(
            trial_cost(each) != trial_cost(found[0]) and values == {**probes[0], key: values[key]}
            for values, each in zip(probes, found, strict=True)
        )
    ]
    combined = settings_of_space(tune, recipe_of, costly, "tune: space")
    return tuple({trial_cost(each): each for each in (*found, *combined)}.values())


# --- exploring trainings -----------------------------------------------------------------------


_NEUTRAL_NOISE = 1.0  # of a training that is built before its noise is calibrated


class Explorer:
    """Build trainings in this process to read their recipes; none of them takes a step.

    Args:
        function: builds the trainings.
        tune: the section of the search.
        privacy: the requested privacy of training and search together.
    """

    def __init__(self, function: TrainFunction, tune: TuneRecipe, privacy: PrivacyRecipe) -> None:
        self.function, self._tune, self._privacy = function, tune, privacy
        self._found: dict[str, tuple[Recipe, str]] = {}  # recipe and digest, by values

    def recipe_of(self, values: TrialValues) -> Recipe:
        """Return the recipe of the training for these values, with the requested noise and epsilon.

        Raises:
            TrainRaisedError: the function raised an error.
            UserError: the training cannot be searched.
        """
        return self._explore(values)[0]

    def description_of(self, values: TrialValues) -> str | None:
        """Return the digest of the training for these values; None if `train` raises an error."""
        try:
            return self._explore(values)[1]
        except TrainRaisedError:
            return None

    def _explore(self, values: TrialValues) -> tuple[Recipe, str]:
        key = key_of(values)
        if key not in self._found:
            training = self._build(values)
            told = _description(training)
            if not self._found:
                self.function.check_score(training)
                if _description(self._build(values)) != told:
                    raise UserError(
                        "train: must build the same model, optimizer and settings for the same "
                        "config, built others the second time: seed its random numbers",
                        see="how-to/tuning.md#from-a-ray-tune-script-to-a-private-search",
                    )
            self._found[key] = self._as_asked(training.recipe), told
        return self._found[key]

    def _build(self, values: TrialValues) -> PrivateTraining:
        privacy = _trial_privacy(self._privacy, _NEUTRAL_NOISE, None)
        with ExitStack() as after:
            folder = Path(after.enter_context(tempfile.TemporaryDirectory())) / "run"
            for block in (redirect_stdout(StringIO()), redirect_stderr(StringIO())):
                after.enter_context(block)
            after.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            return self.function.build(all_values(self._tune, values), privacy, folder)

    def _as_asked(self, recipe: Recipe) -> Recipe:
        """Return a training's recipe with the requested noise, epsilon and budget."""
        own, asked = recipe.privacy, self._privacy
        update = {key: getattr(asked, key) for key in ("epsilon", *_BUDGET)}
        update["noise_multiplier"] = own.noise_multiplier if asked.epsilon is None else None
        return recipe.model_copy(update={"privacy": own.model_copy(update=update)})


_BUDGET = ("budget", "budget_ceiling", "budget_delta", "budget_composition")


def _trial_privacy(asked: PrivacyRecipe, noise: float, run_key: str | None) -> PrivacyRecipe:
    """Return the privacy section of a trial, without the budget, which the search charges.

    noise: used if epsilon is requested.
    """
    given = noise if asked.noise_multiplier is None else asked.noise_multiplier
    usual = {key: PrivacyRecipe.model_fields[key].default for key in _BUDGET}
    update = {"epsilon": None, "noise_multiplier": given, "run_key": run_key, **usual}
    return asked.model_copy(update=update)


def all_values(tune: TuneRecipe, values: TrialValues) -> dict[str, Any]:
    """Return the values of all names, including those linked to others."""
    return {name: values[key] for name, key in iter_searched_fields(tune)}


def key_of(values: TrialValues) -> str:
    """Return the values as a text, the key in `descriptions_file`."""
    return json.dumps(values, sort_keys=True)


def descriptions_file(folder: SearchFolder) -> Path:
    """Return the path of the digests of trainings that were built before the search."""
    return folder.path / "built.json"


def sent_file(folder: SearchFolder) -> Path:
    """Return the path of the function as it is sent to the processes of trials."""
    return folder.path / "function.pickle"


# --- the records of a search -----------------------------------------------------------------


def keyed_data(function: TrainFunction, salt: str) -> str:
    """Return the part of a search's terms that identifies its records."""
    return f"{salt} {function.fingerprint(bytes.fromhex(salt))}"


def salt_of(terms: Mapping[str, Any]) -> str:
    """Return the key of a search's fingerprint of its records, in hex."""
    return str(terms["data"]).partition(" ")[0]


# --- a trial, by its own workers --------------------------------------------------------------


def continue_by_workers(
    folder: SearchFolder, number: int, state: dict[str, Any], report: ScoreReporter
) -> None:
    """Train and score a trial by new processes, whose output stays in private/.

    Raises:
        WorkersFailedError: they ended before the trial did.
    """
    resources = folder.run.read_search_recipe().resources
    group = WorkerGroup(
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
        TrialExecutor().run_workers(group)
    except WorkersFailedError:  # after the first worker wrote the result, the others may fail
        if not read_scores(folder, number)["done"]:
            raise
    for score in read_scores(folder, number)["scores"]:
        report(1, score)


def _work_on_trial(argument: tuple[Path, int, dict[str, str]], place: WorkerPlace) -> None:
    """Do one worker's part of a trial; the first writes the result."""
    path, number, packages = argument
    folder = SearchFolder(RunFolder(path))
    sent = pickle.loads(sent_file(folder).read_bytes())
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
    """Train and score a trial, continuing it. Raises UserError if it failed."""
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
    """Return a trial's training, in its folder, as it was built before the search started.

    Raises:
        UserError: the function built a different one, or one that was not accounted for.
    """
    assert asked.tune is not None
    trial, settings = read_trials(folder)[number], read_settings(folder, number)
    noise = settings["noise_multiplier"]
    fixed = asked.privacy.run_key is not None  # of tests: every trial is then repeatable
    run_key = derive_key(trial.key, "fixed").hex() if fixed else None
    privacy = _trial_privacy(asked.privacy, noise, run_key)
    values = all_values(asked.tune, settings["values"])
    own = folder.trial_folder(number)
    training = function.build(values, privacy, own.path)
    terms = read_terms(folder)
    if terms["data"] != keyed_data(function, salt_of(terms)):
        raise UserError("data: other records than those that the search was begun with")
    # One that continues has the weights of its checkpoint, and its settings were compared.
    known = read_json(descriptions_file(folder))[key_of(settings["values"])]
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


def _train(training: PrivateTraining) -> None:
    """Take all remaining steps of a trial, and step its schedulers after each.

    Raises:
        UserError: it could not be replayed exactly, or something else changed the model.
    """
    while training.remaining_steps:
        take_step(training, last=training.remaining_steps == 1)
    ledger = read_verified_ledger(training.run).ledger
    if ledger.num_superseded:
        raise UserError("the training could not be replayed exactly")
    if ledger.changes:
        raise UserError(f"{' and '.join(ledger.changes)} changed between steps")


def take_step(training: PrivateTraining, *, last: bool) -> None:
    """Take a step of a training, and step its schedulers except after the last step."""
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
    # Two sums, or two models, never get the same noise, or their difference would have no noise.
    records = function.fingerprint(derive_key(key, "fingerprint"))
    made_of = [models.model_hash(training.run.model_folder), records, total.hex()]
    noise = terms["score_noise"]
    own = derive_key(key, "noise", json.dumps([*made_of, noise]))
    return float(add_noise(np.array([total]), own, noise)[0]) / len(function.scored)
