"""The same on Ray Serve: replicas that hold the model, and before them one gate, with HTTP of its
own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.base.errors import ClusterError
from dpdist.base.extras import library
from dpdist.serving.batches import Batches
from dpdist.serving.gate import Gate, Limits, Lost
from dpdist.serving.http import listen, speak

if TYPE_CHECKING:
    from dpdist.release.reading import Release

_CALLS = 2  # of a replica: it works on one while the next one waits there


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

    async def __call__(self, images: list[np.ndarray]) -> tuple[list[dict[str, Any] | None], float]:
        """An answer to each, None for a fault of ours; and the seconds that all of them took.

        A coroutine that never waits: the next call must not begin in a thread beside it.
        """
        began = time.perf_counter()
        return [self._one(image) for image in images], time.perf_counter() - began

    def _one(self, image: np.ndarray) -> dict[str, Any] | None:
        try:
            return self._answer(image).as_json
        except Exception:  # the others of its call are not to suffer
            logging.getLogger("ray.serve").exception("an image ended in a fault")
            return None


class Ingress:
    """Every request comes here first, by HTTP of its own. calls: of replicas, at a time."""

    async def __init__(  # type: ignore[misc]
        self,
        classifier: Any,
        about: dict[str, Any],
        shape: tuple[int, ...],
        limits: Limits,
        calls: int,
        where: tuple[str, int],
    ) -> None:
        self._classifier = classifier
        batches = Batches(self._ask, calls, limits.seconds)
        self._http = speak(Gate(about, shape, batches, limits), listen(*where))

    async def _ask(self, images: list[np.ndarray]) -> tuple[list[dict[str, Any] | None], float]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import ReplicaUnavailableError

        try:
            return await self._classifier.remote(images)
        except (RayActorError, ReplicaUnavailableError) as error:
            raise Lost(str(error)) from error

    def check_health(self) -> None:
        """Serve asks now and then, and starts another where this raises."""
        if self._http.done():
            raise RuntimeError("nobody listens any more")


def require_serve() -> Any:
    """ray.serve. Raises UserError where what it needs is not installed."""
    return library("ray.serve", "serve", "dpdist serve")


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
    """The release behind HTTP while the context lasts; gives its address. Ray must be initialised.

    Raises UserError where that cannot be listened on, ClusterError when Serve cannot start it.
    """
    import ray

    serve = require_serve()
    listen(host, port).close()  # what cannot be is said before anything starts
    serve.start(proxy_location="Disabled")
    try:
        classifier = serve.deployment(
            num_replicas=serving.replicas,
            ray_actor_options={"num_cpus": 1},
            max_ongoing_requests=_CALLS,
            max_constructor_retry_count=1,
            health_check_period_s=2,
            graceful_shutdown_timeout_s=2,
        )(Classifier)
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}  # whose address it listens on
        ingress = serve.deployment(
            ray_actor_options={"num_cpus": 0, "resources": here},
            health_check_period_s=2,
            graceful_shutdown_timeout_s=2,
        )(Ingress)
        app = ingress.bind(
            classifier.bind(serving, release.sums),
            _about(release, serving),
            tuple(release.spec.input_shape),
            serving.limits,
            _CALLS * serving.replicas,
            (host, port),
        )
        try:
            serve.run(app, name="dpdist", route_prefix=None)
        except RuntimeError as error:
            raise ClusterError(f"Ray Serve did not start the model: {error}") from error
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        serve.shutdown()
