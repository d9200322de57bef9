"""Connect to the given Ray cluster, or start a session on this machine, on loopback only."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist.core.console import log
from dpdist.core.errors import ClusterError, ExitCode, UserError
from dpdist.core.files import (
    SESSION_FOLDER,
    TRAINING_FOLDER,
    error_text,
    lock_temporary_folder,
    remove_unlocked_folders,
)

# --- waiting for lost hosts -------------------------------------------------------------------


_POLL_SECONDS = 10.0


class CapacityMonitor:
    """Log once whenever the cluster becomes smaller than the work needs.

    needed, and the result of `get_resources`: amounts of Ray's resources ("CPU", "GPU") in the
    whole cluster.
    """

    def __init__(
        self,
        work_name: str,
        needed: dict[str, float],
        log: Callable[[str], None],
        get_resources: Callable[[], dict[str, float]] | None = None,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        self._work_name, self._log, self._poll_seconds = work_name, log, poll_seconds
        self._needed = {name: amount for name, amount in needed.items() if amount > 0}
        self._get_resources = get_resources
        self._last_poll, self._is_short = time.monotonic(), False

    def poll(self) -> None:
        """Check the cluster's size, at most every ten seconds; call it often."""
        now = time.monotonic()
        if now - self._last_poll < self._poll_seconds:
            return
        self._last_poll = now
        if self._get_resources is None:
            import ray

            self._get_resources = ray.cluster_resources
        have = self._get_resources()
        missing = any(have.get(name, 0.0) < amount - 1e-9 for name, amount in self._needed.items())
        if missing and not self._is_short:
            shares = " and ".join(
                f"{have.get(name, 0.0):g} of {amount:g} {name}s"
                for name, amount in self._needed.items()
            )
            self._log(
                f"{self._work_name}: waits for hosts: the cluster has {shares}; an autoscaler "
                "starts hosts; yours start by `ray up` or `ray start --address=HEAD:6379`"
            )
        elif self._is_short and not missing:
            self._log(f"{self._work_name}: the cluster has room again")
        self._is_short = missing


# --- a lost session ---------------------------------------------------------------------------


_WATCH_SECONDS = 5.0
# Not SIGINT, which background jobs ignore, and which asks a training to end early.
_WAKE = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
_LOST = (
    "the Ray session is lost: its node on this machine did not answer for about a minute, for "
    "example because the machine slept. Finished work is kept; run the same command again"
)
# Lost sessions, kept until this process ends.
_lost_sessions: list[contextlib.ExitStack] = []
_open_watches: list[_NodeWatch] = []


class _NodeWatch:
    """Interrupt the main thread if Ray declares this process's own node dead.

    Ray's calls (wait, kill, shutdown) then never return, whatever their timeout, so only an
    interrupt ends the current call. A second thread watches the node.
    """

    def __init__(self) -> None:
        self.lost, self._ended, self._ending = False, threading.Event(), threading.Lock()
        self._before: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        import ray

        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread receives signals
        _open_watches.append(self)
        with contextlib.suppress(Exception):  # through Ray Client the node is a different one
            own = ray.get_runtime_context().get_node_id()
            self._before = signal.signal(_WAKE, signal.default_int_handler)
            self._thread = threading.Thread(target=self._watch, args=(own,), daemon=True)
            self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._ending:
            self._ended.set()
        if self in _open_watches:
            _open_watches.remove(self)
        if not self.lost and self._thread is not None:
            # For its last check; it must not use a session after its shutdown.
            self._thread.join(_WATCH_SECONDS)
            with contextlib.suppress(ValueError):  # exited in a different thread
                signal.signal(_WAKE, self._before)
        if self.lost:  # even without an error: an executor closes its session without one
            raise ClusterError(_LOST) from error

    def _watch(self, own: str) -> None:
        import ray

        ended = False
        while not ended:
            # Once more at the end: work on a dead node may fail before this thread notices.
            ended = self._ended.wait(_WATCH_SECONDS)
            if not self.lost:
                with contextlib.suppress(Exception):
                    dead = [node["NodeID"] for node in ray.nodes() if not node["Alive"]]
                    self.lost = own in dead
            with self._ending:
                if self.lost and not self._ended.is_set():  # repeatedly, if the first was caught
                    signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)


def is_session_lost() -> bool:
    """Return whether the session is lost, so that Ray's calls would not return."""
    return bool(_lost_sessions) or any(watch.lost for watch in _open_watches)


