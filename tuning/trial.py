"""Run the trials of a search: train each under its own key, score it, write the score.

A trial reads everything from the search's private folder, so that nothing secret is sent through
Ray, and does each part once: a trial that is repeated after a crash replays its training exactly,
from its checkpoint and with the same keys, and never repeats a score. A trial that cannot continue,
or cannot replay exactly, has failed; that is an outcome like any other. Ray Tune makes one pass
over all trials and gets only numbers. Whether everything fits into the cluster is checked before
anything starts.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpdist import data, models
from dpdist.cluster.executor import LocalExecutor, RayExecutor
from dpdist.cluster.session import describe_session
from dpdist.cluster.versions import PACKAGES, check_same_versions, code_digest, package_fingerprints
from dpdist.cluster.work import Host, ReportMetrics, TrialPass, WorkerGroup
from dpdist.config.search import PublicData, TuneRecipe
from dpdist.config.training import ResourcesRecipe
from dpdist.core.errors import ClusterError, UserError, is_disk_full
from dpdist.core.files import make_private_folder, write_json
from dpdist.data import Dataset
from dpdist.privacy.ledger import JournalBusy, LedgerError, ReplayConflict
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe
from dpdist.training.job import TrainJob, ensure_run_key, prepare
from dpdist.training.records import by_unit, data_source, private_records_between
from dpdist.training.trainer import fit
from dpdist.tuning.manifest import (
    SearchFolder,
    Trial,
    read_scores,
    read_settings,
    read_terms,
    read_trial_limit,
    read_trials,
)
from dpdist.tuning.space import TrialValues, apply_values, private_eval_fraction_of

# --- cluster resources of a trial -------------------------------------------------------------


# Every Ray cluster has this resource, once, on its head node. A trial whose training has its own
# workers uses a small part of it and no CPU: a trial with the CPU that its workers need would wait
# forever.
HEAD_NODE_RESOURCE = "node:__internal_head__"
_SLOT = 0.001


def trial_resources(resources: ResourcesRecipe) -> dict[str, float]:
    """Return the Ray resources of one trial: its only worker, or a slot besides Ray Train's."""
    if resources.max_workers > 1:
        return {HEAD_NODE_RESOURCE: _SLOT}
    bundle = {"CPU": resources.cpus_per_worker}
    if resources.gpus_per_worker:
        bundle["GPU"] = resources.gpus_per_worker
    return bundle


def count_concurrent_trials(
    resources: ResourcesRecipe, requested: int | None, nodes: list[Host]
) -> int:
    """Return how many trials run at the same time: as many as requested, or as fit.

    Raises ClusterError if not even one fits, or fewer than requested.
    """
    places = sum(_workers_that_fit(node, resources) for node in nodes)
    fitting = places // resources.max_workers
    have = (
        f"{len(nodes)} nodes with {sum(node.cpus for node in nodes):g} CPUs and "
        f"{sum(node.gpus for node in nodes):g} GPUs"
    )
    need = (
        f"{resources.max_workers} workers of {resources.cpus_per_worker:g} CPUs and "
        f"{resources.gpus_per_worker:g} GPUs"
    )
    if fitting < 1:
        raise ClusterError(
            f"resources: one trial needs {need}; there are {have}, room for {places} such workers. "
            "Start the nodes first (a search does not wait for a cluster to grow)",
            see="how-to/tuning.md#on-a-cluster",
        )
    if requested is not None and requested > fitting:
        raise ClusterError(
            f"tune.concurrent: {requested} trials at once, each of {need}, do not fit: there are "
            f"{have}, room for {fitting}"
        )
    return min(requested or fitting, math.floor(0.9 / _SLOT))


def _workers_that_fit(node: Host, resources: ResourcesRecipe) -> int:
    tiny = 1e-9
    places = math.floor(node.cpus / resources.cpus_per_worker + tiny)
    if resources.gpus_per_worker:
        gpus = resources.gpus_per_worker
        if gpus < 1:  # a worker uses a fraction of one GPU
            per_node = math.floor(node.gpus + tiny) * math.floor(1 / gpus + tiny)
        else:
            per_node = math.floor(node.gpus / gpus + tiny)
        places = min(places, per_node)
    return places


# --- one trial --------------------------------------------------------------------------------


ScoreReporter = Callable[[int, float], None]  # rung (from 1), score


# Takes a search, a trial's number and its scores so far; trains, scores and writes the scores.
ContinueTrial = Callable[[SearchFolder, int, dict[str, Any], ScoreReporter], None]


