"""Tune a recipe on public records by Ray Tune's own Tuner: NOT PRIVATE, without a guarantee.

The folder of such a sweep:

    recipe.yaml    the recipe with its section tune
    trials/        an ordinary run folder for each trial
    ray/           Ray Tune's experiment, with which the same call continues after a kill
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpdist.cluster.executor import RayExecutor, open_executor
from dpdist.cluster.versions import PACKAGES, check_same_versions, package_fingerprints
from dpdist.config.search import ScoreRecipe
from dpdist.core.errors import UserError
from dpdist.core.files import write_atomic
from dpdist.core.optional_imports import import_extra
from dpdist.data import Dataset
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.job import check_trainable, prepare
from dpdist.training.records import data_source, load_test_records
from dpdist.tuning.search import check_certifiable
from dpdist.tuning.space import TrialValues, apply_values, check_space, iter_probe_values
from dpdist.tuning.trial import (
    count_concurrent_trials,
    public_data,
    rung_steps,
    train_until,
    trial_resources,
)

NOT_PRIVATE = "NOT PRIVATE: a public sweep; nothing is proved about the records it reads"


def recipe_trainable(
    recipe: Recipe, folder: Path, context: str = "recipe"
) -> Callable[[TrialValues], None]:
    """Return a recipe with a section tune as a function of Ray Tune: NOT PRIVATE.

    A trial gets the values of the searched fields by their dotted keys. It reports `score`, on
    `tune.score.public` or the test split, at each rung of `tune.asha`, and `reached`, which grows
    by a rung's factor.

    Args:
        recipe: with `privacy: none`, which declares its records public.
        folder: gets a run folder for each trial, by Ray's id.
        context: begins error messages.

    Raises:
        UserError: the recipe, or one with values of its space, cannot be trained or is private.
    """
    section, folder, packages = recipe.tune, folder.resolve(), package_fingerprints(PACKAGES)
    if section is None:
        raise UserError(f"{context}: tune: is required: the fields to search and their values")
    factor = section.asha.reduction_factor if section.asha else 1
    rungs, objective = section.scores_per_trial, section.score
    check_space(recipe, context)
    for values in iter_probe_values(section):
        trial = _public_trial(recipe, values, context)
        if objective.needs_certificates:
            check_certifiable(trial, objective, context)
        check_trainable(trial, context)

    def train(config: TrialValues) -> None:
        from ray import tune

        from dpdist.tuning.scoring import compute_score

        name = str(tune.get_context().get_trial_id())
        check_same_versions(packages, PACKAGES, f"trial {name}")
        own, where = RunFolder(folder / name), f"trial {name}"
        trial = _public_trial(recipe, config, where)
        job, scored = prepare(trial, own, where), _scored(recipe, objective)
        if math.isfinite(job.plan.guarantee().epsilon):
            raise UserError(_PRIVATE.format(where))
        for rung, step in enumerate(rung_steps(job.plan.steps, rungs, factor), 1):
            train_until(job, step)
            score = compute_score(
                own.model_folder,
                scored,
                objective,
                sigma=trial.certify.sigma if trial.certify else None,
                noise=None,
                key=derive_key(own.read_run_key(), "public", "rung", rung),
                trusted_factory=trial.model.name,
            )
            reached = {"reached": factor ** (rung - 1), "steps": step}
            tune.report({"score": score, **reached, "privacy": NOT_PRIVATE})

    train.__name__ = f"NOT_PRIVATE_{recipe.name}"
    return train


_PRIVATE = (
    "{}: privacy: must be none in a public sweep, whose trainings are not composed; leave --public "
    "out to search privately"
)


def _public_trial(recipe: Recipe, values: TrialValues, context: str) -> Recipe:
    """Return the recipe of one trial. Raises UserError if it trains with privacy."""
    trial = apply_values(recipe, values, context)
    if trial.privacy.noise_multiplier != 0:
        raise UserError(_PRIVATE.format(context))
    return trial


def _scored(recipe: Recipe, score: ScoreRecipe) -> Dataset:
    """Return the records that trials are scored on."""
    if score.public is None:
        return load_test_records(recipe, data_source(recipe))
    return public_data(recipe, score.public)


def tune_publicly(recipe: Recipe, folder: Path, context: str) -> Any:
    """Sweep a recipe by its section tune, or continue after a kill: NOT PRIVATE.

    Returns Ray Tune's ResultGrid. Raises UserError, and ClusterError if no trial fits.
    """
    from ray import tune

    from dpdist.tuning.searchers import asha_scheduler, ray_domain

    folder = folder.resolve()
    trainable = recipe_trainable(recipe, folder / "trials", context)
    section, kept = recipe.tune, folder / "recipe.yaml"
    assert section is not None
    if kept.exists() and kept.read_text() != recipe.to_yaml():
        raise UserError(f"{folder}: contains the sweep of another recipe; choose another --name")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(kept, recipe.to_yaml())
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    with open_executor("ray", log_file=folder / "ray.log") as executor:
        assert isinstance(executor, RayExecutor)
        executor.check_nodes(PACKAGES, folder)
        most = count_concurrent_trials(recipe.resources, section.concurrent, executor.hosts())
        place = tune.PlacementGroupFactory([trial_resources(recipe.resources)])
        held, experiment = tune.with_resources(trainable, place), str(folder / "ray")
        if tune.Tuner.can_restore(experiment):
            return tune.Tuner.restore(
                experiment, held, resume_unfinished=True, restart_errored=True
            ).fit()
        return tune.Tuner(
            held,
            param_space={key: ray_domain(domain) for key, domain in section.space.items()},
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                num_samples=section.num_trials.runs or round(section.num_trials.mean_trials),
                search_alg=_searcher(section.searcher),
                scheduler=asha_scheduler(section.asha),
                max_concurrent_trials=most,
            ),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=str(folder),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=0, fail_fast=False),
            ),
        ).fit()


def _searcher(name: str) -> Any:
    if name == "random":
        return None
    import_extra("optuna", "tune", "tune.searcher")
    from ray.tune.search.optuna import OptunaSearch

    return OptunaSearch()
