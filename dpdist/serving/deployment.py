"""Deploy a release behind HTTP: Ray actors that hold the model, and batches of waiting requests.

Not Ray Serve: its replicas open a gRPC port on every interface of the machine, which unpickles
what it is sent. Requests that wait together are asked together, in one call of a replica for
several images, so that the cost of a call beside its draws is paid once. The images of a call
share nothing else: each is answered by noise of its own, in network batches of its own, so that no
answer depends on other requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.core.errors import ClusterError, UserError
from dpdist.core.optional_imports import import_extra
from dpdist.serving.app import (
    ReplicaLostError,
    RequestHandler,
    RequestLimits,
    listen,
    start_http_server,
)

if TYPE_CHECKING:
    from dpdist.release.bundle import Answer, Release, TextAnswer


# --- batches of requests ----------------------------------------------------------------------


# Answers, None for a fault that the replica's log has; and the seconds that they took.
BatchCall = Callable[[list[Any]], Awaitable[tuple[list[dict[str, Any] | None], float]]]

# images of a call; seconds of work in one, where an image takes less
_MAX_BATCH_SIZE, _BATCH_SECONDS = 64, 0.1


class RequestBatcher:
    """call: asks whichever replica is free; what it raises is raised to each of its requests.
    max_calls: calls at a time. timeout_seconds: that one may take. Belongs to one event loop."""

    def __init__(self, call: BatchCall, max_calls: int, timeout_seconds: float) -> None:
        self._call, self._free_calls, self._timeout_seconds = call, max_calls, timeout_seconds
        self._queue: deque[tuple[Any, asyncio.Future[dict[str, Any]]]] = deque()
        self._running_tasks: set[asyncio.Task[None]] = set()
        # seconds of an image; before anything is known, one at a time
        self._seconds_per_image = _BATCH_SECONDS

    async def __call__(self, image: Any) -> dict[str, Any]:
        """Its answer. Raises what the call raised, TimeoutError after so many seconds."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._queue.append((image, answer))
        self._start_calls()
        return await answer

    def _start_calls(self) -> None:
        while self._free_calls and (batch := self._next_batch()):
            self._free_calls -= 1
            task = asyncio.ensure_future(self._answer_batch(*zip(*batch, strict=True)))
            self._running_tasks.add(task)  # the loop itself would let go of it
            task.add_done_callback(self._on_task_done)

    def _next_batch(self) -> list[tuple[Any, asyncio.Future[dict[str, Any]]]]:
        """Return the requests that wait longest, as many as are shared out to the free lanes.

        Those whose sender left are dropped.
        """
        while self._queue and self._queue[0][1].done():
            self._queue.popleft()
        share = math.ceil(len(self._queue) / self._free_calls)
        most = min(share, _MAX_BATCH_SIZE, max(1, int(_BATCH_SECONDS / self._seconds_per_image)))
        taken = [self._queue.popleft() for _ in range(most)] if self._queue else []
        return [(image, answer) for image, answer in taken if not answer.done()]

    async def _answer_batch(self, images: tuple[Any, ...], answers: tuple[Any, ...]) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                found, seconds = await self._call(list(images))
            for answer, value in zip(answers, found, strict=True):
                if value is None:
                    _set_exception(
                        answer, RuntimeError("a replica could not answer; its log has more")
                    )
                elif not answer.done():
                    answer.set_result(value)
            self._seconds_per_image = max(seconds / len(images), 1e-6)
        except Exception as error:
            for answer in answers:
                _set_exception(answer, error)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._running_tasks.discard(task)
        self._free_calls += 1
        self._start_calls()


