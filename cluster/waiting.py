"""Tell the user when work cannot go on because a host of the cluster is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_EVERY = 10.0  # seconds


class Room:
    """Says, once each time it happens, that the cluster is smaller than what the work needs.

    need, and what `have` returns: amounts of Ray's resources ("CPU", "GPU") in the whole cluster.
    """

    def __init__(
        self,
        what: str,
        need: dict[str, float],
        say: Callable[[str], None],
        have: Callable[[], dict[str, float]] | None = None,
        look_every: float = _LOOK_EVERY,
    ) -> None:
        self._what, self._say, self._look_every = what, say, look_every
        self._need = {name: amount for name, amount in need.items() if amount > 0}
        self._have = have or _cluster_resources
        self._looked, self._missing = time.monotonic(), False

    def look(self) -> None:
        """To be called often; asks Ray every ten seconds."""
        now = time.monotonic()
        if now - self._looked < self._look_every:
            return
        self._looked = now
        have = self._have()
        missing = any(have.get(name, 0.0) < amount - 1e-9 for name, amount in self._need.items())
        if missing and not self._missing:
            shares = " and ".join(
                f"{have.get(name, 0.0):g} of {amount:g} {name}s"
                for name, amount in self._need.items()
            )
            self._say(
                f"{self._what}: waits for hosts: the cluster has {shares}; an autoscaler starts "
                "them, on your own hosts `ray up` does"
            )
        elif self._missing and not missing:
            self._say(f"{self._what}: the cluster has room again")
        self._missing = missing


def _cluster_resources() -> dict[str, float]:
    import ray

    return ray.cluster_resources()
