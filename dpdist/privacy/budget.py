"""Privacy budgets of data sets: every run and search on any of their records, on one journal.

A run is recorded before it starts (its whole plan) and settled when it ends (its releases), so that
a crash leaves the whole plan counted. Without a ceiling the guarantee is the composition, which
assumes that no run was chosen by the results of an earlier one. With a ceiling, fixed when the
budget is opened, it is a Renyi filter, and the guarantee is the ceiling: a composed epsilon is
valid for runs fixed beforehand, since a run that is chosen by an earlier result can be the most
harmful one for that result, while a sum that is capped in advance is valid for any choice if it is
a sum of ONE number per run.

Budgets are matched by the records themselves: one more row, a different order or a different split
is the same data. A run is counted on every budget with any of its records, and the budget adds the
others. Records are stored as hashes under a key that never leaves the folder.

A copy of a run's folder cannot be distinguished from the original, and both may continue. So a
charge lists releases by process: each process has a nonce in the ledger that it wrote; entries that
two ledgers have in common count once, all others are added. Renyi divergence adds up over releases
with fresh randomness of any copy: the charge is never less than the releases of all counted copies.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpdist.core.console import format_exact, format_percent
from dpdist.core.files import check_regular_or_missing, make_folder
from dpdist.privacy.guarantee import (
    CHOSEN_APART,
    Guarantee,
    Neighbors,
    check_delta,
    format_epsilon,
)
from dpdist.privacy.ledger import ChainedJournal, JournalBacked, JournalError, anchor_path
from dpdist.privacy.phases import (
    NonPrivate,
    Phase,
    compose_path_events,
    dataset_path_events,
    phases_from_dicts,
    walk_phases,
)
from dpdist.privacy.plan import PrivacyPlan

# --- the Renyi filter -------------------------------------------------------------------------


# Whole orders: sampled Gaussians have a closed form there.
_ORDERS = (*range(2, 65), *(2**k for k in range(7, 15)))


@dataclass(frozen=True)
class RenyiFilter:
    """A Renyi filter: runs whose divergences at `order` add up to at most `share`.

    Together they are (epsilon, delta)-differentially private, whatever each was chosen by.

    Feldman and Zrnic 2021 (individual accounting via a Renyi filter), with one order fixed in
    advance: "some order suffices" is no filter. The conversion is Canonne, Kamath and Steinke 2020,
    Proposition 12. `for_ceiling` chooses order and share.
    """

    epsilon: float
    delta: float
    adjacency: Neighbors
    order: int
    share: float

    @classmethod
    def for_ceiling(cls, epsilon: float, delta: float, adjacency: Neighbors) -> RenyiFilter:
        """Return the filter of a ceiling, at the order where most Gaussian noise fits under it.

        Raises ValueError for a ceiling that no order reaches.
        """
        if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
            raise ValueError(f"not a ceiling: epsilon {epsilon} at delta {delta}")
        order = max(_ORDERS, key=lambda a: (epsilon - _conversion(a, delta)) / a)
        share = epsilon - _conversion(order, delta)
        if share <= 0:
            raise ValueError(f"no Renyi order proves epsilon {epsilon:g} at delta {delta:g}")
        return cls(epsilon, delta, adjacency, order, share)

    def cost(self, phases: Sequence[Phase], records: int) -> float:
        """Return the Renyi divergence of phases at the filter's order, on a record's worst path.

        Raises dpdist.privacy.accounting.UnsupportedMechanismError when no bound is known.
        """
        return _divergence(tuple(phases), records, self.adjacency, self.order)

    def epsilon_for_divergence(self, spent: float) -> float:
        """Return the epsilon that a sum fixed in advance at `spent` would promise."""
        return max(0.0, spent + _conversion(self.order, self.delta))

    def guarantee(self, spent: float, size_public: bool) -> Guarantee:
        """Return the ceiling, which holds from the first run on, however little is spent.

        A sum above the share (restarts cost more than was reserved) is stated as it is.
        """
        from dpdist.privacy import accounting

        lines = [
            "every release of these records is on this budget",
            "each run was executed as planned",
        ]
        if spent > self.share:
            lines.append("restarts, which carried the sum above its share, followed no result")
        return Guarantee(
            self.epsilon if spent <= self.share else self.epsilon_for_divergence(spent),
            self.delta,
            self.adjacency,
            "proved",
            f"Renyi filter of order {self.order} ({accounting.library_version()})",
            tuple(lines),
            size_public,
        )

    def __str__(self) -> str:
        return f"epsilon {self.epsilon!r} at delta {self.delta!r}, {self.adjacency}"


@lru_cache(maxsize=1024)  # every charge is computed again with each new one
def _divergence(phases: tuple[Phase, ...], records: int, adjacency: Neighbors, order: int) -> float:
    from dpdist.privacy import accounting

    several = any(phase.couples_orders for phase in walk_phases(phases))
    orders = sorted({*accounting.QUICK_ORDERS, order}) if several else [order]
    at = orders.index(order)
    paths = dataset_path_events(phases, records, adjacency)
    curves = [accounting.compose_rdp(path, adjacency, orders).rdp for path in paths]
    return max((float(curve[at]) for curve in curves), default=0.0)


def _conversion(order: int, delta: float) -> float:
    """Return epsilon minus the Renyi divergence."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


