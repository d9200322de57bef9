"""Start the training of a run, or continue it, where its executor says; wait for its end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpdist.cluster.executor import (
    SMALL_TRAINING,
    Executor,
    LocalExecutor,
    RayExecutor,
    open_executor,
)
from dpdist.cluster.session import CapacityMonitor, Session
from dpdist.cluster.versions import PACKAGES
from dpdist.cluster.work import MAX_PREEMPTIONS, WorkerGroup, WorkersFailedError
from dpdist.core.errors import ClusterError, DiskFullError, UserError, is_disk_full
from dpdist.core.fields import Section
from dpdist.core.files import make_private_folder, remove_leftovers, write_atomic
from dpdist.privacy.ledger import (
    JournalBusy,
    Ledger,
    LedgerError,
    ReplayConflict,
    wait_until_unlocked,
)
from dpdist.runs import charging
from dpdist.runs.archive import Archive
from dpdist.runs.folder import RunFolder, verify_ledger
from dpdist.training.job import TrainJob
from dpdist.training.monitoring import (
    WorkerChangeReporter,
    is_stop_requested,
    stopped_between_steps,
    write_summary,
)
from dpdist.training.records import training_records

ProgressCallback = Callable[[int, int, float], None]  # done, total, per second
_SHUTDOWN_SECONDS = 5.0  # in which the workers of a killed command end


class RunBusy(ClusterError):
    """A different process is training the run."""


def train(
    job: TrainJob,
    session: Session | Executor | None = None,
    progress: ProgressCallback = lambda done, total, rate: None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train a prepared job to the end of its plan; a finished run returns at once.

    Failures of workers are retried up to resources.max_failures times, each from the newest
    checkpoint as an exact replay.

    Args:
        job: from `dpdist.training.job.prepare`.
        session: where it trains: a session of Ray from `dpdist.connect`, or an executor; None for
            the enclosing one, else this process if the training is small, or a new session.
        progress: called with steps done, steps in all, and steps per second.
        log: function that gets a line (str) if an archive cannot be written, or a cluster has
            become too small.

    Returns:
        The summary of the training, a dict of JSON values, as in private/trained.json: "steps"
        (int), "seconds" (float, the duration), "model" (str, hash of the trained model) and others.

    Raises:
        RunBusy: a different process trains the run; nothing was started or added to the budget.
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
        >>> dpdist.train(job)["steps"]
        3
    """
    if isinstance(session, Session):
        session = RayExecutor(session)
    if session is None:
        with open_executor(log_file=job.folder.log) as executor:
            return train(job, executor, progress, log)
    folder, executor = job.folder, place_training(job, session)
    with _only_command(folder):
        if not folder.training_summary.exists():
            if isinstance(executor, LocalExecutor):
                from dpdist.training.worker import require_current_code

                require_current_code(job.recipe, folder.path)
            remove_leftovers(folder.path, folder.private, folder.model_folder, folder.checkpoints)
            remove_leftovers(*folder.checkpoints.glob("step-*"))
        with _budget_charged(job):
            if not folder.training_summary.exists():
                _train_to_end(job, executor, progress, log)
    return folder.require_trained()


def _train_to_end(
    job: TrainJob, executor: Executor, progress: ProgressCallback, log: Callable[[str], None]
) -> None:
    folder = job.folder
    executor.check_nodes(PACKAGES, folder.private)
    archive = Archive.find(folder)
    looks = [WorkerChangeReporter(folder, log).poll]
    if archive:
        looks.append(archive.make_updater(log))
    if not isinstance(executor, LocalExecutor):
        resources = job.recipe.resources
        gpus = resources.min_workers * resources.gpus_per_worker
        need = {"CPU": resources.min_cpus, "GPU": gpus}
        looks.append(CapacityMonitor("training", need, log).poll)

    def poll() -> None:
        _report_progress(folder.progress, progress)
        for look in looks:
            look()

    def work() -> None:
        if isinstance(executor, LocalExecutor):
            _fit_in_process(job, executor)
        else:
            fit(job, executor)

    with stopped_between_steps(folder) as look_at_clock:
        looks.append(look_at_clock)
        executor.supervise(work, poll)


def _budget_charged(job: TrainJob) -> AbstractContextManager[None]:
    """Charge the records' budget around a training, if the recipe names one."""
    if job.recipe.privacy.budget is None:
        return nullcontext()
    records = training_records(job.recipe, job.source)
    return charging.charged(job.recipe, job.plan, job.folder, records, str(job.folder.recipe_file))


def place_training(job: TrainJob, executor: Executor) -> Executor:
    """Return where a training runs: in this process if it is small, of one worker without GPUs."""
    plan, resources = job.plan, job.recipe.resources
    examples = plan.steps * plan.max_expected_batch if plan.steps else 0.0
    alone = resources.max_workers == 1 and not resources.gpus_per_worker
    return executor.place(alone and examples <= SMALL_TRAINING)


