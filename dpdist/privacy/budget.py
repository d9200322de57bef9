"""What a set of records has cost so far: every run and search on any of them, on one journal.

A run is put on record before it starts (its whole plan) and settled when it ends (what was really
released), so that a crash leaves the records charged, never free. With a ceiling, fixed when the
budget is opened, it is a Renyi filter: runs may be chosen by the results of earlier ones, and what
is stated is the ceiling. Otherwise what is stated is the composition, which assumes that they are
not. `dpdist.privacy.budgets` finds the budgets that some records belong to.

A copy of a run's folder cannot be told from the original, and both may go on. So a charge says what
was released by whom: each process has a nonce, in the ledger that it wrote, and what two ledgers
have in common counts once, all else is added. Renyi divergence adds up over what a run releases one
after the other, with fresh randomness, whoever does it: what is charged is never less than what all
copies that were charged have released.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpdist.base.rounding import exact, percent
from dpdist.privacy.catalogue import phases_from
from dpdist.privacy.filter import RenyiFilter
from dpdist.privacy.guarantee import Guarantee, Neighbours, check_delta, format_epsilon
from dpdist.privacy.journal import ChainedJournal, JournalError, OnJournal
from dpdist.privacy.phases import Phase, compose_alternatives, data_alternatives
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.releases import NonPrivate

KIND, SUFFIX = "budget", ".budget.jsonl"
_FORMAT = 2
Status = Literal["reserved", "settled"]


class BudgetExceeded(ValueError):
    """The run would carry the records above their ceiling, or cannot be accounted under it."""


def run_id(key_name: str, plan: PrivacyPlan) -> str:
    """Return the id of a run's charges, made of its key's public name and its plan. What each
    process of the run, or of a copy of its folder, has released stands in the charge (`Lineage`).
    """
    return f"{key_name}-{plan.fingerprint()[:8]}"


Counts = tuple[int, ...]  # units (`Phase.units`) of each of a plan's phases; 1: what has none


@dataclass(frozen=True)
class Lineage:
    """What the processes of one run, and of copies of its folder, have released and may yet.

    planned: the plan's phases. place: where the ledger lies that says so. made: by the nonce of a
    process, what it released first. open: by the nonce of a process that may be under way, what it
    may yet release, and where its ledger lies. alone: no bound is known for two copies that both
    go on.
    """

    planned: tuple[Phase, ...]
    place: str
    made: Mapping[str, Counts]
    open: Mapping[str, tuple[Counts, str]]
    alone: bool = False

    @classmethod
    def of(
        cls,
        planned: tuple[Phase, ...],
        place: Path,
        made: Mapping[str, Counts],
        going_on: str | None = None,
        left: Counts = (),
        alone: bool = False,
    ) -> Lineage:
        """What one ledger says. going_on: the process that may release what is left; None where
        nobody will."""
        where = str(place.resolve())
        still = {} if going_on is None or not any(left) else {going_on: (left, where)}
        return cls(planned, where, made, still, alone)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All of it, charged: the plan's phases in their order."""
        counts = [*self.made.values(), *(left for left, _ in self.open.values())]
        units = [sum(each) for each in zip(*counts, strict=True)] or [0] * len(self.planned)
        found = [at for phase, n in zip(self.planned, units, strict=True) for at in phase.at(n)]
        if self.alone and len([made for made in self.made.values() if any(made)]) > 1:
            found.append(NonPrivate("two copies of a search shared one secret number of trials"))
        return tuple(found)

    def joined(self, before: Lineage) -> Lineage:
        """Return what is on record and what the writer of this one knows.

        A process that this ledger knows of has ended, unless it belongs to another copy of the
        folder that is still there. What it released is at least what either side says: its steps
        come one after the other, and a copy may have been made between two of them.
        """
        made = {
            nonce: _larger(before.made.get(nonce), self.made.get(nonce))
            for nonce in [*before.made, *(n for n in self.made if n not in before.made)]
        }
        kept = {
            nonce: (left, place)
            for nonce, (left, place) in before.open.items()
            if nonce not in self.made or (place != self.place and Path(place).exists())
        }
        return replace(self, made=made, open=kept | dict(self.open))

    def foreign(self, own: Lineage) -> bool:
        """Whether processes that `own` does not know of have released anything, or may."""
        others = [made for nonce, made in self.made.items() if nonce not in own.made]
        others += [left for nonce, (left, _) in self.open.items() if nonce not in own.open]
        return any(map(any, others))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "planned": [phase.to_dict() for phase in self.planned],
            "place": self.place,
            "made": {nonce: list(counts) for nonce, counts in self.made.items()},
            "open": {nonce: [list(left), place] for nonce, (left, place) in self.open.items()},
            "alone": self.alone,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Lineage:
        """Inverse of `to_dict`."""
        return cls(
            phases_from(record["planned"]),
            record["place"],
            {nonce: tuple(counts) for nonce, counts in record["made"].items()},
            {nonce: (tuple(left), place) for nonce, (left, place) in record["open"].items()},
            record["alone"],
        )


