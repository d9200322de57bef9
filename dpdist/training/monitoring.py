"""Files that worker 0 writes while it trains: private metrics, progress, summary and worker groups.

All of it is PRIVATE. The record of worker groups has one line for each (re)start. It releases
nothing and no result depends on it; only the ledger counts in epsilon.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dpdist import models
from dpdist.core.fields import weakest
from dpdist.core.files import (
    MissingFileError,
    finite_or_none,
    own_only,
    parse_json,
    read_json,
    read_text,
    write_json,
)
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.training.job import TrainJob

if TYPE_CHECKING:
    from dpdist.training.collectives import Reducer


# --- metrics and progress ---------------------------------------------------------------------


_PROGRESS_SECONDS = 0.5


@dataclass
class StepMetrics:
    """Hold metrics of worker 0's records in one step: PRIVATE."""

    examples: int = 0
    nonfinite: int = 0
    loss_sum: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


class Monitor:
    """Write worker 0's private metrics, and the progress file for the driver's terminal."""

    def __init__(self, job: TrainJob, steps: int, start: int) -> None:
        self.folder, self.steps, self.start = job.folder, steps, start
        self.started_at = self.last_progress_at = time.monotonic()
        self.metrics = open(  # noqa: SIM115
            job.folder.metrics, "a", buffering=1, opener=own_only
        )
        self._write_progress(start)

    def record_step(self, step: int, metrics: StepMetrics) -> None:
        line = {
            "step": step,
            "examples": metrics.examples,
            "nonfinite": metrics.nonfinite,
            "loss_sum": finite_or_none(metrics.loss_sum),
        }
        line |= metrics.details
        self.metrics.write(json.dumps(line, allow_nan=False) + "\n")
        if time.monotonic() - self.last_progress_at > _PROGRESS_SECONDS:
            self._write_progress(step + 1)

    def _write_progress(self, done: int) -> None:
        self.last_progress_at = time.monotonic()
        seconds = self.last_progress_at - self.started_at
        rate = (done - self.start) / max(seconds, 1e-9)
        state = {"done": done, "steps": self.steps, "rate": rate}
        # Not durable: all workers would wait for the disk twice a second, only for the terminal.
        write_json(self.folder.progress, state, durable=False)

    def pause(self, done: int) -> None:
        self.metrics.close()
        self._write_progress(done)

    def finish(self, ledger: Ledger, **made: Any) -> None:
        """Write the summary of a training.

        ledger: has every release that the saved model depends on. made: further keys.
        """
        self.metrics.close()
        self._write_progress(self.steps)
        if self.start:
            made["timed_from"] = self.start
        if sure := [group.independence for group in read_groups(self.folder) if group.independence]:
            made["independence"] = weakest(sure)  # of all starts: each of them took steps
        seconds = time.monotonic() - self.started_at
        model = models.model_hash(self.folder.model_folder)
        write_summary(self.folder, ledger, self.steps, seconds, model=model, **made)


def write_summary(
    folder: RunFolder, ledger: Ledger, steps: int, seconds: float, **made: Any
) -> None:
    """Write the summary of a finished training, with the state of its ledger.

    seconds: of the steps from made["timed_from"], the first after the last restart; else of all.
    made: further keys.
    """
    write_json(
        folder.training_summary,
        {
            "steps": steps,
            "seconds": seconds,
            **made,
            "ledger": ledger.anchor.to_dict(),
            "reexecuted_releases": ledger.num_superseded,
            "attempt_epochs": (ledger.epoch or 0) + 1,
        },
    )


# --- worker groups of each start --------------------------------------------------------------


@dataclass(frozen=True)
class WorkerGroup:
    """Describe workers that ran together.

    step: their first one. backend: of their communication. again: steps on record that they release
    again, each counted again. independence: how their passes keep records apart
    (`dpdist.core.fields`); "" if nothing depends on it. saved: steps that they need not repeat,
    since the group before them wrote a checkpoint at its end.
    """

    step: int
    workers: int
    backend: str
    again: int
    independence: str = field(default="", compare=False)
    saved: int = 0


_SHAPE = {"step": int, "workers": int, "backend": str, "again": int}


def append_group(folder: RunFolder, group: WorkerGroup) -> None:
    """Record a group of workers, with the steps that the interruption before it saved."""
    group = replace(group, saved=group.saved or take_interruption(folder, group.step))
    line = {name: value for name, value in asdict(group).items() if name != "saved" or value}
    with open(folder.worker_groups, "a", opener=own_only) as file:
        file.write(json.dumps(line) + "\n")


def read_groups(folder: RunFolder) -> list[WorkerGroup]:
    """Return all groups so far, without lines that a crash or a full disk cut off.

    Raises UserError for a damaged line.
    """
    path = folder.worker_groups
    try:
        lines = read_text(path).split("\n")[:-1]
    except MissingFileError:
        return []
    # From the last brace: a line may start with one that was cut off.
    whole = [line[max(0, line.rfind("{")) :] for line in lines]
    places = [f"{path}, line {number}" for number in range(1, len(whole) + 1)]
    found = [parse_json(*each, _SHAPE) for each in zip(whole, places, strict=True)]
    return [
        WorkerGroup(
            **{name: line[name] for name in _SHAPE},
            independence=str(line.get("independence", "")),
            saved=int(line.get("saved", 0)),
        )
        for line in found
    ]