@dataclass(frozen=True)
class _TrainingDriver:
    """Train by an executor (`dpdist.methods.base.TrainingDriver`)."""

    job: TrainJob
    executor: Executor
    max_restarts: int
    stop_after: int | None
    started_at: float = field(default_factory=time.monotonic)

    def run_workers(self, records: Any = None) -> None:
        job = self.job if records is None else replace(self.job, replacement_records=records)
        _run_workers(job, self.executor, self.max_restarts, self.stop_after)

    def train_teachers(self, count: int, sections: Mapping[str, Section] | None = None) -> Any:
        from dpdist.training.ensembles import train_teachers

        return train_teachers(self.job, count, sections, executor=self.executor)

    def release_once(
        self, private_source: bytes, draw: Callable[[bytes], Sequence[float]]
    ) -> list[float]:
        from dpdist.training.ensembles import release_once

        return release_once(self.job, private_source, draw)

    def write_summary(self) -> None:
        job = self.job
        with Ledger.open(job.folder.ledger, job.plan.fingerprint()) as ledger:
            verify_ledger(job.folder, job.plan, ledger)
            seconds = time.monotonic() - self.started_at
            write_summary(job.folder, ledger, 0, seconds, fallback_layers=[])


def fit(
    job: TrainJob,
    executor: Executor,
    *,
    max_failures: int | None = None,
    stop_after: int | None = None,
) -> None:
    """Train a prepared job as its method does, from its newest checkpoint if any.

    Args:
        job: from `dpdist.training.job.prepare`.
        executor: where its workers and teachers run.
        max_failures: restarts by Ray; None for resources.max_failures.
        stop_after: number of steps after which to pause.

    Raises:
        UserError: the run cannot be trained here. In this process other errors are raised as they
            are.
        ClusterError: the workers failed for good.
    """
    restarts = job.recipe.resources.max_failures if max_failures is None else max_failures
    job.recipe.method.execution().train(_TrainingDriver(job, executor, restarts, stop_after))


def _run_workers(job: TrainJob, executor: Executor, restarts: int, stop_after: int | None) -> None:
    from dpdist.training.worker import train_worker

    resources = job.recipe.resources
    group = WorkerGroup(
        train_worker,
        {"job": job, "until": stop_after},
        (resources.min_workers, resources.max_workers)
        if resources.is_elastic
        else resources.max_workers,
        resources.cpus_per_worker,
        resources.gpus_per_worker,
        make_private_folder(job.folder.private / "ray"),
        torch_config,
        restarts,
    )
    job.folder.failure.unlink(missing_ok=True)
    for _ in range(MAX_PREEMPTIONS + 1):
        try:
            executor.run_workers(group)
        except WorkersFailedError as error:
            raise _training_error(job.folder, str(error), restarts) from error
        finally:
            if job.folder.failure.exists():
                raise _worker_error(job.folder)
        if is_stop_requested(job.folder):
            raise KeyboardInterrupt
        if not job.folder.interruption.exists():
            return
    raise ClusterError(
        f"training was pre-empted {MAX_PREEMPTIONS + 1} times; the same command continues it",
        see="how-to/cluster.md#faults",
    )


def torch_config() -> Any:
    """Return Ray Train's configuration of torch, for a `WorkerGroup`."""
    from dpdist.training.rendezvous import ManualProcessGroupConfig

    return ManualProcessGroupConfig()


def _fit_in_process(job: TrainJob, executor: Executor) -> None:
    """Fit in this process, with the restarts and the errors that a group on Ray has."""
    restarts = job.recipe.resources.max_failures
    for left in reversed(range(restarts + 1)):
        try:
            return fit(job, executor)
        except (UserError, ClusterError):
            raise
        except Exception as error:
            if is_disk_full(error):
                raise _disk_full_error(error) from error
            # A restart fixes only a conflict, by the new epoch, of a ledger's errors.
            if isinstance(error, LedgerError) and not isinstance(error, ReplayConflict):
                raise UserError(str(error)) from error
            if not left:
                raise _training_error(job.folder, traceback.format_exc(), restarts) from error


@contextmanager
def _only_command(folder: RunFolder) -> Iterator[None]:
    """Lock an unfinished run for this command. Raises RunBusy if a different one trains it.

    Its workers hold the ledger only once they have started, which may take minutes.
    """
    if folder.training_summary.exists():
        yield
        return
    _check_not_running(folder)
    with open(folder.run_key, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(folder) from None
        yield


def _check_not_running(folder: RunFolder) -> None:
    """Raise RunBusy if another process holds the run's ledger."""
    try:
        wait_until_unlocked(folder.ledger, _SHUTDOWN_SECONDS)
    except JournalBusy:
        raise _busy(folder) from None


def _busy(folder: RunFolder) -> RunBusy:
    return RunBusy(
        f"{folder.path}: another process is training this run; wait for it, or end it, and "
        "the same command continues"
    )


def _training_error(folder: RunFolder, message: str, restarts: int) -> ClusterError:
    """Return the error to raise for workers that failed for good."""
    try:
        _check_not_running(folder)  # another process may have started since `train` checked
    except RunBusy as busy:
        return busy  # without a file in the other process's folder
    write_atomic(folder.errors, message)
    return ClusterError(
        f"training failed {restarts + 1} times; the same command continues it from its last "
        f"checkpoint. Details, which may be private: {folder.errors}",
        see="how-to/cluster.md#faults",
    )


def _worker_error(folder: RunFolder) -> UserError:
    """Return the error in the file that a worker wrote; an empty file means a full disk."""
    said = json.loads(folder.failure.read_text() or "{}")
    if said and not said["full"]:
        return UserError(said["error"])
    return _disk_full_error(said.get("error") or f"{folder.path}: {os.strerror(errno.ENOSPC)}")


def _disk_full_error(what: object) -> DiskFullError:
    return DiskFullError(f"{what}; make room, and the same command continues")


def _report_progress(path: Path, progress: ProgressCallback) -> None:
    """Report the last progress that worker 0 wrote."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    progress(state["done"], state["steps"], state["rate"])