# --- the budget of one data set ---------------------------------------------------------------


BUDGET_KIND, BUDGET_SUFFIX = "budget", ".budget.jsonl"
_FORMAT = 3
Status = Literal["reserved", "settled"]


class BudgetExceeded(ValueError):
    """The run would carry the records above their ceiling, or cannot be accounted under it."""


def charge_id(key_name: str, plan: PrivacyPlan) -> str:
    """Return the id of a run's charges, made of its key's public name and its plan.

    The charge holds the releases of each process of the run, or of a copy of its folder
    (`Lineage`).
    """
    return f"{key_name}-{plan.fingerprint()[:8]}"


# units (`Phase.num_units`) of each of a plan's phases; 1: what has none
UnitCounts = tuple[int, ...]


@dataclass(frozen=True)
class Lineage:
    """Releases made and still allowed of the processes of one run and of copies of its folder.

    planned: the plan's phases. place: where the ledger lies that says so. made: by the nonce of a
    process, what it released first. open: by the nonce of a process that may be under way, what it
    may yet release, and where its ledger lies. alone: no bound is known for two copies that both
    go on.
    """

    planned: tuple[Phase, ...]
    place: str
    made: Mapping[str, UnitCounts]
    open: Mapping[str, tuple[UnitCounts, str]]
    alone: bool = False

    @classmethod
    def from_ledger(
        cls,
        planned: tuple[Phase, ...],
        ledger_path: Path,
        released: Mapping[str, UnitCounts],
        active_nonce: str | None = None,
        remaining: UnitCounts = (),
        forbids_copies: bool = False,
    ) -> Lineage:
        """Return the lineage that one ledger records.

        active_nonce: the process that may release the rest; None when no process will.
        """
        where = str(ledger_path.resolve())
        still = (
            {} if active_nonce is None or not any(remaining) else {active_nonce: (remaining, where)}
        )
        return cls(planned, where, released, still, forbids_copies)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the charged phases: the plan's phases in their order."""
        counts = [*self.made.values(), *(left for left, _ in self.open.values())]
        units = [sum(each) for each in zip(*counts, strict=True)] or [0] * len(self.planned)
        found = [
            at
            for phase, n in zip(self.planned, units, strict=True)
            for at in phase.executed_units(n)
        ]
        if self.alone and len([made for made in self.made.values() if any(made)]) > 1:
            found.append(NonPrivate("two copies of a search shared one secret number of trials"))
        return tuple(found)

    def merge(self, recorded: Lineage) -> Lineage:
        """Return the union of the recorded lineage and the writer's own.

        A process that this ledger knows of has ended, unless it belongs to another copy of the
        folder that is still there. What it released is at least what either side says: its steps
        come one after the other, and a copy may have been made between two of them.
        """
        made = {
            nonce: _elementwise_max(recorded.made.get(nonce), self.made.get(nonce))
            for nonce in [*recorded.made, *(n for n in self.made if n not in recorded.made)]
        }
        kept = {
            nonce: (left, place)
            for nonce, (left, place) in recorded.open.items()
            if nonce not in self.made or (place != self.place and Path(place).exists())
        }
        return replace(self, made=made, open=kept | dict(self.open))

    def has_unknown_processes(self, known: Lineage) -> bool:
        """Return whether processes unknown to `known` have released anything, or may."""
        others = [made for nonce, made in self.made.items() if nonce not in known.made]
        others += [left for nonce, (left, _) in self.open.items() if nonce not in known.open]
        return any(map(any, others))

    def to_dict(self) -> dict[str, Any]:
        """Return the lineage as plain JSON types."""
        return {
            "planned": [phase.to_dict() for phase in self.planned],
            "place": self.place,
            "made": {nonce: list(counts) for nonce, counts in self.made.items()},
            "open": {nonce: [list(left), place] for nonce, (left, place) in self.open.items()},
            "alone": self.alone,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Lineage:
        """Return the lineage that `to_dict` wrote."""
        return cls(
            phases_from_dicts(record["planned"]),
            record["place"],
            {nonce: tuple(counts) for nonce, counts in record["made"].items()},
            {nonce: (tuple(left), place) for nonce, (left, place) in record["open"].items()},
            record["alone"],
        )


def _elementwise_max(one: UnitCounts | None, other: UnitCounts | None) -> UnitCounts:
    if one is None or other is None:
        return one or other or ()
    return tuple(map(max, one, other))


@dataclass(frozen=True)
class Charge:
    """The cost of one run or search.

    phases: in the order they ran; those of its lineage, where it has one. records, nominal: its
    plan's.
    """

    run: str
    name: str
    records: int
    phases: tuple[Phase, ...]
    status: Status
    nominal: bool = False
    lineage: Lineage | None = None

    @classmethod
    def for_plan(
        cls,
        run: str,
        name: str,
        plan: PrivacyPlan,
        phases: Sequence[Phase],
        lineage: Lineage | None = None,
    ) -> Charge:
        """Return a reservation for `phases`, or those of a lineage, on the records of `plan`."""
        phases = phases if lineage is None else lineage.phases
        return cls(run, name, plan.records, tuple(phases), "reserved", plan.nominal, lineage)

    def merge(self, recorded: Charge | None) -> Charge:
        """Return this charge merged with what is on record for the same run."""
        if recorded is None or recorded.lineage is None or self.lineage is None:
            return self
        lineage = self.lineage.merge(recorded.lineage)
        return replace(self, lineage=lineage, phases=lineage.phases)

    def to_dict(self) -> dict[str, Any]:
        """Return the charge as plain JSON types."""
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
        """Return the charge that `to_dict` wrote."""
        fields = dict(record)
        fields["phases"] = phases_from_dicts(fields["phases"])
        if "lineage" in fields:
            fields["lineage"] = Lineage.from_dict(fields["lineage"])
        return cls(**fields)


def composed_guarantee(
    charges: Sequence[Charge], delta: float, adjacency: Neighbors = "add-or-remove-one"
) -> Guarantee:
    """Return the guarantee of all charges together for any one record.

    No charge may have been chosen by the results of another.

    Raises dpdist.privacy.accounting.UnsupportedMechanismError when no theorem covers the
    composition.
    """
    from dpdist.privacy import accounting

    check_delta(delta)
    paths = compose_path_events(
        [dataset_path_events(charge.phases, charge.records, adjacency) for charge in charges]
    )
    value, source = accounting.compute_epsilon(paths, delta, adjacency)
    lines = ["every release of these records is on this budget", "each run was executed as planned"]
    if len(charges) > 1:
        lines.append(CHOSEN_APART)
    public = not all(charge.nominal for charge in charges)
    return Guarantee(value, delta, adjacency, "proved", source, tuple(lines), public)


class DataBudget(JournalBacked):
    """One budget. `dpdist.privacy.budget` opens it to charge it, `read` only looks at it."""

    def __init__(self, journal: ChainedJournal) -> None:
        header = journal.header
        self.path = journal.path
        if header.get("format") != _FORMAT:
            raise JournalError(
                f"{self.path}: its format must be {_FORMAT}, got {header.get('format')!r}: another "
                "dpdist wrote it; name a new folder"
            )
        self.data_name: str = header["name"]
        self.hash_dtype: str = header["hashed"]
        ceiling = header["terms"]["ceiling"]  # fixed when it was opened; None: plain composition
        self.ceiling = None if ceiling is None else RenyiFilter(**ceiling)
        self.key_id: str = header["key"]
        self._journal = journal

    @classmethod
    def create(
        cls, folder: Path, name: str, ceiling: RenyiFilter | None, hash_dtype: str, key_id: str
    ) -> DataBudget:
        """Return a new budget, open for writing.

        name: a public name of the data. hash_dtype: the type of its records' hashes. key_id: of
        the key under which they are kept.
        """
        terms = {"ceiling": None if ceiling is None else asdict(ceiling)}
        header = {"format": _FORMAT, "name": name, "terms": terms, "hashed": hash_dtype}
        header["key"] = key_id
        path = folder / f"{secrets.token_hex(8)}{BUDGET_SUFFIX}"
        return cls(ChainedJournal.open(path, BUDGET_KIND, header))

    @classmethod
    def open(cls, path: Path) -> DataBudget:
        """Load an existing budget and hold its lock until `close`. Raises JournalError."""
        return cls(ChainedJournal.open(path, BUDGET_KIND, {}))

    @classmethod
    def read(cls, path: str | Path) -> DataBudget:
        """Load a budget file without locking it. Raises JournalError."""
        return cls(ChainedJournal.read(path, BUDGET_KIND))

    @property
    def charges(self) -> list[Charge]:
        """Return the last charge of every run, in the order the runs first appeared."""
        latest: dict[str, Charge] = {}
        for record in self._journal.records:
            if "run" in record:
                charge = Charge.from_dict(record)
                latest[charge.run] = charge
        return list(latest.values())

    @cached_property
    def known(self) -> NDArray[np.uint64]:
        """Return the records on this budget, as `dpdist.privacy.budget` recognizes them: sorted."""
        parts = [
            np.frombuffer(base64.b64decode(record["known"]), "<u8")
            for record in self._journal.records
            if "known" in record
        ]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)

    @property
    def spent(self) -> float:
        """Return the sum of all charges' Renyi divergences; 0 without a ceiling.

        They are at the filter's order.
        """
        if self.ceiling is None:
            return 0.0
        return sum(self.ceiling.cost(charge.phases, charge.records) for charge in self.charges)

    def guarantee(
        self, delta: float | None = None, adjacency: Neighbors = "add-or-remove-one"
    ) -> Guarantee:
        """Return the proved guarantee of the records: the ceiling if there is one.

        Otherwise the composition of all charges at `delta`, see `composed_guarantee`.
        """
        charges = self.charges
        if self.ceiling is not None:
            public = not all(charge.nominal for charge in charges)
            return self.ceiling.guarantee(self.spent, public)
        if delta is None:
            raise ValueError("without a ceiling a delta is needed")
        return composed_guarantee(charges, delta, adjacency)

    def add_records(self, known: NDArray[np.uint64]) -> None:
        """Put records on this budget that are not on it yet; durable on return."""
        new = np.setdiff1d(known, self.known)
        if len(new):
            raw = base64.b64encode(new.astype("<u8").tobytes()).decode()
            self._journal.append({"known": raw})
            self.__dict__.pop("known", None)

    def find_charge(self, run: str) -> Charge | None:
        """Return the recorded charge of this run or search, or None."""
        return next((charge for charge in self.charges if charge.run == run), None)

    def append_charge(self, charge: Charge) -> None:
        """Put a charge on record, durably, unless it is there already."""
        mine = self.find_charge(charge.run)
        if mine is not None and charge in (mine, replace(mine, status="reserved")):
            return
        self._journal.append(charge.to_dict())


