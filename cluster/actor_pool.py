"""Run chunks of work on a crash-tolerant pool of Ray actors.

Every chunk is delivered to ``on_result`` exactly once, even if actors die or hang: a chunk of an
actor that died, or that took much longer than others, is queued again. Chunks must therefore be
pure functions of their payload.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dpdist.cluster.versions import check_same_versions, package_fingerprints
from dpdist.cluster.work import Chunk, ChunkJob, in_order
from dpdist.core.errors import ClusterError, InvalidResultsError

# --- the actor and its calls ------------------------------------------------------------------


class PoolActor:
    """An actor that builds its worker once, and calls it with each payload."""

    def __init__(
        self,
        factory: Callable[..., Callable[[Any], Any]],
        shared: Any,
        check_host: Callable[[], None],
    ) -> None:
        self._factory, self._shared, self._check_host = factory, shared, check_host

    def ready(self) -> bool:
        self._check_host()
        self._worker = self._factory(self._shared)
        return True

    def run(self, payload: Any) -> Any:
        return self._worker(payload)


def _check_host(driver: dict[str, str], packages: tuple[str, ...]) -> None:
    """Raise ClusterError if this host, which may have joined late, has different packages."""
    if packages:
        check_same_versions(driver, packages, f"node {ray.util.get_node_ip_address()}")


@dataclass(frozen=True, eq=False)
class CallFailure:
    error: RayError


def fetch_results(refs: list[Any]) -> dict[Any, Any]:
    """Return the values of finished calls by reference; a `CallFailure` for a failed one.

    They are fetched together, which is several times faster, unless one of them failed.
    """
    try:
        return dict(zip(refs, ray.get(refs), strict=True))
    except RayError:
        pass
    values: dict[Any, Any] = {}
    for ref in refs:
        try:
            values[ref] = ray.get(ref)
        except RayError as error:
            values[ref] = CallFailure(error)
    return values


# --- the pool ---------------------------------------------------------------------------------


_MAX_ATTEMPTS = 5  # failures or dead actors after which a chunk itself must be the cause
_MAX_DEATHS_WITHOUT_RESULT = 6
_GROW_EVERY = 2.0  # seconds between checks of the cluster's size
_STALL_EVERY = 1.0  # seconds between checks for stalled actors
_PAUSE = 20.0  # seconds between checks after which this process must have been stopped or asleep
_READ_AHEAD_CHUNKS = 64  # minimum number of chunks to read from the caller in advance
_CALLS_PER_ACTOR = 2  # at once
_START_SECONDS = 600.0  # to wait for the first actor
_POLL_SECONDS = 0.5  # between checks of the actors
_DRAIN_SECONDS = 2.0  # for running calls when the caller is interrupted


def run_chunks(
    job: ChunkJob,
    is_session_lost: Callable[[], bool] = lambda: False,
    packages: tuple[str, ...] = (),
) -> None:
    """Run every chunk on actors. Ray must be initialized.

    After Ctrl-C or a ClusterError, the results of calls that end within two seconds are still
    delivered; a result that was being delivered at Ctrl-C may then be delivered twice.

    Args:
        job: the chunks and their worker.
        is_session_lost: returns whether Ray's calls would not return, so that the end skips them.
        packages: names of packages whose sources must be the driver's in every actor, also on a
            host that joins later.

    Raises:
        ClusterError: no actor can start, actors keep dying, or a chunk keeps failing.
        InvalidResultsError: a worker raised it; the chunk is not retried.
    """
    pool = _Pool(job, packages)
    try:
        pool.run()
    except (KeyboardInterrupt, ClusterError):
        if not is_session_lost():
            pool.deliver_finished()
        raise
    finally:
        if not is_session_lost():
            pool.stop()


@dataclass(eq=False)
class _PendingChunk:
    chunk: Chunk
    order: int
    attempts: int = 0


@dataclass(eq=False)
class _Slot:
    actor: Any
    ready_ref: Any
    is_ready: bool = False
    last_result_time: float = 0.0
    calls: dict[Any, _PendingChunk] = field(default_factory=dict)  # the first one is running


class _Pool:
    def __init__(self, job: ChunkJob, packages: tuple[str, ...]) -> None:
        self.job, self.settings = job, job.settings
        driver = package_fingerprints(packages) if packages else {}
        self.check_host = partial(_check_host, driver, packages)
        self.source = in_order(job.chunks)
        self.chunks_read = 0
        self.pending: set[str] = set()  # read from the source, without a result
        self.queue: list[tuple[float, int, _PendingChunk]] = []
        self.slots: list[_Slot] = []
        self.durations: list[float] = []
        self.deaths_without_result = 0
        self.last_growth = self.last_stall_check = 0.0
        self.max_actors = 1  # that the cluster has resources for
        self.start_time = time.monotonic()
        self._read_ahead()
        if not self.pending:
            return
        self.shared = ray.put(job.shared)
        self.actor_class: Any = ray.remote(PoolActor)

    def run(self) -> None:
        while self.pending:
            self._start_actors()
            self._assign_calls()
            calls = {ref: slot for slot in self.slots for ref in slot.calls}
            waiting = [*calls, *(slot.ready_ref for slot in self.slots if not slot.is_ready)]
            if not waiting:
                time.sleep(_POLL_SECONDS)
                continue
            done, _ = ray.wait(waiting, num_returns=1, timeout=_POLL_SECONDS)
            if done:
                done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)  # all finished
            answers = fetch_results([ref for ref in done if ref in calls])
            for ref in done:
                if ref in calls:
                    self._handle_answer(calls[ref], ref, answers[ref])
                else:
                    self._handle_ready(ref)
            self._replace_stalled()
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Read chunks until the queue is long enough for every actor."""
        ahead = max(_READ_AHEAD_CHUNKS, 2 * _CALLS_PER_ACTOR * self.max_actors)
        while len(self.queue) < ahead and (chunk := next(self.source, None)) is not None:
            if chunk.key in self.pending:
                raise ClusterError(f"chunks: keys must be unique, got {chunk.key!r} twice")
            self.pending.add(chunk.key)
            self._enqueue(_PendingChunk(chunk, self.chunks_read))
            self.chunks_read += 1

    def _enqueue(self, pending: _PendingChunk) -> None:
        heapq.heappush(self.queue, (pending.chunk.priority, pending.order, pending))

    def deliver_finished(self) -> None:
        """Deliver the results of running calls that end within `_DRAIN_SECONDS`."""
        calls = {ref: pending for slot in self.slots for ref, pending in slot.calls.items()}
        if not calls:
            return
        with suppress(RayError):  # so that the original error is raised
            done, _ = ray.wait([*calls], num_returns=len(calls), timeout=_DRAIN_SECONDS)
            for ref, answer in fetch_results(done).items():
                if not isinstance(answer, CallFailure):
                    self._deliver(calls[ref], answer)

    def _deliver(self, pending: _PendingChunk, result: Any) -> None:
        self.job.on_result(pending.chunk.key, result)
        self.pending.discard(pending.chunk.key)

    def stop(self) -> None:
        for slot in self.slots:
            ray.kill(slot.actor, no_restart=True)
        self.slots.clear()

    def _max_actors_now(self) -> int:
        if self.settings.actors is not None:
            return self.settings.actors
        have = ray.cluster_resources()
        if self.settings.num_gpus:
            return max(1, int(have.get("GPU", 0) / self.settings.num_gpus))
        return max(1, int(have.get("CPU", 0)))

    def _start_actors(self) -> None:
        now = time.monotonic()
        if self.slots and now - self.last_growth < _GROW_EVERY:
            return
        self.last_growth = now
        self.max_actors = self._max_actors_now()
        self._read_ahead()
        for _ in range(min(self.max_actors, len(self.pending)) - len(self.slots)):
            actor = self.actor_class.options(num_cpus=1, num_gpus=self.settings.num_gpus).remote(
                self.job.make_worker, self.shared, self.check_host
            )
            self.slots.append(_Slot(actor, actor.ready.remote()))
        never = not self.durations and not any(slot.is_ready for slot in self.slots)
        if never and now - self.start_time > _START_SECONDS:
            raise ClusterError(
                f"no worker started within {_START_SECONDS:.0f} s: each needs 1 CPU and "
                f"{self.settings.num_gpus:g} GPU; available now: {ray.available_resources()}"
            )

    def _assign_calls(self) -> None:
        starting = sum(not slot.is_ready for slot in self.slots)
        # One call each, then a second: no actor takes two while others are idle or starting.
        for depth in range(1, _CALLS_PER_ACTOR + 1):
            for slot in self.slots:
                kept = 0 if depth == 1 else starting
                if slot.is_ready and len(slot.calls) < depth and len(self.queue) > kept:
                    self._send(slot, heapq.heappop(self.queue)[2])

    def _send(self, slot: _Slot, pending: _PendingChunk) -> None:
        if not slot.calls:
            slot.last_result_time = time.monotonic()
        slot.calls[slot.actor.run.remote(pending.chunk.payload)] = pending

    def _handle_answer(self, slot: _Slot, ref: Any, answer: Any) -> None:
        if ref not in slot.calls:  # its actor died meanwhile
            return
        if not isinstance(answer, CallFailure):
            now = time.monotonic()
            self.durations.append(now - slot.last_result_time)
            del self.durations[:-200]
            slot.last_result_time = now
            self.deaths_without_result = 0
            self._deliver(slot.calls[ref], answer)
            del slot.calls[ref]  # after the delivery, so that Ctrl-C cannot lose the result
        elif not isinstance(answer.error, RayTaskError):
            self._remove_dead_actor(slot, answer.error)
        elif isinstance(answer.error.cause, InvalidResultsError):
            raise InvalidResultsError(str(answer.error.cause)) from None
        else:
            self._retry(slot.calls.pop(ref), answer.error)

    def _handle_ready(self, ref: Any) -> None:
        slot = next((slot for slot in self.slots if slot.ready_ref == ref), None)
        if slot is None:
            return
        try:
            slot.is_ready = ray.get(ref)
        except RayTaskError as error:
            raise ClusterError(f"a worker could not start: {error.cause}") from error.cause
        except RayError as error:
            self._remove_dead_actor(slot, error)

    def _retry(self, pending: _PendingChunk, error: Exception) -> None:
        """Queue the chunk of a failed call again."""
        pending.attempts += 1
        if pending.attempts >= _MAX_ATTEMPTS:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise ClusterError(
                f"{pending.chunk.key} failed {_MAX_ATTEMPTS} times: {cause}"
            ) from cause
        self._enqueue(pending)

    def _remove_dead_actor(self, slot: _Slot, error: Exception) -> None:
        self.slots.remove(slot)
        ray.kill(slot.actor, no_restart=True)
        self.last_growth = 0.0
        self.deaths_without_result += 1
        if self.deaths_without_result > _MAX_DEATHS_WITHOUT_RESULT:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ClusterError(
                f"{self.deaths_without_result} workers died in a row without a result: "
                f"{lines[-1] if lines else type(error).__name__}"
            ) from error
        calls = [*slot.calls.values()]
        slot.calls.clear()
        for pending in calls[1:]:
            self._enqueue(pending)
        for pending in calls[:1]:  # only the running call can be the cause
            self._retry(pending, error)

    def _replace_stalled(self) -> None:
        now = time.monotonic()
        if not self.durations or now - self.last_stall_check < _STALL_EVERY:
            return
        paused, self.last_stall_check = now - self.last_stall_check > _PAUSE, now
        if paused:  # this process or its machine was stopped, so the actors are not stalled
            for slot in self.slots:
                slot.last_result_time = now
        limit = max(self.settings.stall_seconds, 20 * statistics.median(self.durations))
        for slot in list(self.slots):
            if slot.calls and now - slot.last_result_time > limit:
                self._remove_dead_actor(slot, ClusterError(f"no answer for {limit:.0f} s"))
