"""The trials of a search as Ray Tune runs them: one pass over all; it is told numbers only."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpdist.base.storage import private_folder
from dpdist.cluster.packages import fingerprint
from dpdist.cluster.session import staged_artifacts
from dpdist.randomness.keys import derive_key
from dpdist.runs.recipe import Recipe
from dpdist.sections.search import TuneRecipe
from dpdist.training.job import PACKAGES
from dpdist.tuning.manifest import SearchFolder, read_settings, read_trials, scores_of
from dpdist.tuning.room import trial_resources
from dpdist.tuning.space import Values
from dpdist.tuning.trial import run_trial


def one_pass(
    folder: SearchFolder, recipe: Recipe, concurrent: int, noise_of: Callable[[Values], float]
) -> None:
    """One pass of Ray Tune over all K trials; finished ones only report again."""
    # Ray must not print trial tables, and writes them to the private folder only.
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    from ray import tune
    from ray.tune.logger import JsonLoggerCallback

    from dpdist.tuning.searchers import METRIC, ManifestSearcher

    section = recipe.tune
    assert section is not None
    trials = read_trials(folder)
    adaptive = _suggestions(folder, section) if section.searcher != "random" else None
    searcher = ManifestSearcher(
        folder, trials, noise_of, adaptive, stops_early=section.asha is not None
    )
    scheduler, factor = None, 1
    if section.asha is not None:
        from ray.tune.schedulers import ASHAScheduler

        factor = section.asha.reduction_factor
        scheduler = ASHAScheduler(
            time_attr="reached",
            metric=METRIC,
            mode="max",
            grace_period=1,
            reduction_factor=factor,
            max_t=factor ** (section.rungs - 1),
        )
    name = f"search-{time.time_ns()}"
    tuner = tune.Tuner(
        tune.with_resources(_trainable(folder.run.path, factor), trial_resources(recipe.resources)),
        tune_config=tune.TuneConfig(
            num_samples=len(trials),
            search_alg=searcher,
            scheduler=scheduler,
            max_concurrent_trials=concurrent,
            reuse_actors=scheduler is None,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(private_folder(folder.ray)),
            failure_config=tune.FailureConfig(max_failures=0, fail_fast=False),
            callbacks=[JsonLoggerCallback()],
            verbose=0,
        ),
    )
    with _removed(staged_artifacts(), name):
        tuner.fit()


@contextmanager
def _removed(staged: Path, name: str) -> Iterator[None]:
    """Remove at the end what Tune staged of an experiment: K and every score."""
    try:
        yield
    finally:
        for left in staged.glob(f"*/{name}"):
            shutil.rmtree(left, ignore_errors=True)


def _suggestions(folder: SearchFolder, section: TuneRecipe) -> Any:
    from dpdist.tuning.searchers import Suggestions

    trials = read_trials(folder)
    known = []
    for trial in trials:
        state = scores_of(folder, trial.number)
        if state["done"] and state["scores"]:
            values = read_settings(folder, trial.number)["values"]
            known.append((values, state["scores"][-1]))
    seed = int.from_bytes(derive_key(trials[0].key, "optuna")[:4], "little")
    return Suggestions(section, seed, known)


def _trainable(path: Path, factor: int) -> Callable[[dict[str, Any]], None]:
    packages = fingerprint(PACKAGES)

    def trial(config: dict[str, Any]) -> None:
        from ray import tune

        def report(rung: int, value: float) -> None:
            tune.report({"score": value, "reached": factor ** (rung - 1)})

        staged_artifacts()  # of a node without the driver
        run_trial(path, packages, config["trial"], report)

    return trial


def in_background(work: Callable[[], None], show: Callable[[], None]) -> None:
    """Work in a thread and show progress meanwhile: Ray would take Ctrl-C from the main thread."""
    errors: list[BaseException] = []

    def keep_errors() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=keep_errors, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        show()
    if errors:
        raise errors[0]