def check_fits(
    ceiling: RenyiFilter | None,
    charges: Sequence[Charge],
    new: Charge,
    adjacency: Neighbors,
    limit: tuple[float, float] | None = None,
) -> None:
    """Raise BudgetExceeded if `new` and the charges of other runs exceed the ceiling.

    new: with what is on record for the same run (`Charge.merge`). limit: epsilon and delta of a
    composition without a filter.
    """
    others = [charge for charge in charges if charge.run != new.run]
    if ceiling is not None:
        _check_filter(ceiling, others, new, adjacency)
    elif limit is not None:
        epsilon, delta = limit
        total = composed_guarantee([*others, new], delta, adjacency)
        if total.epsilon > epsilon:
            spent = composed_guarantee(others, delta, adjacency).epsilon
            raise BudgetExceeded(
                f"with {new.name!r} the records would have cost epsilon "
                f"{format_epsilon(total.epsilon)} at delta {format_exact(delta)}, above their "
                f"ceiling of {format_exact(epsilon)} (so far {format_epsilon(spent)})"
            )


def _check_filter(
    ceiling: RenyiFilter, others: Sequence[Charge], new: Charge, adjacency: Neighbors
) -> None:
    from dpdist.privacy.pld import UnsupportedMechanismError

    if adjacency != ceiling.adjacency:
        raise BudgetExceeded(f"the budget counts {ceiling.adjacency}, this run {adjacency}")
    try:
        cost = ceiling.cost(new.phases, new.records)
    except UnsupportedMechanismError as error:
        raise BudgetExceeded(
            f"{new.name!r} has no Renyi bound, which a ceiling over runs that follow each other's "
            f"results needs: {error}"
        ) from error
    spent = sum(ceiling.cost(other.phases, other.records) for other in others)
    if not spent + cost <= ceiling.share:  # nor where it is no number
        raise BudgetExceeded(
            f"{new.name!r} would take {_percent(cost, ceiling)} of what the ceiling of {ceiling} "
            f"allows, and {_percent(spent, ceiling)} are spent (Renyi divergence of order "
            f"{ceiling.order})"
        )


