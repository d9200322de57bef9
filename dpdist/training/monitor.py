"""What worker 0 writes while it trains: private metrics, progress, and the summary at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpdist import models
from dpdist.base.independence import weakest
from dpdist.base.storage import json_number, write_json
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.training import groups
from dpdist.training.job import TrainJob

_PROGRESS_SECONDS = 0.5


@dataclass
class Seen:
    """Of worker 0's records in one step: PRIVATE."""

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
        if sure := [group.independence for group in groups.read(self.folder) if group.independence]:
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