def run_trial(
    path: Path,
    packages: dict[str, str],
    number: int,
    report: ScoreReporter,
    continue_trial: ContinueTrial,
) -> None:
    """Run, or continue, trial `number` of the search under run folder `path` to its end.

    packages: the driver's. report: called with every rung's score, also those from before a crash.
    continue_trial: trains and scores. Errors that a repetition may fix (a lost worker) are raised;
    with any other error the trial has failed.
    """
    folder = SearchFolder(RunFolder(path))
    state = read_scores(folder, number)
    for rung, value in enumerate(state["scores"], 1):
        report(rung, value)
    if state["done"]:
        return
    check_same_versions(packages, PACKAGES, f"trial on {os.uname().nodename}")
    try:
        continue_trial(folder, number, state, report)
    except JournalBusy:
        raise  # an abandoned attempt still holds the ledger
    except (UserError, LedgerError, ReplayConflict, ValueError, OSError) as error:
        if is_disk_full(error):
            folder.disk_full_marker.touch()
        if isinstance(error, OSError) or is_disk_full(error):
            raise
        write_json(folder.scores_file(number), {**state, "done": True, "failed": str(error)})


def trial_recipe(
    search_recipe: Recipe, settings: dict[str, Any], key: bytes, context: str
) -> Recipe:
    """Return the recipe of a trial, with values and noise, without budget and search."""
    chosen = apply_values(search_recipe, settings["values"], context)
    fixed = search_recipe.privacy.run_key is not None  # of tests: every trial is then repeatable
    own = {
        **dict.fromkeys(("epsilon", "budget", "budget_ceiling", "budget_delta")),
        "noise_multiplier": settings["noise_multiplier"],
        "run_key": derive_key(key, "fixed").hex() if fixed else None,
    }
    held_out = {"private_eval_fraction": private_eval_fraction_of(search_recipe)}
    return chosen.model_copy(
        update={
            "statistics": None,  # bought once, outside of the trials
            "data": chosen.data.model_copy(update=held_out),
            "privacy": chosen.privacy.model_copy(update=own),
        }
    )


def scoring_data(search_recipe: Recipe) -> Dataset:
    """Return the records that trials are scored on: public ones, or private held-out ones.

    No trial trains on these, and data.private_eval_fraction keeps further ones out of the search.
    Private ones are by user if a user is the unit.
    """
    tune = search_recipe.tune
    assert tune is not None
    if tune.score.public is not None:
        return public_data(search_recipe, tune.score.public)
    low, high = search_recipe.data.private_eval_fraction, private_eval_fraction_of(search_recipe)
    held_out = private_records_between(search_recipe, data_source(search_recipe), low, high)
    return by_unit(search_recipe, held_out)


def public_data(search_recipe: Recipe, public: PublicData) -> Dataset:
    """Return the named public records."""
    source = data_source(search_recipe)
    root = source.root if public.root is None else public.root
    split = "train" if public.split == "train" else "test"
    named = data.DataSource(
        public.name,
        source.classes,
        root,
        public.split,
        public.split,
        source.columns,
        class_names=source.class_names,
    )
    return data.load(named, split).first(public.max_records)


