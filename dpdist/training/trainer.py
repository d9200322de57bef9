"""Start the training of a run on Ray Train, or continue it, and wait for its end."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpdist.cluster.session import CapacityMonitor, Session
from dpdist.cluster.versions import check_nodes
from dpdist.core.errors import ClusterError, DiskFullError, UserError
from dpdist.core.fields import Section
from dpdist.core.files import make_private_folder, remove_leftovers, write_atomic
from dpdist.privacy.ledger import JournalBusy, Ledger, wait_until_unlocked
from dpdist.runs.archive import Archive
from dpdist.runs.folder import RunFolder, verify_ledger
from dpdist.runs.recipe import Recipe
from dpdist.training import job as charging
from dpdist.training.job import PACKAGES, TrainJob
from dpdist.training.monitoring import WorkerChangeReporter
from dpdist.training.records import training_records

ProgressCallback = Callable[[int, int, float], None]  # done, total, per second
_SHUTDOWN_SECONDS = 5.0  # that workers of a command which was killed may live on


class RunBusy(ClusterError):
    """Another process is training the run."""


def train(
    job: TrainJob,
    session: Session,
    progress: ProgressCallback = lambda done, total, rate: None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train a prepared job to the end of its plan; a finished run returns at once.

    Worker failures are retried by Ray Train up to resources.max_failures times, each from the
    newest checkpoint as an exact replay.

    Args:
        job: from `dpdist.training.job.prepare`.
        session: the session of Ray that trains it, from `dpdist.connect`.
        progress: called with steps done, steps in all, and steps per second.
        log: hears of an archive that cannot be written, and of a cluster that has become too small.

    Returns:
        The summary of the training.

    Raises:
        RunBusy: another process trains the run; nothing was started or charged.
        UserError: the run cannot be trained here.
        ClusterError: the workers failed for good.

    Example:
        >>> import dpdist
        >>> from dpdist.training.job import prepare
        >>> from pathlib import Path
        >>> recipe = dpdist.Recipe.model_validate({
        ...     "name": "trained",
        ...     "data": {"name": "digits", "max_train": 200},
        ...     "model": {"name": "linear"},
        ...     "privacy": {"epsilon": 3, "delta": 1e-4},
        ...     "training": {"batch_size": 50, "steps": 3, "learning_rate": 0.5},
        ... })
        >>> job = prepare(recipe, dpdist.RunFolder(Path("runs/trained")), "recipe")
        >>> with dpdist.connect(cpus=2) as session:
        ...     dpdist.train(job, session)["steps"]
        3
    """
    folder = job.folder
    if not folder.training_summary.exists():
        _check_not_running(folder)
        remove_leftovers(folder.path, folder.private, folder.model_folder, folder.checkpoints)
        remove_leftovers(*folder.checkpoints.glob("step-*"))
    with _budget_charged(job):
        if not folder.training_summary.exists():
            _check_capacity(job.recipe, session)
            check_nodes(PACKAGES, folder.private)
            archive = Archive.find(folder)
            looks = [WorkerChangeReporter(folder, log).poll]
            if archive:
                looks.append(archive.make_updater(log))
            if not session.local:
                looks.append(_capacity_monitor(job.recipe, log).poll)
            _fit_and_poll(job, progress, looks)
    return folder.require_trained()


@contextmanager
def _budget_charged(job: TrainJob) -> Iterator[None]:
    """Charge the records' budget: the whole plan before the run, the real releases after it.

    Raises UserError, before anything runs, where the run does not fit under the recipe's ceiling.
    """
    recipe, plan, folder = job.recipe, job.plan, job.folder
    if recipe.privacy.budget is None:
        yield
        return
    records, where = training_records(recipe, job.source), str(folder.recipe_file)
    mine: str | None = None
    if not folder.training_summary.exists():
        # In the ledger first: of two copies that go on, each is charged for what is left.
        with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
            verify_ledger(folder, plan, ledger)
            mine = ledger.announce_process()
        charging.reserve_charge(recipe, records, charging.build_charge(recipe, folder, mine), where)
    try:
        yield
    finally:
        charge = charging.build_charge(recipe, folder, mine)
        if folder.training_summary.exists():
            charging.settle_charge(recipe, records, charge, where)
        else:
            charging.reserve_charge(recipe, records, charge, where, enforce=False)


@dataclass(frozen=True)
class _TrainingDriver:
    """A training in the hands of the driver (`dpdist.methods.base.TrainingDriver`)."""

    job: TrainJob
    start_workers: Callable[[TrainJob], None]  # training workers
    in_process: bool = False
    started_at: float = field(default_factory=time.monotonic)

    def run_workers(self, records: Any = None) -> None:
        self.start_workers(
            self.job if records is None else replace(self.job, replacement_records=records)
        )

    def train_teachers(self, count: int, sections: Mapping[str, Section] | None = None) -> Any:
        from dpdist.training.ensembles import train_teachers

        return train_teachers(self.job, count, sections, in_process=self.in_process)

    def release_once(
        self, private_source: bytes, draw: Callable[[bytes], Sequence[float]]
    ) -> list[float]:
        from dpdist.training.ensembles import release_once

        return release_once(self.job, private_source, draw)

    def write_summary(self) -> None:
        from dpdist.training.monitoring import write_summary

        job = self.job
        with Ledger.open(job.folder.ledger, job.plan.fingerprint()) as ledger:
            verify_ledger(job.folder, job.plan, ledger)
            seconds = time.monotonic() - self.started_at
            write_summary(job.folder, ledger, 0, seconds, fallback_layers=[])


