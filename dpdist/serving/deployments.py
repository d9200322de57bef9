"""The same on Ray Serve: replicas that hold the model, and one gate before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.base.errors import ClusterError
from dpdist.base.extras import library
from dpdist.serving.gate import Gate, Limits, Lost

if TYPE_CHECKING:
    from dpdist.release.reading import Release


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

    def __call__(self, image: np.ndarray) -> dict[str, Any]:
        return self._answer(image).as_json


class Ingress:
    """Every request comes here first."""

    def __init__(
        self, classifier: Any, about: dict[str, Any], shape: tuple[int, ...], limits: Limits
    ) -> None:
        self._classifier = classifier
        self._gate = Gate(about, shape, self._ask, limits)

    async def _ask(self, image: np.ndarray) -> dict[str, Any]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import ReplicaUnavailableError

        try:
            return await self._classifier.remote(image)
        except (RayActorError, ReplicaUnavailableError) as error:
            raise Lost(str(error)) from error

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import Response

        headers = {name.lower(): value for name, value in request.headers.items()}
        reply = await self._gate.reply(request.method, request.url.path, headers, request.stream())
        return Response(reply.content, reply.status, dict(reply.headers), media_type=reply.kind)


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

    Raises ClusterError when Serve cannot start it.
    """
    serve = require_serve()
    serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
    try:
        classifier = serve.deployment(
            num_replicas=serving.replicas,
            ray_actor_options={"num_cpus": 1},
            max_ongoing_requests=1,
            max_constructor_retry_count=1,
            health_check_period_s=2,
            graceful_shutdown_timeout_s=2,
        )(Classifier)
        ingress = serve.deployment(
            ray_actor_options={"num_cpus": 0},
            max_ongoing_requests=10 * serving.limits.waiting,
            graceful_shutdown_timeout_s=2,
        )(Ingress)
        shape = tuple(release.spec.input_shape)
        app = ingress.bind(
            classifier.bind(serving, release.sums), _about(release, serving), shape, serving.limits
        )
        try:
            serve.run(app, name="dpdist")
        except RuntimeError as error:
            raise ClusterError(f"Ray Serve did not start the model: {error}") from error
        yield f"http://{host}:{port}"
    finally:
        serve.shutdown()
