"""What a pool of actors calls: the actor itself, how its answers are fetched, one call alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dpdist.base.errors import InvalidResults, UserError


class Runner:
    """The actor: builds the worker once, then applies it to whatever arrives."""

    def __init__(self, factory: Callable[..., Callable[[Any], Any]], shared: Any) -> None:
        self._factory, self._shared = factory, shared

    def ready(self) -> bool:
        self._work = self._factory(self._shared)
        return True

    def run(self, payloads: list[Any], seconds: float) -> tuple[list[Any], float]:
        """Results of the first payloads, as many as fit in ``seconds`` but one at least, and how
        long they took. An error is raised by the call in which its payload comes first; that all
        results are invalid, at once."""
        results: list[Any] = []
        begun = time.perf_counter()
        for payload in payloads:
            try:
                results.append(self._work(payload))
            except InvalidResults:
                raise
            except Exception:
                if not results:
                    raise
                break
            if time.perf_counter() - begun > seconds:
                break
        return results, time.perf_counter() - begun


@dataclass(frozen=True, eq=False)
class Failed:
    error: RayError


def fetched(refs: list[Any]) -> dict[Any, Any]:
    """What arrived; fetched together, which is several times faster, unless one of them failed."""
    try:
        return dict(zip(refs, ray.get(refs), strict=True))
    except RayError:
        pass
    values: dict[Any, Any] = {}
    for ref in refs:
        try:
            values[ref] = ray.get(ref)
        except RayError as error:
            values[ref] = Failed(error)
    return values


def gpus() -> float:
    """Of the whole cluster."""
    return float(ray.cluster_resources().get("GPU", 0.0)) if ray.is_initialized() else 0.0


def may_grow() -> bool:
    """Whether hosts may join: not in a session on this machine alone."""
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local")


def run_once(
    function: Callable[[Any], Any], argument: Any, failed: str, num_gpus: float = 0.0
) -> Any:
    """function(argument) on one of the machines that actors run on.

    Raises UserError "{failed}: why" when it raises anything.
    """
    try:
        once = ray.remote(function).options(num_cpus=1, num_gpus=num_gpus)
        return ray.get(once.remote(argument))
    except RayTaskError as error:
        raise UserError(f"{failed}: {error.cause}") from error.cause
