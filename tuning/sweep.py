"""Sweep hyper-parameters by Ray Tune as people know it: an ordinary sweep, which is NOT PRIVATE.

Nothing is proved about the records of an ordinary sweep, so it is for public ones: a recipe
declares them by `privacy: none`. Any searcher and scheduler of Ray Tune may look at the scores.

Recipes with privacy on are swept by `dpdist.tuning.sweep_recipe`.

The folder of an ordinary sweep:

    sweep.json     the request, and that nothing is proved
    trials.json    all trials, with their values and scores
    trials/        of a recipe: an ordinary run folder each
    ray/           Ray Tune's experiment, with which the same call goes on after a kill
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from dpdist.cluster.executor import RayExecutor, open_executor
from dpdist.cluster.versions import check_same_versions, package_fingerprints
from dpdist.config.search import Domain, PublicData, ScoreRecipe
from dpdist.core.errors import UserError
from dpdist.core.fields import FileShape, Keys
from dpdist.core.files import read_json, write_json
from dpdist.core.version import __version__
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, iter_differences
from dpdist.training.job import PACKAGES, check_trainable, prepare
from dpdist.training.records import data_source, load_test_records
from dpdist.tuning.search import check_certifiable
from dpdist.tuning.space import TrialValues, apply_values, check_space, iter_probe_values
from dpdist.tuning.sweep_recipe import (
    FACTOR,
    SweepSettings,
    is_public_recipe,
    name_of,
    parse_metric,
    parse_public,
    read_space,
    shown_values,
    validated,
    with_space,
)
from dpdist.tuning.trial import (
    count_concurrent_trials,
    public_data,
    rung_steps,
    train_until,
    trial_resources,
)

if TYPE_CHECKING:
    from dpdist.data import Dataset
    from dpdist.tuning.searchers import SweepResults

NOT_PRIVATE = "NOT PRIVATE: an ordinary sweep; nothing is proved about the records it reads"
FORMAT = 1
_CONTINUE = "repeat it as it was to continue it, or name another folder (--name)"


# --- the folder -------------------------------------------------------------------------------


class SweepRecord(FileShape):
    """sweep.json: the request of an ordinary sweep, and the statement of its privacy.

    Attributes:
        format: Format of the file.
        privacy: The statement that nothing is proved.
        asked: All that the sweep was asked for.
    """

    newest_format = FORMAT

    format: int
    privacy: str
    asked: Keys


class SweptTrial(FileShape):
    """A trial of an ordinary sweep: one entry of trials.json.

    Attributes:
        values: The values of the fields, as Ray Tune chose them.
        metrics: The numbers that the trial reported last.
        failed: The error with which the trial ended; null where it did not.
        stopped: Whether the scheduler ended it.
        chosen: Whether it is the best trial.
        folder: Its run folder, by its path in the sweep's; null of a function.
    """

    values: Keys
    metrics: Keys
    failed: str | None
    stopped: bool
    chosen: bool
    folder: str | None


def read_sweep(folder: Path) -> tuple[SweepRecord, list[SweptTrial]]:
    """Return the record and the trials of an ordinary sweep that has ended. Raises UserError."""
    record, path = SweepRecord.read(folder / "sweep.json"), folder / "trials.json"
    rows = read_json(path, {"trials": list})["trials"]
    return record, [SweptTrial.parse(row, f"{path}: trial {n}") for n, row in enumerate(rows)]


def sweep_table(folder: Path) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the trials of an ordinary sweep. Raises UserError."""
    record, trials = read_sweep(folder)
    metric, fields = record.asked["metric"], sorted({key for t in trials for key in t.values})
    rows = []
    for number, trial in enumerate(trials):
        outcome = trial.failed or " ".join(
            word for word, so in (("chosen", trial.chosen), ("stopped", trial.stopped)) if so
        )
        cells = [_cell(trial.values.get(field)) for field in fields]
        score = _cell(trial.metrics[metric]) if metric in trial.metrics else "none"
        rows.append([str(number), *cells, score, outcome])
    return ["trial", *fields, metric, "outcome"], rows


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def begin_sweep(folder: Path, asked: Keys) -> None:
    """Write down the request of a sweep, or check that it was asked for the same before.

    Raises UserError where the folder holds something else.
    """
    path = folder / "sweep.json"
    if path.exists():
        differing = [key for key, _, _ in iter_differences(SweepRecord.read(path).asked, asked)]
        if differing:
            raise UserError(
                f"{folder}: a sweep of that name was asked for otherwise ({', '.join(differing)} "
                f"differ); {_CONTINUE}"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something else than a sweep; name another (--name)")
    folder.mkdir(parents=True, exist_ok=True)
    said = {"format": FORMAT, "dpdist": __version__, "privacy": NOT_PRIVATE, "asked": asked}
    write_json(path, said)


# --- ordinary sweeps --------------------------------------------------------------------------


def sweep_function(
    train: Callable[[dict[str, Any]], Any],
    space: str | Path | Mapping[str, Any],
    *,
    folder: str | Path,
    metric: str = "score",
    mode: str = "max",
    num_samples: int = 8,
    searcher: Any = None,
    scheduler: Any = None,
    concurrent: int | None = None,
    resources: Mapping[str, float] | None = None,
    seed: int | None = None,
) -> SweepResults:
    """Sweep the settings of a function by Ray Tune: NOT PRIVATE, for public records.

    The same call on the same folder goes on after a kill: trials that ended are not run again.

    Args:
        train: an ordinary function trainable of Ray Tune: train(config) returns a dict of metrics,
            or reports them by `ray.tune.report`, checkpoints included.
        space: Ray Tune's search space, or domains as in a recipe ({"rate": {"log_uniform":
            [0.01, 1]}}), or the path of a YAML file with such domains.
        folder: of the sweep; must be empty, or of the same sweep.
        metric, mode, num_samples, searcher, scheduler, concurrent, seed: as in `SweepSettings`.
        resources: of Ray that each trial holds; None for one CPU.

    Returns:
        Ray Tune's own ResultGrid, which also knows the sweep's folder and says NOT PRIVATE.

    Raises:
        UserError: a setting or the folder cannot be used.
        ClusterError: no session of Ray could be opened.
    """
    settings = SweepSettings(metric, mode, num_samples, searcher, scheduler, concurrent, seed)
    if not callable(train):
        raise UserError(
            f"train: must be a function of a config, got {type(train).__name__}; a recipe is swept "
            "by `dpdist sweep`, from Python by dpdist.pipeline.sweep"
        )
    given = read_space(space) if isinstance(space, str | Path) else dict(space)
    parameters = {key: _ray_domain(value, key) for key, value in given.items()}
    name = f"{getattr(train, '__module__', '')}.{getattr(train, '__qualname__', type(train))}"
    asked = {"function": name, "space": _describe_space(parameters), **settings.to_dict()}
    return _run_tuner(
        train, parameters, settings, Path(folder), asked, dict(resources or {"CPU": 1.0}),
        concurrent=lambda executor: settings.concurrent, is_recipe=False,
    )  # fmt: skip


def sweep_recipe(
    recipe: Recipe,
    space: Mapping[str, Domain],
    settings: SweepSettings,
    *,
    folder: Path,
    public_scores: str | None = None,
    context: str = "recipe",
) -> SweepResults:
    """Sweep a recipe without privacy by Ray Tune: NOT PRIVATE, each trial an ordinary run folder.

    Args:
        recipe: one that declares its records public (`is_public_recipe`).
        space: the swept fields.
        settings: of the sweep.
        folder: of the sweep; must be empty, or of the same sweep.
        public_scores: NAME or NAME/SPLIT of records to score on; None for the recipe's test split.
        context: begins complaints.

    Returns:
        Ray Tune's own ResultGrid, which also knows the sweep's folder and says NOT PRIVATE.

    Raises:
        UserError: in one line, before anything is written, for a sweep that cannot be made.
        ClusterError: no session of Ray could be opened, or a trial does not fit into it.
    """
    from dpdist.tuning.searchers import is_population_based

    if is_population_based(settings.scheduler):
        raise UserError(
            f"{context}: scheduler: must not change settings in the middle of a training, which a "
            f"recipe fixes, got {name_of(settings.scheduler)}; it is for a function of yours "
            "(dpdist.tuning.sweep.sweep_function)"
        )
    score = _PublicScore.of(recipe, settings, public_scores, context)
    asked = with_space(
        recipe, space, context, law={"name": "fixed", "runs": settings.num_samples},
        score=score.section,
    )  # fmt: skip
    _check_sweep(asked, score, context)
    said = {
        "recipe": recipe.model_dump(mode="json", exclude={"resources", "tune"}),
        "space": {key: domain.description for key, domain in space.items()},
        "public_scores": public_scores,
        **settings.to_dict(),
    }
    trial = functools.partial(
        _run_recipe_trial, asked=asked, score=score, folder=folder.resolve(),
        rungs=settings.rungs, packages=package_fingerprints(PACKAGES),
    )  # fmt: skip

    def concurrent(executor: RayExecutor) -> int:
        executor.check_nodes(PACKAGES, folder.resolve())
        return count_concurrent_trials(asked.resources, settings.concurrent, executor.hosts())

    parameters = {key: _ray_domain(domain, key) for key, domain in space.items()}
    return _run_tuner(
        trial, parameters, settings, folder, said, trial_resources(asked.resources),
        concurrent=concurrent, is_recipe=True,
    )  # fmt: skip


@dataclass(frozen=True)
class _PublicScore:
    """The score of a recipe's trials: which records, and which number of them."""

    metric: str
    section: Keys
    objective: ScoreRecipe | None
    public: PublicData | None

    @classmethod
    def of(
        cls, recipe: Recipe, settings: SweepSettings, public_scores: str | None, context: str
    ) -> _PublicScore:
        named = parse_public(public_scores or f"{recipe.data.name}/test")
        keys = parse_metric(settings.metric)
        section = {"public": named, **(keys or {})}
        found: ScoreRecipe = validated(TypeAdapter(ScoreRecipe), section, f"{context}: metric")
        public = None if public_scores is None else found.public
        return cls(settings.metric, section, None if keys is None else found, public)

    def records(self, recipe: Recipe) -> Dataset:
        if self.public is None:
            return load_test_records(recipe, data_source(recipe))
        return public_data(recipe, self.public)

    def compute(self, recipe: Recipe, folder: RunFolder, key: bytes) -> float:
        """Return the metric of a trained model."""
        records = self.records(recipe)
        if self.objective is None:
            return _cross_entropy(recipe, folder, records)
        from dpdist.tuning.scoring import compute_score

        return compute_score(
            folder.model_folder,
            records,
            self.objective,
            sigma=recipe.certify.sigma if recipe.certify else None,
            noise=None,
            key=key,
            trusted_factory=recipe.model.name,
        )


def _cross_entropy(recipe: Recipe, folder: RunFolder, records: Dataset) -> float:
    import torch

    from dpdist import models

    model = models.load(folder.model_folder, trusted_factory=recipe.model.name).eval()
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(records), 1000):
            rows = slice(start, start + 1000)
            outputs, targets = model(records.batch(rows)), records.targets(rows)
            total += float(torch.nn.functional.cross_entropy(outputs, targets, reduction="sum"))
    return total / len(records)