def _keep_until_exit(session: contextlib.ExitStack) -> None:
    """Keep a lost session, and let this process exit without Ray's shutdown, which would hang.

    The exit code is that of a ClusterError: Python does not provide a script's own code.
    """
    _lost_sessions.append(session)

    def leave() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ExitCode.USER_ERROR)

    atexit.register(leave)  # runs before Ray's handler, which would hang


# --- the session ------------------------------------------------------------------------------


# Ray listens on all interfaces, even with a loopback node address, unless this variable is 0.
_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# A thread that outlives the session, as Tune's does after an interrupt, would start a new one with
# its next call of Ray, without a token.
_AUTO_START_VARIABLE = "RAY_ENABLE_AUTO_CONNECT"
# These close a local session to the network and to other users of the machine, even if variables
# for a cluster are set.
_SECURE_VARIABLES = {_LOOPBACK_VARIABLE: "0", "RAY_AUTH_MODE": "token"}
# a server that would receive the session's state
_REMOVED_VARIABLES = ("RAY_REDIS_ADDRESS",)
WATCHER_VARIABLE = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"  # the session's own: others may know the token of a cluster
_LOCAL_ENVIRONMENT = {
    # A local session needs no metrics and no pre-emption watcher. Without them Ray's idle processes
    # use less of the workers' cores (benchmarks/results/gradients.md, the row of two workers).
    "RAY_event_stats": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    WATCHER_VARIABLE: "0",
}
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    _AUTO_START_VARIABLE: "0",
}
_CONNECT_SECONDS = 5.0
_FOLDER_PREFIX = "dpdist-ray-"
# A socket's path has at most 107 bytes, of which Ray uses about 70 inside its folder.
_MAX_ROOT_BYTES = 20


@dataclass(frozen=True)
class Session:
    """The connection of this process to Ray. address: None for a local session."""

    address: str | None
    cpus: float
    gpus: float
    nodes: int

    @property
    def local(self) -> bool:
        """Return whether this is a local session on this machine."""
        return self.address is None

    def __str__(self) -> str:
        where = "this machine" if self.local else f"cluster at {self.address}"
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{where}: {self.nodes} node{'s' * (self.nodes > 1)}, {self.cpus:g} CPUs{gpus}"


@contextlib.contextmanager
def connect(
    log_file: Path | None = None,
    *,
    cpus: int | None = None,
    worker_setup: Callable[[], None] | None = None,
) -> Iterator[Session]:
    """Yield one Ray session for a whole command; reuse the session of an enclosing `connect`.

    With RAY_ADDRESS set (as inside `ray job submit`) it is that cluster; otherwise a new local
    session with every port on loopback, a fresh access token, and Ray's own files (logs, sockets,
    staged artifacts) in a folder that only this user can read and that is deleted with the session.
    Environment variables that would change this are ignored, with a line on standard error.

    Args:
        log_file: a file for Ray's messages; None drops them.
        cpus: CPUs of a local session; None for the CPUs that this process may use.
        worker_setup: a function that runs once in every worker process.

    Yields:
        A `Session`: `address` (str; None for a new local session), `cpus` and `gpus` (floats),
        `nodes` (int), and `local` (bool: whether it is a session on this machine).

    Raises:
        ClusterError: nothing answers at RAY_ADDRESS, or the session was lost, for example because
            the machine slept: start Python again.

    Example:
        >>> import dpdist
        >>> with dpdist.connect(cpus=2) as session:
        ...     session.local
        True
    """
    address = os.environ.get("RAY_ADDRESS") or None
    if address == "local":  # Ray's word for a new local session
        address = None
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    import ray

    if _lost_sessions:
        raise ClusterError(f"{_LOST}, in a new Python process")
    if ray.is_initialized():
        yield describe_session(address)
        return
    before: dict[str, str | None] = {}
    if address is None:
        before = _secure_environment()
        reload_ray_environment()
    else:
        _check_reachable(address)
    handler: logging.Handler | None = None
    interrupts = signal.getsignal(signal.SIGINT)
    watch = _NodeWatch()
    with contextlib.ExitStack() as after:
        options = _options(address, cpus, worker_setup)
        try:
            if address is None:
                folder = after.enter_context(_session_folder())
                before[SESSION_FOLDER] = os.environ.get(SESSION_FOLDER)
                os.environ[SESSION_FOLDER] = str(folder)
                options["_temp_dir"] = str(folder / "ray")  # Ray opens this folder to all users
            _start(address, options)
            handler = _add_log_handler(log_file)
            with watch:
                yield describe_session(address)
        finally:
            if watch.lost:  # the token stays set: without it, Ray aborts this process
                _keep_until_exit(after.pop_all())
            else:
                ray.shutdown()
                _set_environment(before)
                reload_ray_environment()
            _stop_logging(handler)
            with contextlib.suppress(TypeError, ValueError):  # not Python's, or in another thread
                signal.signal(signal.SIGINT, interrupts)  # which Ray Tune replaces and leaves