def _larger(one: Counts | None, other: Counts | None) -> Counts:
    if one is None or other is None:
        return one or other or ()
    return tuple(map(max, one, other))


@dataclass(frozen=True)
class Charge:
    """What one run or search costs. phases: in the order they ran; those of its lineage, where it
    has one. records, nominal: its plan's."""

    run: str
    name: str
    records: int
    phases: tuple[Phase, ...]
    status: Status
    nominal: bool = False
    lineage: Lineage | None = None

    @classmethod
    def of(
        cls,
        run: str,
        name: str,
        plan: PrivacyPlan,
        phases: Sequence[Phase],
        lineage: Lineage | None = None,
    ) -> Charge:
        """A reservation for `phases`, or for those of a lineage, on the records of `plan`."""
        phases = phases if lineage is None else lineage.phases
        return cls(run, name, plan.records, tuple(phases), "reserved", plan.nominal, lineage)

    def joined(self, before: Charge | None) -> Charge:
        """Return this charge beside what is on record for the same run."""
        if before is None or before.lineage is None or self.lineage is None:
            return self
        lineage = self.lineage.joined(before.lineage)
        return replace(self, lineage=lineage, phases=lineage.phases)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        lineage = {} if self.lineage is None else {"lineage": self.lineage.to_dict()}
        return {
            "run": self.run,
            "name": self.name,
            "records": self.records,
            "phases": [phase.to_dict() for phase in self.phases],
            "status": self.status,
            "nominal": self.nominal,
            **lineage,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Charge:
        """Inverse of `to_dict`."""
        fields = dict(record)
        fields["phases"] = phases_from(fields["phases"])
        if "lineage" in fields:
            fields["lineage"] = Lineage.from_dict(fields["lineage"])
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
        self.key_id: str | None = header.get("key")  # files made before it was written have none
        self._journal = journal

    @classmethod
    def create(cls, folder: Path, name: str, terms: Terms, hashed: str, key_id: str) -> DataBudget:
        """A new budget, open for writing. name: a public name of the data. hashed: the type of its
        records' hashes. key_id: of the key under which they are kept."""
        header = {"format": _FORMAT, "name": name, "terms": terms.to_dict(), "hashed": hashed}
        header["key"] = key_id
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

    def charge_of(self, run: str) -> Charge | None:
        """What is on record for this run or search."""
        return next((charge for charge in self.charges if charge.run == run), None)

    def record(self, charge: Charge) -> None:
        """Put a charge on record, durably, unless it is there already."""
        mine = self.charge_of(charge.run)
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

    new: with what is on record for the same run (`Charge.joined`). limit: epsilon and delta of a
    composition without a filter.
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
                f"with {new.name!r} the records would have cost epsilon "
                f"{format_epsilon(total.epsilon)} at delta {exact(delta)}, above their ceiling of "
                f"{exact(epsilon)} (so far {format_epsilon(spent)})"
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
    return f"{percent(part / ceiling.share, up=True)} %"
