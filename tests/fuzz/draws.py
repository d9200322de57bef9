"""Values drawn by Python's own generator: the same for the same seed, whatever else is loaded.

Hypothesis draws constants of the modules that happen to be loaded, so that a seed names no case.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Strategy = Callable[[Random], Any]
_LETTERS = "aA0 _-.:/\\'\"{}[]#&*!%@`,\n\t\r\0é½²ß\u0301\u202e\ufeff\U0001f642"


def sampled_from(values: Sequence[Any]) -> Strategy:
    return lambda random: values[random.randrange(len(values))]


def one_of(*strategies: Strategy) -> Strategy:
    return lambda random: random.choice(strategies)(random)


def booleans() -> Strategy:
    return lambda random: random.random() < 0.5


def integers(min_value: int = -(2**70), max_value: int = 2**70) -> Strategy:
    return lambda random: random.randint(min_value, max_value)


def floats() -> Strategy:
    """Draw floats of random bits: half of them are huge or tiny."""
    return lambda random: struct.unpack("<d", random.randbytes(8))[0]


def text(alphabet: str = _LETTERS, *, min_size: int = 0, max_size: int = 10) -> Strategy:
    return lambda random: "".join(
        random.choice(alphabet) for _ in range(random.randint(min_size, max_size))
    )


def binary(*, max_size: int) -> Strategy:
    return lambda random: random.randbytes(random.randint(0, max_size))


def lists(inner: Strategy, *, max_size: int) -> Strategy:
    return lambda random: [inner(random) for _ in range(random.randint(0, max_size))]


def tuples(*inner: Strategy) -> Strategy:
    return lambda random: tuple(each(random) for each in inner)


class Data:
    """Draw the values of one case."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def draw(self, strategy: Strategy) -> Any:
        return strategy(self._random)


def data() -> Strategy:
    return Data
