"""A crash-tolerant pool of Ray actors that pull chunks of work.

Every chunk is delivered to ``on_result`` exactly once, whatever dies or hangs in between: a chunk
of a dead actor is queued again, a chunk that takes much longer than the others is also given to an
idle actor, and the first answer wins. Chunks must therefore be pure functions of their payload.

One call carries as many short chunks as an actor does in a tenth of a second, for a driver to keep
up with a million; an actor that is slower than it was gives the rest back.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dpdist.cluster.work import Chunk, PoolSettings, in_order
from dpdist.core.errors import ClusterError, InvalidResultsError

# --- the actor and its calls ------------------------------------------------------------------


class PoolActor:
    """The actor: builds the worker once, then applies it to whatever arrives."""

    def __init__(self, factory: Callable[..., Callable[[Any], Any]], shared: Any) -> None:
        self._factory, self._shared = factory, shared

    def ready(self) -> bool:
        self._worker = self._factory(self._shared)
        return True

    def run(self, payloads: list[Any], seconds: float) -> tuple[list[Any], float]:
        """Results of the first payloads, as many as fit in ``seconds`` but one at least, and how
        long they took. An error is raised by the call in which its payload comes first; that all
        results are invalid, at once."""
        results: list[Any] = []
        begun = time.perf_counter()
        for payload in payloads:
            try:
                results.append(self._worker(payload))
            except InvalidResultsError:
                raise
            except Exception:
                if not results:
                    raise
                break
            if time.perf_counter() - begun > seconds:
                break
        return results, time.perf_counter() - begun


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
_CALL_SECONDS = 0.1  # how long a call should take
_CALLS_PER_SECOND = 500  # of all actors: one driver handles a few thousand, at most
_MAX_CHUNKS_PER_CALL = 64  # chunks
_DRAIN_SECONDS = 2.0  # for calls under way when the caller is interrupted


def run_chunks(
    factory: Callable[..., Callable[[Any], Any]],
    shared: Any,
    chunks: Iterable[Chunk],
    on_result: Callable[[str, Any], None],
    settings: PoolSettings | None = None,
    is_session_lost: Callable[[], bool] = lambda: False,
) -> None:
    """Run every chunk on actors; ``on_result(key, result)`` is called here, once per chunk.

    factory: called once in each actor as factory(shared); returns the function applied to payloads.
    shared: put into Ray's object store once.
    chunks: a sequence is worked off by priority; any other iterable in its own order, and it is
    read only a little ahead, so that a million chunks need no memory.
    is_session_lost: whether Ray's calls would not return, so that none is made on leaving.

    Ray must be initialized. Raises ClusterError when no actor can start, actors keep dying, or a
    chunk keeps failing; what ``factory`` or a chunk raised is given back after the retries, an
    InvalidResultsError at once. After Ctrl-C and a ClusterError the results of calls that end
    within two seconds are still delivered; the one that Ctrl-C struck in may then be delivered
    twice.
    """
    pool = _Pool(factory, shared, chunks, on_result, settings or PoolSettings())
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
class _Slot:
    actor: Any
    ready_ref: Any
    is_ready: bool = False
    last_result_time: float = 0.0
    max_chunks: int = 1  # chunks of its next call, at most
    call_refs: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class _PendingChunk:
    chunk: Chunk
    order: int
    attempts: int = 0
    calls_in_flight: int = 0  # calls in flight
    run_alone: bool = False  # it was in a call that failed: the next failure is its own


@dataclass
class _Call:
    slot: _Slot
    chunks: list[Chunk]
    start_time: float


class _Pool:
    def __init__(
        self,
        factory: Callable[..., Callable[[Any], Any]],
        shared: Any,
        chunks: Iterable[Chunk],
        on_result: Callable[[str, Any], None],
        settings: PoolSettings,
    ) -> None:
        self.settings = settings
        self.on_result = on_result
        self.source = in_order(chunks)
        self.exhausted = False
        self.chunks_read = 0
        self.pending: dict[str, _PendingChunk] = {}  # taken from the source, no result yet
        self.queue: list[tuple[float, int, str]] = []
        self.calls: dict[Any, _Call] = {}
        self.slots: list[_Slot] = []
        self.durations: list[float] = []
        self.deaths_without_result = 0
        self.last_growth = self.last_stall_check = 0.0
        self.max_actors = 1  # actors there could be
        self.start_time = time.monotonic()
        self._read_ahead()
        if not self.pending:
            return
        self.factory = factory
        self.shared = ray.put(shared)
        self.actor_class: Any = ray.remote(PoolActor)

    def run(self) -> None:
        while self.pending:
            self._start_actors()
            self._assign_calls()
            waiting = [*self.calls, *(slot.ready_ref for slot in self.slots if not slot.is_ready)]
            if not waiting:
                time.sleep(self.settings.poll_seconds)
                continue
            done, _ = ray.wait(waiting, num_returns=1, timeout=self.settings.poll_seconds)
            if done:
                done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)  # what else came
            values = fetch_results([ref for ref in done if ref in self.calls])
            for ref in done:
                self._handle_done(ref, values)
            self._replace_stalled()
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Keep the queue long enough for every actor, and no longer."""
        calls = max(self.max_actors, sum(slot.max_chunks for slot in self.slots))
        ahead = max(_READ_AHEAD_CHUNKS, 2 * self.settings.calls_per_actor * calls)
        while not self.exhausted and len(self.queue) < ahead:
            chunk = next(self.source, None)
            if chunk is None:
                self.exhausted = True
                return
            if chunk.key in self.pending:
                raise ClusterError(f"two chunks are called {chunk.key!r}")
            self.pending[chunk.key] = _PendingChunk(chunk, self.chunks_read)
            heapq.heappush(self.queue, (chunk.priority, self.chunks_read, chunk.key))
            self.chunks_read += 1

    def deliver_finished(self) -> None:
        """Deliver what calls under way return within `_DRAIN_SECONDS`, before leaving."""
        refs = list(self.calls)
        if not refs:
            return
        with suppress(RayError):  # a lost session: what ended it is what is to be said
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=_DRAIN_SECONDS)
            for ref, answer in fetch_results(done).items():
                if not isinstance(answer, CallFailure):
                    self._deliver(self.calls[ref], answer[0])

    def _deliver(self, call: _Call, results: list[Any]) -> None:
        for chunk, result in zip(call.chunks, results, strict=False):
            if chunk.key in self.pending:
                self.on_result(chunk.key, result)
                del self.pending[chunk.key]  # only now: Ctrl-C before must not lose it

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
        if self.settings.num_cpus:
            return max(1, int(have.get("CPU", 0) / self.settings.num_cpus))
        return 1

    def _start_actors(self) -> None:
        now = time.monotonic()
        if self.slots and now - self.last_growth < _GROW_EVERY:
            return
        self.last_growth = now
        self.max_actors = self._max_actors_now()
        self._read_ahead()
        for _ in range(min(self.max_actors, len(self.pending)) - len(self.slots)):
            actor = self.actor_class.options(
                num_cpus=self.settings.num_cpus, num_gpus=self.settings.num_gpus
            ).remote(self.factory, self.shared)
            self.slots.append(_Slot(actor, actor.ready.remote()))
        never = not self.durations and not any(slot.is_ready for slot in self.slots)
        if never and now - self.start_time > self.settings.start_timeout:
            raise ClusterError(
                f"no worker could start in {self.settings.start_timeout:.0f} s: each needs "
                f"{self.settings.num_cpus:g} CPU and {self.settings.num_gpus:g} GPU, free now: "
                f"{ray.available_resources()}"
            )

    def _assign_calls(self) -> None:
        late: list[Chunk] | None = None
        starting = sum(not slot.is_ready for slot in self.slots)
        # One each, then the next: no actor hoards chunks while another is idle or yet to start.
        for depth in range(1, self.settings.calls_per_actor + 1):
            for slot in self.slots:
                while slot.is_ready and len(slot.call_refs) < depth:
                    if depth > 1 and len(self.queue) <= starting:
                        break
                    chunks = self._next_call(slot)
                    if not chunks:
                        late = self._late_chunks() if late is None else late
                        if slot.call_refs or not late:
                            break
                        chunks = [late.pop()]  # never from the slot itself: it has no calls
                    self._send(slot, chunks)

    def _next_call(self, slot: _Slot) -> list[Chunk]:
        """Chunks for one call, none when the queue is empty. Near the end calls are small, so that
        all actors finish together."""
        share = -(-len(self.queue) // (2 * self.settings.calls_per_actor * len(self.slots)))
        size = max(1, min(slot.max_chunks, share))
        chunks: list[Chunk] = []
        while len(chunks) < size and (step_plan := self._next_pending()) is not None:
            if step_plan.run_alone and chunks:
                self._requeue(step_plan.chunk.key)
                break
            chunks.append(step_plan.chunk)
            if step_plan.run_alone:
                break
        return chunks

    def _next_pending(self) -> _PendingChunk | None:
        while self.queue:
            _, _, key = heapq.heappop(self.queue)
            if key in self.pending and not self.pending[key].calls_in_flight:
                return self.pending[key]
        return None

    def _late_chunks(self) -> list[Chunk]:
        """Chunks that an actor has had for much longer than chunks usually take, the latest
        first."""
        if not self.durations:
            return []
        limit = time.monotonic() - max(3 * statistics.median(self.durations), 1.0)
        late = [call for call in self.calls.values() if call.start_time < limit]
        return [
            chunk
            for call in sorted(late, key=lambda call: -call.start_time)
            for chunk in reversed(call.chunks)
            if chunk.key in self.pending and self.pending[chunk.key].calls_in_flight == 1
        ]

    def _call_seconds(self) -> float:
        """Return the target duration of a call: longer with very many actors.

        Calls are then fewer.
        """
        return max(_CALL_SECONDS, len(self.slots) / _CALLS_PER_SECOND)

    def _send(self, slot: _Slot, chunks: list[Chunk]) -> None:
        payloads = [chunk.payload for chunk in chunks]
        ref = slot.actor.run.remote(payloads, 2 * self._call_seconds())
        now = time.monotonic()
        if not slot.call_refs:
            slot.last_result_time = now
        slot.call_refs.append(ref)
        self.calls[ref] = _Call(slot, chunks, now)
        for chunk in chunks:
            self.pending[chunk.key].calls_in_flight += 1

    def _handle_done(self, ref: Any, values: dict[Any, Any]) -> None:
        if ref not in self.calls:
            self._handle_ready(ref)
            return
        call = self.calls[ref]
        answer = values[ref]
        if isinstance(answer, CallFailure):
            if isinstance(answer.error, RayTaskError):
                if isinstance(answer.error.cause, InvalidResultsError):
                    raise InvalidResultsError(str(answer.error.cause)) from None
                self._remove_call(ref)
                self._retry(call.chunks, answer.error)
            else:
                self._remove_dead_actor(call.slot, answer.error)
            return
        results, seconds = answer
        now = time.monotonic()
        self.durations.append(now - max(call.start_time, call.slot.last_result_time))
        del self.durations[:-200]
        call.slot.last_result_time = now
        fitting = int(self._call_seconds() * len(results) / max(seconds, 1e-9))
        call.slot.max_chunks = max(1, min(fitting, 4 * len(results), _MAX_CHUNKS_PER_CALL))
        self.deaths_without_result = 0
        self._deliver(call, results)
        self._remove_call(ref)
        for chunk in call.chunks[len(results) :]:
            self._requeue(chunk.key)

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

    def _remove_call(self, ref: Any) -> None:
        call = self.calls.pop(ref)
        call.slot.call_refs.remove(ref)
        for chunk in call.chunks:
            if chunk.key in self.pending:
                self.pending[chunk.key].calls_in_flight -= 1

    def _retry(self, chunks: list[Chunk], error: Exception) -> None:
        """Queue the chunks of a failed call again. A chunk that was alone in it is to blame; of
        several nobody knows, and each goes alone next time."""
        for chunk in chunks:
            step_plan = self.pending.get(chunk.key)
            if step_plan is None:
                continue
            step_plan.run_alone = True
            step_plan.attempts += len(chunks) == 1
            if step_plan.attempts >= _MAX_ATTEMPTS:
                cause = error.cause if isinstance(error, RayTaskError) else error
                raise ClusterError(f"{chunk.key} failed {_MAX_ATTEMPTS} times: {cause}") from cause
            self._requeue(chunk.key)

    def _requeue(self, key: str) -> None:
        step_plan = self.pending.get(key)
        if step_plan is not None and not step_plan.calls_in_flight:
            heapq.heappush(self.queue, (step_plan.chunk.priority, step_plan.order, key))

    def _remove_dead_actor(self, slot: _Slot, error: Exception) -> None:
        if slot not in self.slots:
            return
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
        for place, ref in enumerate(list(slot.call_refs)):
            chunks = self.calls[ref].chunks
            self._remove_call(ref)
            if place == 0:  # only the call it was working on can be to blame
                self._retry(chunks, error)
            else:
                for chunk in chunks:
                    self._requeue(chunk.key)

    def _replace_stalled(self) -> None:
        now = time.monotonic()
        if not self.durations or now - self.last_stall_check < _STALL_EVERY:
            return
        paused, self.last_stall_check = now - self.last_stall_check > _PAUSE, now
        if paused:  # this process stood still, and so did its machine: no actor is to blame
            for slot in self.slots:
                slot.last_result_time = now
        limit = max(self.settings.stall_seconds, 20 * statistics.median(self.durations))
        limit += 2 * self._call_seconds()  # before the last chunk of a call is begun
        for slot in list(self.slots):
            if slot.call_refs and now - slot.last_result_time > limit:
                self._remove_dead_actor(slot, ClusterError(f"no answer for {limit:.0f} s"))
