"""Run the stages of a recipe in order: train, evaluate, certify, report.

Each stage is skipped when its results are already in the run folder.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist.certification.certificate import Certificate
from dpdist.certification.evaluation import Evaluation, Subject
from dpdist.cluster.session import Session, connect, require_gpus
from dpdist.cluster.versions import check_nodes
from dpdist.core import console, optional_imports
from dpdist.core.errors import Interrupted, UserError
from dpdist.evaluation import evaluate_stage, require_model, split_images
from dpdist.runs.archive import Archive
from dpdist.runs.folder import OtherRun, RunFolder
from dpdist.runs.recipe import Recipe, field_error, refuse_unused, resolve
from dpdist.training.job import PACKAGES, CheckedTraining, TrainJob
from dpdist.training.job import check as check_training
from dpdist.training.records import evaluation_data, source_of, training_data
from dpdist.training.trainer import train
from dpdist.tuning.search import Search
from dpdist.tuning.search import check as check_search

if TYPE_CHECKING:
    from dpdist.certification.job import Data


def run(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    runs: str | Path = "runs",
    name: str | None = None,
    data_root: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    where: str | None = None,
) -> RunFolder:
    """Run every stage that a recipe asks for: train, evaluate, certify, report.

    A stage whose results are in the run's folder already is not done again, so that the same call
    continues a run that was interrupted.

    Args:
        recipe: a validated recipe, the path or name of one, or its keys and values as a dict.
        runs: the folder of all runs.
        name: the run's name; None for the recipe's.
        data_root: the folder of data sets that the recipe names.
        changes: new values by dotted key, as in {"training.batch_size": 512}.
        where: begins complaints; None for the recipe's path.

    Returns:
        The run's folder.

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
        >>> dpdist.read_facts(folder).guarantee.epsilon <= 3
        True
    """
    where = where or (str(recipe) if isinstance(recipe, str | Path) else "recipe")
    recipe = resolve(recipe, changes=changes, name=name, data_root=data_root)
    searching = recipe.tune is not None
    with _trained(recipe, Path(runs), where, search=searching) as (recipe, folder):
        if recipe.certify is not None:
            certify_stage(recipe, folder, recipe.certify)
        report_stage(folder)
    return folder


def train_alone(recipe: Recipe, *, runs: str | Path = "runs", where: str = "recipe") -> RunFolder:
    """Train a recipe as it stands, without a search, and measure its accuracy. Raises as `run`."""
    with _trained(recipe, Path(runs), where, search=False) as (_, folder):
        return folder


def tune(
    recipe: Recipe, *, runs: str | Path = "runs", where: str = "recipe", only_resume: bool = False
) -> RunFolder:
    """Run the private search of a recipe alone, and measure the best trial's accuracy.

    only_resume: refuse to begin a new search. Raises as `run`, and dpdist.tuning.search.NoModel.
    """
    if recipe.tune is None:
        raise UserError(f"{where}: tune: is required to search: the space and the law of trials")
    trained = _trained(recipe, Path(runs), where, search=True, only_resume=only_resume)
    with trained as (_, folder):
        return folder


@contextmanager
def _trained(
    recipe: Recipe, runs: Path, where: str, *, search: bool, only_resume: bool = False
) -> Iterator[tuple[Recipe, RunFolder]]:
    """Yield the recipe and the trained run with its Ray session open; then update its archive.

    The recipe it gives has the values that a search chose.
    """
    folder = RunFolder(runs / recipe.name)
    # Complaints come before anything is written, the archive is claimed and Ray started.
    checked = _checked(recipe, folder, where, search=search, only_resume=only_resume)
    Archive.check_writable(folder, recipe.resources.archive)
    if not folder.trained.exists():
        _require_gpus(recipe)
    work = checked.begin()
    begin_archive(recipe, folder)
    with session(folder, recipe.resources.cpus) as ray_session:
        if isinstance(work, Search):
            search_stage(work, ray_session)
            recipe = folder.read_recipe()
        else:
            train_stage(work, ray_session)
        evaluate_stage(recipe, folder)
        yield recipe, folder
    archive_stage(folder)


def _checked(
    recipe: Recipe,
    folder: RunFolder,
    where: str,
    *,
    search: bool,
    only_resume: bool = False,
    pretrain: bool = True,
) -> Search | CheckedTraining:
    """Return the search or training that a run will execute, after every check before it.

    Public pre-training is left out, since it is made up for first. Raises UserError.
    """
    refuse_elsewhere(recipe, where)
    if not folder.recipe_file.exists():
        refuse_unused(recipe, where)
    Archive.check_free(folder, recipe.resources.archive)
    check_evaluations(recipe, where)
    if pretrain:
        public_stage(recipe, where)
    if search:
        return check_search(recipe, folder, where, only_resume=only_resume)
    return check_training(recipe, folder, where)


def refuse_elsewhere(recipe: Recipe, where: str) -> None:
    """Raise UserError for work on the training of a model that was trained elsewhere."""
    if (why := recipe.method.trained_elsewhere) is not None:
        raise UserError(f"{where}: method.name: must be one that trains, got imported: {why}")


def dry_run(
    recipe: Recipe, *, runs: str | Path = "runs", where: str = "recipe"
) -> list[tuple[str, str]]:
    """Return name and value of each planned step of `run`, by the same checks.

    Nothing is written or trained. Where the folder holds a run of another recipe, the plan is that
    of a new run, and a row says why this name cannot have it. Raises as `run` does before it
    begins.
    """
    from dpdist.training.model_setup import describe_cost

    folder = RunFolder(Path(runs) / recipe.name)
    checked = partial(_checked, recipe, search=recipe.tune is not None, pretrain=False)
    taken: list[tuple[str, str]] = []
    try:
        work = checked(folder, where)
    except OtherRun as error:
        taken = [("not under this name", str(error))]
        with tempfile.TemporaryDirectory() as empty:
            work = checked(RunFolder(Path(empty) / recipe.name), where)
    if isinstance(work, Search):
        trial, plan = work.example()
        return [*taken, *work.describe(), *describe_cost(trial, plan)]
    return [
        *taken,
        ("guarantee", str(work.plan.guarantee())),
        *describe_cost(work.recipe, work.plan),
    ]


def _require_gpus(recipe: Recipe) -> None:
    """Raise UserError, before Ray starts, for GPUs that this machine has not."""
    resources = recipe.resources
    what = "training" if resources.least == 1 else f"a training of {resources.least} workers"
    need = resources.least * resources.gpus_per_worker
    require_gpus("resources.gpus_per_worker", what, need)
    if recipe.certify is not None:
        require_certifying_gpus(recipe)


def require_certifying_gpus(recipe: Recipe) -> None:
    """Raise UserError, before Ray starts, where no certifying actor could have its GPUs."""
    need = recipe.resources.certify_gpus or 0.0
    require_gpus("resources.certify_gpus", "each certifying actor", need)


@contextmanager
def session(folder: RunFolder | Path | None, workers_cpus: float = 0) -> Iterator[Session]:
    """Yield the Ray session of a command about this run.

    Ray's messages go into the run's log file, or into the file named; None: nowhere.

    workers_cpus: CPUs the training workers ask for. A local session claims to have them even when
    the machine has fewer: the workers then share, which is slower and changes nothing else.
    """
    here = len(os.sched_getaffinity(0))
    cpus = max(here, math.ceil(workers_cpus))
    try:
        log = folder.log if isinstance(folder, RunFolder) else folder
        with connect(
            log, cpus=cpus, worker_setup=optional_imports.install_torchvision_hook
        ) as ray_session:
            if ray_session.local and cpus > here:
                console.say(f"training: {cpus} CPUs asked for, this machine has {here}: slower")
            yield ray_session
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command continues where it stopped") from None


def begin_archive(recipe: Recipe, folder: RunFolder) -> None:
    """Claim the archive that the recipe asks for, before anything is computed."""
    resources = recipe.resources
    archive = Archive.begin(folder, resources.archive, resources.archive_private)
    if archive is not None:
        console.say(archive.notice)


def archive_stage(folder: RunFolder) -> None:
    """Bring the run's archive up to date, if it has one."""
    archive = Archive.of(folder)
    if archive is not None:
        archive.update()
        console.say(f"archive: {archive.store.url} is up to date")