def _shown(ceiling: RenyiFilter | None) -> str:
    return "no ceiling" if ceiling is None else f"a ceiling of {ceiling}"


def _percent(part: float, ceiling: RenyiFilter) -> str:
    return f"{format_percent(part / ceiling.share, round_up=True)} %"


# --- all budgets of a folder ------------------------------------------------------------------


_KEY = "records.key"
_KEY_BYTES = 32


def read_budgets(folder: str | Path) -> list[DataBudget]:
    """Return every budget in a folder, by file name. Raises JournalError if one is damaged."""
    return [DataBudget.read(path) for path in _files(Path(folder))]


def reserve(
    folder: str | Path,
    records: NDArray[np.integer] | None,
    charge: Charge,
    ceiling: RenyiFilter | None,
    adjacency: Neighbors,
    *,
    name: str = "",
    limit: tuple[float, float] | None = None,
    enforce: bool = True,
    record: bool = True,
) -> None:
    """Put a run on record before it starts, on every budget that holds any of its records.

    records: a hash of every record the run reads, one number each; None for a run that is on record
    and goes on. ceiling: of the budget that is opened when there is none; otherwise it must be the
    same. name: a public name of the data. A run on record already (a continued one) is charged
    once, and of a copy of it what the other has not released (`Lineage`). Durable on return.

    Raises BudgetExceeded, and nothing was recorded, where the run does not fit; JournalError.
    enforce: False records what was done already, whatever it costs. record: False checks alone.
    """
    with ExitStack() as stack:
        key, budgets = bytes(_KEY_BYTES), list[DataBudget]()
        if record or _files(Path(folder)):  # reading creates no file
            key, budgets = stack.enter_context(_open_budgets(Path(folder)))
        if records is None:
            _continue_charge(budgets, charge, adjacency, limit)
            return
        hashed = records.dtype.str
        other = [budget.path for budget in budgets if budget.hash_dtype != hashed]
        if other and enforce:
            raise BudgetExceeded(
                f"{other[0]}: its records have hashes of a different kind, from a different "
                "version of dpdist, and cannot be compared with these; name a new folder"
            )
        known = _keyed_hashes(key, records)
        held = [b for b in budgets if len(np.intersect1d(b.known, known, assume_unique=True))]
        if enforce:
            for budget in held:
                if str(budget.ceiling) != str(ceiling):
                    raise BudgetExceeded(
                        f"{budget.path} contains some of these records under "
                        f"{_shown(budget.ceiling)}, fixed before its first run; this run has "
                        f"{_shown(ceiling)}"
                    )
            _check_charge_fits(held, ceiling, charge, adjacency, limit)
        if not record:
            return
        if not held:
            held = [DataBudget.create(Path(folder), name, ceiling, hashed, _key_id(key))]
            budgets.append(held[0])  # is closed with the others
        for budget in held:
            budget.add_records(known)
            budget.append_charge(charge.merge(budget.find_charge(charge.run)))