def _secure_environment() -> dict[str, str | None]:
    """Set the environment of a local session; return the replaced values, None for unset ones.

    A user's own values of `_LOCAL_ENVIRONMENT` are kept.
    """
    new: dict[str, str | None] = {**_SECURE_VARIABLES, **dict.fromkeys(_REMOVED_VARIABLES)}
    for name, value in new.items():
        if os.environ.get(name) not in (None, value):
            log(
                f"{name} is ignored: a session on this machine listens only on loopback and "
                "requires a token; the variable applies if RAY_ADDRESS names a cluster"
            )
    new[_TOKEN_VARIABLE] = secrets.token_hex(32)
    new |= {name: os.environ.get(name, value) for name, value in _LOCAL_ENVIRONMENT.items()}
    before = {name: os.environ.get(name) for name in new}
    _set_environment(new)
    return before


def _set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables; remove those with value None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def require_gpus(key: str, purpose: str, needed: float) -> None:
    """Raise UserError, before Ray starts, if a session on this machine has too few GPUs.

    A cluster is not checked here, since hosts may join it. key: the recipe key for the message.
    purpose: what needs the GPUs.
    """
    if not needed:
        return
    import ray

    if is_elastic() or ray.is_initialized() or needed <= (have := count_local_gpus()):
        return
    raise UserError(
        f"{key}: must be available on this machine: {purpose} needs {needed:g} GPUs, it has "
        f"{have:g}; leave the key out or set 0 to compute on CPUs, or set RAY_ADDRESS to a cluster "
        "with GPUs"
    )


WORKER_MIB = 400  # MiB of a worker before any model: Python, its libraries and Ray