def _set_exception(answer: asyncio.Future[dict[str, Any]], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


# --- replicas ---------------------------------------------------------------------------------


_CALLS = 2  # of a replica: it works on one while the next one waits there
_COOLDOWN_SECONDS = 5.0  # that a replica which was lost is asked only when no other is left


@dataclass(frozen=True)
class ServingSettings:
    """folder: of the release, where every replica can read it. sigma, n, alpha: as in
    `Release.answerer`. replicas: processes that answer, one CPU each."""

    folder: Path
    trusted_factory: str | None
    sigma: float | None
    n: int
    alpha: float
    replicas: int
    limits: RequestLimits


class Classifier:
    """One replica: the model, and noise of its own that nobody else draws.

    checksums: of the release that GET / describes. Raises ReleaseError where another lies there by
    now.
    """

    def __init__(self, settings: ServingSettings, checksums: dict[str, str]) -> None:
        from dpdist.release.bundle import ReleaseError, load

        release = load(settings.folder, trusted_factory=settings.trusted_factory)
        if release.checksums != checksums:
            raise ReleaseError(f"{settings.folder}: changed since it is served; start serve again")
        self._answerer: Callable[[Any], Answer | TextAnswer]
        if release.description.tokens:
            self._answerer = release.text_answerer
        else:
            self._answerer = release.answerer(settings.sigma, settings.n, settings.alpha)

    def ready(self) -> None:
        """Return once the model is there."""

    def answer(self, images: list[Any]) -> tuple[list[dict[str, Any] | None], float]:
        """Return an answer to each, None for a fault of ours, and the seconds that all took."""
        began = time.perf_counter()
        return [self._answer_one(image) for image in images], time.perf_counter() - began

    def _answer_one(self, image: np.ndarray | str) -> dict[str, Any] | None:
        try:
            return self._answerer(image).as_json
        except UserError as error:  # of a text that cannot be continued
            return {"error": str(error)}
        except Exception:  # the others of its call are not to suffer
            logging.getLogger(__name__).exception("an image ended in a fault")
            return None


class ReplicaPool:
    """Ray actors of `Classifier`, asked in turn. Belongs to one event loop.

    A replica whose process dies is started again by Ray.
    """

    def __init__(self, actors: list[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._actors, self._clock = actors, clock
        self._calls_in_progress = [0] * len(actors)  # calls under way
        self._last_lost = [-_COOLDOWN_SECONDS] * len(actors)  # when it was lost last

    async def __call__(self, images: list[Any]) -> tuple[list[dict[str, Any] | None], float]:
        """Return the answers of the replica with the fewest calls. Raises Lost if it dies."""
        from ray.exceptions import RayActorError

        now = self._clock()
        rests = [now - lost < _COOLDOWN_SECONDS for lost in self._last_lost]
        chosen = min(
            range(len(rests)),
            key=lambda i: (rests[i], self._calls_in_progress[i], self._last_lost[i]),
        )
        self._calls_in_progress[chosen] += 1
        try:
            actor = self._actors[chosen]
            result: tuple[list[dict[str, Any] | None], float] = await actor.answer.remote(images)
            return result
        except RayActorError as error:
            self._last_lost[chosen] = self._clock()
            raise ReplicaLostError(str(error)) from error
        finally:
            self._calls_in_progress[chosen] -= 1


def require_server() -> Any:
    """Return the HTTP server's module. Raises UserError where it is not installed."""
    return import_extra("uvicorn", "serve", "dpdist serve")


def _service_description(release: Release, settings: ServingSettings) -> dict[str, Any]:
    """Return the answer to GET /."""
    texts = release.description.tokens
    answers = {} if texts else {"alpha": settings.alpha, "draws": settings.n}
    about = release.description
    told: dict[str, Any] = {"classes": list(about.classes)}
    if about.vocabulary is not None:
        told = {"vocabulary": about.vocabulary}
    return {
        "name": release.name,
        **told,
        "input_shape": list(release.spec.input_shape),
        "epsilon": release.epsilon if math.isfinite(release.epsilon) else "inf",
        "delta": release.delta,
        "private": release.card["private"],
        **({} if release.no_epsilon is None else {"privacy": release.no_epsilon}),
        **answers,
    }


@contextmanager
def deploy_release(
    release: Release, settings: ServingSettings, host: str, port: int
) -> Iterator[str]:
    """Answer by HTTP while the context lasts; gives the address. A session of Ray must be open.

    Raises UserError where that cannot be listened on, ClusterError when no replica starts or no
    session is open: Ray would start one by itself, which listens on every interface.
    """
    import ray

    require_server()
    if not ray.is_initialized():
        raise ClusterError("no session of Ray is open: serve within dpdist.connect()")
    listen(host, port).close()  # said before anything starts
    replica: Any = ray.remote(num_cpus=1, max_restarts=-1)(Classifier)
    actors: list[Any] = [
        replica.remote(settings, release.checksums) for _ in range(settings.replicas)
    ]
    try:
        try:
            ray.get([actor.ready.remote() for actor in actors])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise ClusterError(f"no replica could start: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"no replica could start: {_error_message(error)}") from error
        limits = settings.limits
        shape = None if release.description.tokens else tuple(release.spec.input_shape)
        batches = RequestBatcher(
            ReplicaPool(actors), _CALLS * settings.replicas, limits.timeout_seconds
        )
        with _run_http_server(
            RequestHandler(
                _service_description(release, settings),
                shape,
                batches,
                limits,
                fit_picture=release.fit_picture if release.description.pictures else None,
                bounded=not release.description.raw_inputs,
            ),
            host,
            port,
        ):
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        for actor in actors:
            ray.kill(actor)


def _error_message(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


@contextmanager
def _run_http_server(handler: RequestHandler, host: str, port: int) -> Iterator[None]:
    """Speak HTTP in a thread with an event loop of its own: this one waits for the user's end."""
    loop = asyncio.new_event_loop()
    listening = listen(host, port)

    async def begin() -> asyncio.Task[None]:
        return start_http_server(handler, listening)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    speaking = asyncio.run_coroutine_threadsafe(begin(), loop).result()

    async def end() -> None:
        speaking.cancel()
        with suppress(asyncio.CancelledError):
            await speaking

    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()
        listening.close()