def fit(
    job: TrainJob,
    *,
    max_failures: int | None = None,
    stop_after: int | None = None,
    callbacks: Sequence[Any] = (),
    start_workers: Callable[[TrainJob], None] | None = None,
    in_process: bool = False,
) -> None:
    """Train a prepared job as its method does: on Ray Train, from its newest checkpoint if any.

    max_failures: restarts by Ray (default: resources.max_failures). stop_after: pause after so many
    steps. callbacks: for Ray's run configuration. start_workers: in place of Ray Train. in_process:
    teachers are trained in this process, as in a search's trial, which holds what it needs. Raises
    UserError, ClusterError.
    """
    restarts = job.recipe.resources.max_failures if max_failures is None else max_failures
    on_ray = lambda it: _fit_on_ray(it, restarts, stop_after, callbacks)  # noqa: E731
    job.recipe.method.execution().train(_TrainingDriver(job, start_workers or on_ray, in_process))


def _fit_on_ray(
    job: TrainJob, restarts: int, stop_after: int | None, callbacks: Sequence[Any]
) -> None:
    import ray.train
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from dpdist.training.rendezvous import ManualProcessGroupConfig
    from dpdist.training.worker import train_worker

    resources = job.recipe.resources
    count = (
        (resources.min_workers, resources.max_workers)
        if resources.is_elastic
        else resources.max_workers
    )
    per_worker: dict[str, float] = {"CPU": resources.cpus_per_worker}
    if resources.gpus_per_worker:
        per_worker["GPU"] = resources.gpus_per_worker
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"job": job, "until": stop_after},
        torch_config=ManualProcessGroupConfig(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=count,  # type: ignore[arg-type]  # its base class's type
            use_gpu=resources.gpus_per_worker > 0,
            resources_per_worker=per_worker,
        ),
        run_config=ray.train.RunConfig(
            # Checkpoints are ours (private/checkpoints); Ray's own folder holds no state we read.
            name=f"train-{time.time_ns()}",
            storage_path=str(make_private_folder(job.folder.private / "ray")),
            failure_config=ray.train.FailureConfig(max_failures=restarts),
            callbacks=list(callbacks),
        ),
    )
    job.folder.failure.unlink(missing_ok=True)
    try:
        trainer.fit()
    except TrainingFailedError as error:
        raise _training_error(job.folder, str(error), restarts) from error
    finally:
        if job.folder.failure.exists():
            raise _worker_error(job.folder)


def _check_not_running(folder: RunFolder) -> None:
    """Raise RunBusy where another process holds the run's ledger."""
    try:
        wait_until_unlocked(folder.ledger, _SHUTDOWN_SECONDS)
    except JournalBusy:
        raise RunBusy(
            f"{folder.path}: another process is training this run; wait for it, or end it, and "
            "the same command continues"
        ) from None


def _training_error(folder: RunFolder, message: str, restarts: int) -> ClusterError:
    """Return the error to raise for workers that failed for good."""
    try:
        _check_not_running(folder)  # it may have come first since `train` looked
    except RunBusy as busy:
        return busy  # and nothing is left in the other's folder
    write_atomic(folder.errors, message)
    return ClusterError(
        f"training failed {restarts + 1} times; the same command continues it from its last "
        f"checkpoint. Details, which may be private: {folder.errors}"
    )


def _worker_error(folder: RunFolder) -> UserError:
    """Return the error that a worker left for the driver; it names only the file on a full disk."""
    said = json.loads(folder.failure.read_text() or "{}")
    if said and not said["full"]:
        return UserError(said["error"])
    what = said.get("error") or f"{folder.path}: {os.strerror(errno.ENOSPC)}"
    return DiskFullError(f"{what}; make room, and the same command continues")


def _check_capacity(recipe: Recipe, session: Session) -> None:
    """Refuse at once a training that waits forever, since a local session never grows."""
    resources = recipe.resources
    cpus = resources.min_cpus
    gpus = resources.min_workers * resources.gpus_per_worker
    if session.local and (cpus > session.cpus or gpus > session.gpus):
        raise ClusterError(
            f"resources: {resources.min_workers} workers need {cpus:g} CPUs and {gpus:g} GPUs, "
            f"{session} has "
            f"{session.cpus:g} and {session.gpus:g}"
        )


def _capacity_monitor(recipe: Recipe, log: Callable[[str], None]) -> CapacityMonitor:
    resources = recipe.resources
    need = {"CPU": resources.min_cpus, "GPU": resources.min_workers * resources.gpus_per_worker}
    return CapacityMonitor("training", need, log)


def _fit_and_poll(
    job: TrainJob, progress: ProgressCallback, polls: Sequence[Callable[[], None]]
) -> None:
    """Fit in a thread, show progress and call `polls` meanwhile.

    Ray would take Ctrl-C from the main thread.
    """
    errors: list[BaseException] = []

    def fit_and_keep_errors() -> None:
        try:
            fit(job)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit_and_keep_errors, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        _report_progress(job.folder.progress, progress)
        for look in polls:
            look()
    polls[0]()  # nobody may have looked since the last change
    if errors:
        raise errors[0]


def _report_progress(path: Path, progress: ProgressCallback) -> None:
    """Report the last progress that worker 0 wrote."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    progress(state["done"], state["steps"], state["rate"])
