"""Suggest trials to Ray Tune: in the manifest's order, or by an adaptive searcher.

An ordinary sweep takes Ray Tune's own searchers and schedulers, by their names.

In a private search Ray asks for one trial after another; each is written down, with its noise,
before it starts. So a continued search starts the trials it had, never others. An adaptive searcher
(Optuna's TPE) is told scores that were paid for beforehand.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import tune as ray_tune
from ray.tune import schedulers
from ray.tune.logger import JsonLoggerCallback
from ray.tune.result import AUTO_RESULT_KEYS
from ray.tune.search import BasicVariantGenerator, Searcher
from ray.tune.search.sample import Categorical

from dpdist.config.search import Domain, TuneRecipe
from dpdist.core.console import log
from dpdist.core.errors import UserError
from dpdist.core.files import error_text, quoted, write_json
from dpdist.core.optional_imports import import_extra
from dpdist.tuning.manifest import SearchFolder, Trial, read_scores
from dpdist.tuning.space import TrialValues

METRIC = "score"


class ManifestSearcher(Searcher):
    """Hands out the numbers 0..K-1 of the manifest's trials, each with its settings on record.

    noise_multiplier_of: the noise multiplier of a trial with given values. suggester: suggests
    values where the manifest has none. stops_early: a scheduler may stop a trial between two rungs.
    """

    def __init__(
        self,
        folder: SearchFolder,
        trials: list[Trial],
        noise_multiplier_of: Callable[[TrialValues], float],
        suggester: OptunaSuggester | None = None,
        *,
        stops_early: bool = False,
    ) -> None:
        super().__init__(metric=METRIC, mode="max")
        self._folder, self._trials, self._noise_multiplier_of = folder, trials, noise_multiplier_of
        self._suggester, self._stops_early = suggester, stops_early
        self._next = 0
        self._numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> Any:
        """The next trial, as {"trial": number}, or that there are no more."""
        if self._next == len(self._trials):
            return Searcher.FINISHED
        trial = self._trials[self._next]
        path = self._folder.settings_file(trial.number)
        if not path.exists():
            values = trial.values
            if values is None:
                assert self._suggester is not None
                values = self._suggester.suggest(trial_id)
            settings = {"values": values, "noise_multiplier": self._noise_multiplier_of(values)}
            write_json(path, settings)
        self._next += 1
        self._numbers[trial_id] = trial.number
        return {"trial": trial.number}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing: scores are read from the trials' own files."""

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the adaptive searcher; mark a trial that the scheduler stopped."""
        number = self._numbers[trial_id]
        state = read_scores(self._folder, number)
        if self._stops_early and not error and not state["done"]:
            write_json(
                self._folder.scores_file(number), {**state, "done": True, "failed": "stopped early"}
            )
        if self._suggester is not None:
            score = state["scores"][-1] if state["scores"] else None
            self._suggester.tell(trial_id, score)

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles its searcher beside its own state: without keys and settings."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the manifest and the trials' files are the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore; a continued search makes a new searcher from the files."""


class OptunaSuggester:
    """Optuna's TPE through Ray Tune, fed with what an interrupted search had found."""

    def __init__(
        self, tune: TuneRecipe, seed: int, evaluated: list[tuple[TrialValues, float]]
    ) -> None:
        optuna = import_extra("optuna", "tune", "tune.searcher")
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = tune.space
        distributions = {key: _optuna_distribution(domain) for key, domain in tune.space.items()}
        self._optuna_search = OptunaSearch(distributions, metric=METRIC, mode="max", seed=seed)
        self._suggested_ids: set[str] = set()
        for values, score in evaluated:
            self._optuna_search.add_evaluated_point(self._encode_choices(values), score)

    def suggest(self, trial_id: str) -> TrialValues:
        """Values of the searched fields for the next trial."""
        self._suggested_ids.add(trial_id)
        found = self._optuna_search.suggest(trial_id)
        assert isinstance(found, dict)
        return {
            key: domain.choice[found[key]] if domain.choice is not None else found[key]
            for key, domain in self._space.items()
        }

    def tell(self, trial_id: str, score: float | None) -> None:
        """The last score of a trial that was suggested here; None for a failed one."""
        if trial_id in self._suggested_ids:
            result = None if score is None else {METRIC: score}
            self._optuna_search.on_trial_complete(trial_id, result, error=score is None)

    def _encode_choices(self, values: TrialValues) -> TrialValues:
        return {
            key: domain.choice.index(values[key]) if domain.choice is not None else values[key]
            for key, domain in self._space.items()
        }


