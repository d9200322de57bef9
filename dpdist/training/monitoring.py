"""Files that worker 0 writes while it trains: private metrics, progress, summary and worker groups.

All of it is PRIVATE. The record of worker groups has one line for each (re)start. It releases
nothing and no result depends on it; the ledger alone states the charges.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dpdist import models
from dpdist.core.fields import weakest
from dpdist.core.files import NoSuchFile, json_number, parse_json, read_text, write_json
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.training.job import TrainJob

if TYPE_CHECKING:
    from dpdist.training.collectives import Reducer


# --- metrics and progress ---------------------------------------------------------------------


_PROGRESS_SECONDS = 0.5


@dataclass
class Seen:
    """Metrics of worker 0's records in one step: PRIVATE."""

    examples: int = 0
    nonfinite: int = 0
    loss_sum: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


class Monitor:
    """Worker 0's private metrics and the progress file that the driver's terminal shows."""

    def __init__(self, job: TrainJob, steps: int, start: int) -> None:
        self.folder, self.steps, self.start = job.folder, steps, start
        self.began = self.shown = time.monotonic()
        self.metrics = open(job.folder.metrics, "a", buffering=1)  # noqa: SIM115
        self._progress(start)

    def step(self, step: int, seen: Seen) -> None:
        line = {
            "step": step,
            "examples": seen.examples,
            "nonfinite": seen.nonfinite,
            "loss_sum": json_number(seen.loss_sum),
        }
        line |= seen.details
        self.metrics.write(json.dumps(line, allow_nan=False) + "\n")
        if time.monotonic() - self.shown > _PROGRESS_SECONDS:
            self._progress(step + 1)

    def _progress(self, done: int) -> None:
        self.shown = time.monotonic()
        seconds = self.shown - self.began
        rate = (done - self.start) / max(seconds, 1e-9)
        state = {"done": done, "steps": self.steps, "rate": rate}
        # Twice a second: all workers would wait for the disk, and the terminal alone reads it.
        write_json(self.folder.progress, state, durable=False)

    def pause(self, done: int) -> None:
        self.metrics.close()
        self._progress(done)

    def finish(self, fallback_layers: list[str], frozen: int, ledger: Ledger) -> None:
        """Sum the training up. frozen: parameters that no step may change. ledger: everything the
        saved model was made of is in it."""
        self.metrics.close()
        self._progress(self.steps)
        made: dict[str, Any] = {"frozen_parameters": frozen} if frozen else {}
        if sure := [group.independence for group in read_groups(self.folder) if group.independence]:
            made["independence"] = weakest(sure)  # of all starts: each of them took steps
        sum_up(
            self.folder, ledger, self.steps, time.monotonic() - self.began,
            fallback_layers=fallback_layers, model=models.model_hash(self.folder.model), **made,
        )  # fmt: skip


def sum_up(folder: RunFolder, ledger: Ledger, steps: int, seconds: float, **made: Any) -> None:
    """Write down that a training is finished, and how far its ledger goes. made: of the model."""
    write_json(
        folder.trained,
        {
            "steps": steps,
            "seconds": seconds,
            **made,
            "ledger": ledger.anchor.to_dict(),
            "superseded_releases": ledger.superseded,
            "attempt_epochs": (ledger.epoch or 0) + 1,
        },
    )


# --- worker groups of each start --------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Workers that went on together. step: their first. backend: what they talk through. again:
    steps on record that they release anew, each charged another time. independence: how their
    passes keep records apart (`dpdist.core.fields`); "" where nothing rests on it."""

    step: int
    workers: int
    backend: str
    again: int
    independence: str = field(default="", compare=False)

    @classmethod
    def of(cls, reducer: Reducer, ledger: Ledger, step: int, independence: str = "") -> Group:
        """Return the group of a ledger's current attempt, which begins with `step`."""
        again = ledger.repeats(step)
        return cls(step, reducer.world_size, reducer.backend, again, independence)


_SHAPE = {"step": int, "workers": int, "backend": str, "again": int}
_SURE = "independence"


def append_group(folder: RunFolder, group: Group) -> None:
    with open(folder.groups, "a") as file:
        file.write(json.dumps(asdict(group)) + "\n")


def read_groups(folder: RunFolder) -> list[Group]:
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
        self._told = len(read_groups(folder))

    def look(self) -> None:
        """Report changes of the group of workers; call it often."""
        groups = read_groups(self._folder)
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
