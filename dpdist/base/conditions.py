"""Options that apply only beside others: where nothing would use them, they are refused.

A section of a recipe says so in its `conditions`. They hold for new runs: what a run was begun with
stays readable, and a recipe that is written complete, with every default, is its own recipe again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dpdist.base.reading import shown


@dataclass(frozen=True)
class OnlyWith:
    """A condition of some options.

    keys: below the section that states it, dotted. words: when they apply, behind "only applies".
    holds: whether they do, for a section; without it they never do.
    """

    keys: tuple[str, ...]
    words: str
    holds: Callable[[Any], bool] = lambda section: False


def conditions_of(kind: type[BaseModel]) -> list[OnlyWith]:
    """Return the conditions of a section's class, those of its bases first."""
    stated = [vars(each).get("conditions", ()) for each in reversed(kind.__mro__)]
    return [condition for some in stated for condition in some]


def unused(section: BaseModel, where: str = "") -> Iterator[str]:
    """Yield a complaint about each option of a section that differs from its default and that
    nothing uses, those of the sections in it, too. where: begins each key."""
    yield from complaints(conditions_of(type(section)), section, where)
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, BaseModel):
            yield from unused(inner, f"{where}{name}.")


def complaints(
    conditions: Iterable[OnlyWith], section: BaseModel, where: str = ""
) -> Iterator[str]:
    """Yield a complaint about each option of a section that these conditions refuse."""
    for condition in conditions:
        if condition.holds(section):
            continue
        for key in condition.keys:
            value, usual = _value(section, key)
            if value != usual:
                said = f"only applies {condition.words}, got {shown(value)}"
                yield f"{where}{key}: {said}; leave it out"


def _value(section: BaseModel, key: str) -> tuple[Any, Any]:
    """Return an option's value and its default; nothing twice where a section around it is not
    there."""
    *path, name = key.split(".")
    for part in path:
        found = getattr(section, part)
        if found is None:
            return None, None
        section = found
    field = type(section).model_fields[name]
    return getattr(section, name), field.get_default(call_default_factory=True)
