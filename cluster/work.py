"""Describe work for an executor: chunks of a job, a group of training workers, a search's trials.

`dpdist.cluster.executor` says where such work runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist.core.errors import ClusterError


@dataclass(frozen=True)
class Chunk:
    """A piece of work. Lower ``priority`` first; ``key`` is unique and names it in messages."""

    key: str
    payload: Any
    priority: float = 0.0


def in_order(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield chunks in the order of work: a sequence by priority, a stream as it comes."""
    by_priority = isinstance(chunks, Sequence)
    return iter(sorted(chunks, key=lambda chunk: chunk.priority) if by_priority else chunks)


@dataclass(frozen=True)
class PoolSettings:
    """How many workers do the chunks of a job, and what each of them holds.

    Args:
        actors: None uses the whole cluster and grows with it.
        num_gpus: of each worker, beside one CPU.
        stall_seconds: an actor that has returned nothing for this long, and for 20 median chunks,
            is replaced.
    """

    actors: int | None = None
    num_gpus: float = 0.0
    stall_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise ClusterError(f"actors: must be at least 1, got {self.actors}")


@dataclass(frozen=True)
class ChunkJob:
    """Chunks, each of which is done by one of several workers.

    Args:
        make_worker: called as make_worker(shared), once in each worker; returns the function of a
            payload, whose result depends on shared and payload alone.
        shared: given to every worker.
        chunks: a sequence is worked off by priority; any other iterable in its own order, and it is
            read only a little ahead, so that a million chunks need no memory.
        on_result: keeps a result; called as on_result(key, result) where the job was begun, once
            per chunk.
        settings: the number of workers and what each holds.
    """

    make_worker: Callable[..., Callable[[Any], Any]]
    shared: Any
    chunks: Iterable[Chunk]
    on_result: Callable[[str, Any], None]
    settings: PoolSettings = PoolSettings()


@dataclass(frozen=True)
class WorkerPlace:
    """The place of one training worker in its group.

    rank: from 0 to world_size - 1. device: as torch names it, "cpu" or "cuda:0". in_process:
    whether the worker is the process that started the group, to which it may raise its errors.
    host_leaves: asks Ray whether it takes a host away from the group; a barrier, so that all
    workers call it equally often and hear the same. None where nobody would say so.
    """

    rank: int
    world_size: int
    device: str
    in_process: bool = False
    host_leaves: Callable[[], bool] | None = None


MAX_PREEMPTIONS = 100  # of one command's training: then its cluster is no place to train


@dataclass(frozen=True)
class WorkerGroup:
    """A group of training workers, each of which calls work(argument, place).

    Args:
        work: the function of one worker.
        argument: given to every worker.
        workers: their number, or the least and the most of a group that grows and shrinks.
        cpus, gpus: of each worker.
        storage: a private folder that all hosts see, for what Ray Train writes.
        torch_config: makes Ray Train's configuration of torch; called where Ray is used.
        max_restarts: how often Ray Train starts the group again after it failed.
        callbacks: of Ray's run configuration.
        log: a private file that takes all that the workers print. With it no worker is the process
            that started the group: each has a new one.
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
    """The workers of a group failed for good; the message is what they left."""


ReportMetrics = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrialPass:
    """One pass over the trials of a search; finished ones only report again.

    Args:
        run: run(number, report) brings a trial to its end and reports its metrics.
        count: number of trials.
        make_searcher: makes Ray Tune's searcher, which hands out {"trial": number}.
        make_scheduler: makes Ray Tune's scheduler; None where every trial runs to its end.
        concurrent: trials at the same time, at most.
        resources: of Ray that each trial holds.
        storage: a private folder that all hosts see, for what Ray Tune writes.
        name: of the pass, within `storage`.
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
    """Resources of one live host."""

    cpus: float
    gpus: float
