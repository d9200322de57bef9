"""What a run really released: the one door to its ledger.

Epsilon is computed from the ledger, so a ledger that lost lines would prove too little. Nobody
reads it without holding it against what was made of its releases: the plan, the newest checkpoint
and the finished training. Each of these keeps the ledger's anchor from the moment it was written;
the ledger may go further, and never less far.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist.base.errors import UserError
from dpdist.base.reading import check_shape, read_json
from dpdist.privacy.journal import Anchor, JournalError
from dpdist.privacy.ledger import Ledger, LedgerError
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder, complete_checkpoints

_LONGEST = 2**16  # bytes of a first line
_LOST = "the ledger was replaced or cut, and epsilon cannot be stated"


@dataclass(frozen=True)
class Released:
    """A run's plan, and the ledger that holds everything the run's model was made of."""

    plan: PrivacyPlan
    ledger: Ledger


@dataclass(frozen=True)
class _Made:
    """Something made of the releases of steps 0 to `steps` - 1. anchor: of the ledger then."""

    what: str
    steps: int
    anchor: Anchor


def begun(folder: RunFolder) -> bool:
    """Whether the run may have released anything; its ledger must then be there. A file without a
    whole line is what a crash or a full disk left of its very first write."""
    made = (folder.ledger, folder.anchor, folder.trained, folder.groups)
    return any(map(_has_line, made)) or bool(complete_checkpoints(folder.checkpoints))


def _has_line(path: Path) -> bool:
    if not path.is_file():
        return path.exists()
    with open(path, "rb") as file:
        return b"\n" in file.read(_LONGEST)


def read_released(folder: RunFolder) -> Released:
    """What a run really released. Raises UserError when its ledger cannot be trusted to say so."""
    plan = folder.read_plan()
    made = _made(folder)  # first: whoever trains meanwhile only makes the ledger longer
    try:
        ledger = Ledger.read(folder.ledger)
        _check(folder, plan, ledger, made)
    except FileNotFoundError:
        raise UserError(f"{folder.ledger}: missing: {_LOST}") from None
    except JournalError as error:
        raise UserError(str(error)) from error
    return Released(plan, ledger)


def check_released(folder: RunFolder, plan: PrivacyPlan, ledger: Ledger) -> None:
    """Raise LedgerError unless the ledger holds every release the run's model was made of, and no
    step that is not the plan's; UserError for a damaged file beside it."""
    _check(folder, plan, ledger, _made(folder))


def _check(folder: RunFolder, plan: PrivacyPlan, ledger: Ledger, all_made: list[_Made]) -> None:
    if ledger.plan_fingerprint != plan.fingerprint():
        raise LedgerError(f"{ledger.path} was not written under the plan of {folder.plan}: {_LOST}")
    if max(ledger.releases, default=-1) >= plan.steps:
        raise LedgerError(f"{ledger.path} holds steps that {folder.plan} has not: {_LOST}")
    if ledger.asked > plan.answers:
        raise LedgerError(f"{ledger.path} holds more answers than {folder.plan} pays for: {_LOST}")
    for made in all_made:
        if made.steps > plan.steps:
            raise LedgerError(f"{made.what} has more steps than {folder.plan}: {_LOST}")
        complete = ledger.releases.keys() >= set(range(made.steps))
        if not complete or not ledger.reaches(made.anchor):
            raise LedgerError(f"{ledger.path} lacks releases that {made.what} was made of: {_LOST}")
    if folder.trained.exists():
        _check_finished(folder, plan)


def _made(folder: RunFolder) -> list[_Made]:
    found = []
    for checkpoint in complete_checkpoints(folder.checkpoints)[-1:]:
        done = checkpoint / "done.json"
        record = read_json(done)
        steps = _number(record, "step", done)
        found.append(_Made(f"the checkpoint of step {steps}", steps, _anchor(record, done)))
    if folder.trained.exists():
        record = read_json(folder.trained)
        steps = _number(record, "steps", folder.trained)
        found.append(_Made("the trained model", steps, _anchor(record, folder.trained)))
    return found


def _check_finished(folder: RunFolder, plan: PrivacyPlan) -> None:
    trained = read_json(folder.trained)
    if _number(trained, "steps", folder.trained) != plan.steps:
        raise LedgerError(f"{folder.trained} has other steps than {folder.plan}: {_LOST}")


def _number(record: dict[str, Any], key: str, where: object) -> int:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{where}: damaged: {key} must be a whole number >= 0, got {value!r}")
    return value


def _anchor(record: dict[str, Any], where: object) -> Anchor:
    value = check_shape(record, str(where), {"ledger": dict})["ledger"]
    try:
        return Anchor(**value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: damaged: ledger: {error}") from error
