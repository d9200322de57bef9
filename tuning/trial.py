"""One trial: train under its own key, score, write the score down. Runs inside Ray Tune.

A trial reads everything from the search's private folder, so that nothing secret travels through
Ray, and does each part once: a trial that is repeated after a crash replays its training exactly,
from its checkpoint and with the same keys, and never scores anew what it has scored. A trial that
cannot go on, or cannot replay exactly, has failed; that is an outcome like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpdist import data, models
from dpdist.base.errors import UserError, no_room
from dpdist.base.storage import write_atomic, write_json
from dpdist.cluster.packages import check_same, code_digest
from dpdist.data import Dataset
from dpdist.privacy.journal import JournalBusy
from dpdist.privacy.ledger import LedgerError, ReplayConflict
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.runs.released import read_released
from dpdist.sections.search import PublicData
from dpdist.training.job import PACKAGES, TrainJob, prepare
from dpdist.training.records import private_part, source_of
from dpdist.training.trainer import fit
from dpdist.tuning.cost import kept_out
from dpdist.tuning.manifest import (
    SearchFolder,
    Trial,
    read_settings,
    read_terms,
    read_trials,
    scores_of,
    trial_limit,
)
from dpdist.tuning.space import with_values

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
    from dpdist.training.identity import recipe_digest

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

    from dpdist.training.loop import run
    from dpdist.training.reducer import Reducer

    # A single worker needs no process group: this process is the worker, and saves the 15 seconds
    # that starting and stopping Ray Train takes.
    torch.set_num_threads(max(1, int(resources.cpus_per_worker)))
    on_gpu = resources.gpus_per_worker > 0 and torch.cuda.is_available()
    reducer = Reducer(0, 1, torch.device("cuda" if on_gpu else "cpu"))
    fit(job, workers=lambda it: run(it, reducer, until), here=True)


def _train_on_ray_train(job: TrainJob, until: int) -> None:
    from ray.tune.integration.ray_train import TuneReportCallback

    fit(job, max_failures=0, until=until, callbacks=[TuneReportCallback()], here=True)
