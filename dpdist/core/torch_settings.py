"""Torch's deterministic algorithms: one setting of the process, which several threads need at once.

A block that needs them and a job that sets aside what the program around it chose may overlap in
any order: neither changes what the other computes under.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

Choice = tuple[bool, bool, bool]  # deterministic, warns only, fills new tensors


class SharedBlocks:
    """Blocks, in any threads, that need one state of the process.

    The first one to begin makes it, and the last one to end takes it back.
    """

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), 0

    @contextmanager
    def block(self) -> Iterator[None]:
        """Hold the state until the end of the block."""
        with self._lock:
            if not self._open:
                self._begin()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._end()

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class _Deterministic(SharedBlocks):
    """Blocks that compute by deterministic algorithms, whatever the program chose around them.

    An operation that has none warns, unless the program chose an error.
    """

    _chosen: Choice = (False, False, True)  # while a block is open

    def chosen(self) -> Choice:
        """Return what the program chose, also inside of a block of any thread."""
        with self._lock:
            return self._chosen if self._open else _in_torch()

    def choose(self, choice: Choice) -> None:
        """Choose what holds as soon as no block is open."""
        with self._lock:
            self._chosen = choice
            _set_in_torch(_inside(choice) if self._open else choice)

    def _begin(self) -> None:
        self._chosen = _in_torch()
        _set_in_torch(_inside(self._chosen))

    def _end(self) -> None:
        _set_in_torch(self._chosen)


DETERMINISTIC = _Deterministic()


def _inside(choice: Choice) -> Choice:
    strict, warned, filled = choice
    return True, not strict or warned, strict and filled


def _in_torch() -> Choice:
    import torch

    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )


def _set_in_torch(choice: Choice) -> None:
    import torch

    # Not by torch.use_deterministic_algorithms, which loads torch's compiler.
    strict, warned, filled = choice
    torch._C._set_deterministic_algorithms(strict, warn_only=warned)
    torch._C._set_deterministic_fill_uninitialized_memory(filled)
