"""Run the stages of a recipe in order: train, evaluate, certify, report.

Each stage is skipped when its results are already in the run folder.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.certification.certificate import Certificate
from dpdist.certification.evaluation import EvaluatedModel, Evaluation
from dpdist.cluster.executor import (
    Executor,
    ExecutorName,
    check_executor_name,
    current_executor,
    open_executor,
    require_one_process,
)
from dpdist.cluster.session import count_local_cpus, require_gpus, require_workers
from dpdist.core import console
from dpdist.core.errors import Interrupted, UserError
from dpdist.core.files import read_json
from dpdist.evaluation import (
    data_units_row,
    evaluate_stage,
    load_subject,
    split_images,
)
from dpdist.runs.archive import Archive
from dpdist.runs.folder import DifferentRecipeError, RunFolder
from dpdist.runs.recipe import Recipe, field_error, refuse_unused, resolve_recipe
from dpdist.training.job import PACKAGES, CheckedTraining, TrainJob, check_training
from dpdist.training.records import data_source, load_test_records, records_with_canaries
from dpdist.training.trainer import place_training, train
from dpdist.tuning.search import Search, check_search

if TYPE_CHECKING:
    from dpdist.certification.subject import DatasetLike, Subject
    from dpdist.certification.table import CertificateTable


def run(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    runs: str | Path = "runs",
    name: str | None = None,
    data_root: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    context: str | None = None,
    executor: ExecutorName | None = None,
) -> RunFolder:
    """Run every stage that a recipe asks for: train, evaluate, certify, report.

    A stage whose results are already in the run's folder is not repeated, so the same call
    continues a run that was interrupted.

    Args:
        recipe: a validated recipe, the path or name of one, or its keys and values as a dict.
        runs: the folder of all runs.
        name: the run's name; None for the recipe's.
        data_root: the folder of data sets that the recipe names.
        changes: new values by dotted key, as in {"training.batch_size": 512}.
        context: first words of error messages; None for the recipe's path.
        executor: where it runs: "local" in this process, "ray" in a session of Ray, None by the
            size of each stage (`dpdist.cluster.executor`). No bit of the results depends on it.

    Returns:
        The `RunFolder` of the finished run: `dpdist.load_results` reads its guarantee and accuracy,
        and its `report_file` is the HTML report.

    Raises:
        UserError: the recipe, its data or the folder cannot be used.
        ClusterError: the cluster failed for good.

    Example:
        >>> import dpdist
        >>> recipe = dpdist.Recipe.model_validate({
        ...     "name": "small",
        ...     "data": {"name": "digits", "max_train": 200},
        ...     "model": {"name": "linear"},
        ...     "privacy": {"epsilon": 3, "delta": 1e-4},
        ...     "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.5},
        ...     "certify": {"sigma": 0.25, "n": 100, "max_inputs": 5},
        ... })
        >>> folder = dpdist.run(recipe)
        >>> folder.path.as_posix()
        'runs/small'
        >>> dpdist.load_results(folder).guarantee.epsilon <= 3
        True
    """
    context = context or (str(recipe) if isinstance(recipe, str | Path) else "recipe")
    recipe = resolve_recipe(recipe, changes=changes, name=name, data_root=data_root)
    searching = recipe.tune is not None
    trained = _train_and_evaluate(recipe, Path(runs), context, search=searching, executor=executor)
    with trained as (recipe, folder):
        if recipe.certify is not None:
            certify_stage(recipe, folder, recipe.certify)
        report_stage(folder)
    return folder


def train_only(
    recipe: Recipe,
    *,
    runs: str | Path = "runs",
    context: str = "recipe",
    executor: ExecutorName | None = None,
) -> RunFolder:
    """Train a recipe as it stands, without a search, and measure its accuracy. Raises as `run`."""
    trained = _train_and_evaluate(recipe, Path(runs), context, search=False, executor=executor)
    with trained as (_, folder):
        return folder


def tune(
    recipe: Recipe,
    *,
    runs: str | Path = "runs",
    context: str = "recipe",
    executor: ExecutorName | None = None,
) -> RunFolder:
    """Run the private search of a recipe alone, and measure the best trial's accuracy.

    executor: as in `run`. Raises as `run`, and
        dpdist.tuning.search.NoModelError.
    """
    if recipe.tune is None:
        raise UserError(
            f"{context}: tune: is required to search: the space and the distribution of trials"
        )
    trained = _train_and_evaluate(recipe, Path(runs), context, search=True, executor=executor)
    with trained as (_, folder):
        return folder


def tune_public(recipe: Recipe, *, runs: str | Path, context: str = "recipe") -> Any:
    """Sweep a recipe by its section tune on public records, by Ray Tune: NOT PRIVATE.

    Guarantee: none. The recipe says `privacy: none`, and every result says NOT PRIVATE. The same
    call continues after a kill.

    Args:
        recipe: with a section tune: its space, number of trials, score, searcher and asha.
        runs: gets the folder of the sweep, named as the recipe with -public.
        context: begins complaints.

    Returns:
        Ray Tune's ResultGrid.

    Raises:
        UserError: in one line, for a recipe that cannot be swept.
        ClusterError: the cluster failed for good.
    """
    from dpdist.tuning.public import tune_publicly

    folder = Path(runs) / f"{recipe.name}-public"
    refuse_elsewhere(recipe, context)
    if not folder.exists():
        refuse_unused(recipe, context)
    pretrain_stage(recipe, context)
    return tune_publicly(recipe, folder, context)


@contextmanager
def _train_and_evaluate(
    recipe: Recipe,
    runs: Path,
    context: str,
    *,
    search: bool,
    executor: ExecutorName | None = None,
) -> Iterator[tuple[Recipe, RunFolder]]:
    """Yield the recipe and the trained run with its executor open; then update its archive.

    The recipe it gives has the values that a search chose.
    """
    folder = RunFolder(runs / recipe.name)
    check_executor_name(executor)
    if executor == "local":
        asha = search and recipe.tune is not None and recipe.tune.asha is not None
        require_one_process(recipe.resources.max_workers, stops_early=asha)
    # Complaints come before anything is written, the archive is claimed and Ray started.
    recipe = statistics_stage(recipe, folder, context, search=search)
    checked = _check_run(recipe, folder, context, search=search)
    if not folder.training_summary.exists():
        require_workers(recipe.resources.min_workers, recipe.resources.cpus_per_worker)
        _require_gpus(recipe)
    if not folder.recipe_file.exists():  # a name is not taken by a run that its budget refuses
        checked.check_budget(context)
    work = checked.begin()
    resources = recipe.resources
    archive = Archive.claim(folder, resources.archive, resources.archive_private)
    if archive is not None:
        console.log(archive.notice)
    with run_session(folder, recipe.resources.min_cpus, executor) as opened:
        if isinstance(work, Search):
            search_stage(work, opened)
            recipe = folder.read_recipe()
        else:
            train_stage(work, opened)
        evaluate_stage(recipe, folder)
        yield recipe, folder
    archive_stage(folder)


def _check_run(
    recipe: Recipe,
    folder: RunFolder,
    context: str,
    *,
    search: bool,
    pretrain: bool = True,
) -> Search | CheckedTraining:
    """Return the search or training that a run will execute, after every check before it.

    Public pre-training is left out, since it is made up for first. Raises UserError.
    """
    refuse_elsewhere(recipe, context)
    if not folder.recipe_file.exists():
        refuse_unused(recipe, context)
    Archive.check_unclaimed(folder, recipe.resources.archive)
    check_evaluations(recipe, context)
    if pretrain:
        pretrain_stage(recipe, context)
    if search:
        return check_search(recipe, folder, context)
    return check_training(recipe, folder, context)


def refuse_elsewhere(recipe: Recipe, where: str) -> None:
    """Raise UserError for work on the training of a model that was trained elsewhere."""
    if (why := recipe.method.capabilities.trained_elsewhere) is not None:
        raise UserError(f"{where}: method.name: must be one that trains, got imported: {why}")


def dry_run(
    recipe: Recipe, *, runs: str | Path = "runs", context: str = "recipe"
) -> list[tuple[str, str]]:
    """Return name and value of each planned step of `run`, by the same checks.

    Nothing is written or trained. Where the folder holds a run of another recipe, the plan is that
    of a new run, and a row says why this name cannot have it. A row says so, too, where this
    machine has no room for the workers; a cluster may. Raises as `run` does before it begins.
    """
    from dpdist.training.estimate import describe_cost

    folder = RunFolder(Path(runs) / recipe.name)
    checked = partial(_check_run, recipe, search=recipe.tune is not None, pretrain=False)
    taken: list[tuple[str, str]] = []
    try:
        work = checked(folder, context)
    except DifferentRecipeError as error:
        taken = [("not under this name", str(error))]
        with tempfile.TemporaryDirectory() as empty:
            work = checked(RunFolder(Path(empty) / recipe.name), context)
    work.check_budget(context)
    units = data_units_row(recipe, load_test_records(recipe, data_source(recipe)))
    try:
        if not folder.training_summary.exists():
            require_workers(recipe.resources.min_workers, recipe.resources.cpus_per_worker)
            _require_gpus(recipe)
    except UserError as error:  # it may run elsewhere, which a plan made here cannot know
        taken.append(("not on this machine", str(error)))
    told = [("bought before", each.description) for each in recipe.statistics_phases]
    if isinstance(work, Search):
        trial, plan = work.example_trial()
        return [*taken, *work.describe(), *told, *describe_cost(trial, plan), *units]
    return [
        *taken,
        ("guarantee", str(work.recipe.guarantee_of(work.plan, work.plan.phases))),
        *_other_runs(work.recipe, folder, work.fingerprint),
        *told,
        *describe_cost(work.recipe, work.plan),
        *units,
    ]


def _other_runs(recipe: Recipe, folder: RunFolder, fingerprint: str) -> list[tuple[str, str]]:
    """Return a row of runs beside this one on the same records, unless a budget counts them.

    fingerprint: of the training records.
    """
    if recipe.privacy.budget is not None:
        return []
    own, others = folder.path, list[str]()
    for path in own.parent.glob("*/private/data.json"):
        other = RunFolder(path.parent.parent)
        if other.path.name != own.name and other.ledger.exists():
            with suppress(UserError):  # what is damaged is told where it is used
                if read_json(path, {"train": str})["train"] == fingerprint:
                    others.append(other.name)
    if not others:
        return []
    names = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
    said = f"{len(others)} trained on these records ({names}): their epsilons add up"
    if recipe.user_unit is None:
        said += "; privacy.budget would keep the sum below a ceiling"
    return [("other runs", said)]


def _require_gpus(recipe: Recipe) -> None:
    """Raise UserError, before Ray starts, for GPUs that this machine has not."""
    resources = recipe.resources
    need = resources.min_workers * resources.gpus_per_worker
    require_gpus("resources.gpus_per_worker", "training", need)
    if recipe.certify is not None:
        require_certifying_gpus(recipe)


def require_certifying_gpus(recipe: Recipe) -> None:
    """Raise UserError, before Ray starts, where no certifying actor could have its GPUs."""
    need = recipe.resources.certify_gpus or 0.0
    require_gpus("resources.certify_gpus", "each certifying actor", need)


@contextmanager
def run_session(
    folder: RunFolder | Path | None,
    training_cpus: float = 0,
    executor: ExecutorName | None = None,
) -> Iterator[Executor]:
    """Yield the executor of a command about this run.

    Args:
        folder: the run, in whose log file Ray's messages go, or that file; None drops them.
        training_cpus: CPUs that processes ask for. A session on this machine claims to have them
            even when the machine has fewer: replicas of a server then share, which is slower and
            changes nothing else. Training workers that the machine has no room for were refused
            before.
        executor: as in `run`.
    """
    here = count_local_cpus()
    cpus = max(here, math.ceil(training_cpus))
    try:
        log = folder.log if isinstance(folder, RunFolder) else folder
        with open_executor(executor, log_file=log, cpus=cpus) as opened:
            if cpus > here and opened.is_local:
                console.log(f"{cpus} CPUs asked for, this machine has {here}: slower")
            yield opened
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command continues where it stopped") from None


def archive_stage(folder: RunFolder) -> None:
    """Bring the run's archive up to date, if it has one."""
    archive = Archive.find(folder)
    if archive is not None:
        archive.update()
        console.log(f"archive: {archive.store.url} is up to date")


