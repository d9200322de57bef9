"""The budgets of a folder, found by the records themselves.

Data are known by their records, not by their file: one row more, another order or another split is
the same data. A run is charged to every budget that holds any of its records, and that budget takes
in the others, so that all runs on a record are on each budget it is on. Records are kept as hashes
under a key that never leaves the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpdist.base.reading import not_blocking
from dpdist.base.storage import make_folder
from dpdist.privacy.budget import (
    SUFFIX,
    BudgetExceeded,
    Charge,
    DataBudget,
    Lineage,
    Terms,
    check_fits,
)
from dpdist.privacy.guarantee import Neighbours
from dpdist.privacy.journal import JournalError, anchor_path
from dpdist.privacy.phases import Phase

_KEY = "records.key"
_KEY_BYTES = 32


def budgets_in(folder: str | Path) -> list[DataBudget]:
    """Every budget in a folder, by file name. Raises JournalError if one is damaged."""
    return [DataBudget.read(path) for path in _files(Path(folder))]


def reserve(
    folder: str | Path,
    records: NDArray | None,
    charge: Charge,
    terms: Terms,
    neighbours: Neighbours,
    *,
    name: str = "",
    limit: tuple[float, float] | None = None,
    enforce: bool = True,
) -> None:
    """Put a run on record before it starts, on every budget that holds any of its records.

    records: a hash of every record the run reads, one number each; None for a run that is on record
    and goes on. terms: of the budget that is opened when there is none; otherwise they must be the
    same. name: a public name of the data. A run on record already (a continued one) is charged
    once, and of a copy of it what the other has not released (`Lineage`). Durable on return.

    Raises BudgetExceeded, and nothing was recorded, where the run does not fit; JournalError.
    enforce: False records what was done already, whatever it costs.
    """
    with _opened(Path(folder)) as (key, budgets):
        if records is None:
            _go_on(budgets, charge, neighbours, limit)
            return
        hashed = records.dtype.str
        other = [budget.path for budget in budgets if budget.hashed != hashed]
        if other and enforce:
            raise BudgetExceeded(
                f"{other[0]} knows its records by hashes of another kind, as another dpdist makes "
                "them, and cannot tell whether it holds these; name a new folder"
            )
        known = _recognisable(key, records)
        held = [budget for budget in budgets if _common(budget, known)]
        if enforce:
            for budget in held:
                if not budget.terms.same(terms):
                    raise BudgetExceeded(
                        f"{budget.path} holds some of these records under {budget.terms}, fixed "
                        f"before its first run; this run comes with {terms}"
                    )
            _check_fits(held, terms, charge, neighbours, limit)
        if not held:
            held = [DataBudget.create(Path(folder), name, terms, hashed, _key_id(key))]
            budgets.append(held[0])  # is closed with the others
        for budget in held:
            budget.add_records(known)
            budget.record(charge.joined(budget.charge_of(charge.run)))


def _go_on(
    budgets: Sequence[DataBudget],
    charge: Charge,
    neighbours: Neighbours,
    limit: tuple[float, float] | None,
) -> None:
    held = [budget for budget in budgets if budget.charge_of(charge.run) is not None]
    if not held:
        raise BudgetExceeded(
            f"{charge.name!r} is on no budget here; name the folder it was run with"
        )
    for budget in held:
        _check_fits([budget], budget.terms, charge, neighbours, limit)
    for budget in held:
        budget.record(charge.joined(budget.charge_of(charge.run)))


def _check_fits(
    held: Sequence[DataBudget],
    terms: Terms,
    charge: Charge,
    neighbours: Neighbours,
    limit: tuple[float, float] | None,
) -> None:
    """Raise BudgetExceeded where a run, with all that copies of it have on record, does not fit."""
    if not held:
        check_fits(terms, [], charge, neighbours, limit)
    for budget in held:
        whole = charge.joined(budget.charge_of(charge.run))
        if whole.lineage and charge.lineage and whole.lineage.foreign(charge.lineage):
            if whole.lineage.alone:
                raise BudgetExceeded(
                    f"another copy of {charge.name!r} has gone on, or may: both have one secret "
                    "number of trials, and what two such searches cost together is not known. Go "
                    "on with that copy, remove it, or begin a new search"
                )
            whole = replace(whole, name=f"{whole.name}, with copies of it that went on or may,")
        check_fits(terms, budget.charges, whole, neighbours, limit)


def settle(
    folder: str | Path, run: str, phases: Sequence[Phase], lineage: Lineage | None = None
) -> bool:
    """Replace a reservation by what was really released (`Ledger.phases`); may be repeated.

    lineage: says by whom; what it has not in common with what is on record is added. False for a
    run that was never reserved. Raises JournalError.
    """
    found = False
    with _opened(Path(folder)) as (_, budgets):
        for budget in budgets:
            for charge in budget.charges:
                if charge.run == run:
                    made = replace(charge, phases=tuple(phases), status="settled", lineage=lineage)
                    budget.record(made.joined(charge))
                    found = True
    return found


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(f"*{SUFFIX}"))
    return [path for path in found if path.stat().st_size]  # a crash may leave one just created


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[bytes, list[DataBudget]]]:
    """The folder's key and all its budgets, for one process at a time."""
    make_folder(folder, 0o700)
    not_blocking(folder / _KEY)
    descriptor = os.open(folder / _KEY, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+", errors="replace") as file, ExitStack() as stack:
        fcntl.flock(file, fcntl.LOCK_EX)
        budgets: list[DataBudget] = []
        stack.callback(_close, budgets)
        for path in _files(folder):
            budgets.append(DataBudget.open(path))
        left = {anchor_path(budget.path) for budget in budgets}
        for anchor in sorted(folder.glob(f"*{anchor_path(Path(SUFFIX)).suffix}")):
            if anchor not in left:
                raise JournalError(f"{anchor}: the budget it belongs to is gone; bring it back")
        text = file.read()
        if not re.fullmatch(rf"[0-9a-f]{{{2 * _KEY_BYTES}}}", text):
            if budgets:
                raise JournalError(
                    f"{folder / _KEY}: lost or damaged, and with it which records the budgets "
                    "beside it hold; bring it back"
                )
            text = secrets.token_hex(_KEY_BYTES)
            file.seek(0)
            file.truncate()
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        key = bytes.fromhex(text)
        for budget in budgets:
            if budget.key_id not in (None, _key_id(key)):
                raise JournalError(
                    f"{budget.path}: keeps its records under another key than that of "
                    f"{folder / _KEY}, and they would not be recognised: one of the two was "
                    "replaced or comes from another folder; bring back its own"
                )
        yield key, budgets


def _key_id(key: bytes) -> str:
    """Return what a budget keeps of its folder's key to know it again; the key stays secret."""
    return hashlib.blake2b(key=key, digest_size=8, person=b"dpdist.budget.id").hexdigest()


def _close(budgets: list[DataBudget]) -> None:
    for budget in budgets:
        budget.close()


def _recognisable(key: bytes, records: NDArray) -> NDArray[np.uint64]:
    """Keyed hashes of the records' own, sorted and each once: uint64."""
    if records.ndim != 1 or not len(records):
        raise ValueError(f"one hash for each record is needed, got shape {records.shape}")
    raw, size = np.ascontiguousarray(records).tobytes(), records.dtype.itemsize
    person = b"dpdist.budget"
    digests = b"".join(
        hashlib.blake2b(raw[i : i + size], digest_size=8, key=key, person=person).digest()
        for i in range(0, len(raw), size)
    )
    return np.unique(np.frombuffer(digests, "<u8"))


def _common(budget: DataBudget, known: NDArray[np.uint64]) -> bool:
    return len(np.intersect1d(budget.known, known, assume_unique=True)) > 0
