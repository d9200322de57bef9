"""Decide where work runs: in this process, or on Ray.

Everything that dpdist executes in bulk goes through an `Executor`: the chunks of a job, single
calls, a group of training workers, the trials of a search. `RayExecutor` gives them to a session of
Ray, `LocalExecutor` does them in this process, and `AutoExecutor` does small work in this process
and opens a session for the first work that is not small. The same functions run with the same keys
and shards under all of them, so that the choice is no part of a run's identity and changes no bit
of a result.

Small work is, on this machine without GPUs:

* a training on one worker of at most `SMALL_TRAINING` examples in all its steps; attacks, or
  several trainings together, of at most as many passes;
* a certification whose draws take one process at most `SMALL_JOB_SECONDS`, by the rate that was
  measured before its first draw.

A job for which a number of actors is asked is not small. What is left of a small one after
`SMALL_JOB_SECONDS` goes to Ray.

Asked for nothing else, a search goes to Ray, as does all work where RAY_ADDRESS names a cluster.
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
from dpdist.cluster.versions import NEW_BACKENDS, backend_setting, check_nodes, set_backend
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
from dpdist.core.torch_settings import DETERMINISTIC, SharedBlocks

ExecutorName = Literal["auto", "local", "ray"]
SMALL_TRAINING = 200_000  # passes of an example in all steps
SMALL_JOB_SECONDS = 20.0  # about what a session and its actors take to start, and a second process


class Executor:
    """A place where work runs.

    A subclass runs work itself or chooses, by `place`, who does; the other methods have the answers
    of a place that is one process.
    """

    @property
    def gpus(self) -> float:
        """Return the number of GPUs that jobs may hold."""
        return 0.0

    @property
    def is_local(self) -> bool:
        """Return whether nothing runs outside this machine."""
        return True

    def place(self, small: bool) -> Executor:
        """Return the executor for a piece of work, which is small or not."""
        return self

    def hosts(self) -> list[Host]:
        """Return the resources of the live hosts."""
        return [Host(float(count_local_cpus()), self.gpus)]

    def check_nodes(self, packages: Sequence[str], shared_folder: Path) -> None:
        """Raise ClusterError where a host has other packages, or does not see the folder."""

    def run_once(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        error_prefix: str,
        num_gpus: float = 0.0,
    ) -> Any:
        """Return function(argument), computed where workers are.

        Raises UserError "{error_prefix}: why" for whatever the function raises.
        """
        raise NotImplementedError

    def run_chunks(self, job: ChunkJob) -> None:
        """Run every chunk by workers.

        Raises:
            InvalidResultsError: a worker found that none of the results hold.
            ClusterError: the workers failed for good.
        """
        self.place(False).run_chunks(job)

    def run_workers(self, group: WorkerGroup) -> None:
        """Run a group of training workers to their end. Raises WorkersFailedError."""
        self.place(False).run_workers(group)

    def supervise(self, work: Callable[[], None], poll: Callable[[], None]) -> None:
        """Run `work`, and call `poll` twice a second meanwhile and once after it."""
        self.place(False).supervise(work, poll)

    def run_trials(self, trials: TrialPass) -> None:
        """Make one pass over the trials of a search."""
        self.place(False).run_trials(trials)

    def __str__(self) -> str:
        return "this process"


# --- in this process --------------------------------------------------------------------------


class LocalExecutor(Executor):
    """Do all work in this process, one piece after the other; open no port and no session.

    Jobs count on the CPU. A training takes the GPU that its recipe asks for.

    Args:
        shuffle: for tests: answer in another order than asked, as actors may, with as many workers
            as there would be actors.

    Example:
        >>> from dpdist.cluster.executor import LocalExecutor
        >>> LocalExecutor().run_once(abs, -1, "no result")
        1
    """

    def __init__(self, *, shuffle: bool = False) -> None:
        self._shuffle = shuffle

    def transfer(self, value: Any) -> Any:
        """Return what a worker receives of a value that is sent to it: here the value itself."""
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
        """Run the chunks in turn; with `shuffle` the last one asked answers first."""
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
        """Run the group's only worker, whose errors are raised as they are.

        With a log it has a new process: raises WorkersFailedError where that ends with an error.
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
        """Run `work` in this thread, which Ctrl-C ends, and poll in another one.

        A poll that fails ends the work as Ctrl-C does, and its error is the one that is raised.
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
                    # Ctrl-C: the work may wait for what a poll would have done.
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
            if errors:  # a poll failed first, and so ended the work
                raise errors[0] from None
            raise
        if errors:
            raise errors[0]
        poll()

    def run_trials(self, trials: TrialPass) -> None:
        """Run the trials one after another, each to its end."""
        require_one_process(stops_early=trials.make_scheduler is not None)
        searcher = trials.make_searcher()
        for place in range(trials.count):
            name, last = f"trial-{place}", dict[str, Any]()
            config = searcher.suggest(name)
            try:
                trials.run(config["trial"], last.update)
            except Exception as error:  # the next pass repeats the trial, as on Ray
                log(f"search: a trial was interrupted by {type(error).__name__}")
                searcher.on_trial_complete(name, error=True)
            else:
                searcher.on_trial_complete(name, last)


def _run_in_new_process(group: WorkerGroup, place: WorkerPlace, log: Path) -> None:
    """Run a group's only worker in a new process, which ends when this one does.

    It begins with nothing but the import path: `multiprocessing` would execute the program's main
    file again, which not every script expects.
    """
    sent = pickle.dumps((group.work, group.argument, place))
    code = f"from {__name__} import work_in_new_process; work_in_new_process()"
    path = os.pathsep.join(each for each in sys.path if each)
    with open(log, "ab") as output:
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
        raise WorkersFailedError(f"the process of a worker ended with {ended}")


def work_in_new_process() -> None:
    """Do the work that the starting process sends; end as soon as that has ended."""
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
    """Raise UserError for what one process cannot execute.

    Args:
        workers: of a training.
        stops_early: whether a search stops trials by the scores of those that run beside them.
    """
    if workers > 1:
        raise UserError(
            f"resources.workers: must be 1 in one process, got {workers}; leave DPDIST_EXECUTOR "
            "out to train on Ray"
        )
    if stops_early:
        raise UserError(
            "tune.asha: must be left out in one process, where no trial runs beside "
            "another that it could be compared with; leave DPDIST_EXECUTOR out"
        )


@contextlib.contextmanager
def _own_interrupts_heard(errors: list[BaseException]) -> Iterator[None]:
    """Hear the interrupt of a failed poll where SIGINT is ignored, as in a shell's background."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return

    def interrupt(*_: Any) -> None:
        if errors:  # else it is somebody's Ctrl-C, which stays ignored
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _torch_as_in_a_new_process() -> Iterator[None]:
    """Compute as a new process would, whatever the program around the work set in torch.

    At the end all is as before, the number of threads included, which workers set for themselves.
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
    """Blocks that compute under the settings of a new process, in several threads if need be."""

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
        _set_backends(None, new)  # libraries set apart have no precision in common to be asked for
        after.callback(_set_backends, torch.get_float32_matmul_precision(), given)
        _set_backends("highest", new)


def _set_backends(precision: str | None, settings: Iterable[tuple[str, str, Any]]) -> None:
    """Set the products' precision, then each setting, of which a whole sets its parts."""
    if precision is not None:
        _set_precision(precision)
    for name, key, value in settings:
        if value is not None:
            set_backend(name, key, value)