def pretrain_stage(recipe: Recipe, context: str) -> None:
    """Run the recipe's public pre-training, when it has one and its folder is not there yet."""
    if recipe.public is None or recipe.model.pretrained_part is None:
        return
    if recipe.model.pretrained_part[1].folder.exists():
        return
    from dpdist.training.pretraining import pretrain

    with console.progress("pretraining, WITHOUT privacy, on public records", "steps") as show:
        path, _ = pretrain(recipe, context, show)
    console.log(f"pretraining: {path}")


def statistics_stage(
    recipe: Recipe, folder: RunFolder, context: str, *, search: bool = False
) -> Recipe:
    """Return a recipe with the constants of its bought columns, bought unless the run has them.

    All that can be checked before is. Raises UserError as a run of the recipe does.
    """
    if recipe.statistics is None:
        return recipe
    if folder.recipe_file.exists():
        begun = folder.read_recipe()
        if folder.search_recipe_file.exists():
            begun = folder.read_search_recipe()
        known = begun.statistics
        return recipe if known is None else recipe.with_constants(known.constants)
    if recipe.statistics.constants:
        raise UserError(
            f"{context}: statistics.constants: must be left out in a new run, with range and "
            "missing of these columns under data.columns.preprocessing: they were bought for "
            "another run, whose cost this one does not count"
        )
    _check_run(recipe, folder, context, search=search)
    from dpdist.training.statistics import buy_for_recipe, statistics_folder

    path = statistics_folder(folder)
    bought = recipe.with_constants(buy_for_recipe(recipe, path))
    console.log(f"statistics: bought for {', '.join(recipe.statistics.columns)} ({path})")
    return bought


