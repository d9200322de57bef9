"""Run the trials of a search on Ray Tune: train under its own key, score, write the score down.

A trial reads everything from the search's private folder, so that nothing secret travels through
Ray, and does each part once: a trial that is repeated after a crash replays its training exactly,
from its checkpoint and with the same keys, and never scores anew what it has scored. A trial that
cannot continue, or cannot replay exactly, has failed; that is an outcome like any other. Ray Tune
makes one pass over all trials and is told numbers only. Whether everything fits into the cluster
is checked before anything starts.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist import data, models
from dpdist.cluster.session import staged_artifacts
from dpdist.cluster.versions import check_same, code_digest, fingerprint
from dpdist.config.search import PublicData, TuneRecipe
from dpdist.config.training import ResourcesRecipe
from dpdist.core.errors import ClusterError, UserError, no_room
from dpdist.core.files import private_folder, write_atomic, write_json
from dpdist.data import Dataset
from dpdist.privacy.ledger import JournalBusy, LedgerError, ReplayConflict
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder, read_released
from dpdist.runs.recipe import Recipe
from dpdist.training.job import PACKAGES, TrainJob, prepare
from dpdist.training.records import private_part, source_of
from dpdist.training.trainer import fit
from dpdist.tuning.manifest import (
    SearchFolder,
    Trial,
    read_settings,
    read_terms,
    read_trials,
    scores_of,
    trial_limit,
)
from dpdist.tuning.space import Values, kept_out, with_values

# --- cluster resources of a trial -------------------------------------------------------------


# Every Ray cluster has this resource, once, on its head node. A trial whose training has workers of
# its own holds a sliver of it and no CPU: a trial that held the CPU its workers wait for would wait
# for ever.
SLOT = "node:__internal_head__"
_SLIVER = 0.001


@dataclass(frozen=True)
class Node:
    """Resources of one live node."""

    cpus: float
    gpus: float


def live_nodes() -> list[Node]:
    """The nodes of the connected cluster."""
    import ray

    return [
        Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def trial_resources(resources: ResourcesRecipe) -> Any:
    """Return the resources that Ray Tune reserves for one trial.

    They are its only worker, or a slot beside Ray Train's.
    """
    from ray import tune

    if resources.most > 1:
        return tune.PlacementGroupFactory([{SLOT: _SLIVER}])
    bundle = {"CPU": resources.cpus_per_worker}
    if resources.gpus_per_worker:
        bundle["GPU"] = resources.gpus_per_worker
    return tune.PlacementGroupFactory([bundle])


def trials_at_once(resources: ResourcesRecipe, wanted: int | None, nodes: list[Node]) -> int:
    """How many trials run at the same time: as many as fit, or as many as wanted.

    Raises ClusterError, before anything waits for ever, when not even one fits or not as many as
    wanted.
    """
    places = sum(_workers_on(node, resources) for node in nodes)
    fitting = places // resources.most
    have = (
        f"{len(nodes)} nodes with {sum(node.cpus for node in nodes):g} CPUs and "
        f"{sum(node.gpus for node in nodes):g} GPUs"
    )
    need = (
        f"{resources.most} workers of {resources.cpus_per_worker:g} CPUs and "
        f"{resources.gpus_per_worker:g} GPUs"
    )
    if fitting < 1:
        raise ClusterError(
            f"resources: one trial needs {need}; there are {have}, room for {places} such workers. "
            "Start the nodes first (a search does not wait for a cluster to grow)"
        )
    if wanted is not None and wanted > fitting:
        raise ClusterError(
            f"tune.concurrent: {wanted} trials at once, each of {need}, do not fit: there are "
            f"{have}, room for {fitting}"
        )
    # A slot is a thousandth of a resource that exists once.
    return min(wanted or fitting, math.floor(0.9 / _SLIVER))


def _workers_on(node: Node, resources: ResourcesRecipe) -> int:
    tiny = 1e-9
    places = math.floor(node.cpus / resources.cpus_per_worker + tiny)
    if resources.gpus_per_worker:
        gpus = resources.gpus_per_worker
        if gpus < 1:  # a worker's share lies on one GPU
            per_node = math.floor(node.gpus + tiny) * math.floor(1 / gpus + tiny)
        else:
            per_node = math.floor(node.gpus / gpus + tiny)
        places = min(places, per_node)
    return places


# --- one trial --------------------------------------------------------------------------------


Report = Callable[[int, float], None]  # rung (from 1), score


def run_trial(path: Path, packages: dict[str, str], number: int, report: Report) -> None:
    """Bring trial `number` of the search under run folder `path` to its end, however far it was.

    packages: the driver's. report: called with every rung's score, also those from before a crash.
    Errors that a repetition may mend (a lost worker) are raised; all others make the trial a failed
    one.
    """
    folder = SearchFolder(RunFolder(path))
    state = scores_of(folder, number)
    for rung, value in enumerate(state["scores"], 1):
        report(rung, value)
    if state["done"]:
        return
    check_same(packages, PACKAGES, f"trial on {os.uname().nodename}")
    try:
        _go_on(folder, number, state, report)
    except JournalBusy:
        raise  # an attempt that was given up still holds the ledger
    except (UserError, LedgerError, ReplayConflict, ValueError, OSError) as error:
        if no_room(error):
            folder.full.touch()
        if isinstance(error, OSError) or no_room(error):
            raise
        write_json(folder.scores(number), {**state, "done": True, "failed": str(error)})


def trial_recipe(asked: Recipe, settings: dict[str, Any], key: bytes, where: str) -> Recipe:
    """The recipe of a trial: values put in, noise fixed, no budget or search of its own."""
    chosen = with_values(asked, settings["values"], where)
    fixed = asked.privacy.run_key is not None  # of tests: every trial is then repeatable
    return chosen.model_copy(
        update={
            "data": chosen.data.model_copy(update={"hold_out": kept_out(asked)}),
            "privacy": chosen.privacy.model_copy(
                update={
                    "epsilon": None,
                    "noise_multiplier": settings["noise_multiplier"],
                    "budget": None,
                    "budget_ceiling": None,
                    "budget_delta": None,
                    "run_key": derive_key(key, "fixed").hex() if fixed else None,
                }
            ),
        }
    )


def scoring_data(asked: Recipe) -> Dataset:
    """The records that trials are scored on: named public ones, or private ones that no trial
    trains on, beside those that data.hold_out keeps out of training and search."""
    tune = asked.tune
    assert tune is not None
    public = tune.score.public
    if public is None:
        return private_part(asked, source_of(asked), asked.data.hold_out, kept_out(asked))
    return public_data(asked, public)


def public_data(asked: Recipe, public: PublicData) -> Dataset:
    """Named public records."""
    source = source_of(asked)
    root = source.root if public.root is None else public.root
    split = "train" if public.split == "train" else "test"
    named = data.Source(
        public.name, source.classes, root, public.split, public.split, source.columns,
        names=source.names,
    )  # fmt: skip
    return data.load(named, split).first(public.max_records)


def rung_steps(steps: int, rungs: int, factor: int) -> list[int]:
    """Steps after which a trial is scored, the last after all of them."""
    return [max(1, steps * factor**rung // factor ** (rungs - 1)) for rung in range(rungs)]


def _go_on(folder: SearchFolder, number: int, state: dict[str, Any], report: Report) -> None:
    asked = folder.run.read_asked()
    tune = asked.tune
    assert tune is not None
    trial, scored = read_trials(folder)[number], scoring_data(asked)
    noise = read_terms(folder)["score_noise"]
    job = begin_trial(folder, asked, trial)
    trial_limit(folder).check(job.plan, f"trial {number}")
    from dpdist.tuning.scoring import score

    factor = tune.asha.reduction_factor if tune.asha else 1
    for rung, step in enumerate(rung_steps(job.plan.steps, tune.rungs, factor), 1):
        if rung <= len(state["scores"]):
            continue
        _train(job, step)
        if read_released(job.folder).ledger.superseded:
            raise UserError("the training could not be replayed exactly")
        value = score(
            job.folder.model,
            scored,
            tune.score,
            sigma=job.recipe.certify.sigma if job.recipe.certify else None,
            noise=noise,
            key=score_key(trial, rung, asked, job, scored, noise),
            trusted_factory=job.recipe.model.name,
        )
        state = {**state, "scores": [*state["scores"], value], "done": rung == tune.rungs}
        write_json(folder.scores(number), state)
        report(rung, value)


def score_key(
    trial: Trial, rung: int, asked: Recipe, job: TrainJob, scored: Dataset, noise: float | None
) -> bytes:
    """Return the key of a score's noise: another one for everything that the score is made of.

    In two copies of a search the same trial may have another model, or be scored otherwise: the
    same noise on both counts would be none on their difference. To score again after a crash is an
    exact replay. A fixed key is for tests, which want the same again.
    """
    if asked.privacy.run_key is not None:
        return derive_key(trial.key, "rung", rung)
    from dpdist.training.worker import recipe_digest

    made_of = [
        asked.model_dump(mode="json", exclude={"resources"}), recipe_digest(job.recipe), noise,
        models.model_hash(job.folder.model), scored.fingerprint, code_digest(PACKAGES),
    ]  # fmt: skip
    return derive_key(trial.key, "rung", rung, json.dumps(made_of, sort_keys=True))


def begin_trial(folder: SearchFolder, asked: Recipe, trial: Trial) -> TrainJob:
    """The trial's run folder with its drawn key in it; read back when it was begun before."""
    where = f"trial {trial.number}"
    settings = read_settings(folder, trial.number)
    recipe = trial_recipe(asked, settings, trial.key, where)
    own = folder.trial(trial.number)
    own.begin(recipe)
    if not own.run_key.exists():
        secret = recipe.privacy.run_key or derive_key(trial.key, "run key").hex()
        write_atomic(own.run_key, secret)
        own.run_key.chmod(0o600)
    if recipe.privacy.run_key is not None:
        write_atomic(own.fixed_key, "The run key was fixed in the recipe: not private.\n")
    return prepare(recipe, own, where)


def _train(job: TrainJob, until: int) -> None:
    if job.folder.trained.exists():
        return
    resources = job.recipe.resources
    if resources.most > 1:
        _train_on_ray_train(job, until)
        return
    import torch

    from dpdist.training.collectives import Reducer
    from dpdist.training.worker import run

    # A single worker needs no process group: this process is the worker, and saves the 15 seconds
    # that starting and stopping Ray Train takes.
    torch.set_num_threads(max(1, int(resources.cpus_per_worker)))
    on_gpu = resources.gpus_per_worker > 0 and torch.cuda.is_available()
    reducer = Reducer(0, 1, torch.device("cuda" if on_gpu else "cpu"))
    fit(job, workers=lambda it: run(it, reducer, until), here=True)


def _train_on_ray_train(job: TrainJob, until: int) -> None:
    from ray.tune.integration.ray_train import TuneReportCallback

    fit(job, max_failures=0, until=until, callbacks=[TuneReportCallback()], here=True)


# --- all trials on Ray Tune -------------------------------------------------------------------


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
