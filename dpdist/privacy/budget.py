"""What a data set has cost so far: runs and searches on the same records compose.

One file per data set, in a folder the user names, keyed by the data set's fingerprint. A run is put
on record before it starts (its whole plan) and settled when it ends (what was really released), so
that a crash leaves the data set charged, never free. A ceiling refuses a run whose cost would carry
the composed epsilon above it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpdist.privacy.guarantee import Guarantee, Neighbours
from dpdist.privacy.journal import Journal, JournalError, OnJournal
from dpdist.privacy.plan import (
    Phase,
    compose_alternatives,
    data_alternatives,
    phase_from_dict,
    phase_to_dict,
)

_KIND = "budget"
_SUFFIX = ".budget.jsonl"
Status = Literal["reserved", "settled"]


class BudgetExceeded(ValueError):
    """The run would carry the data set's composed epsilon above its ceiling."""


@dataclass(frozen=True)
class Charge:
    """What one run or search costs. phases: in the order they ran; records: N of that run."""

    run: str
    name: str
    records: int
    phases: tuple[Phase, ...]
    status: Status

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "run": self.run,
            "name": self.name,
            "records": self.records,
            "phases": [phase_to_dict(phase) for phase in self.phases],
            "status": self.status,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Charge:
        """Inverse of `to_dict`."""
        fields = dict(record)
        fields["phases"] = tuple(phase_from_dict(phase) for phase in fields["phases"])
        return cls(**fields)


def base_fingerprint(fingerprint: str) -> str:
    """The whole data set's fingerprint: parts of it are charged to the same budget."""
    return re.sub(r"-(first|part)-.*$", "", fingerprint)


def composed_guarantee(
    charges: Sequence[Charge], delta: float, neighbours: Neighbours = "add-or-remove-one"
) -> Guarantee:
    """All charges together, adaptively composed, for any one record of the data set.

    Raises dpdist.privacy.accounting.Unsupported when no theorem covers the composition.
    """
    from dpdist.privacy import accounting

    if not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}")
    paths = compose_alternatives(
        [data_alternatives(charge.phases, charge.records, neighbours) for charge in charges]
    )
    value, source = accounting.epsilon(paths, delta, neighbours)
    return Guarantee(
        value,
        delta,
        neighbours,
        "proved",
        source,
        ("every release of these records is on this budget", "each run was executed as planned"),
    )


class DataBudget(OnJournal):
    """The budget of one data set. `open` to charge it, `read` to look at it."""

    def __init__(self, journal: Journal) -> None:
        self.path = journal.path
        self.fingerprint: str = journal.header["data"]
        self.data_name: str = journal.header["name"]
        self._journal = journal

    @classmethod
    def open(cls, folder: str | Path, fingerprint: str, name: str = "") -> DataBudget:
        """Create or load the budget of a data set and hold its lock until `close`.

        name: a public name, kept from the first opening. Raises JournalError if the file is damaged
        or in use.
        """
        key = base_fingerprint(fingerprint)
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", key):
            raise ValueError(f"not a data fingerprint: {fingerprint!r}")
        path = Path(folder) / f"{key}{_SUFFIX}"
        return cls(Journal.open(path, _KIND, {"data": key, "name": name}))

    @classmethod
    def read(cls, path: str | Path) -> DataBudget:
        """Load a budget file without locking it."""
        return cls(Journal.read(path, _KIND))

    @property
    def charges(self) -> list[Charge]:
        """The last charge of every run, in the order the runs first appeared."""
        latest: dict[str, Charge] = {}
        for record in self._journal.records:
            charge = Charge.from_dict(record)
            latest[charge.run] = charge
        return list(latest.values())

    def guarantee(self, delta: float, neighbours: Neighbours = "add-or-remove-one") -> Guarantee:
        """Everything on record, composed. See `composed_guarantee`."""
        return composed_guarantee(self.charges, delta, neighbours)

    def reserve(
        self,
        run: str,
        name: str,
        records: int,
        phases: Sequence[Phase],
        *,
        delta: float,
        neighbours: Neighbours = "add-or-remove-one",
        ceiling: float | None = None,
    ) -> Guarantee:
        """Put a run on record before it starts; durable on return. The composed cost with it.

        run: a unique id; a run already on record (a continued one) is not charged twice, unless its
        phases changed. Raises BudgetExceeded, and records nothing, above `ceiling` at `delta`.
        """
        charge = Charge(run, name, records, tuple(phases), "reserved")
        others = [other for other in self.charges if other.run != run]
        mine = next((other for other in self.charges if other.run == run), None)
        if mine is not None and mine.phases == charge.phases and mine.records == records:
            charge = mine
        total = composed_guarantee([*others, charge], delta, neighbours)
        if ceiling is not None and total.epsilon > ceiling:
            spent = composed_guarantee(others, delta, neighbours).epsilon
            raise BudgetExceeded(
                f"with {name!r} the data set would have cost epsilon {total.epsilon:.4g} at delta "
                f"{delta:g}, above its ceiling of {ceiling:g} (so far {spent:.4g})"
            )
        if charge is not mine:
            self._journal.append(charge.to_dict())
        return total

    def settle(self, run: str, phases: Sequence[Phase]) -> None:
        """Replace a reservation by what was really released (`Ledger.phases`); may be repeated.

        Raises JournalError for a run that was never reserved.
        """
        for charge in self.charges:
            if charge.run == run:
                settled = Charge(run, charge.name, charge.records, tuple(phases), "settled")
                if settled != charge:
                    self._journal.append(settled.to_dict())
                return
        raise JournalError(f"{self.path} has no run {run!r}: reserve comes before settle")


def budgets_in(folder: str | Path) -> list[DataBudget]:
    """Every budget in a folder, by file name. Raises JournalError if one is damaged."""
    return [DataBudget.read(path) for path in sorted(Path(folder).glob(f"*{_SUFFIX}"))]