def _continue_charge(
    budgets: Sequence[DataBudget],
    charge: Charge,
    adjacency: Neighbors,
    limit: tuple[float, float] | None,
) -> None:
    held = [budget for budget in budgets if budget.find_charge(charge.run) is not None]
    if not held:
        raise BudgetExceeded(
            f"{charge.name!r} is on no budget here; name the folder it was run with"
        )
    for budget in held:
        _check_charge_fits([budget], budget.ceiling, charge, adjacency, limit)
    for budget in held:
        budget.append_charge(charge.merge(budget.find_charge(charge.run)))


def _check_charge_fits(
    held: Sequence[DataBudget],
    ceiling: RenyiFilter | None,
    charge: Charge,
    adjacency: Neighbors,
    limit: tuple[float, float] | None,
) -> None:
    """Raise BudgetExceeded where a run, with all that copies of it have on record, does not fit."""
    if not held:
        check_fits(ceiling, [], charge, adjacency, limit)
    for budget in held:
        whole = charge.merge(budget.find_charge(charge.run))
        if whole.lineage and charge.lineage and whole.lineage.has_unknown_processes(charge.lineage):
            if whole.lineage.alone:
                raise BudgetExceeded(
                    f"a second copy of {charge.name!r} was continued, or may be: both have one "
                    "secret number of trials, and their joint privacy cost is unknown. Continue "
                    "that copy, remove it, or start a new search"
                )
            whole = replace(whole, name=f"{whole.name}, with copies of it that went on or may,")
        check_fits(ceiling, budget.charges, whole, adjacency, limit)