def require_workers(workers: int, cpus_each: float) -> None:
    """Raise UserError, before Ray starts, if this machine has too few CPUs for the workers.

    A cluster is not checked here, since hosts may join it.

    Args:
        workers: the smallest number of workers that trains.
        cpus_each: CPUs per worker.
    """
    if workers == 1:
        return
    import ray

    if is_elastic() or ray.is_initialized():
        return
    cpus = count_local_cpus()
    most = int(cpus / cpus_each + 1e-9)
    if workers <= most:
        return
    share = max(1, 100 * cpus // workers) / 100
    raise UserError(
        f"resources.workers: must be at most {max(1, most)}, got {workers}: {workers:,} x "
        f"{cpus_each:g} CPUs are {workers * cpus_each:g}, this machine has {cpus:g}; use fewer "
        f"workers, set resources.cpus_per_worker: {share:g} to share CPUs, which is slower, or set "
        "RAY_ADDRESS to a larger cluster",
        see="how-to/cluster.md#where-work-runs",
    )


def count_local_cpus() -> int:
    """Return the number of CPUs that affinity and container quota allow this process."""
    return max(1, min(len(os.sched_getaffinity(0)), int(cpu_quota() + 1e-9)))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the number of CPUs that the control groups of this process allow, at most 1,000,000.

    Parent groups limit the process too. Version 2 has `cpu.max`, version 1 a quota and a period.
    Files that cannot be read set no limit.

    Args:
        root: root of the file system.
    """
    found, groups = _UNLIMITED, root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in ["0::/", *lines]:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops = [groups] if not controllers else [groups / controllers, groups / "cpu"]
        own = Path(path.lstrip("/"))
        for place in (top / part for top in tops for part in (own, *own.parents)):
            found = min(found, _quota_of(place))
    return found


_UNLIMITED = 1e6


def _quota_of(group: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            if float(quota) > 0:  # "max" and -1: no limit
                return float(quota) / float(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return _UNLIMITED


def count_local_gpus() -> int:
    """Return the number of GPUs that torch detects on this machine."""
    import torch

    return torch.cuda.device_count()


@contextlib.contextmanager
def _session_folder() -> Iterator[Path]:
    """Yield a folder for the files of a local session, and remove it at the end.

    Ray's default, /tmp/ray, can be read by all users of the machine and is never emptied: it would
    contain a search's number of trials and scores. Unlocked folders that killed sessions and
    trainings left (`dpdist.core.files.temporary_folder`) are removed too.
    """
    root = Path(tempfile.gettempdir())
    if len(os.fsencode(root)) > _MAX_ROOT_BYTES:
        root = Path("/tmp")
    remove_unlocked_folders(root, _FOLDER_PREFIX)
    remove_unlocked_folders(Path(tempfile.gettempdir()), TRAINING_FOLDER)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=root))  # mode 0700
    try:
        with lock_temporary_folder(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def secure_staging_folder() -> Path:
    """Return the folder where Ray Train and Tune stage files on this node, closed to other users.

    They stage files in Ray's session folder even if `storage_path` is set, and all users of a
    cluster's node can read that folder.
    """
    from ray.train.constants import _get_ray_train_session_dir

    folder = Path(_get_ray_train_session_dir())
    with contextlib.suppress(OSError):  # in the session of a different user
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    return folder


def _start(address: str | None, options: dict[str, Any]) -> None:
    """Start Ray, and keep the command's own handler of SIGTERM.

    Ray's handlers exit without a message while it starts, and abort with a stack trace later.
    """
    import ray

    ending = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises a bare Exception if its start takes too long
        where = f"connect to RAY_ADDRESS={address}" if address else "start a local session"
        cure = "" if address else ", or set DPDIST_EXECUTOR=local, which needs no Ray"
        text = f"Ray cannot {where}: {error_text(error)}; try again{cure}"
        raise ClusterError(text) from error
    except SystemExit:
        if callable(ending):
            ending(signal.SIGTERM, None)
        raise
    finally:
        if callable(ending):
            with contextlib.suppress(ValueError):  # only the main thread may set it
                signal.signal(signal.SIGTERM, ending)


def _options(
    address: str | None, cpus: int | None, worker_setup: Callable[[], None] | None
) -> dict[str, Any]:
    """Return the options of `ray.init`."""
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if worker_setup is not None:
        options["runtime_env"] = {"worker_process_setup_hook": worker_setup}
    if address is not None:
        return options | {"address": address}
    return options | {
        "address": "local",  # never an existing session on this machine
        "num_cpus": cpus or count_local_cpus(),
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }


def reload_ray_environment() -> None:
    """Let Ray read its mode, token and interfaces from the environment again."""
    from ray._common.utils import env_bool
    from ray._private import auto_init_hook, ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    auto_init_hook.enable_auto_connect = env_bool(_AUTO_START_VARIABLE, True)
    ray_constants.ENABLE_RAY_CLUSTER = env_bool(_LOOPBACK_VARIABLE, True)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def is_elastic() -> bool:
    """Return whether hosts may join, which they cannot in a local session."""
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local")


def describe_session(address: str | None = None) -> Session:
    """Return the open session. address: its cluster; None for the one in RAY_ADDRESS."""
    import ray

    if address is None and is_elastic():
        address = os.environ["RAY_ADDRESS"]
    total = ray.cluster_resources()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return Session(address, total.get("CPU", 0.0), total.get("GPU", 0.0), len(alive))


def _check_reachable(address: str) -> None:
    """Raise ClusterError within seconds if nothing answers; Ray would retry for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"RAY_ADDRESS={address}: must be HOST:PORT, ray://HOST:PORT or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"RAY_ADDRESS={address}: no Ray cluster answers: {error}; start one with `ray up`, or "
            "unset RAY_ADDRESS to use this machine",
            see="how-to/cluster.md#where-work-runs",
        ) from error


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop Ray's messages if the disk is full; logging would print a traceback per line."""


def _add_log_handler(log_file: Path | None) -> logging.Handler:
    """Install and return the handler of Ray's messages, after `ray.init`.

    `ray.init` removes all handlers. Without one, Python would print warnings and errors, such as
    tracebacks of lost workers.
    """
    logger = logging.getLogger("ray")
    logger.propagate = False
    handler: logging.Handler = logging.NullHandler()
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(log_file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    return handler


def _stop_logging(handler: logging.Handler | None) -> None:
    if handler is not None:
        logging.getLogger("ray").removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()