def train_stage(job: TrainJob, executor: Executor) -> None:
    """Train with differential privacy."""
    folder = job.folder
    if folder.training_summary.exists():
        train(job, executor)  # settles a budget that a crash left open
        console.log(f"training: finished before ({folder.training_summary})")
        return
    place = place_training(job, executor)
    done = job.recipe.guarantee_of(job.plan, job.plan.phases)
    work = job.recipe.method.describe(job.plan)
    if job.plan.steps:
        count = job.recipe.resources.worker_count_text
        work = f"{job.plan.steps:,} steps on {count} worker{'s' * (count != '1')}"
    console.log(f"training: {work}, {place}")
    console.log(f"training: when done, {done.row.text}")
    trained_on = read_json(folder.data_fingerprint, {"train": str})["train"]
    for name, said in _other_runs(job.recipe, folder, trained_on):
        console.log(f"training: {name}: {said}")
    with console.progress("training", "steps" if job.plan.steps else "models") as show:
        train(job, place, show, console.log)


def search_stage(search: Search, executor: Executor) -> None:
    """Run a private search; the folder then holds its best trial."""
    if search.run_folder.training_summary.exists():
        search.run(executor)
        console.log(f"search: finished before ({search.run_folder.model_folder})")
        return
    place = executor.place(False)
    console.log(f"search: {search.tune.num_trials.full_description}, {place}")
    console.log(f"search: when done, {search.cost.guarantee.row.text}")
    if search.tune.score.caution:
        console.log(f"search: {search.tune.score.caution}")
    live = sys.stderr.isatty()
    if search.tune.num_trials.name != "fixed" and not live:  # a log may be kept, and read by others
        console.log(
            "search: the number of trials is secret, and is not printed; only for you: "
            f"{search.folder.progress}"
        )
        search.run(place)
        console.log(f"search: done ({search.run_folder.path})")
        return
    if search.tune.num_trials.name != "fixed":
        console.log("search: the number of trials is secret: what follows is for your eyes only")
    with console.progress("search", "trials") as show:
        search.run(place, show)