def settle(
    folder: str | Path, run: str, phases: Sequence[Phase], lineage: Lineage | None = None
) -> bool:
    """Replace a reservation by the releases really made; may be repeated.

    phases: `Ledger.released_phases`. lineage: says by whom; what it has not in common with what is
    on record is added. False for a run that was never reserved. Raises JournalError.
    """
    found = False
    with _open_budgets(Path(folder)) as (_, budgets):
        for budget in budgets:
            for charge in budget.charges:
                if charge.run == run:
                    made = replace(charge, phases=tuple(phases), status="settled", lineage=lineage)
                    budget.append_charge(made.merge(charge))
                    found = True
    return found


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(f"*{BUDGET_SUFFIX}"))
    return [path for path in found if path.stat().st_size]  # a crash may leave one just created


@contextmanager
def _open_budgets(folder: Path) -> Iterator[tuple[bytes, list[DataBudget]]]:
    """Yield the folder's key and all its budgets, for one process at a time."""
    make_folder(folder, 0o700)
    check_regular_or_missing(folder / _KEY)
    descriptor = os.open(folder / _KEY, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+", errors="replace") as file, ExitStack() as stack:
        fcntl.flock(file, fcntl.LOCK_EX)
        budgets: list[DataBudget] = []
        stack.callback(_close, budgets)
        for path in _files(folder):
            budgets.append(DataBudget.open(path))
        left = {anchor_path(budget.path) for budget in budgets}
        for anchor in sorted(folder.glob(f"*{anchor_path(Path(BUDGET_SUFFIX)).suffix}")):
            if anchor not in left:
                raise JournalError(f"{anchor}: its budget is missing; restore it")
        text = file.read()
        if not re.fullmatch(rf"[0-9a-f]{{{2 * _KEY_BYTES}}}", text):
            if budgets:
                raise JournalError(
                    f"{folder / _KEY}: lost or damaged, so that the records of the budgets in this "
                    "folder cannot be recognized; restore it"
                )
            text = secrets.token_hex(_KEY_BYTES)
            file.seek(0)
            file.truncate()
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        key = bytes.fromhex(text)
        for budget in budgets:
            if budget.key_id != _key_id(key):
                raise JournalError(
                    f"{budget.path}: its records have a different key than {folder / _KEY} and "
                    "cannot be recognized: one of the files was replaced or comes from a different "
                    "folder; restore it"
                )
        yield key, budgets


def _key_id(key: bytes) -> str:
    """Return the identification of a folder's key that a budget keeps; the key stays secret."""
    return hashlib.blake2b(key=key, digest_size=8, person=b"dpdist.budget.id").hexdigest()


def _close(budgets: list[DataBudget]) -> None:
    for budget in budgets:
        budget.close()


def _keyed_hashes(key: bytes, records: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return keyed hashes of the records' hashes, sorted and distinct: uint64."""
    if records.ndim != 1 or not len(records):
        raise ValueError(f"one hash for each record is needed, got shape {records.shape}")
    raw, size = np.ascontiguousarray(records).tobytes(), records.dtype.itemsize
    person = b"dpdist.budget"
    digests = b"".join(
        hashlib.blake2b(raw[i : i + size], digest_size=8, key=key, person=person).digest()
        for i in range(0, len(raw), size)
    )
    return np.unique(np.frombuffer(digests, "<u8"))
