"""Run the stages of a recipe in order: train, evaluate, certify, report.

Each stage is skipped if its results are already in the run folder.
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
from dpdist.cluster.versions import PACKAGES
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
from dpdist.training.job import CheckedTraining, TrainJob, check_training
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

    A stage whose results are already in the run's folder is not repeated, so the same call resumes
    an interrupted run.

    Args:
        recipe: a validated recipe, the path or name of one, or its keys and values as a dict.
        runs: the folder of all runs.
        name: the run's name; None for the recipe's.
        data_root: the folder of data sets that the recipe names.
        changes: new values by dotted key, as in {"training.batch_size": 512}.
        context: first words of error messages; None for the recipe's path.
        executor: "local" runs it in this process, "ray" in a session of Ray, and None chooses by
            the size of each stage (`dpdist.cluster.executor`). It does not affect the results.

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
    """Train a recipe without a search, and measure its accuracy. Raises as `run`."""
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
    """Run only the private search of a recipe, and measure the best trial's accuracy.

    executor: as in `run`. Raises as `run`, and dpdist.tuning.search.NoModelError.
    """
    if recipe.tune is None:
        raise UserError(f"{context}: tune: must be given: the space and the number of trials")
    trained = _train_and_evaluate(recipe, Path(runs), context, search=True, executor=executor)
    with trained as (_, folder):
        return folder


def tune_public(recipe: Recipe, *, runs: str | Path, context: str = "recipe") -> Any:
    """Tune a recipe on public records with Ray Tune, as its section tune says: NOT PRIVATE.

    Guarantee: none. The recipe has `privacy: none`, and every result is labeled NOT PRIVATE. The
    same call resumes an interrupted sweep.

    Args:
        recipe: a recipe with a section tune: space, number of trials, score, searcher and asha.
        runs: the folder for the sweep's folder, which has the recipe's name with -public.
        context: first words of error messages.

    Returns:
        Ray Tune's ResultGrid.

    Raises:
        UserError: the recipe cannot be tuned this way; one line.
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

    The recipe has the values that a search chose.
    """
    folder = RunFolder(runs / recipe.name)
    check_executor_name(executor)
    if executor == "local":
        asha = search and recipe.tune is not None and recipe.tune.asha is not None
        require_one_process(recipe.resources.max_workers, stops_early=asha)
    # All checks come before anything is written, the archive is claimed, and Ray is started.
    recipe = statistics_stage(recipe, folder, context, search=search)
    checked = _check_run(recipe, folder, context, search=search)
    if not folder.training_summary.exists():
        require_workers(recipe.resources.min_workers, recipe.resources.cpus_per_worker)
        _require_gpus(recipe)
    if not folder.recipe_file.exists():  # so that a run beyond its budget creates no folder
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
    """Return the search or training of a run after all checks, and after public pre-training.

    pretrain: False omits the pre-training. Raises UserError.
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
    """Raise UserError for training a model that was trained elsewhere."""
    if (why := recipe.method.capabilities.trained_elsewhere) is not None:
        raise UserError(f"{where}: method.name: must be one that trains, got imported: {why}")


def dry_run(
    recipe: Recipe, *, runs: str | Path = "runs", context: str = "recipe"
) -> list[tuple[str, str]]:
    """Return name and value of the plan of `run`, after the same checks.

    Nothing is written or trained. If the folder contains a run of a different recipe, the plan is
    that of a new run, and a row says why it needs a different name. If this machine has too few
    resources for the workers, a row says that too. Raises as `run` does before it starts.
    """
    from dpdist.training.estimate import describe_cost

    folder = RunFolder(Path(runs) / recipe.name)
    checked = partial(_check_run, recipe, search=recipe.tune is not None, pretrain=False)
    warnings: list[tuple[str, str]] = []
    try:
        work = checked(folder, context)
    except DifferentRecipeError as error:
        warnings = [("not under this name", str(error))]
        with tempfile.TemporaryDirectory() as empty:
            work = checked(RunFolder(Path(empty) / recipe.name), context)
    work.check_budget(context)
    units = data_units_row(recipe, load_test_records(recipe, data_source(recipe)))
    try:
        if not folder.training_summary.exists():
            require_workers(recipe.resources.min_workers, recipe.resources.cpus_per_worker)
            _require_gpus(recipe)
    except UserError as error:  # it may run on a different machine
        warnings.append(("not on this machine", str(error)))
    bought = [("bought before", each.description) for each in recipe.statistics_phases]
    if isinstance(work, Search):
        trial, plan = work.example_trial()
        return [*warnings, *work.describe(), *bought, *describe_cost(trial, plan), *units]
    return [
        *warnings,
        ("guarantee", str(work.recipe.guarantee_of(work.plan, work.plan.phases))),
        *_other_runs(work.recipe, folder, work.fingerprint),
        *bought,
        *describe_cost(work.recipe, work.plan),
        *units,
    ]


def _other_runs(recipe: Recipe, folder: RunFolder, fingerprint: str) -> list[tuple[str, str]]:
    """Return a row about other runs on the same records, unless a budget counts them.

    fingerprint: that of the training records. Runs on another part of the same data set count too:
    a search holds records out, and an audit adds canaries.
    """
    if recipe.privacy.budget is not None:
        return []

    def data_set(about: Recipe) -> tuple[object, ...] | None:
        data = about.data
        return (data.name, data.root, data.train) if about.by_script is None else None

    own, others = folder.path, list[str]()
    for path in own.parent.glob("*/private/data.json"):
        other = RunFolder(path.parent.parent)
        if other.path.name != own.name and other.ledger.exists():
            with suppress(UserError):  # damage is reported where the file is used
                theirs = data_set(other.read_recipe())
                same = read_json(path, {"train": str})["train"] == fingerprint
                if same or (theirs is not None and theirs == data_set(recipe)):
                    others.append(other.name)
    if not others:
        return []
    names = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
    text = f"{len(others)} trained on records of this data set ({names}): their epsilons add up"
    if recipe.user_unit is None:
        text += "; set privacy.budget to keep the sum below a ceiling"
    return [("other runs", text)]


