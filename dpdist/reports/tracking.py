"""Send the publishable results of a run to TensorBoard, MLflow and W&B, and no others.

The content of a tracker counts as released. So it gets epsilon by step, scores on named test data
and certified accuracy. Training loss, gradient norms and batch sizes depend on private records, and
epsilon does not cover them. All results are sent after the run, so that the times of steps stay
hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpdist.core.console import format_exact
from dpdist.core.errors import UserError
from dpdist.core.fields import MEASURES
from dpdist.core.optional_imports import import_extra

if TYPE_CHECKING:
    from dpdist.reports.results import RunResults
    from dpdist.runs.folder import RunFolder

_MEASURED = [name.replace(" ", "_") for names in MEASURES.values() for name in names]
_PUBLISHABLE_NAME = re.compile(
    rf"privacy/(epsilon|delta)|test/(accuracy|cross_entropy|{'|'.join(_MEASURED)})"
    r"|certified/[^/]+/[^/]+"
    # a script's values that its steps release, or that are measured on public records
    r"|training/(learning_rate|noisy_norm|score|eval_\w+)"
)


Write = Callable[[str, float, int], Any]  # name, value, step
Close = Callable[[], Any]


@dataclass(frozen=True)
class Tracker:
    """The only way to a tracking library: its function that writes a value, and that closes it."""

    write: Write
    close: Close

    def log(self, name: str, value: float, step: int) -> None:
        """Write a value, unless it is not finite, which some backends cannot store.

        Raises UserError for a value that must not be published.
        """
        if not _PUBLISHABLE_NAME.fullmatch(name):
            raise UserError(
                f"{name}: must be a score on named test data (test/accuracy, test/cross_entropy), "
                "certified/TABLE/RADIUS, privacy/epsilon or privacy/delta: a tracker receives what "
                "may be published, and other values of a training are private",
                see="how-to/own-data.md#for-other-programs",
            )
        if math.isfinite(value):
            self.write(name, float(value), int(step))

    def log_run(self, facts: RunResults) -> None:
        """Write all publishable values of a finished run, and close the tracker."""
        for name, value, step in iter_metrics(facts):
            self.log(name, value, step)
        self.close()


def iter_metrics(facts: RunResults) -> Iterator[tuple[str, float, int]]:
    """Yield name, value and step.

    Epsilon covers the search that chose a run, and the runs that it started from.
    """
    steps, proved = facts.plan.steps, facts.guarantee
    single = facts.search is None and not facts.recipe.stages
    if single and not facts.has_fixed_key and math.isfinite(proved.epsilon):
        for step, epsilon in facts.plan.epsilon_curve()[:-1]:
            yield "privacy/epsilon", epsilon, step
    if not facts.has_fixed_key:
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
        for radius in table.reported_radii:
            accuracy = table.certified_accuracy(radius)
            yield f"certified/{table.name}/radius_{format_exact(radius)}", accuracy, steps


def _tensorboard(module: Any, location: str, run: str) -> tuple[Write, Close]:
    """Return functions that write event files in the folder PLACE/RUN."""
    writer = module.SummaryWriter(f"{location}/{run}")
    return writer.add_scalar, writer.close


def _mlflow(module: Any, location: str, run: str) -> tuple[Write, Close]:
    """Return functions that write a run on the tracking server, or in the folder, PLACE."""
    module.set_tracking_uri(location)
    module.start_run(run_name=run)
    return lambda name, value, step: module.log_metric(name, value, step=step), module.end_run


def _wandb(module: Any, location: str, run: str) -> tuple[Write, Close]:
    """Return functions that write a run in the project PLACE, or ENTITY/PROJECT, of W&B.

    WANDB_MODE=offline keeps it on this machine. What the library would send by itself (command
    line, console, code, machine and its load) is turned off.
    """
    entity, _, project = location.rpartition("/")
    settings = module.Settings(
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        program="dpdist",
        host="",
        silent=True,
    )
    own = module.init(project=project, entity=entity or None, name=run, settings=settings)
    return lambda name, value, step: own.log({name: value}, step=step), own.finish


# The kind is also the name of the extra; each has its library, and a function that opens it.
BACKENDS: Mapping[str, tuple[str, Callable[[Any, str, str], tuple[Write, Close]]]] = {
    "tensorboard": ("tensorboardX", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
    "wandb": ("wandb", _wandb),
}


def check_tracker_address(address: str) -> Any:
    """Return the library for KIND:PLACE, such as tensorboard:logs.

    Raises UserError for an unknown kind, and if the library is not installed.
    """
    kind, _, place = address.partition(":")
    if kind not in BACKENDS or not place:
        kinds = ", ".join(f"{name}:PLACE" for name in BACKENDS)
        raise UserError(f"--log: must be one of {kinds}, got {address!r}")
    return import_extra(BACKENDS[kind][0], kind, "--log")


def open_tracker(address: str, run: str) -> Tracker:
    """Return the tracker at the address. Raises as `check_tracker_address`."""
    library, (kind, _, place) = check_tracker_address(address), address.partition(":")
    return Tracker(*BACKENDS[kind][1](library, place, run))


def check_script_tracker(tracker: str, folder: RunFolder) -> str:
    """Return the address KIND:PLACE of a script's tracker, which may be given as KIND.

    Raises UserError for an unknown kind, and if its library is not installed.
    """
    runs = folder.path.parent
    places = {"tensorboard": runs / "tensorboard", "mlflow": runs / "mlruns", "wandb": runs.name}
    address = f"{tracker}:{places[tracker]}" if tracker in places else tracker
    try:
        check_tracker_address(address)
    except UserError as error:
        raise UserError(str(error).replace("--log:", "trackers:", 1)) from error
    return address


def track_script(
    folder: RunFolder, addresses: Sequence[str], history: Mapping[str, Sequence[Any]]
) -> None:
    """Send the history and the results of a finished script's run to each tracker."""
    from dpdist.reports.results import load_results

    facts = load_results(folder)
    for address in addresses:
        tracker = open_tracker(address, folder.name)
        for name, values in history.items():
            for step, value in zip(history["step"], values, strict=True):
                if name != "step" and value is not None:
                    tracker.log(f"training/{name}", value, step + 1)
        tracker.log_run(facts)


def track_run(folder: RunFolder, addresses: Sequence[str]) -> None:
    """Send all publishable results of a finished run to each of the addresses.

    Trackers store the time, which the user chose by calling this. Raises UserError, before anything
    is sent, as `check_tracker_address` and if the run has not finished.
    """
    for address in addresses:
        check_tracker_address(address)
    from dpdist.reports.results import load_results

    facts = load_results(folder)
    for address in addresses:
        open_tracker(address, folder.name).log_run(facts)