def rung_steps(steps: int, rungs: int, factor: int) -> list[int]:
    """Return the steps after which a trial is scored, the last one after all of them."""
    return [max(1, steps * factor**rung // factor ** (rungs - 1)) for rung in range(rungs)]


def continue_recipe_trial(
    folder: SearchFolder, number: int, state: dict[str, Any], report: ScoreReporter
) -> None:
    asked = folder.run.read_search_recipe()
    tune = asked.tune
    assert tune is not None
    trial, scored = read_trials(folder)[number], scoring_data(asked)
    noise = read_terms(folder)["score_noise"]
    job = prepare_trial(folder, asked, trial)
    read_trial_limit(folder).check(job.plan, f"trial {number}")
    from dpdist.tuning.scoring import compute_score

    factor = tune.asha.reduction_factor if tune.asha else 1
    for rung, step in enumerate(rung_steps(job.plan.steps, tune.scores_per_trial, factor), 1):
        if rung <= len(state["scores"]):
            continue
        train_until(job, step)
        if read_verified_ledger(job.folder).ledger.num_superseded:
            raise UserError("the training could not be replayed exactly")
        value = compute_score(
            job.folder.model_folder,
            scored,
            tune.score,
            sigma=job.recipe.certify.sigma if job.recipe.certify else None,
            noise=noise,
            key=score_key(trial, rung, asked, job, scored, noise),
            trusted_factory=job.recipe.model.name,
        )
        state = {
            **state,
            "scores": [*state["scores"], value],
            "done": rung == tune.scores_per_trial,
        }
        write_json(folder.scores_file(number), state)
        report(rung, value)


def score_key(
    trial: Trial,
    rung: int,
    search_recipe: Recipe,
    job: TrainJob,
    scoring_records: Dataset,
    noise: float | None,
) -> bytes:
    """Return the key of a score's noise, which depends on everything that the score depends on.

    In two copies of a search the same trial may have a different model, or be scored differently:
    with the same noise on both counts their difference would have no noise. Scoring again after a
    crash is an exact replay. With a fixed run key, as in tests, only the rung counts.
    """
    if search_recipe.privacy.run_key is not None:
        return derive_key(trial.key, "rung", rung)
    from dpdist.training.worker import recipe_digest

    made_of = [
        search_recipe.model_dump(mode="json", exclude={"resources"}),
        recipe_digest(job.recipe),
        noise,
        models.model_hash(job.folder.model_folder),
        scoring_records.fingerprint,
        code_digest(PACKAGES),
    ]
    return derive_key(trial.key, "rung", rung, json.dumps(made_of, sort_keys=True))


def prepare_trial(folder: SearchFolder, search_recipe: Recipe, trial: Trial) -> TrainJob:
    """Return the job of a trial, and start its run folder with the drawn key, or continue it."""
    where = f"trial {trial.number}"
    settings = read_settings(folder, trial.number)
    recipe = trial_recipe(search_recipe, settings, trial.key, where)
    own = folder.trial_folder(trial.number)
    begin_trial_folder(own, recipe, trial)
    return prepare(recipe, own, where)


def begin_trial_folder(own: RunFolder, recipe: Recipe, trial: Trial) -> None:
    """Create the run folder of a trial with its drawn key, unless it exists."""
    own.create_or_open(recipe)
    ensure_run_key(own, recipe.privacy.run_key, derive_key(trial.key, "run key"))


class TrialExecutor(LocalExecutor):
    """Run a trial's single worker in this process, and several workers on Ray Train."""

    def run_workers(self, group: WorkerGroup) -> None:
        """Run a single worker here, which saves the 15 seconds of Ray Train's start."""
        if group.max_workers == 1:
            super().run_workers(group)
            return
        from ray.tune.integration.ray_train import TuneReportCallback

        with_reports = replace(group, callbacks=[TuneReportCallback()])
        RayExecutor(describe_session()).run_workers(with_reports)


def train_until(job: TrainJob, last_step: int) -> None:
    """Train up to a step, from the newest checkpoint; the next pass repeats a failed trial."""
    if not job.folder.training_summary.exists():
        fit(job, TrialExecutor(), max_failures=0, stop_after=last_step)


# --- all trials -------------------------------------------------------------------------------


def make_tune_pass(
    folder: SearchFolder,
    recipe: Recipe,
    concurrent: int,
    noise_multiplier_of: Callable[[TrialValues], float],
    continue_trial: ContinueTrial,
) -> TrialPass:
    """Return one pass over all K trials, in which finished ones only report again."""
    section = recipe.tune
    assert section is not None
    trials = read_trials(folder)

    def make_searcher() -> Any:
        from dpdist.tuning.searchers import ManifestSearcher

        adaptive = _make_suggester(folder, section) if section.searcher != "random" else None
        return ManifestSearcher(
            folder, trials, noise_multiplier_of, adaptive, stops_early=section.asha is not None
        )

    def make_scheduler() -> Any:
        from dpdist.tuning.searchers import METRIC, asha_scheduler

        return asha_scheduler(section.asha, metric=METRIC, mode="max")

    def run(number: int, report: ReportMetrics) -> None:
        run_trial(
            path,
            packages,
            number,
            lambda rung, value: report({"score": value, "reached": factor ** (rung - 1)}),
            continue_trial,
        )

    path, packages = folder.run.path, package_fingerprints(PACKAGES)
    factor = section.asha.reduction_factor if section.asha else 1
    return TrialPass(
        run,
        len(trials),
        make_searcher,
        make_scheduler if section.asha else None,
        concurrent,
        trial_resources(recipe.resources),
        make_private_folder(folder.ray_folder),
        f"search-{time.time_ns()}",
    )


def _make_suggester(folder: SearchFolder, section: TuneRecipe) -> Any:
    from dpdist.tuning.searchers import OptunaSuggester

    trials = read_trials(folder)
    known = []
    for trial in trials:
        state = read_scores(folder, trial.number)
        if state["done"] and state["scores"]:
            values = read_settings(folder, trial.number)["values"]
            known.append((values, state["scores"][-1]))
    seed = int.from_bytes(derive_key(trials[0].key, "optuna")[:4], "little")
    return OptunaSuggester(section, seed, known)
