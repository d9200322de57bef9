"""A release behind HTTP: Ray actors that hold the model, and the gate in this process.

Not Ray Serve: its replicas open a gRPC port on every interface of the machine, which unpickles what
it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.base.errors import ClusterError, UserError
from dpdist.base.extras import library
from dpdist.serving.batches import Batches
from dpdist.serving.gate import Gate, Limits, Lost
from dpdist.serving.http import listen, speak

if TYPE_CHECKING:
    from dpdist.release.reading import Release

_CALLS = 2  # of a replica: it works on one while the next one waits there
_REST_SECONDS = 5.0  # that a replica which was lost is asked only when no other is left


@dataclass(frozen=True)
class Serving:
    """folder: of the release, where every replica can read it. sigma, n, alpha: as in
    `Release.answerer`. replicas: processes that answer, one CPU each."""

    folder: Path
    trusted_factory: str | None
    sigma: float | None
    n: int
    alpha: float
    replicas: int
    limits: Limits


class Classifier:
    """One replica: the model, and noise of its own that nobody else draws.

    sums: of the release that GET / describes. Raises ReleaseError where another lies there by now.
    """

    def __init__(self, serving: Serving, sums: dict[str, str]) -> None:
        from dpdist.release.files import ReleaseError
        from dpdist.release.reading import load

        release = load(serving.folder, trusted_factory=serving.trusted_factory)
        if release.sums != sums:
            raise ReleaseError(f"{serving.folder}: changed since it is served; start serve again")
        self._answer = release.answerer(serving.sigma, serving.n, serving.alpha)

    def ready(self) -> None:
        """Return once the model is there."""

    def answer(self, images: list[np.ndarray]) -> tuple[list[dict[str, Any] | None], float]:
        """Return an answer to each, None for a fault of ours, and the seconds that all took."""
        began = time.perf_counter()
        return [self._one(image) for image in images], time.perf_counter() - began

    def _one(self, image: np.ndarray) -> dict[str, Any] | None:
        try:
            return self._answer(image).as_json
        except Exception:  # the others of its call are not to suffer
            logging.getLogger(__name__).exception("an image ended in a fault")
            return None


class Replicas:
    """Ray actors of `Classifier`, asked in turn. Belongs to one event loop.

    A replica whose process dies is started again by Ray.
    """

    def __init__(self, actors: list[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._actors, self._clock = actors, clock
        self._asked = [0] * len(actors)  # calls under way
        self._lost = [-_REST_SECONDS] * len(actors)  # when it was lost last

    async def __call__(self, images: list[np.ndarray]) -> tuple[list[dict[str, Any] | None], float]:
        """Return the answers of the replica with the fewest calls. Raises Lost if it dies."""
        from ray.exceptions import RayActorError

        now = self._clock()
        rests = [now - lost < _REST_SECONDS for lost in self._lost]
        chosen = min(range(len(rests)), key=lambda i: (rests[i], self._asked[i], self._lost[i]))
        self._asked[chosen] += 1
        try:
            return await self._actors[chosen].answer.remote(images)
        except RayActorError as error:
            self._lost[chosen] = self._clock()
            raise Lost(str(error)) from error
        finally:
            self._asked[chosen] -= 1


def require_server() -> Any:
    """Return the HTTP server's module. Raises UserError where it is not installed."""
    return library("uvicorn", "serve", "dpdist serve")


def _about(release: Release, serving: Serving) -> dict[str, Any]:
    """What GET / says."""
    return {
        "name": release.name,
        "classes": list(release.about.classes),
        "input_shape": list(release.spec.input_shape),
        "epsilon": release.card["guarantee"]["epsilon"],
        "delta": release.delta,
        "private": release.card["private"],
        "alpha": serving.alpha,
        "draws": serving.n,
    }


@contextmanager
def deployed(release: Release, serving: Serving, host: str, port: int) -> Iterator[str]:
    """Answer by HTTP while the context lasts; gives the address. Ray must be initialised.

    Raises UserError where that cannot be listened on, ClusterError when no replica starts.
    """
    import ray

    require_server()
    listen(host, port).close()  # said before anything starts
    replica: Any = ray.remote(num_cpus=1, max_restarts=-1)(Classifier)
    actors: list[Any] = [replica.remote(serving, release.sums) for _ in range(serving.replicas)]
    try:
        try:
            ray.get([actor.ready.remote() for actor in actors])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise ClusterError(f"no replica could start: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"no replica could start: {_why(error)}") from error
        limits, shape = serving.limits, tuple(release.spec.input_shape)
        batches = Batches(Replicas(actors), _CALLS * serving.replicas, limits.seconds)
        with _spoken(Gate(_about(release, serving), shape, batches, limits), host, port):
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        for actor in actors:
            ray.kill(actor)


def _why(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


@contextmanager
def _spoken(gate: Gate, host: str, port: int) -> Iterator[None]:
    """Speak HTTP in a thread with an event loop of its own: this one waits for the user's end."""
    loop = asyncio.new_event_loop()
    listening = listen(host, port)

    async def begin() -> asyncio.Task[None]:
        return speak(gate, listening)

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