def _set_precision(precision: str) -> None:
    """Set it unless it is so: to set it sets each library's."""
    import torch

    with contextlib.suppress(RuntimeError):  # libraries set apart have none in common
        if torch.get_float32_matmul_precision() == precision:
            return
    torch.set_float32_matmul_precision(precision)


_SETTINGS = _SharedSettings()


# --- on Ray -----------------------------------------------------------------------------------


class RayExecutor(Executor):
    """Do all work in a session of Ray, on this machine or a cluster.

    Args:
        session: an open one, from `connect`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def gpus(self) -> float:
        """Return the number of GPUs of the whole cluster, which may have grown."""
        import ray

        return float(ray.cluster_resources().get("GPU", 0.0))

    @property
    def is_local(self) -> bool:
        """Return whether this is a session of our own, on this machine."""
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
        """Call the function in a task of Ray, on one of the machines that actors run on."""
        import ray

        try:
            task = ray.remote(function).options(num_cpus=1, num_gpus=num_gpus)
            return ray.get(task.remote(argument))
        except ray.exceptions.RayTaskError as error:
            raise UserError(f"{error_prefix}: {error.cause}") from error.cause

    def run_chunks(self, job: ChunkJob) -> None:
        """Run the chunks on a pool of actors (`dpdist.cluster.actor_pool`)."""
        from dpdist.cluster.actor_pool import run_chunks

        run_chunks(job, is_session_lost)

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
                # Checkpoints are the run's own; Ray's folder holds no state that is read.
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
        """Run `work` in a thread and poll in this one: Ray would take Ctrl-C from it."""
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
        poll()  # nobody may have looked since the last change
        if errors:
            raise errors[0]

    def run_trials(self, trials: TrialPass) -> None:
        """Run the trials on Ray Tune, several at a time."""
        # Ray must not print trial tables, and writes them to the private folder only.
        os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
        from ray import tune
        from ray.tune.logger import JsonLoggerCallback

        scheduler = trials.make_scheduler() if trials.make_scheduler else None
        run = trials.run  # the trials' processes get nothing else

        def trial(config: dict[str, Any]) -> None:
            secure_staging_folder()  # of a host without the driver
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
    """Enter one worker of Ray Train."""
    import ray.train
    import ray.train.torch

    if (log := config["log"]) is not None:
        with open(log, "ab") as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
    context = ray.train.get_context()
    device = str(ray.train.torch.get_device())
    rank, world_size = context.get_world_rank(), context.get_world_size()
    place = WorkerPlace(rank, world_size, device, host_leaves=_preemption_question())
    config["work"](config["argument"], place)


def _failure_config(group: WorkerGroup) -> Any:
    """Return how often Ray Train starts a group again; Ray before 2.60 counts all alike."""
    import ray.train

    kind = ray.train.FailureConfig
    counts: dict[str, Any] = {"max_failures": group.max_restarts}
    if "max_preemption_failures" in {field.name for field in fields(kind)}:
        counts["max_preemption_failures"] = MAX_PREEMPTIONS
    return kind(**counts)


def _preemption_question() -> Callable[[], bool] | None:
    """Return the call that asks Ray for an announced pre-emption; None where Ray has none."""
    import ray.train

    ask = getattr(ray.train, "get_preemption_info", None)  # since Ray 2.60
    if ask is None or os.environ.get(WATCHER_VARIABLE) == "0":
        return None
    return lambda: ask() is not None


@contextlib.contextmanager
def _staged_files_removed(staging_folder: Path, name: str) -> Iterator[None]:
    """Remove at the end what Tune staged of an experiment: K and every score."""
    try:
        yield
    finally:
        for left in staging_folder.glob(f"*/{name}"):
            shutil.rmtree(left, ignore_errors=True)


# --- by the size of the work ------------------------------------------------------------------


class AutoExecutor(Executor):
    """Do small work in this process, and open a session of Ray for the first work that is not.

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
        """Return the executor on Ray, after opening the session if that was not done yet."""
        if self._ray is None:
            self._ray = RayExecutor(self._after.enter_context(self._open_session()))
            for check in self._checks:
                self._ray.check_nodes(*check)
        return self._ray

    def close(self) -> None:
        """End the session, if one was opened."""
        self._after.close()

    @property
    def gpus(self) -> float:
        """Return the number of GPUs; a machine that has some is asked through Ray."""
        return self.ray().gpus if self._ray is not None or count_local_gpus() else 0.0

    def place(self, small: bool) -> Executor:
        """Return this process for small work, unless a session is open or there are GPUs."""
        alone = small and self._ray is None and not count_local_gpus()
        return _LocalAtFirst(self) if alone else self.ray()

    def hosts(self) -> list[Host]:
        """Return the resources of this machine, as Ray counts them."""
        return self.ray().hosts()

    def check_nodes(self, packages: Sequence[str], shared_folder: Path) -> None:
        """Check the hosts now, or as soon as there is a session."""
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
        """Call the function in this process, or on Ray where it is open or a GPU is needed."""
        return self.place(not num_gpus).run_once(function, argument, error_prefix, num_gpus)

    def __str__(self) -> str:
        return str(self._ray or _LocalAtFirst(self))


