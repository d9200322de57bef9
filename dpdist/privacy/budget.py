"""What a set of records has cost so far: every run and search on any of them, on one journal.

A run is put on record before it starts (its whole plan) and settled when it ends (what was really
released), so that a crash leaves the records charged, never free. With a ceiling, fixed when the
budget is opened, it is a Renyi filter: runs may be chosen by the results of earlier ones, and what
is stated is the ceiling. Otherwise what is stated is the composition, which assumes that they are
not. `dpdist.privacy.budgets` finds the budgets that some records belong to.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpdist.privacy.catalogue import phases_from
from dpdist.privacy.filter import RenyiFilter
from dpdist.privacy.guarantee import Guarantee, Neighbours, check_delta
from dpdist.privacy.journal import ChainedJournal, JournalError, OnJournal
from dpdist.privacy.phases import Phase, compose_alternatives, data_alternatives
from dpdist.privacy.plan import PrivacyPlan

KIND, SUFFIX = "budget", ".budget.jsonl"
_FORMAT = 2
Status = Literal["reserved", "settled"]


class BudgetExceeded(ValueError):
    """The run would carry the records above their ceiling, or cannot be accounted under it."""


@dataclass(frozen=True)
class Charge:
    """What one run or search costs. phases: in the order they ran. records, nominal: its plan's."""

    run: str
    name: str
    records: int
    phases: tuple[Phase, ...]
    status: Status
    nominal: bool = False

    @classmethod
    def of(cls, run: str, name: str, plan: PrivacyPlan, phases: Sequence[Phase]) -> Charge:
        """A reservation for `phases` on the records of `plan`."""
        return cls(run, name, plan.records, tuple(phases), "reserved", plan.nominal)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "run": self.run,
            "name": self.name,
            "records": self.records,
            "phases": [phase.to_dict() for phase in self.phases],
            "status": self.status,
            "nominal": self.nominal,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Charge:
        """Inverse of `to_dict`."""
        fields = dict(record)
        fields["phases"] = phases_from(fields["phases"])
        return cls(**fields)


@dataclass(frozen=True)
class Terms:
    """How a budget counts, fixed when it is opened. ceiling: None for plain composition."""

    ceiling: RenyiFilter | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"ceiling": None if self.ceiling is None else self.ceiling.to_dict()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Terms:
        """Inverse of `to_dict`."""
        ceiling = record["ceiling"]
        return cls(None if ceiling is None else RenyiFilter(**ceiling))

    def same(self, other: Terms) -> bool:
        """Whether both promise the same."""
        return str(self) == str(other)

    def __str__(self) -> str:
        return "no ceiling" if self.ceiling is None else f"a ceiling of {self.ceiling}"


def composed_guarantee(
    charges: Sequence[Charge], delta: float, neighbours: Neighbours = "add-or-remove-one"
) -> Guarantee:
    """All charges together for any one record, if none was chosen by the results of another.

    Raises dpdist.privacy.accounting.Unsupported when no theorem covers the composition.
    """
    from dpdist.privacy import accounting

    check_delta(delta)
    paths = compose_alternatives(
        [data_alternatives(charge.phases, charge.records, neighbours) for charge in charges]
    )
    value, source = accounting.epsilon(paths, delta, neighbours)
    lines = ["every release of these records is on this budget", "each run was executed as planned"]
    if len(charges) > 1:
        lines.append("no run was chosen by looking at the results of an earlier one")
    public = not all(charge.nominal for charge in charges)
    return Guarantee(value, delta, neighbours, "proved", source, tuple(lines), public)