def public_stage(recipe: Recipe, where: str) -> None:
    """Run the recipe's public pre-training, when it has one and its folder is not there yet."""
    if recipe.public is None or recipe.model.pretrained is None:
        return
    if recipe.model.pretrained[1].folder.exists():
        return
    from dpdist.training.pretraining import pretrain

    with console.progress("pretraining, WITHOUT privacy, on public records", "steps") as show:
        path, _ = pretrain(recipe, where, show)
    console.say(f"pretraining: {path}")


def train_stage(job: TrainJob, ray_session: Session) -> None:
    """Train with differential privacy on Ray Train."""
    folder = job.folder
    if folder.trained.exists():
        train(job, ray_session)  # settles a budget that a crash left open
        console.say(f"training: finished before ({folder.trained})")
        return
    console.say(f"training: {_work(job)}, {ray_session}; when done: {job.plan.guarantee()}")
    with console.progress("training", "steps" if job.plan.steps else "models") as show:
        train(job, ray_session, show, console.say)


def _work(job: TrainJob) -> str:
    if not job.plan.steps:
        return job.recipe.method.words(job.plan)
    return f"{job.plan.steps:,} steps on {job.recipe.resources.span} workers"


def search_stage(search: Search, ray_session: Session) -> None:
    """Run a private search on Ray Tune; the folder then holds its best trial."""
    if search.run_folder.trained.exists():
        search.run(ray_session)
        console.say(f"search: finished before ({search.run_folder.model})")
        return
    console.say(
        f"search: {search.tune.law.in_full}, {ray_session}; when done: {search.cost.guarantee}"
    )
    if search.tune.law.name != "fixed":
        console.say("search: the number of trials is secret: what follows is for your eyes only")
    with console.progress("search", "trials") as show:
        search.run(ray_session, show)


