"""Decide where work runs: in this process, or on Ray.

Everything that dpdist executes in bulk goes through an `Executor`: the chunks of a job, single
calls, a group of training workers, the trials of a search. `RayExecutor` runs it in a session of
Ray, `LocalExecutor` in this process, and `AutoExecutor` runs small work in this process and opens a
session for the first work that is not small. All of them run the same functions with the same keys
and shards, so the choice is not part of a run's identity and does not change any bit of a result.

On a machine without GPUs, small work is:

* a training on one worker with at most `SMALL_TRAINING` examples in all its steps; attacks, or
  several trainings together, with at most that many passes;
* a certification whose samples take one process at most `SMALL_JOB_SECONDS`, at the rate measured
  before its first sample.

A job with a given number of actors is not small. The rest of a small job after `SMALL_JOB_SECONDS`
goes to Ray. By default a search goes to Ray, and so does all work if RAY_ADDRESS names a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from dpdist.cluster.session import (
    WATCHER_VARIABLE,
    Session,
    connect,
    count_local_cpus,
    count_local_gpus,
    describe_session,
    is_elastic,
    is_session_lost,
    secure_staging_folder,
)
from dpdist.cluster.versions import (
    NEW_BACKENDS,
    PACKAGES,
    backend_setting,
    check_nodes,
    set_backend,
)
from dpdist.cluster.work import (
    MAX_PREEMPTIONS,
    Chunk,
    ChunkJob,
    Host,
    TrialPass,
    WorkerGroup,
    WorkerPlace,
    WorkersFailedError,
    in_order,
)
from dpdist.core import optional_imports
from dpdist.core.console import log
from dpdist.core.errors import UserError
from dpdist.core.files import own_only
from dpdist.core.torch_settings import DETERMINISTIC, SharedBlocks

ExecutorName = Literal["auto", "local", "ray"]
SMALL_TRAINING = 200_000  # passes of an example in all steps
SMALL_JOB_SECONDS = 20.0  # about the start of a session and its actors, and of a second process


class Executor:
    """A place where work runs.

    A subclass runs work itself, or `place` returns the executor that does. The other defaults are
    those of a single process.
    """

    @property
    def gpus(self) -> float:
        """Return the number of GPUs for jobs."""
        return 0.0

    @property
    def is_local(self) -> bool:
        """Return whether all work runs on this machine."""
        return True

    def place(self, small: bool) -> Executor:
        """Return the executor for a piece of work. small: whether the work is small."""
        return self

    def hosts(self) -> list[Host]:
        """Return the resources of the live hosts."""
        return [Host(float(count_local_cpus()), self.gpus)]

    def check_nodes(self, packages: Sequence[str], shared_folder: Path) -> None:
        """Raise ClusterError if a host has different packages, or does not see the folder."""

    def run_once(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        error_prefix: str,
        num_gpus: float = 0.0,
    ) -> Any:
        """Return function(argument), computed on a machine of the workers.

        Raises UserError with `error_prefix` and the message of any error of the function.
        """
        raise NotImplementedError

    def run_chunks(self, job: ChunkJob) -> None:
        """Run every chunk on workers.

        Raises:
            InvalidResultsError: a worker found that all results are invalid.
            ClusterError: the workers failed permanently.
        """
        self.place(False).run_chunks(job)

    def run_workers(self, group: WorkerGroup) -> None:
        """Run a group of training workers until they end. Raises WorkersFailedError."""
        self.place(False).run_workers(group)

    def supervise(self, work: Callable[[], None], poll: Callable[[], None]) -> None:
        """Run `work`; call `poll` twice a second during it, and once after it."""
        self.place(False).supervise(work, poll)

    def run_trials(self, trials: TrialPass) -> None:
        """Make one pass over the trials of a search."""
        self.place(False).run_trials(trials)

    def __str__(self) -> str:
        return "this process"


# --- in this process --------------------------------------------------------------------------


class LocalExecutor(Executor):
    """Run all work in this process, one piece after the other, without a port or session.

    Jobs run on the CPU. A training uses the GPU that its recipe requests.

    Args:
        shuffle: for tests: return results in a different order, as actors may, with one worker per
            actor.

    Example:
        >>> from dpdist.cluster.executor import LocalExecutor
        >>> LocalExecutor().run_once(abs, -1, "no result")
        1
    """

    def __init__(self, *, shuffle: bool = False) -> None:
        self._shuffle = shuffle

    def transfer(self, value: Any) -> Any:
        """Return what a worker receives if a value is sent to it: here the value itself."""
        return value

    def run_once(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        error_prefix: str,
        num_gpus: float = 0.0,
    ) -> Any:
        """Call the function."""
        try:
            with _torch_as_in_a_new_process():
                return self.transfer(function(self.transfer(argument)))
        except Exception as error:
            raise UserError(f"{error_prefix}: {error}") from error

    def run_chunks(self, job: ChunkJob) -> None:
        """Run the chunks in turn; with `shuffle`, deliver the results of a batch in reverse."""
        asked_at_once = job.settings.actors or 1 if self._shuffle else 1
        waiting, workers = in_order(job.chunks), list[Callable[[Any], Any]]()
        with _torch_as_in_a_new_process():
            while asked := list(itertools.islice(waiting, asked_at_once)):
                while len(workers) < len(asked):
                    make, own = self.transfer((job.make_worker, job.shared))
                    workers.append(make(own))
                answers = [
                    (chunk.key, self.transfer(worker(self.transfer(chunk.payload))))
                    for worker, chunk in zip(workers, asked, strict=False)
                ]
                for key, answer in reversed(answers):
                    job.on_result(key, answer)

    def run_workers(self, group: WorkerGroup) -> None:
        """Run the group's only worker, and raise its errors.

        With a log it runs in a new process; raises WorkersFailedError if that process fails.
        """
        require_one_process(group.max_workers)
        import torch

        on_gpu = group.gpus > 0 and torch.cuda.is_available()
        place = WorkerPlace(0, 1, "cuda" if on_gpu else "cpu", in_process=group.log is None)
        if group.log is not None:
            _run_in_new_process(group, place, group.log)
            return
        with _torch_as_in_a_new_process():
            group.work(group.argument, place)

    def supervise(self, work: Callable[[], None], poll: Callable[[], None]) -> None:
        """Run `work` in this thread, which Ctrl-C interrupts, and poll in a second thread.

        A poll that fails interrupts the work as Ctrl-C does, and its error is raised.
        """
        ended, errors = threading.Event(), list[BaseException]()
        working = threading.current_thread()

        def poll_until_end() -> None:
            try:
                while not ended.wait(0.5):
                    poll()
            except BaseException as error:
                errors.append(error)
                if working is threading.main_thread() and not ended.is_set():
                    # The work may be waiting for a poll.
                    signal.pthread_kill(working.ident or 0, signal.SIGINT)

        thread = threading.Thread(target=poll_until_end, daemon=True)
        thread.start()
        try:
            try:
                with _own_interrupts_heard(errors):
                    work()
            finally:
                ended.set()
                thread.join()
        except BaseException:
            if errors:  # a failed poll interrupted the work
                raise errors[0] from None
            raise
        if errors:
            raise errors[0]
        poll()

    def run_trials(self, trials: TrialPass) -> None:
        """Run the trials one after another, each to its end."""
        require_one_process(stops_early=trials.make_scheduler is not None)
        searcher = trials.make_searcher()
        for number in range(trials.count):
            name, last = f"trial-{number}", dict[str, Any]()
            config = searcher.suggest(name)
            try:
                trials.run(config["trial"], last.update)
            except Exception as error:  # the next pass repeats the trial, as on Ray
                log(f"search: a trial was interrupted by {type(error).__name__}")
                searcher.on_trial_complete(name, error=True)
            else:
                searcher.on_trial_complete(name, last)


def _run_in_new_process(group: WorkerGroup, place: WorkerPlace, log: Path) -> None:
    """Run a group's only worker in a new process, which ends when this process ends.

    `multiprocessing` would execute the program's main file again, which not every script supports;
    this process only gets the import path.
    """
    sent = pickle.dumps((group.work, group.argument, place))
    code = f"from {__name__} import work_in_new_process; work_in_new_process()"
    path = os.pathsep.join(each for each in sys.path if each)
    with open(log, "ab", opener=own_only) as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(sent)
                process.stdin.flush()
            ended = process.wait()
        finally:
            process.kill()
            process.communicate()
    if ended:
        raise WorkersFailedError(f"the worker process ended with exit code {ended}")


def work_in_new_process() -> None:
    """Run the work that the parent process sends; exit if the parent exits."""
    pipe = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    work, argument, place = pickle.load(pipe)

    def end_with_parent() -> None:
        pipe.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    work(argument, place)


def require_one_process(workers: int = 1, *, stops_early: bool = False) -> None:
    """Raise UserError for work that needs several processes.

    Args:
        workers: number of training workers.
        stops_early: whether a search stops trials by the scores of trials that run at the same
            time.
    """
    if workers > 1:
        raise UserError(
            f"resources.workers: must be 1 in one process, got {workers}; unset DPDIST_EXECUTOR to "
            "train on Ray"
        )
    if stops_early:
        raise UserError(
            "tune.asha: must be left out in one process, which runs one trial at a time; unset "
            "DPDIST_EXECUTOR to search on Ray"
        )


@contextlib.contextmanager
def _own_interrupts_heard(errors: list[BaseException]) -> Iterator[None]:
    """Let a failed poll interrupt the work even if SIGINT is ignored, as in a background job."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return

    def interrupt(*_: Any) -> None:
        if errors:  # else it is the user's Ctrl-C, which stays ignored
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _torch_as_in_a_new_process() -> Iterator[None]:
    """Use the torch settings of a new process inside the block, and restore the program's own.

    The number of threads, which workers set, is restored too.
    """
    import torch

    with contextlib.ExitStack() as after:
        after.callback(torch.set_num_threads, torch.get_num_threads())
        after.enter_context(_SETTINGS.block())
        for block in (torch.inference_mode(False), torch.enable_grad()):
            after.enter_context(block)
        for device in ("cpu", "cuda"):
            after.enter_context(torch.autocast(device, enabled=False))
        yield