class _LocalAtFirst(LocalExecutor):
    """Do work that seems small in this process; give what is left of a long job to Ray."""

    def __init__(self, whole: AutoExecutor) -> None:
        super().__init__()
        self._whole = whole

    def place(self, small: bool) -> Executor:
        """Return the executor for a piece of work within this one."""
        return self._whole.place(small)

    def check_nodes(self, packages: Sequence[str], shared_folder: Path) -> None:
        """Check the hosts as soon as there is a session, which work within this may open."""
        self._whole.check_nodes(packages, shared_folder)

    def run_chunks(self, job: ChunkJob) -> None:
        """Run the chunks in turn for `SMALL_JOB_SECONDS`, and the others on Ray."""
        waiting, end = in_order(job.chunks), time.monotonic() + SMALL_JOB_SECONDS
        left: list[Chunk] = []

        def at_first() -> Iterator[Chunk]:
            for chunk in waiting:
                if time.monotonic() > end:
                    left.append(chunk)
                    return
                yield chunk

        super().run_chunks(replace(job, chunks=at_first()))
        if left:
            self._whole.ray().run_chunks(replace(job, chunks=itertools.chain(left, waiting)))


# --- the executor in use ----------------------------------------------------------------------


_open_executors: list[Executor] = []  # of enclosing blocks, the innermost last