def check_evaluations(recipe: Recipe, where: str) -> None:
    """Raise UserError for a certification that the test split could not carry.

    The check comes before a training has cost anything.
    """
    if recipe.certify is None:
        return
    dataset = evaluation_data(recipe, source_of(recipe))
    if not recipe.certify.indices(len(dataset)):
        rule = f"must be below the {len(dataset):,} inputs of {dataset.name}"
        raise field_error(where, "certify.start", rule, recipe.certify.start)


def _shared(recipe: Recipe, folder: RunFolder, actors: int | None) -> dict[str, Any]:
    """Return the arguments that certification and attacks share, after the checks before them."""
    require_model(recipe, folder)
    check_nodes(PACKAGES, folder.private.resolve())
    return {
        "actors": actors or recipe.resources.certify_actors,
        "trusted_factory": recipe.model.name,
    }


def certify_stage(
    recipe: Recipe,
    folder: RunFolder,
    settings: Certificate,
    output: Path | None = None,
    actors: int | None = None,
    inputs: Data | None = None,
) -> Path:
    """Certify the test split on Ray actors; return the table's path.

    output: its folder; by default one in the run folder, named by the settings. inputs: certified
    in place of the test split's.
    """
    shared = _shared(recipe, folder, actors)
    from dpdist.certification.job import TABLE, certify
    from dpdist.certification.table import about

    output = output or folder.certificates / settings.folder_name
    with console.progress(f"certifying, {settings.folder_name}", "inputs", "draws") as show:
        table = certify(
            folder.model,
            evaluation_data(recipe, source_of(recipe)) if inputs is None else inputs,
            settings,
            output,
            progress=show,
            gpus=recipe.resources.certify_gpus,
            say=console.say,
            **shared,
        )
    if settings.form is not None:  # of forms that nobody asked for, another one was as good
        for note in about(table)["classifier"]["notes"]:
            console.say(f"certifying: {note}")
    return output / TABLE


def evaluation_stage(
    recipe: Recipe,
    folder: RunFolder,
    evaluation: Evaluation,
    output: Path | None = None,
    actors: int | None = None,
) -> Path:
    """Evaluate the model on Ray actors; return the file of the results.

    output: its folder; by default one in the run folder, private for private results. Raises
    UserError for another one in which they would not stay so.
    """
    if evaluation.of_trained:
        require_model(recipe, folder)
    check_nodes(PACKAGES, folder.private.resolve())
    output, recipe = evaluation.place(folder, output), evaluation.recipe_of(recipe)
    source = source_of(recipe)
    from dpdist.cluster.resumable_job import run as run_job

    subject = Subject(
        folder.model,
        evaluation_data(recipe, source),
        lambda: training_data(recipe, source),
        recipe.model.name,
        recipe,
    )
    title = f"{evaluation.name}, {evaluation.folder_name}"
    actors = actors or recipe.resources.certify_actors
    with console.progress(title, evaluation.unit) as show:
        run_job(evaluation.work(subject), output, actors=actors, progress=show)
    return output / evaluation.file


def report_stage(folder: RunFolder, images: bool | None = None, *, dated: bool = False) -> None:
    """Write the HTML report from the folder's files and the test images that it may show.

    images: whether it may; None: as was asked last, and unasked only those of built-in data.
    dated: as in `dpdist.reports.html.write_report`.
    """
    from dpdist.reports.html import UNASKED, allowed, write_report

    recipe = folder.read_recipe()
    shown = allowed(folder, images, built_in=recipe.data.root is None)
    write_report(folder, split_images(recipe) if shown else UNASKED, dated=dated)


def summary(folder: RunFolder) -> list[tuple[str, str]]:
    """Return name and value of each line that a finished run shows at its end."""
    from dpdist.reports.facts import read_facts

    return read_facts(folder).summary()