def _check_sweep(asked: Recipe, score: _PublicScore, context: str) -> None:
    """Raise UserError for a space that a trial could not be trained or scored with."""
    assert asked.tune is not None
    check_space(asked, context)
    for values in iter_probe_values(asked.tune):
        trial = _trial_recipe(asked, values, context)
        if score.objective is not None and score.objective.needs_certificates:
            check_certifiable(trial, score.objective, context)
        check_trainable(trial, context)
    if not len(score.records(asked)):
        raise UserError(f"{context}: public scores: there are no records to score on")


def _trial_recipe(asked: Recipe, values: TrialValues, context: str) -> Recipe:
    """Return the recipe of one trial. Raises UserError where it is trained with privacy."""
    trial = apply_values(asked, values, context)
    if not is_public_recipe(trial):
        raise UserError(
            f"{context}: space: must leave privacy off in every trial of an ordinary sweep, and "
            f"{shown_values(values)} turns it on; give the recipe itself noise to sweep with "
            "privacy on"
        )
    return trial


def _run_recipe_trial(
    config: TrialValues,
    *,
    asked: Recipe,
    score: _PublicScore,
    folder: Path,
    rungs: int,
    packages: dict[str, str],
) -> None:
    """Train one trial of a recipe in its run folder, and report its score at each rung."""
    from ray import tune

    context = tune.get_context().get_trial_id()
    check_same_versions(packages, PACKAGES, f"trial {context}")
    own = RunFolder(folder / "trials" / str(context))
    recipe = _trial_recipe(asked, config, f"trial {context}")
    job, kept = prepare(recipe, own, f"trial {context}"), own.private / "sweep-scores.json"
    scores: list[float] = read_json(kept, {"scores": list})["scores"] if kept.exists() else []
    for rung, step in enumerate(rung_steps(job.plan.steps, rungs, FACTOR), 1):
        if rung > len(scores):
            train_until(job, step)
            key = derive_key(own.read_run_key(), "sweep", "rung", rung)
            scores = [*scores, score.compute(recipe, own, key)]
            write_json(kept, {"scores": scores})
        metrics = {score.metric: scores[rung - 1], "reached": FACTOR ** (rung - 1)}
        tune.report({**metrics, "steps": step, "planned_steps": max(step, job.plan.steps)})


