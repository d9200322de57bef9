"""Torch's deterministic algorithms, a setting of the process that several threads need at once.

A block that needs them, and a job that replaces the program's choice, may overlap in any order, and
neither changes the setting of the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

Choice = tuple[bool, bool, bool]  # deterministic, warns only, fills new tensors


class SharedBlocks:
    """Blocks in any threads that need one state of the process.

    The first block to start sets it, and the last one to end restores it.
    """

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), 0

    @contextmanager
    def block(self) -> Iterator[None]:
        """Keep the state inside the block."""
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
    """Blocks with deterministic algorithms, whatever the program chose.

    An operation without one warns, unless the program chose an error.
    """

    _chosen: Choice = (False, False, True)  # while a block is open

    def chosen(self) -> Choice:
        """Return the program's choice, also inside a block of any thread."""
        with self._lock:
            return self._chosen if self._open else _in_torch()

    def choose(self, choice: Choice) -> None:
        """Set the program's choice, which applies once no block is open."""
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

    # torch.use_deterministic_algorithms would load torch's compiler.
    strict, warned, filled = choice
    torch._C._set_deterministic_algorithms(strict, warn_only=warned)
    torch._C._set_deterministic_fill_uninitialized_memory(filled)
