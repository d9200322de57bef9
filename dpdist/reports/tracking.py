"""Send the publishable figures of a run to TensorBoard and MLflow, and no others.

A tracker is handed around, shared and kept: its content has been released. So it takes epsilon
against step, scores on named test data and certified accuracy, by name, and refuses the rest.
Training loss, gradient norms or batch sizes are made of private records and are paid for by
nothing. Nor does it see when a step was made: all is written once the run has finished.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dpdist.core import console
from dpdist.core.console import exact
from dpdist.core.errors import UserError
from dpdist.core.fields import MEASURES
from dpdist.core.optional_imports import library

if TYPE_CHECKING:
    from dpdist.reports.facts import Facts
    from dpdist.runs.folder import RunFolder

_MEASURED = [name.replace(" ", "_") for names in MEASURES.values() for name in names]
_PUBLISHED = re.compile(
    rf"privacy/(epsilon|delta)|test/(accuracy|cross_entropy|{'|'.join(_MEASURED)})"
    r"|certified/[^/]+/[^/]+"
)


class Backend(Protocol):
    """What is needed of a tracking library."""

    def scalar(self, name: str, value: float, step: int) -> None:
        """Write one figure."""

    def close(self) -> None:
        """Everything was written."""


class Tracker:
    """The one way to a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def log(self, name: str, value: float, step: int) -> None:
        """Write a figure. Raises UserError for one that may not be published. One that is not
        finite is left out, since not all backends can hold it."""
        if not _PUBLISHED.fullmatch(name):
            raise UserError(
                f"{name}: must be a score on named test data (test/accuracy, test/cross_entropy), "
                "certified/TABLE/RADIUS, privacy/epsilon or privacy/delta: a tracker receives what "
                "may be published, and whatever else a training measures is private"
            )
        if math.isfinite(value):
            self._backend.scalar(name, float(value), int(step))

    def log_run(self, facts: Facts) -> None:
        """Everything of a finished run that may be published."""
        for name, value, step in figures(facts):
            self.log(name, value, step)
        self._backend.close()


def figures(facts: Facts) -> Iterator[tuple[str, float, int]]:
    """Name, value and step. Of a run that a search chose, epsilon is that of the whole search."""
    steps, proved = facts.plan.steps, facts.guarantee
    if facts.search is None and not facts.fixed_key and math.isfinite(proved.epsilon):
        for step, epsilon in facts.plan.epsilon_curve()[:-1]:
            yield "privacy/epsilon", epsilon, step
    if not facts.fixed_key:
        yield "privacy/epsilon", proved.epsilon, steps
        yield "privacy/delta", proved.delta, steps
    for name in ("accuracy", "cross_entropy"):
        value = (facts.evaluation or {}).get(name)
        if value is not None:
            yield f"test/{name}", value, steps
    for name, value in (facts.evaluation or {}).get("measures", {}).items():
        if value is not None:
            yield f"test/{name.replace(' ', '_')}", value, steps
    for table in facts.tables:
        for radius in table.shown_radii:
            accuracy = table.certified_accuracy(radius)
            yield f"certified/{table.name}/radius_{exact(radius)}", accuracy, steps


class TensorBoard:
    """Event files in the folder PLACE/RUN."""

    def __init__(self, library: Any, place: str, run: str) -> None:
        self._writer = library.SummaryWriter(f"{place}/{run}")

    def scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of that name on the tracking server, or in the folder, PLACE."""

    def __init__(self, library: Any, place: str, run: str) -> None:
        self._library = library
        library.set_tracking_uri(place)
        library.start_run(run_name=run)

    def scalar(self, name: str, value: float, step: int) -> None:
        self._library.log_metric(name, value, step=step)

    def close(self) -> None:
        self._library.end_run()


# Kind, which is the name of the extra too -> its library, and what writes with it.
BACKENDS: Mapping[str, tuple[str, Callable[[Any, str, str], Backend]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "mlflow": ("mlflow", MLflow),
}


def check_address(address: str) -> Any:
    """The library for KIND:PLACE, such as tensorboard:logs. Raises UserError for another kind, and
    where it is not installed."""
    kind, _, place = address.partition(":")
    if kind not in BACKENDS or not place:
        kinds = " or ".join(f"{name}:PLACE" for name in BACKENDS)
        raise UserError(f"--log: must be {kinds}, got {address!r}")
    return library(BACKENDS[kind][0], kind, "--log")


def tracker(address: str, run: str) -> Tracker:
    """What writes a run's figures there. Raises as `check_address`."""
    library, (kind, _, place) = check_address(address), address.partition(":")
    return Tracker(BACKENDS[kind][1](library, place, run))


def track(folder: RunFolder, addresses: Sequence[str], *, dated: bool = True) -> None:
    """Give everything of a finished run that may be published to each of the addresses.

    dated: even where a date may tell how long something secret took, as trackers keep when they
    were told: whoever asks chose the day. Raises UserError, before anything is written, as
    `check_address` and where the run has not finished.
    """
    for address in addresses:
        check_address(address)
    from dpdist.reports.facts import read_facts

    facts = read_facts(folder)
    if facts.times_hidden and not dated:
        console.say(
            "--log: left for later: trackers keep the time, and when a search ended, or how long a "
            f"training took, is secret; some day: dpdist log {folder.name} {shlex.join(addresses)}"
        )
        return
    for address in addresses:
        tracker(address, folder.name).log_run(facts)
