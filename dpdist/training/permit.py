"""Leave from the archive: no step is released that a lost run folder could hide.

`dpdist.runs.archive` says why. Worker 0 asks through a file of the run folder; the command that
started the training copies ledger and request to the archive, and answers through another file.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from dpdist.base.errors import ClusterError
from dpdist.base.reading import read_json
from dpdist.base.storage import write_json
from dpdist.runs.archive import Permit, read_permit
from dpdist.runs.folder import RunFolder

_AHEAD_SECONDS = 60.0
_AHEAD_STEPS = 50
_PATIENCE = 1800.0  # seconds; the command itself gives up earlier, and says why
_POLL = 0.05


class PermitGate:
    """Passes at once in a run whose private state is not archived."""

    def __init__(self, folder: RunFolder, epoch: int | None, start: int, total: int) -> None:
        self._on = (
            folder.archive.exists() and read_json(folder.archive, {"private": bool})["private"]
        )
        self._folder, self._epoch, self._total = folder, epoch or 0, total
        self._granted = start  # the first step without leave
        self._next = start  # where to ask again
        self._asked = (time.monotonic(), start)

    def wait(self, step: int) -> None:
        """Return when `step` may be released. Raises ClusterError when no answer comes in 30
        minutes."""
        if not self._on:
            return
        if step >= self._next:
            self._ask(step)
        until = time.monotonic() + _PATIENCE
        while step >= self._granted:
            permit = read_permit(self._folder.permit)
            if permit is not None and permit.epoch == self._epoch:
                self._granted = permit.steps
            if step < self._granted:
                return
            if time.monotonic() > until:
                raise ClusterError(f"step {step}: the archive did not answer in 30 minutes")
            time.sleep(_POLL)

    def _ask(self, step: int) -> None:
        """For the steps of the next minute, half a minute before they are needed."""
        now = time.monotonic()
        since, before = self._asked
        pace = (step - before) / max(now - since, 1e-9)
        steps = min(step + max(_AHEAD_STEPS, int(_AHEAD_SECONDS * pace)), self._total)
        earlier = read_permit(self._folder.permit_asked)
        if earlier is not None and earlier.epoch == self._epoch:
            steps = max(steps, earlier.steps)  # leave that was given stays given
        write_json(self._folder.permit_asked, asdict(Permit(self._epoch, step, steps)))
        self._asked = (now, step)
        self._next = steps if steps == self._total else (step + steps) // 2