# --- Ray Tune ---------------------------------------------------------------------------------


def _ray_domain(value: Any, key: str) -> Any:
    """Return Ray Tune's word for a domain; a value that is no domain of ours stays as it is."""
    from ray import tune

    kinds = set(Domain.model_fields) - {"also"}
    if isinstance(value, Mapping) and value and set(value) <= set(Domain.model_fields):
        value = validated(TypeAdapter(Domain), dict(value), f"space: {key}")
    if not isinstance(value, Domain):
        return value
    kind = next(kind for kind in kinds if getattr(value, kind) is not None)
    if kind == "choice":
        return tune.choice(list(value.values_or_bounds))
    low, high = value.values_or_bounds
    if kind == "integer":
        return tune.randint(low, high + 1)
    return (tune.loguniform if kind == "log_uniform" else tune.uniform)(low, high)


def _describe_space(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _describe_space(inner) for key, inner in value.items()}
    return f"{type(value).__name__} {getattr(value, 'domain_str', value)}"


def _run_tuner(
    trainable: Callable[[dict[str, Any]], Any],
    parameters: dict[str, Any],
    settings: SweepSettings,
    folder: Path,
    asked: Keys,
    resources: Mapping[str, float],
    *,
    concurrent: Callable[[RayExecutor], int | None],
    is_recipe: bool,
) -> SweepResults:
    """Run Ray Tune to its end, or go on with it; write the trials down."""
    from dpdist.tuning.searchers import SweepResults, make_scheduler, make_searcher, run_tuner

    searcher = make_searcher(settings.searcher, parameters, settings.seed)
    scheduler = make_scheduler(
        settings.scheduler, parameters, settings.rungs if is_recipe else None, FACTOR
    )
    begin_sweep(folder, asked)
    folder = folder.resolve()
    with open_executor("ray", log_file=folder / "ray.log") as executor:
        assert isinstance(executor, RayExecutor)
        most = concurrent(executor)
        grid = run_tuner(
            trainable, parameters, resources, folder / "ray",
            searcher=searcher, scheduler=scheduler, metric=settings.metric, mode=settings.mode,
            num_samples=settings.num_samples, concurrent=most,
            reuse_processes=is_recipe and scheduler is None,
        )  # fmt: skip
    results = SweepResults(grid, folder, NOT_PRIVATE)
    rows = _trial_rows(results, is_recipe)
    write_json(folder / "trials.json", {"privacy": NOT_PRIVATE, "trials": rows})
    if rows and all(row["failed"] for row in rows):
        raise UserError(
            f"{folder}: all {len(rows)} trials failed, the first by: {rows[0]['failed']}; mend it, "
            "and the same sweep tries them again"
        )
    return results


def _trial_rows(results: SweepResults, is_recipe: bool) -> Sequence[Keys]:
    best, rows = results.best, []
    for result in results.results:
        metrics = results.reported(result)
        row: Keys = {
            "values": {key: _plain(value) for key, value in (result.config or {}).items()},
            "metrics": metrics,
            "failed": results.failure(result),
            "stopped": metrics.get("steps", 0) < metrics.get("planned_steps", 0),
            "chosen": best is not None and result.path == best.path,
            "folder": None,
        }
        if is_recipe:
            row["folder"] = f"trials/{(result.metrics or {}).get('trial_id')}"
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)