class WorkerChangeReporter:
    """Report when a training continues with a different number of workers, or counts again."""

    def __init__(self, folder: RunFolder, log: Callable[[str], None]) -> None:
        self._folder, self._log = folder, log
        self._num_reported = len(read_groups(folder))

    def poll(self) -> None:
        """Report changes of the group of workers; call it often."""
        groups = read_groups(self._folder)
        for place in range(max(1, self._num_reported), len(groups)):
            self._report_change(groups[place - 1], groups[place])
        self._num_reported = len(groups)

    def _report_change(self, before: WorkerGroup, group: WorkerGroup) -> None:
        if group.workers == before.workers and not group.again and not group.saved:
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
        elif group.saved:
            charged += (
                f"; a checkpoint before the interruption saved {group.saved:,} steps, which "
                "would have been repeated"
            )
        self._log(f"training: goes on with {count} from step {group.step:,}: {charged}")


# --- interruption between two steps -----------------------------------------------------------


_ASK_SECONDS = 1.0
_STOP_SECONDS = 60.0  # that a step and its checkpoint may take after SIGTERM
_STOP = b"stop"


class InterruptionWatch:
    """Find out between two steps that the workers are to end, by Ray or by SIGTERM.

    Each worker has one. Asking Ray is a barrier: all workers ask after the same steps, those at
    which worker 0 raised its flag, at most once a second.

    Args:
        folder: the run; to end the training early its driver writes a word into a file there, which
            worker 0 creates: only existing files are read correctly on every network file system.
        reducer: of this worker.
        host_leaves: asks Ray (`dpdist.cluster.work.WorkerPlace`).
    """

    def __init__(
        self, folder: RunFolder, reducer: Reducer, host_leaves: Callable[[], bool] | None
    ) -> None:
        self._folder, self._reducer, self._host_leaves = folder, reducer, host_leaves
        self._asked_at = time.monotonic()
        if reducer.rank == 0 and not folder.stop_request.exists():
            folder.stop_request.write_bytes(b"")

    def close(self) -> None:
        """Remove the file: the last step is done."""
        if self._reducer.rank == 0:
            self._folder.stop_request.unlink(missing_ok=True)

    def is_due(self) -> bool:
        """Return whether all workers are to ask after this step, by worker 0's clock."""
        return self._reducer.rank == 0 and time.monotonic() - self._asked_at >= _ASK_SECONDS

    def ask(self, save: bool) -> tuple[bool, bool]:
        """Return worker 0's `save`, and whether the workers are to end; all workers call it."""
        self._asked_at = time.monotonic()
        stop = self._reducer.rank == 0 and is_stop_requested(self._folder)
        told = self._reducer.broadcast_int(int(save) + 2 * int(stop))
        host_leaves = self._host_leaves is not None and self._host_leaves()
        return bool(told & 1), told >= 2 or host_leaves


def request_stop(folder: RunFolder) -> bool:
    """Ask the workers to end after a checkpoint; return whether any are taking steps."""
    if not folder.stop_request.exists():
        return False
    folder.stop_request.write_bytes(_STOP)
    return True


def is_stop_requested(folder: RunFolder) -> bool:
    """Return whether the driver wrote the word that ends the training early."""
    try:
        return folder.stop_request.read_bytes() == _STOP
    except FileNotFoundError:
        return False


_INTERRUPTION_SHAPE = {"step": int, "saved": int}


def take_interruption(folder: RunFolder, start: int) -> int:
    """Return how many steps the last group of workers saved at its end, and remove the record.

    start: the first step of the new group.
    """
    if not folder.interruption.exists():
        return 0
    record = read_json(folder.interruption, _INTERRUPTION_SHAPE)
    folder.interruption.unlink()
    return int(record["saved"]) if record["step"] == start else 0


@contextmanager
def stopped_between_steps(folder: RunFolder) -> Iterator[Callable[[], None]]:
    """Let SIGTERM end a training after a checkpoint.

    A second one, or a step longer than a minute, ends it at once. Yields a function that raises
    KeyboardInterrupt after this minute; call it often.
    """
    asked_at = list[float]()

    def look_at_clock() -> None:
        if asked_at and time.monotonic() - asked_at[0] > _STOP_SECONDS:
            raise KeyboardInterrupt

    def stop(*_: Any) -> None:
        if asked_at or not request_stop(folder):
            raise KeyboardInterrupt
        asked_at.append(time.monotonic())

    folder.stop_request.unlink(missing_ok=True)
    in_main = threading.current_thread() is threading.main_thread()
    taken = in_main and signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    if taken:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield look_at_clock
    finally:
        if taken:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder.stop_request.unlink(missing_ok=True)
    if asked_at:  # the last step was faster
        raise KeyboardInterrupt