def _optuna_distribution(domain: Domain) -> Any:
    """Optuna's word for a domain; a choice becomes its position in the list."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if domain.choice is not None:
        return CategoricalDistribution(tuple(range(len(domain.choice))))
    if domain.integer is not None:
        return IntDistribution(*domain.integer)
    low, high = domain.values_or_bounds
    return FloatDistribution(low, high, log=domain.log_uniform is not None)


# --- ordinary sweeps --------------------------------------------------------------------------


class SweepResults(ray_tune.ResultGrid):
    """Ray Tune's own ResultGrid of an ordinary sweep, which says that it is NOT PRIVATE.

    folder: of the sweep. privacy: the statement about it.
    """

    def __init__(self, grid: ray_tune.ResultGrid, folder: Path, privacy: str) -> None:
        self.__dict__.update(vars(grid))
        self.folder, self.privacy = folder, privacy

    @property
    def results(self) -> list[ray_tune.Result]:
        """Return every trial, in the order in which they were begun."""
        return [self[number] for number in range(len(self))]

    @property
    def best(self) -> ray_tune.Result | None:
        """Return the best trial, by the sweep's metric; None where no trial reported it."""
        if not any(result.metrics for result in self.results):
            return None
        try:
            return self.get_best_result()
        except RuntimeError:  # all of it is NaN, or nothing was reported
            return None

    def reported(self, result: ray_tune.Result) -> dict[str, float]:
        """Return the numbers that a trial reported last."""
        own = set(AUTO_RESULT_KEYS) | {"checkpoint_dir_name", "timestamp"}
        found = {key: value for key, value in (result.metrics or {}).items() if key not in own}
        return {
            key: value
            for key, value in found.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def failure(self, result: ray_tune.Result) -> str | None:
        """Return why a trial ended with an error, in one line; None where it did not."""
        if result.error is None:
            return None
        error = getattr(result.error, "cause", None) or result.error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1] if lines else type(error).__name__

    def __repr__(self) -> str:
        return f"{self.privacy}\n{super().__repr__()}"


