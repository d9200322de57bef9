"""Requests that wait together are asked together: one call of a replica for several images.

What a call costs beside its draws is then paid once for all of them. The images of a call share
nothing else: each is answered by noise of its own, in network batches of its own, so that no answer
depends on who else asks.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

# Answers, None for a fault that the replica's log has; and the seconds that they took.
Call = Callable[[list[np.ndarray]], Awaitable[tuple[list[dict[str, Any] | None], float]]]

_MOST, _WORTH = 64, 0.1  # images of a call; seconds of work in one, where an image takes less


class Batches:
    """call: asks whichever replica is free; what it raises is raised to each of its requests.
    lanes: calls at a time. seconds: that one may take. Belongs to one event loop."""

    def __init__(self, call: Call, lanes: int, seconds: float) -> None:
        self._call, self._free, self._seconds = call, lanes, seconds
        self._waiting: deque[tuple[np.ndarray, asyncio.Future[dict[str, Any]]]] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._each = _WORTH  # seconds of an image; before anything is known, one at a time

    async def __call__(self, image: np.ndarray) -> dict[str, Any]:
        """Its answer. Raises what the call raised, TimeoutError after so many seconds."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((image, answer))
        self._start()
        return await answer

    def _start(self) -> None:
        while self._free and (batch := self._next()):
            self._free -= 1
            task = asyncio.ensure_future(self._ask(*zip(*batch, strict=True)))
            self._under_way.add(task)  # the loop itself would let go of it
            task.add_done_callback(self._ended)

    def _next(self) -> list[tuple[np.ndarray, asyncio.Future[dict[str, Any]]]]:
        """Who waits longest, as many as are shared out to the free lanes; nobody who left."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        share = math.ceil(len(self._waiting) / self._free)
        most = min(share, _MOST, max(1, int(_WORTH / self._each)))
        taken = [self._waiting.popleft() for _ in range(most)] if self._waiting else []
        return [(image, answer) for image, answer in taken if not answer.done()]

    async def _ask(self, images: tuple, answers: tuple) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                found, seconds = await self._call(list(images))
            for answer, value in zip(answers, found, strict=True):
                if value is None:
                    _tell(answer, RuntimeError("a replica could not answer; its log has more"))
                elif not answer.done():
                    answer.set_result(value)
            self._each = max(seconds / len(images), 1e-6)
        except Exception as error:
            for answer in answers:
                _tell(answer, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._free += 1
        self._start()


def _tell(answer: asyncio.Future[dict[str, Any]], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