def check_evaluations(recipe: Recipe, context: str) -> None:
    """Raise UserError for a certification that the test split could not carry.

    The check comes before a training has cost anything.
    """
    if recipe.certify is None:
        return
    dataset = load_test_records(recipe, data_source(recipe))
    if not recipe.certify.indices(len(dataset)):
        rule = f"must be below the {len(dataset):,} inputs of {dataset.name}"
        raise field_error(context, "certify.start", rule, recipe.certify.start)


def certify_stage(
    recipe: Recipe,
    folder: RunFolder,
    settings: Certificate,
    output: Path | None = None,
    subject: Subject | None = None,
    inputs: DatasetLike | None = None,
) -> CertificateTable:
    """Certify the test split; return the table.

    output: its folder; by default one in the run folder, named by the settings. subject: the run's
    model, where it was loaded. inputs: certified in place of the test split's.
    """
    from dpdist.certification.job import certify

    subject = subject or load_subject(recipe, folder)
    current_executor().check_nodes(PACKAGES, folder.private.resolve())
    with console.progress(f"certifying, {settings.folder_name}", "inputs", "draws") as show:
        found = certify(
            subject,
            load_test_records(recipe, data_source(recipe)) if inputs is None else inputs,
            settings,
            output or folder.certificates / settings.folder_name,
            actors=recipe.resources.certify_actors,
            progress=show,
            gpus=recipe.resources.certify_gpus,
            log=console.log,
        )
    if settings.backend is not None:  # of forms that nobody asked for, another one was as good
        for note in found.job_record["classifier"]["notes"]:
            console.log(f"certifying: {note}")
    return found