class SweepProgress(ray_tune.Callback):
    """Say of each trial of an ordinary sweep which stage it is in."""

    def __init__(self, num_trials: int, metric: str) -> None:
        self._num_trials, self._metric = num_trials, metric
        self._ids: list[str] = []

    def _say(self, trial: Any, stage: str) -> None:
        if trial.trial_id not in self._ids:
            self._ids.append(trial.trial_id)
        number = self._ids.index(trial.trial_id)
        log(f"sweep, NOT PRIVATE: trial {number} of {self._num_trials}: {stage}")

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(trial, "training")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        value = result.get(self._metric)
        if isinstance(value, float | int):
            at = f" after step {result['steps']:,}" if "steps" in result else ""
            self._say(trial, f"{self._metric} {value:.4g}{at}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(trial, "done")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(trial, "failed")


_EXTRAS = {"optuna": "tune", "hyperopt": "hyperopt"}  # of searchers by name


def make_searcher(asked: Any, parameters: Mapping[str, Any], seed: int | None) -> Any:
    """Return a searcher of Ray Tune.

    asked: its name, None for random, or the searcher itself. parameters: Ray Tune's search space.
    Raises UserError.
    """
    if asked is None or asked == "random":
        return BasicVariantGenerator(random_state=seed)
    if not isinstance(asked, str):
        return asked
    if asked not in _EXTRAS:
        names = ", ".join(["random", *_EXTRAS])
        raise UserError(
            f"searcher: must be {names}, or from Python a searcher of Ray Tune, got {quoted(asked)}"
        )
    library = import_extra(asked, _EXTRAS[asked], "searcher")
    for key, domain in parameters.items():
        listed = domain.categories if isinstance(domain, Categorical) else ()
        if any(isinstance(value, dict | list | tuple) for value in listed):
            raise UserError(
                f"space: {key}: must be a list of numbers or texts with searcher {asked}, which "
                "cannot learn from lists and sections; take searcher random"
            )
    if asked == "optuna":
        from ray.tune.search.optuna import OptunaSearch

        library.logging.set_verbosity(library.logging.ERROR)
        return OptunaSearch(seed=seed)
    from ray.tune.search.hyperopt import HyperOptSearch

    return HyperOptSearch(random_state_seed=seed)


def is_population_based(scheduler: Any) -> bool:
    """Return whether a scheduler changes the settings of a trial that runs."""
    return scheduler == "pbt" or isinstance(
        scheduler,
        schedulers.PopulationBasedTraining | schedulers.PopulationBasedTrainingReplay,
    )


def make_scheduler(
    asked: Any, parameters: Mapping[str, Any], rungs: int | None, factor: int
) -> Any:
    """Return a scheduler of Ray Tune; None where every trial runs to its end.

    Args:
        asked: its name, None, or the scheduler itself.
        parameters: Ray Tune's search space.
        rungs: how often a recipe's trial reports; None of a function.
        factor: by which a rung is further than the last.

    Raises:
        UserError: there is none of that name.
    """
    clock = "training_iteration" if rungs is None else "reached"
    if asked is None or not isinstance(asked, str):
        return asked
    if asked == "asha":
        last = 100 if rungs is None else factor ** (rungs - 1)
        return schedulers.ASHAScheduler(
            time_attr=clock, max_t=last, grace_period=1, reduction_factor=factor
        )
    if asked == "median":
        return schedulers.MedianStoppingRule(time_attr=clock, grace_period=1)
    if asked == "pbt":
        return schedulers.PopulationBasedTraining(
            time_attr=clock, perturbation_interval=2, hyperparam_mutations=dict(parameters)
        )
    raise UserError(
        "scheduler: must be asha, median or, of functions, pbt, or from Python a scheduler of Ray "
        f"Tune, got {quoted(asked)}"
    )


def run_tuner(
    trainable: Callable[[dict[str, Any]], Any],
    parameters: dict[str, Any],
    resources: Mapping[str, float],
    experiment: Path,
    *,
    searcher: Any,
    scheduler: Any,
    metric: str,
    mode: str,
    num_samples: int,
    concurrent: int | None,
    reuse_processes: bool,
) -> ray_tune.ResultGrid:
    """Run an experiment of Ray Tune in its folder, or go on with the one that lies there.

    reuse_processes: let a process do one trial after another, which saves its start.
    """
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "5")  # what a kill may lose
    held = ray_tune.with_resources(trainable, ray_tune.PlacementGroupFactory([dict(resources)]))
    if ray_tune.Tuner.can_restore(str(experiment)):
        # Optuna, of a trial that reports again what it had reported before a kill.
        warnings.filterwarnings("ignore", message="The reported value is ignored")
        try:
            tuner = ray_tune.Tuner.restore(
                str(experiment), held, resume_unfinished=True, restart_errored=True
            )
        except Exception as error:
            raise UserError(
                f"{experiment}: cannot be continued: {error_text(error)}; name another folder"
            ) from error
        return tuner.fit()
    tuner = ray_tune.Tuner(
        held,
        param_space=parameters,
        tune_config=ray_tune.TuneConfig(
            metric=metric,
            mode=mode,
            num_samples=num_samples,
            search_alg=searcher,
            scheduler=scheduler,
            max_concurrent_trials=concurrent,
            reuse_actors=reuse_processes,
            trial_dirname_creator=_trial_folder_name,
        ),
        run_config=ray_tune.RunConfig(
            name=experiment.name,
            storage_path=str(experiment.parent),
            failure_config=ray_tune.FailureConfig(max_failures=0, fail_fast=False),
            callbacks=[JsonLoggerCallback(), SweepProgress(num_samples, metric)],
            verbose=0,
        ),
    )
    return tuner.fit()


def _trial_folder_name(trial: Any) -> str:
    return str(trial.trial_id)