def current_executor() -> Executor:
    """Return the executor that the work of the enclosing `open_executor` or `run_job` goes to.

    Raises:
        RuntimeError: there is none.
    """
    executor = _enclosing_executor()
    if executor is None:
        raise RuntimeError("no executor is open: work runs within open_executor()")
    return executor


def _enclosing_executor() -> Executor | None:
    """Return the innermost open executor, an open session of Ray included; None without one."""
    if _open_executors:
        return _open_executors[-1]
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return RayExecutor(describe_session())
    return None


@contextlib.contextmanager
def use_executor(executor: Executor) -> Iterator[Executor]:
    """Give all work inside the block to `executor`.

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
        # The innermost of its places: blocks may be nested as A, B, A.
        last = max(n for n, each in enumerate(_open_executors) if each is executor)
        del _open_executors[last]


@contextlib.contextmanager
def open_executor(
    name: ExecutorName | None = None, *, log_file: Path | None = None, cpus: int | None = None
) -> Iterator[Executor]:
    """Yield the executor for a whole command, and close at the end what it opened.

    Args:
        name: "local": this process. "ray": a session of Ray. None, or "auto": the executor of an
            enclosing block or an open session; else a cluster that RAY_ADDRESS names; else this
            process for small work and a session on this machine for all other.
        log_file: takes Ray's messages; None drops them.
        cpus: of a session on this machine; None for the CPUs that this process may use.

    Raises:
        UserError: the name is none of these.
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
        session = functools.partial(
            connect, log_file, cpus=cpus,
            worker_setup=optional_imports.install_torchvision_hook,
        )  # fmt: skip
        executor: Executor
        if enclosing is not None and _serves(enclosing, name):
            executor = enclosing
        elif name == "local":
            executor = LocalExecutor()
        elif isinstance(enclosing, AutoExecutor):  # of which Ray is asked
            executor = enclosing.ray()
        elif name == "ray" or is_elastic():
            executor = RayExecutor(after.enter_context(session()))
        else:
            executor = AutoExecutor(session)
            after.callback(executor.close)
        yield after.enter_context(use_executor(executor))


def _serves(executor: Executor, name: ExecutorName | None) -> bool:
    """Return whether an enclosing executor is what is asked for."""
    if name == "local":
        return isinstance(executor, LocalExecutor)
    return name != "ray" or isinstance(executor, RayExecutor)


def check_executor_name(name: str | None, key: str = "executor") -> None:
    """Raise UserError for a name that no executor has."""
    names = get_args(ExecutorName)
    if name is not None and name not in names:
        raise UserError(f"{key}: must be {', '.join(names[:-1])} or {names[-1]}, got {name!r}")
