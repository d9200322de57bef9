"""JSON values that are compared: equal but for the last bits of numbers, or but for words."""

from __future__ import annotations

import math
import re
from typing import Any

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|\binf(?:inite|inity)?\b")


def same_json(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal but for the last bits of numbers, in which machines
    differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_json, one, other))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (one, other))
    if numbers:
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-300)
    return type(one) is type(other) and one == other


def numbers_in(text: str) -> list[str]:
    """Return the numbers that a text names, in their order, whatever the words around them."""
    return _NUMBER.findall(re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text.lower()))


def without_words(value: Any) -> Any:
    """Return a JSON value with every text replaced by the numbers in it, and lists of texts by the
    numbers of all of them: what is left when the same is said in other words."""
    if isinstance(value, dict):
        return {key: without_words(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(inner, str) for inner in value):
            return [number for inner in value for number in numbers_in(inner)]
        return [without_words(inner) for inner in value]
    return numbers_in(value) if isinstance(value, str) else value