class _SharedSettings(SharedBlocks):
    """Blocks with the torch settings of a new process, shared by several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._after = contextlib.ExitStack()

    def _end(self) -> None:
        self._after.close()

    def _begin(self) -> None:
        import torch

        after = self._after
        after.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        deterministic = DETERMINISTIC.chosen()
        after.callback(DETERMINISTIC.choose, deterministic)
        DETERMINISTIC.choose((False, False, deterministic[2]))
        new = [
            (name, *each) for name, settings in NEW_BACKENDS.items() for each in settings.items()
        ]
        given = [(name, key, backend_setting(name, key)) for name, key, _ in new]
        # First without a precision: torch reports none if its libraries have different ones.
        _set_backends(None, new)
        after.callback(_set_backends, torch.get_float32_matmul_precision(), given)
        _set_backends("highest", new)


def _set_backends(precision: str | None, settings: Iterable[tuple[str, str, Any]]) -> None:
    """Set the precision of matrix products, then each setting; a whole sets its parts."""
    import torch

    current = None
    with contextlib.suppress(RuntimeError):  # the libraries have different precisions
        current = torch.get_float32_matmul_precision()
    if precision is not None and precision != current:  # setting it again would set each library's
        torch.set_float32_matmul_precision(precision)
    for name, key, value in settings:
        if value is not None:
            set_backend(name, key, value)


_SETTINGS = _SharedSettings()


# --- on Ray -----------------------------------------------------------------------------------


class RayExecutor(Executor):
    """Run all work in a session of Ray, on this machine or a cluster.

    Args:
        session: an open session, from `connect`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def gpus(self) -> float:
        """Return the current number of GPUs of the whole cluster."""
        import ray

        return float(ray.cluster_resources().get("GPU", 0.0))

    @property
    def is_local(self) -> bool:
        """Return whether this is a local session on this machine."""
        return self._session.local

    def hosts(self) -> list[Host]:
        """Return the resources of the live hosts of the cluster."""
        import ray

        return [
            Host(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def check_nodes(self, packages: Sequence[str], shared_folder: Path) -> None:
        """Check every live host."""
        check_nodes(packages, shared_folder)

    def run_once(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        error_prefix: str,
        num_gpus: float = 0.0,
    ) -> Any:
        """Call the function in a task of Ray."""
        import ray

        try:
            task = ray.remote(function).options(num_cpus=1, num_gpus=num_gpus)
            return ray.get(task.remote(argument))
        except ray.exceptions.RayTaskError as error:
            raise UserError(f"{error_prefix}: {error.cause}") from error.cause

    def run_chunks(self, job: ChunkJob) -> None:
        """Run the chunks on a pool of actors (`dpdist.cluster.actor_pool`)."""
        from dpdist.cluster.actor_pool import run_chunks

        run_chunks(job, is_session_lost, () if self._session.local else PACKAGES)

    def run_workers(self, group: WorkerGroup) -> None:
        """Run the group on Ray Train, which restarts it up to `max_restarts` times."""
        import ray.train
        from ray.train.torch import TorchTrainer
        from ray.train.v2.api.exceptions import TrainingFailedError

        per_worker = {"CPU": group.cpus} | ({"GPU": group.gpus} if group.gpus else {})
        trainer = TorchTrainer(
            _work_in_ray_worker,
            train_loop_config={"work": group.work, "argument": group.argument, "log": group.log},
            torch_config=group.torch_config(),
            scaling_config=ray.train.ScalingConfig(
                num_workers=group.workers,  # type: ignore[arg-type]  # its base class's type
                use_gpu=group.gpus > 0,
                resources_per_worker=per_worker,
            ),
            run_config=ray.train.RunConfig(
                # The run has its own checkpoints; no state in Ray's folder is read.
                name=f"train-{time.time_ns()}",
                storage_path=str(group.storage),
                failure_config=_failure_config(group),
                callbacks=list(group.callbacks),
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise WorkersFailedError(str(error)) from error

    def supervise(self, work: Callable[[], None], poll: Callable[[], None]) -> None:
        """Run `work` in a second thread and poll in this one, since Ray handles Ctrl-C."""
        errors: list[BaseException] = []

        def work_and_keep_errors() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work_and_keep_errors, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.5)
            poll()
        poll()  # for changes since the last poll
        if errors:
            raise errors[0]

    def run_trials(self, trials: TrialPass) -> None:
        """Run the trials on Ray Tune, several at a time."""
        # Ray must not print tables of trials; it writes them only to the private folder.
        os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
        from ray import tune
        from ray.tune.logger import JsonLoggerCallback

        scheduler = trials.make_scheduler() if trials.make_scheduler else None
        run = trials.run  # so that trials' processes receive only this

        def trial(config: dict[str, Any]) -> None:
            secure_staging_folder()  # on this host
            run(config["trial"], tune.report)

        tuner = tune.Tuner(
            tune.with_resources(trial, tune.PlacementGroupFactory([dict(trials.resources)])),
            tune_config=tune.TuneConfig(
                num_samples=trials.count,
                search_alg=trials.make_searcher(),
                scheduler=scheduler,
                max_concurrent_trials=trials.concurrent,
                reuse_actors=scheduler is None,
            ),
            run_config=tune.RunConfig(
                name=trials.name,
                storage_path=str(trials.storage),
                failure_config=tune.FailureConfig(max_failures=0, fail_fast=False),
                callbacks=[JsonLoggerCallback()],
                verbose=0,
            ),
        )
        with _staged_files_removed(secure_staging_folder(), trials.name):
            tuner.fit()

    def __str__(self) -> str:
        return str(self._session)


def _work_in_ray_worker(config: dict[str, Any]) -> None:
    """Run one worker of Ray Train."""
    import ray.train
    import ray.train.torch

    if (log := config["log"]) is not None:
        with open(log, "ab", opener=own_only) as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
    context = ray.train.get_context()
    device = str(ray.train.torch.get_device())
    rank, world_size = context.get_world_rank(), context.get_world_size()
    place = WorkerPlace(rank, world_size, device, host_leaves=_preemption_question())
    config["work"](config["argument"], place)


def _failure_config(group: WorkerGroup) -> Any:
    """Return how often Ray Train restarts a group; Ray before 2.60 counts pre-emptions too."""
    import ray.train

    kind = ray.train.FailureConfig
    counts: dict[str, Any] = {"max_failures": group.max_restarts}
    if "max_preemption_failures" in {field.name for field in fields(kind)}:
        counts["max_preemption_failures"] = MAX_PREEMPTIONS
    return kind(**counts)


def _preemption_question() -> Callable[[], bool] | None:
    """Return a function that asks Ray for an announced pre-emption; None if Ray has none."""
    import ray.train

    ask = getattr(ray.train, "get_preemption_info", None)  # since Ray 2.60
    if ask is None or os.environ.get(WATCHER_VARIABLE) == "0":
        return None
    return lambda: ask() is not None


@contextlib.contextmanager
def _staged_files_removed(staging_folder: Path, name: str) -> Iterator[None]:
    """Remove at the end what Tune staged of an experiment: number of trials and all scores."""
    try:
        yield
    finally:
        for left in staging_folder.glob(f"*/{name}"):
            shutil.rmtree(left, ignore_errors=True)


# --- by the size of the work ------------------------------------------------------------------


class AutoExecutor(Executor):
    """Run small work in this process, and open a session of Ray for the first other work.

    Args:
        open_session: returns a context manager that yields a session of Ray.
    """

    def __init__(
        self, open_session: Callable[[], contextlib.AbstractContextManager[Session]]
    ) -> None:
        self._open_session = open_session
        self._ray: RayExecutor | None = None
        self._after = contextlib.ExitStack()
        self._checks: list[tuple[Sequence[str], Path]] = []

    def ray(self) -> RayExecutor:
        """Return the executor on Ray; open its session if it is not open."""
        if self._ray is None:
            self._ray = RayExecutor(self._after.enter_context(self._open_session()))
            for check in self._checks:
                self._ray.check_nodes(*check)
        return self._ray

    def close(self) -> None:
        """Close the session, if it is open."""
        self._after.close()

    @property
    def gpus(self) -> float:
        """Return the number of GPUs; opens a session on a machine that has GPUs."""
        return self.ray().gpus if self._ray is not None or count_local_gpus() else 0.0

    def place(self, small: bool) -> Executor:
        """Return this process for small work, unless a session is open or there are GPUs."""
        here = small and self._ray is None and not count_local_gpus()
        return _LocalAtFirst(self) if here else self.ray()

    def hosts(self) -> list[Host]:
        """Return the resources of this machine, as Ray counts them."""
        return self.ray().hosts()

    def check_nodes(self, packages: Sequence[str], shared_folder: Path) -> None:
        """Check the hosts now, or as soon as a session is open."""
        if self._ray is not None:
            self._ray.check_nodes(packages, shared_folder)
        self._checks.append((packages, shared_folder))

    def run_once(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        error_prefix: str,
        num_gpus: float = 0.0,
    ) -> Any:
        """Call the function in this process, or on Ray if it is open or a GPU is needed."""
        return self.place(not num_gpus).run_once(function, argument, error_prefix, num_gpus)

    def __str__(self) -> str:
        return str(self._ray or _LocalAtFirst(self))


class _LocalAtFirst(LocalExecutor):
    """Run small work in this process, and the rest of a job that takes too long on Ray."""

    def __init__(self, whole: AutoExecutor) -> None:
        super().__init__()
        self._whole = whole

    def place(self, small: bool) -> Executor:
        """Return the executor for a piece of work within this one."""
        return self._whole.place(small)

    def check_nodes(self, packages: Sequence[str], shared_folder: Path) -> None:
        """Check the hosts as soon as a session is open."""
        self._whole.check_nodes(packages, shared_folder)

    def run_chunks(self, job: ChunkJob) -> None:
        """Run chunks in turn for `SMALL_JOB_SECONDS`, and the rest on Ray."""
        waiting, end = in_order(job.chunks), time.monotonic() + SMALL_JOB_SECONDS

        def in_time() -> Iterator[Chunk]:
            while time.monotonic() <= end and (chunk := next(waiting, None)) is not None:
                yield chunk

        super().run_chunks(replace(job, chunks=in_time()))
        if (first := next(waiting, None)) is not None:
            rest = itertools.chain([first], waiting)
            self._whole.ray().run_chunks(replace(job, chunks=rest))


# --- the executor in use ----------------------------------------------------------------------


_open_executors: list[Executor] = []  # of enclosing blocks, the innermost last


def current_executor() -> Executor:
    """Return the executor of the enclosing `open_executor` or `run_job`.

    Raises:
        RuntimeError: no executor is open.
    """
    executor = _enclosing_executor()
    if executor is None:
        raise RuntimeError("no executor is open: run this inside open_executor()")
    return executor


def _enclosing_executor() -> Executor | None:
    """Return the innermost open executor, or that of an open Ray session; None without one."""
    if _open_executors:
        return _open_executors[-1]
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return RayExecutor(describe_session())
    return None


@contextlib.contextmanager
def use_executor(executor: Executor) -> Iterator[Executor]:
    """Run all work inside the block on `executor`.

    Example:
        >>> from dpdist.cluster.executor import LocalExecutor, use_executor
        >>> with use_executor(LocalExecutor()) as executor:
        ...     str(executor)
        'this process'
    """
    _open_executors.append(executor)
    try:
        yield executor
    finally:
        # Its innermost entry: blocks may be nested as A, B, A.
        last = max(n for n, each in enumerate(_open_executors) if each is executor)
        del _open_executors[last]


@contextlib.contextmanager
def open_executor(
    name: ExecutorName | None = None, *, log_file: Path | None = None, cpus: int | None = None
) -> Iterator[Executor]:
    """Yield the executor for a whole command, and close its session at the end.

    Args:
        name: "local": this process. "ray": a session of Ray. None, or "auto": the executor of an
            enclosing block or an open session; else the cluster in RAY_ADDRESS; else this process
            for small work, and a session on this machine for other work.
        log_file: a file for Ray's messages; None drops them.
        cpus: CPUs of a session on this machine; None for the CPUs that this process may use.

    Raises:
        UserError: the name is unknown.
        ClusterError: no session could be opened.

    Example:
        >>> from dpdist.cluster.executor import open_executor
        >>> with open_executor("local") as executor:
        ...     executor.run_once(len, [1, 2], "no result")
        2
    """
    check_executor_name(name)
    enclosing = _enclosing_executor()
    with contextlib.ExitStack() as after:
        hook = optional_imports.install_torchvision_hook
        session = functools.partial(connect, log_file, cpus=cpus, worker_setup=hook)
        kinds: dict[str | None, type[Executor]] = {"local": LocalExecutor, "ray": RayExecutor}
        executor: Executor
        if enclosing is not None and isinstance(enclosing, kinds.get(name, Executor)):
            executor = enclosing
        elif name == "local":
            executor = LocalExecutor()
        elif isinstance(enclosing, AutoExecutor):
            executor = enclosing.ray()
        elif name == "ray" or is_elastic():
            executor = RayExecutor(after.enter_context(session()))
        else:
            executor = AutoExecutor(session)
            after.callback(executor.close)
        yield after.enter_context(use_executor(executor))


def check_executor_name(name: str | None, key: str = "executor") -> None:
    """Raise UserError for an unknown name of an executor."""
    names = get_args(ExecutorName)
    if name is not None and name not in names:
        raise UserError(f"{key}: must be {', '.join(names[:-1])} or {names[-1]}, got {name!r}")
