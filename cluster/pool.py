"""A crash-tolerant pool of Ray actors that pull chunks of work.

Every chunk is delivered to ``on_result`` exactly once, whatever dies or hangs in between: a chunk
of a dead actor is queued again, a chunk that takes much longer than the others is also given to an
idle actor, and the first answer wins. Chunks must therefore be pure functions of their payload.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cluster.errors import ClusterError

_MAX_ATTEMPTS = 5  # of one chunk: a chunk that fails or kills its actor this often is the culprit
_MAX_DEATHS_WITHOUT_RESULT = 6
_GROW_EVERY = 2.0  # seconds between looks at the size of the cluster


@dataclass(frozen=True)
class Chunk:
    """A piece of work. Lower ``priority`` first; ``key`` is unique and names it in messages."""

    key: str
    payload: Any
    priority: float = 0.0


@dataclass(frozen=True)
class PoolSettings:
    """actors: None uses the whole cluster and grows with it. Times in seconds.

    stall_after: an actor that has returned nothing for this long, and for 20 median chunks, is
    replaced. start_timeout: how long to wait for the first actor to start.
    """

    actors: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    in_flight: int = 2
    stall_after: float = 60.0
    start_timeout: float = 600.0
    poll: float = 0.5

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise ClusterError(f"actors: must be at least 1, got {self.actors}")
        if self.in_flight < 1:
            raise ClusterError(f"in_flight: must be at least 1, got {self.in_flight}")


def run_chunks(
    factory: Callable[..., Callable[[Any], Any]],
    shared: Any,
    chunks: Iterable[Chunk],
    on_result: Callable[[str, Any], None],
    settings: PoolSettings | None = None,
) -> None:
    """Run every chunk on actors; ``on_result(key, result)`` is called here, once per chunk.

    factory: called once in each actor as factory(shared); returns the function applied to payloads.
    shared: put into Ray's object store once (weights, settings).

    Ray must be initialised. Raises ClusterError when no actor can start, when actors keep dying, or
    when a chunk keeps failing; an exception of the caller's own kinds raised by ``factory`` or by a
    chunk is given back after the retries as the cause.
    """
    pool = _Pool(factory, shared, chunks, on_result, settings or PoolSettings())
    try:
        pool.run()
    finally:
        pool.stop()


class _Runner:
    """The actor: builds the worker once, then applies it to whatever arrives."""

    def __init__(self, factory: Callable[..., Callable[[Any], Any]], shared: Any) -> None:
        self._factory, self._shared = factory, shared

    def ready(self) -> bool:
        self._work = self._factory(self._shared)
        return True

    def run(self, payload: Any) -> Any:
        return self._work(payload)


@dataclass(eq=False)
class _Slot:
    actor: Any
    ready: Any
    live: bool = False
    last_answer: float = 0.0
    refs: list[Any] = field(default_factory=list)


@dataclass
class _Call:
    slot: _Slot
    chunk: Chunk
    since: float


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
        self.chunks = {chunk.key: chunk for chunk in chunks}
        self.queue = [
            (chunk.priority, i, key) for i, (key, chunk) in enumerate(self.chunks.items())
        ]
        heapq.heapify(self.queue)
        self.order = {key: i for _, i, key in self.queue}
        self.missing = set(self.chunks)
        self.attempts = dict.fromkeys(self.chunks, 0)
        self.copies = dict.fromkeys(self.chunks, 0)
        self.calls: dict[Any, _Call] = {}
        self.slots: list[_Slot] = []
        self.durations: list[float] = []
        self.deaths = 0
        self.grown = 0.0
        self.begun = time.monotonic()
        if not self.missing:
            return
        self.factory = factory
        self.shared = ray.put(shared)
        self.runner: Any = ray.remote(_Runner)

    def run(self) -> None:
        while self.missing:
            self._grow()
            self._fill()
            waiting = [*self.calls, *(slot.ready for slot in self.slots if not slot.live)]
            if not waiting:
                time.sleep(self.settings.poll)
                continue
            done, _ = ray.wait(waiting, num_returns=1, timeout=self.settings.poll)
            if done:
                # Whatever else has arrived by now is taken in the same round.
                done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            for ref in done:
                self._take(ref)
            self._replace_stalled()

    def stop(self) -> None:
        for slot in self.slots:
            ray.kill(slot.actor, no_restart=True)
        self.slots.clear()

    def _wanted(self) -> int:
        if self.settings.actors is not None:
            limit = self.settings.actors
        else:
            have = ray.cluster_resources()
            limit = (
                int(have.get("CPU", 0) / self.settings.num_cpus) if self.settings.num_cpus else 1
            )
            if self.settings.num_gpus:
                limit = int(have.get("GPU", 0) / self.settings.num_gpus)
        return min(max(limit, 1), len(self.missing))

    def _grow(self) -> None:
        now = time.monotonic()
        if self.slots and now - self.grown < _GROW_EVERY:
            return
        self.grown = now
        for _ in range(self._wanted() - len(self.slots)):
            actor = self.runner.options(
                num_cpus=self.settings.num_cpus, num_gpus=self.settings.num_gpus
            ).remote(self.factory, self.shared)
            self.slots.append(_Slot(actor, actor.ready.remote()))
        never = not self.durations and not any(slot.live for slot in self.slots)
        if never and now - self.begun > self.settings.start_timeout:
            raise ClusterError(
                f"no worker could start in {self.settings.start_timeout:.0f} s: each needs "
                f"{self.settings.num_cpus:g} CPU and {self.settings.num_gpus:g} GPU, free now: "
                f"{ray.available_resources()}"
            )

    def _fill(self) -> None:
        # One each, then the next: no actor hoards chunks while another is idle.
        for depth in range(1, self.settings.in_flight + 1):
            for slot in self.slots:
                while slot.live and len(slot.refs) < depth:
                    chunk = self._next(slot)
                    if chunk is None:
                        break
                    self._send(slot, chunk)

    def _next(self, slot: _Slot) -> Chunk | None:
        while self.queue:
            _, _, key = heapq.heappop(self.queue)
            if key in self.missing and not self.copies[key]:
                return self.chunks[key]
        if slot.refs or not self.durations:
            return None
        return self._straggler(slot)

    def _straggler(self, slot: _Slot) -> Chunk | None:
        """The oldest chunk that another actor has had for much longer than chunks usually take."""
        limit = time.monotonic() - max(3 * statistics.median(self.durations), 1.0)
        late = [
            call
            for call in self.calls.values()
            if call.since < limit
            and call.slot is not slot
            and call.chunk.key in self.missing
            and self.copies[call.chunk.key] == 1
        ]
        return min(late, key=lambda call: call.since).chunk if late else None

    def _send(self, slot: _Slot, chunk: Chunk) -> None:
        ref = slot.actor.run.remote(chunk.payload)
        now = time.monotonic()
        if not slot.refs:
            slot.last_answer = now
        slot.refs.append(ref)
        self.calls[ref] = _Call(slot, chunk, now)
        self.copies[chunk.key] += 1

    def _take(self, ref: Any) -> None:
        if ref not in self.calls:
            self._take_ready(ref)
            return
        call = self.calls[ref]
        key = call.chunk.key
        try:
            result = ray.get(ref)
        except RayTaskError as error:
            self._forget(ref)
            self._again(key, error)
            return
        except RayError as error:
            self._bury(call.slot, error)
            return
        now = time.monotonic()
        self.durations.append(now - max(call.since, call.slot.last_answer))
        del self.durations[:-200]
        call.slot.last_answer = now
        self._forget(ref)
        self.deaths = 0
        if key in self.missing:
            self.missing.remove(key)
            self.on_result(key, result)

    def _take_ready(self, ref: Any) -> None:
        slot = next((slot for slot in self.slots if slot.ready == ref), None)
        if slot is None:
            return
        try:
            slot.live = ray.get(ref)
        except RayTaskError as error:
            raise ClusterError(f"a worker could not be set up: {error.cause}") from error.cause
        except RayError as error:
            self._bury(slot, error)

    def _forget(self, ref: Any) -> None:
        call = self.calls.pop(ref)
        call.slot.refs.remove(ref)
        self.copies[call.chunk.key] -= 1

    def _again(self, key: str, error: Exception) -> None:
        if key not in self.missing:
            return
        self.attempts[key] += 1
        if self.attempts[key] >= _MAX_ATTEMPTS:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise ClusterError(f"{key} failed {_MAX_ATTEMPTS} times: {cause}") from cause
        if not self.copies[key]:
            heapq.heappush(self.queue, (self.chunks[key].priority, self.order[key], key))

    def _bury(self, slot: _Slot, error: Exception) -> None:
        if slot not in self.slots:
            return
        self.slots.remove(slot)
        ray.kill(slot.actor, no_restart=True)
        self.grown = 0.0
        self.deaths += 1
        if self.deaths > _MAX_DEATHS_WITHOUT_RESULT:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ClusterError(
                f"{self.deaths} workers died one after another without finishing anything: "
                f"{lines[-1] if lines else type(error).__name__}"
            ) from error
        for place, ref in enumerate(list(slot.refs)):
            key = self.calls[ref].chunk.key
            self._forget(ref)
            if place == 0:  # only the chunk it was working on can be to blame
                self._again(key, error)
            elif key in self.missing and not self.copies[key]:
                heapq.heappush(self.queue, (self.chunks[key].priority, self.order[key], key))

    def _replace_stalled(self) -> None:
        if not self.durations:
            return
        limit = max(self.settings.stall_after, 20 * statistics.median(self.durations))
        now = time.monotonic()
        for slot in list(self.slots):
            if slot.refs and now - slot.last_answer > limit:
                self._bury(slot, ClusterError(f"no answer for {limit:.0f} s"))