class DataBudget(OnJournal):
    """One budget. `dpdist.privacy.budgets` opens it to charge it, `read` is for looking at it."""

    def __init__(self, journal: ChainedJournal) -> None:
        header = journal.header
        self.path = journal.path
        if header.get("format") != _FORMAT:
            raise JournalError(
                f"{self.path}: its format must be {_FORMAT}, got {header.get('format')!r}: another "
                "dpdist wrote it; name a new folder"
            )
        self.data_name: str = header["name"]
        self.hashed: str = header["hashed"]
        self.terms = Terms.from_dict(header["terms"])
        self._journal = journal

    @classmethod
    def create(cls, folder: Path, name: str, terms: Terms, hashed: str) -> DataBudget:
        """A new budget, open for writing. name: a public name of the data. hashed: the type of its
        records' hashes."""
        header = {"format": _FORMAT, "name": name, "terms": terms.to_dict(), "hashed": hashed}
        path = folder / f"{secrets.token_hex(8)}{SUFFIX}"
        return cls(ChainedJournal.open(path, KIND, header))

    @classmethod
    def open(cls, path: Path) -> DataBudget:
        """Load an existing budget and hold its lock until `close`. Raises JournalError."""
        return cls(ChainedJournal.open(path, KIND, {}))

    @classmethod
    def read(cls, path: str | Path) -> DataBudget:
        """Load a budget file without locking it. Raises JournalError."""
        return cls(ChainedJournal.read(path, KIND))

    @property
    def charges(self) -> list[Charge]:
        """The last charge of every run, in the order the runs first appeared."""
        latest: dict[str, Charge] = {}
        for record in self._journal.records:
            if "run" in record:
                charge = Charge.from_dict(record)
                latest[charge.run] = charge
        return list(latest.values())

    @cached_property
    def known(self) -> NDArray[np.uint64]:
        """The records on this budget, as `dpdist.privacy.budgets` recognises them: sorted."""
        parts = [
            np.frombuffer(base64.b64decode(record["known"]), "<u8")
            for record in self._journal.records
            if "known" in record
        ]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)

    @property
    def spent(self) -> float:
        """Sum of all charges' Renyi divergences at the filter's order; 0 without a ceiling."""
        ceiling = self.terms.ceiling
        if ceiling is None:
            return 0.0
        return sum(ceiling.cost(charge.phases, charge.records) for charge in self.charges)

    def guarantee(
        self, delta: float | None = None, neighbours: Neighbours = "add-or-remove-one"
    ) -> Guarantee:
        """What is proved for the records: the ceiling where there is one, whatever the arguments.

        Otherwise the composition of all charges at `delta`, see `composed_guarantee`.
        """
        charges = self.charges
        if self.terms.ceiling is not None:
            public = not all(charge.nominal for charge in charges)
            return self.terms.ceiling.guarantee(self.spent, public)
        if delta is None:
            raise ValueError("without a ceiling a delta is needed")
        return composed_guarantee(charges, delta, neighbours)

    def add_records(self, known: NDArray[np.uint64]) -> None:
        """Put records on this budget that are not on it yet; durable on return."""
        new = np.setdiff1d(known, self.known)
        if len(new):
            raw = base64.b64encode(new.astype("<u8").tobytes()).decode()
            self._journal.append({"known": raw})
            self.__dict__.pop("known", None)

    def record(self, charge: Charge) -> None:
        """Put a charge on record, durably, unless it is there already."""
        mine = next((other for other in self.charges if other.run == charge.run), None)
        if mine is not None and charge in (mine, replace(mine, status="reserved")):
            return
        self._journal.append(charge.to_dict())


def check_fits(
    terms: Terms,
    charges: Sequence[Charge],
    new: Charge,
    neighbours: Neighbours,
    limit: tuple[float, float] | None = None,
) -> None:
    """Raise BudgetExceeded when `new` does not fit beside the charges of other runs.

    limit: epsilon and delta of a composition without a filter.
    """
    others = [charge for charge in charges if charge.run != new.run]
    if terms.ceiling is not None:
        _check_filter(terms.ceiling, others, new, neighbours)
    elif limit is not None:
        epsilon, delta = limit
        total = composed_guarantee([*others, new], delta, neighbours)
        if total.epsilon > epsilon:
            spent = composed_guarantee(others, delta, neighbours).epsilon
            raise BudgetExceeded(
                f"with {new.name!r} the records would have cost epsilon {total.epsilon:.4g} at "
                f"delta {delta:g}, above their ceiling of {epsilon:g} (so far {spent:.4g})"
            )


def _check_filter(
    ceiling: RenyiFilter, others: Sequence[Charge], new: Charge, neighbours: Neighbours
) -> None:
    from dpdist.privacy.accounting import Unsupported

    if neighbours != ceiling.neighbours:
        raise BudgetExceeded(f"the budget counts {ceiling.neighbours}, this run {neighbours}")
    try:
        cost = ceiling.cost(new.phases, new.records)
    except Unsupported as error:
        raise BudgetExceeded(
            f"{new.name!r} has no Renyi bound, which a ceiling over runs that follow each other's "
            f"results needs: {error}"
        ) from error
    spent = sum(ceiling.cost(other.phases, other.records) for other in others)
    if spent + cost > ceiling.share:
        raise BudgetExceeded(
            f"{new.name!r} would take {_percent(cost, ceiling)} of what the ceiling of {ceiling} "
            f"allows, and {_percent(spent, ceiling)} are spent (Renyi divergence of order "
            f"{ceiling.order})"
        )


def _percent(part: float, ceiling: RenyiFilter) -> str:
    return f"{100 * part / ceiling.share:.4g} %"
