"""With which workers a training went on each time, and what that cost: the run's record of it.

PRIVATE, one line a start, written by worker 0. It releases nothing and no result depends on it; the
ledger alone says what is charged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from dpdist.base.reading import NoSuchFile, parse_json, read_text
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder

if TYPE_CHECKING:
    from dpdist.training.reducer import Reducer


@dataclass(frozen=True)
class Group:
    """Workers that went on together. step: their first. backend: what they talk through. again:
    steps on record that they release anew, each charged another time. independence: how their
    passes keep records apart (`dpdist.base.independence`); "" where nothing rests on it."""

    step: int
    workers: int
    backend: str
    again: int
    independence: str = field(default="", compare=False)

    @classmethod
    def of(cls, reducer: Reducer, ledger: Ledger, step: int, independence: str = "") -> Group:
        """That of a ledger's current attempt, which begins with `step`."""
        again = ledger.repeats(step)
        return cls(step, reducer.world_size, reducer.backend, again, independence)


_SHAPE = {"step": int, "workers": int, "backend": str, "again": int}
_SURE = "independence"


def write(folder: RunFolder, group: Group) -> None:
    with open(folder.groups, "a") as file:
        file.write(json.dumps(asdict(group)) + "\n")


def read(folder: RunFolder) -> list[Group]:
    """All so far, the first one first; what a crash or a full disk cut off is left out. Raises
    UserError for a damaged line."""
    path = folder.groups
    try:
        lines = read_text(path).split("\n")[:-1]
    except NoSuchFile:
        return []
    # The last brace: in its line a whole one may stand behind one that was cut off.
    whole = [line[max(0, line.rfind("{")) :] for line in lines]
    places = [f"{path}, line {number}" for number in range(1, len(whole) + 1)]
    found = [parse_json(*each, _SHAPE) for each in zip(whole, places, strict=True)]
    return [
        Group(**{name: line[name] for name in _SHAPE}, independence=str(line.get(_SURE, "")))
        for line in found
    ]


class Teller:
    """Says when a training goes on with another number of workers, or is charged again."""

    def __init__(self, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._told = len(read(folder))

    def look(self) -> None:
        """To be called often."""
        groups = read(self._folder)
        for place in range(max(1, self._told), len(groups)):
            self._tell(groups[place - 1], groups[place])
        self._told = len(groups)

    def _tell(self, before: Group, group: Group) -> None:
        if group.workers == before.workers and not group.again:
            return
        count = f"{group.workers} worker{'s' * (group.workers > 1)}"
        if group.workers != before.workers:
            count += f" (before: {before.workers})"
        charged = "nothing is charged again"
        if group.again:
            charged = (
                f"drawn afresh; up to {group.again:,} steps that were released before are "
                "charged again (training.reproducible avoids it where only the number of workers "
                "changes)"
            )
        self._say(f"training: goes on with {count} from step {group.step:,}: {charged}")
