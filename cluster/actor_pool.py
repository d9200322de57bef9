"""A crash-tolerant pool of Ray actors that pull chunks of work.

Every chunk is delivered to ``on_result`` exactly once, whatever dies or hangs in between: a chunk
of an actor that died, or that says nothing for much longer than others, is queued again. Chunks
must therefore be pure functions of their payload.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dpdist.cluster.work import Chunk, ChunkJob, in_order
from dpdist.core.errors import ClusterError, InvalidResultsError

# --- the actor and its calls ------------------------------------------------------------------


class PoolActor:
    """The actor: builds the worker once, then applies it to whatever arrives."""

    def __init__(self, factory: Callable[..., Callable[[Any], Any]], shared: Any) -> None:
        self._factory, self._shared = factory, shared

    def ready(self) -> bool:
        self._worker = self._factory(self._shared)
        return True

    def run(self, payload: Any) -> Any:
        return self._worker(payload)


@dataclass(frozen=True, eq=False)
class CallFailure:
    error: RayError


def fetch_results(refs: list[Any]) -> dict[Any, Any]:
    """Return the values of the references that arrived.

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


_MAX_ATTEMPTS = 5  # of one chunk: a chunk that fails or kills its actor this often is the culprit
_MAX_DEATHS_WITHOUT_RESULT = 6
_GROW_EVERY = 2.0  # seconds between looks at the size of the cluster
_STALL_EVERY = 1.0  # seconds between looks for stalled actors
_PAUSE = 20.0  # seconds between looks after which this process was stopped, or asleep
_READ_AHEAD_CHUNKS = 64  # chunks taken from the caller before they are needed, at least
_CALLS_PER_ACTOR = 2  # at once
_START_SECONDS = 600.0  # to wait for the first actor
_POLL_SECONDS = 0.5  # between looks at the actors
_DRAIN_SECONDS = 2.0  # for calls under way when the caller is interrupted


def run_chunks(job: ChunkJob, is_session_lost: Callable[[], bool] = lambda: False) -> None:
    """Run every chunk on actors.

    is_session_lost: whether Ray's calls would not return, so that none is made on leaving.

    Ray must be initialized. Raises ClusterError when no actor can start, actors keep dying, or a
    chunk keeps failing; what a worker raised is given back after the retries, an
    InvalidResultsError at once. After Ctrl-C and a ClusterError the results of calls that end
    within two seconds are still delivered; the one that Ctrl-C struck in may then be delivered
    twice.
    """
    pool = _Pool(job)
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
    calls: dict[Any, _PendingChunk] = field(default_factory=dict)  # the first is worked on


class _Pool:
    def __init__(self, job: ChunkJob) -> None:
        self.job, self.settings = job, job.settings
        self.source = in_order(job.chunks)
        self.chunks_read = 0
        self.pending: set[str] = set()  # taken from the source, no result yet
        self.queue: list[tuple[float, int, _PendingChunk]] = []
        self.slots: list[_Slot] = []
        self.durations: list[float] = []
        self.deaths_without_result = 0
        self.last_growth = self.last_stall_check = 0.0
        self.max_actors = 1  # actors there could be
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
                done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)  # what else came
            answers = fetch_results([ref for ref in done if ref in calls])
            for ref in done:
                if ref in calls:
                    self._handle_answer(calls[ref], ref, answers[ref])
                else:
                    self._handle_ready(ref)
            self._replace_stalled()
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Keep the queue long enough for every actor, and no longer."""
        ahead = max(_READ_AHEAD_CHUNKS, 2 * _CALLS_PER_ACTOR * self.max_actors)
        while len(self.queue) < ahead and (chunk := next(self.source, None)) is not None:
            if chunk.key in self.pending:
                raise ClusterError(f"two chunks are called {chunk.key!r}")
            self.pending.add(chunk.key)
            self._enqueue(_PendingChunk(chunk, self.chunks_read))
            self.chunks_read += 1

    def _enqueue(self, pending: _PendingChunk) -> None:
        heapq.heappush(self.queue, (pending.chunk.priority, pending.order, pending))

    def deliver_finished(self) -> None:
        """Deliver what calls under way return within `_DRAIN_SECONDS`, before leaving."""
        calls = {ref: pending for slot in self.slots for ref, pending in slot.calls.items()}
        if not calls:
            return
        with suppress(RayError):  # a lost session: what ended it is what is to be said
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
                self.job.make_worker, self.shared
            )
            self.slots.append(_Slot(actor, actor.ready.remote()))
        never = not self.durations and not any(slot.is_ready for slot in self.slots)
        if never and now - self.start_time > _START_SECONDS:
            raise ClusterError(
                f"no worker could start in {_START_SECONDS:.0f} s: each needs 1 CPU and "
                f"{self.settings.num_gpus:g} GPU, free now: {ray.available_resources()}"
            )

    def _assign_calls(self) -> None:
        starting = sum(not slot.is_ready for slot in self.slots)
        # One each, then the next: no actor hoards chunks while another is idle or yet to start.
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
        if ref not in slot.calls:  # of an actor that died meanwhile
            return
        if not isinstance(answer, CallFailure):
            now = time.monotonic()
            self.durations.append(now - slot.last_result_time)
            del self.durations[:-200]
            slot.last_result_time = now
            self.deaths_without_result = 0
            self._deliver(slot.calls[ref], answer)
            del slot.calls[ref]  # only now: Ctrl-C before must not lose it
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
            raise ClusterError(f"a worker could not be set up: {error.cause}") from error.cause
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
                f"{self.deaths_without_result} workers died one after another without finishing "
                f"anything: {lines[-1] if lines else type(error).__name__}"
            ) from error
        calls = [*slot.calls.values()]
        slot.calls.clear()
        for pending in calls[1:]:
            self._enqueue(pending)
        for pending in calls[:1]:  # only the call it was working on can be to blame
            self._retry(pending, error)

    def _replace_stalled(self) -> None:
        now = time.monotonic()
        if not self.durations or now - self.last_stall_check < _STALL_EVERY:
            return
        paused, self.last_stall_check = now - self.last_stall_check > _PAUSE, now
        if paused:  # this process stood still, and so did its machine: no actor is to blame
            for slot in self.slots:
                slot.last_result_time = now
        limit = max(self.settings.stall_seconds, 20 * statistics.median(self.durations))
        for slot in list(self.slots):
            if slot.calls and now - slot.last_result_time > limit:
                self._remove_dead_actor(slot, ClusterError(f"no answer for {limit:.0f} s"))