def _require_gpus(recipe: Recipe) -> None:
    """Raise UserError, before Ray starts, if this machine has too few GPUs."""
    resources = recipe.resources
    need = resources.min_workers * resources.gpus_per_worker
    require_gpus("resources.gpus_per_worker", "training", need)
    if recipe.certify is not None:
        require_certifying_gpus(recipe)


def require_certifying_gpus(recipe: Recipe) -> None:
    """Raise UserError, before Ray starts, if a certifying actor cannot get its GPUs."""
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
        folder: the run whose log file takes Ray's messages, or a file; None drops them.
        training_cpus: CPUs that processes request. A session on this machine offers them even if
            the machine has fewer: processes then share CPUs, which is only slower.
        executor: as in `run`.
    """
    here = count_local_cpus()
    cpus = max(here, math.ceil(training_cpus))
    try:
        log = folder.log if isinstance(folder, RunFolder) else folder
        with open_executor(executor, log_file=log, cpus=cpus) as opened:
            if cpus > here and opened.is_local:
                console.log(f"{cpus} CPUs requested, this machine has {here}: this is slower")
            yield opened
    except KeyboardInterrupt:
        raise Interrupted("interrupted; repeat the command or script to resume") from None


def archive_stage(folder: RunFolder) -> None:
    """Bring the run's archive up to date, if it has one."""
    archive = Archive.find(folder)
    if archive is not None:
        archive.update()
        console.log(f"archive: {archive.store.url} is up to date")


def pretrain_stage(recipe: Recipe, context: str) -> None:
    """Run the recipe's public pre-training, if it has one and its folder does not exist."""
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
    """Return a recipe with the constants of its bought columns, buying them for a new run.

    All other checks come first. Raises UserError as a run of the recipe does.
    """
    if recipe.statistics is None:
        return recipe
    if folder.recipe_file.exists():
        searched = folder.search_recipe_file.exists()
        known = (folder.read_search_recipe() if searched else folder.read_recipe()).statistics
        return recipe if known is None else recipe.with_constants(known.constants)
    if recipe.statistics.constants:
        raise UserError(
            f"{context}: statistics.constants: must be left out in a new run, and so must range "
            "and missing of these columns under data.columns.preprocessing: they were bought for "
            "a different run, which epsilon of this run does not cover"
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
        console.log(f"training: already finished ({folder.training_summary})")
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
    for name, text in _other_runs(job.recipe, folder, trained_on):
        console.log(f"training: {name}: {text}")
    with console.progress("training", "steps" if job.plan.steps else "models") as show:
        train(job, place, show, console.log)


def search_stage(search: Search, executor: Executor) -> None:
    """Run a private search; the folder then contains its best trial."""
    if search.run_folder.training_summary.exists():
        search.run(executor)
        console.log(f"search: already finished ({search.run_folder.model_folder})")
        return
    place = executor.place(False)
    console.log(f"search: {search.tune.num_trials.full_description}, {place}")
    console.log(f"search: when done, {search.cost.guarantee.row.text}")
    if search.tune.score.caution:
        console.log(f"search: {search.tune.score.caution}")
    secret = search.tune.num_trials.name != "fixed"
    if secret and not sys.stderr.isatty():  # others may read the log later
        console.log(
            "search: the number of trials is secret, so progress is not printed; see "
            f"{search.folder.progress}, and do not publish it"
        )
        search.run(place)
        console.log(f"search: done ({search.run_folder.path})")
        return
    if secret:
        console.log("search: the number of trials is secret: do not publish the following lines")
    with console.progress("search", "trials") as show:
        search.run(place, show)


def check_evaluations(recipe: Recipe, context: str) -> None:
    """Raise UserError for a certification without test inputs, before a training uses epsilon."""
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
    """Certify the test split, and return the table.

    output: its folder; by default one in the run folder, named by the settings. subject: the run's
    model, if it is already loaded. inputs: the inputs to certify instead of the test split.
    """
    from dpdist.certification.job import certify

    subject = subject or load_subject(recipe, folder)
    current_executor().check_nodes(PACKAGES, folder.private.resolve())
    with console.progress(f"certifying, {settings.folder_name}", "inputs", "samples") as show:
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
    if settings.backend is not None:  # notes are about a backend that the user chose
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
    """Evaluate the model, and return the file of the results.

    output: its folder; by default one in the run folder, in private/ for private results. Raises
    UserError for a folder in which private results would not stay private.
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

    show_images: whether to show test images; None repeats the last choice, by default only images
    of built-in data. reveal_date: as in `dpdist.reports.html.write_report`.
    """
    from dpdist.reports.html import IMAGES_NOT_REQUESTED, are_images_allowed, write_report

    recipe = folder.read_recipe()
    shown = are_images_allowed(folder, show_images, built_in=recipe.data.root is None)
    write_report(
        folder, split_images(recipe) if shown else IMAGES_NOT_REQUESTED, reveal_date=reveal_date
    )