def evaluation_stage(
    recipe: Recipe,
    folder: RunFolder,
    evaluation: Evaluation,
    output: Path | None = None,
    actors: int | None = None,
) -> Path:
    """Evaluate the model; return the file of the results.

    output: its folder; by default one in the run folder, private for private results. Raises
    UserError for another one in which they would not stay so.
    """
    subject = load_subject(recipe, folder) if evaluation.needs_trained_model else None
    current_executor().check_nodes(PACKAGES, folder.private.resolve())
    output, recipe = evaluation.output_folder(folder, output), evaluation.data_recipe(recipe)
    source = data_source(recipe)
    from dpdist.cluster.resumable_job import run_job

    evaluated = EvaluatedModel(
        subject,
        load_test_records(recipe, source),
        lambda: records_with_canaries(recipe, source),
        recipe,
    )
    title = f"{evaluation.name}, {evaluation.folder_name}"
    actors = actors or recipe.resources.certify_actors
    with console.progress(title, evaluation.progress_unit) as show:
        run_job(evaluation.job_spec(evaluated), output, actors=actors, progress=show)
    return output / evaluation.file


def report_stage(
    folder: RunFolder, show_images: bool | None = None, *, reveal_date: bool = False
) -> None:
    """Write the HTML report from the folder's files and the test images that it may show.

    show_images: whether it may; None: as was asked last, and unasked only those of built-in data.
    reveal_date: as in `dpdist.reports.html.write_report`.
    """
    from dpdist.reports.html import IMAGES_NOT_REQUESTED, are_images_allowed, write_report

    recipe = folder.read_recipe()
    shown = are_images_allowed(folder, show_images, built_in=recipe.data.root is None)
    write_report(
        folder, split_images(recipe) if shown else IMAGES_NOT_REQUESTED, reveal_date=reveal_date
    )
