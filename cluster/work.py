"""Describe work for an executor (`dpdist.cluster.executor`).

Work is the chunks of a job, a group of training workers, or the trials of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist.core.errors import ClusterError


@dataclass(frozen=True)
class Chunk:
    """A piece of work. key: unique name. priority: chunks with smaller values run first."""

    key: str
    payload: Any
    priority: float = 0.0


def in_order(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks of a sequence by priority, and those of any other iterable in its order."""
    by_priority = isinstance(chunks, Sequence)
    return iter(sorted(chunks, key=lambda chunk: chunk.priority) if by_priority else chunks)


@dataclass(frozen=True)
class PoolSettings:
    """The number and the resources of the workers of a job.

    Args:
        actors: number of workers; None uses the whole cluster and grows with it.
        num_gpus: GPUs per worker, in addition to one CPU.
        stall_seconds: an actor without a result for this time, and for 20 median chunks, is
            replaced.
    """

    actors: int | None = None
    num_gpus: float = 0.0
    stall_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise ClusterError(f"actors: must be >= 1, got {self.actors}")


@dataclass(frozen=True)
class ChunkJob:
    """Chunks of work for a pool of workers.

    Args:
        make_worker: called as make_worker(shared), once in each worker; returns the function of a
            payload, whose result depends only on shared and payload.
        shared: a value for every worker.
        chunks: a sequence is run by priority; any other iterable in its own order, and it is read
            only shortly ahead, so that many chunks need little memory.
        on_result: called as on_result(key, result) in the process that started the job, once per
            chunk.
        settings: the number and the resources of workers.
    """

    make_worker: Callable[..., Callable[[Any], Any]]
    shared: Any
    chunks: Iterable[Chunk]
    on_result: Callable[[str, Any], None]
    settings: PoolSettings = PoolSettings()


@dataclass(frozen=True)
class WorkerPlace:
    """The place of one training worker in its group.

    rank: from 0 to world_size - 1. device: torch's name, "cpu" or "cuda:0". in_process: whether the
    worker is the process that started the group, so that it may raise its errors. host_leaves:
    returns whether Ray announced the pre-emption of a host of the group; a barrier, so all workers
    must call it equally often. None without such announcements.
    """

    rank: int
    world_size: int
    device: str
    in_process: bool = False
    host_leaves: Callable[[], bool] | None = None


MAX_PREEMPTIONS = 100  # during the training of one command


@dataclass(frozen=True)
class WorkerGroup:
    """A group of training workers, each of which calls work(argument, place).

    Args:
        work: the function of one worker.
        argument: a value for every worker.
        workers: their number, or smallest and largest number of a group that grows and shrinks.
        cpus, gpus: per worker.
        storage: a private folder that all hosts see, for files of Ray Train.
        torch_config: returns Ray Train's configuration of torch; called if Ray is used.
        max_restarts: number of times that Ray Train restarts a failed group.
        callbacks: those of Ray's run configuration.
        log: a private file for the workers' output. With it, every worker is a new process.
    """

    work: Callable[[Any, WorkerPlace], None]
    argument: Any
    workers: int | tuple[int, int]
    cpus: float
    gpus: float
    storage: Path
    torch_config: Callable[[], Any]
    max_restarts: int = 0
    callbacks: Sequence[Any] = ()
    log: Path | None = None

    @property
    def max_workers(self) -> int:
        """Return the largest number of workers."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]


class WorkersFailedError(Exception):
    """The workers of a group failed permanently; the message is that of their error."""


ReportMetrics = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrialPass:
    """One pass over the trials of a search, in which finished trials only report again.

    Args:
        run: run(number, report) finishes a trial and reports its metrics.
        count: number of trials.
        make_searcher: returns Ray Tune's searcher, which suggests {"trial": number}.
        make_scheduler: returns Ray Tune's scheduler; None if every trial runs to its end.
        concurrent: largest number of trials at the same time.
        resources: Ray's resources per trial.
        storage: a private folder that all hosts see, for files of Ray Tune.
        name: name of the pass in `storage`.
    """

    run: Callable[[int, ReportMetrics], None]
    count: int
    make_searcher: Callable[[], Any]
    make_scheduler: Callable[[], Any] | None
    concurrent: int
    resources: Mapping[str, float]
    storage: Path
    name: str


@dataclass(frozen=True)
class Host:
    """The resources of one live host."""

    cpus: float
    gpus: float
