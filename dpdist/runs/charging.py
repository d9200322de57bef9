"""Charge runs and searches to the budget of their records.

Before a run, its whole plan is charged; after it, what it released (`dpdist.privacy.budget`). A
recipe's training uses `charged`; a script's uses `begin_charge` and `end_charge`, since it may end
anywhere; answers and searches pass their own charge to `reserve_charge`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from dpdist.core.errors import UserError
from dpdist.privacy import budget
from dpdist.privacy.budget import (
    BudgetExceeded,
    Charge,
    Lineage,
    RenyiFilter,
    charge_id,
)
from dpdist.privacy.ledger import JournalError, Ledger, new_nonce
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import key_id
from dpdist.runs.folder import RunFolder, read_verified_ledger, verify_ledger
from dpdist.runs.recipe import Recipe


def budget_ceiling(recipe: Recipe) -> RenyiFilter | None:
    """Return the ceiling of the budget that this recipe opens; None without a ceiling.

    Raises ValueError for an impossible ceiling.
    """
    privacy = recipe.privacy
    if privacy.budget_ceiling is None or privacy.budget_composition == "non-adaptive":
        return None
    delta = privacy.budget_delta or privacy.delta
    return RenyiFilter.for_ceiling(privacy.budget_ceiling, delta, privacy.adjacency)


def build_charge(recipe: Recipe, folder: RunFolder, process: str | None = None) -> Charge:
    """Return the charge for what a run has released and what one of its processes may yet release.

    process: the nonce of that process; None for the last one in the ledger.
    """
    by_run = read_verified_ledger(folder)
    plan, ledger = by_run.plan, by_run.ledger
    lineage = Lineage.from_ledger(
        plan.phases,
        folder.ledger,
        ledger.released_units(plan),
        process or next(iter(ledger.process_nonces[-1:]), None),
        ledger.remaining_units(plan),
    )
    return Charge.for_plan(run_charge_id(folder, plan), recipe.name, plan, (), lineage)


def run_charge_id(folder: RunFolder, plan: PrivacyPlan) -> str:
    """Return the id under which a run, and every copy of its folder, is charged."""
    return charge_id(key_id(folder.read_run_key()), plan)


class Hashed(Protocol):
    """Records that are recognized by hashes: (N,) integers or strings of fixed length."""

    @property
    def hashes(self) -> np.ndarray:
        """Return one or more hashes for each record."""


def reserve_charge(
    recipe: Recipe,
    records: Hashed | None,
    charge: Charge,
    context: str,
    *,
    enforce: bool = True,
    record: bool = True,
) -> None:
    """Charge the records before anything is released; see `dpdist.privacy.budget.reserve`.

    Raises UserError, without a charge, if the charge does not fit.
    """
    privacy = recipe.privacy
    if privacy.budget is None:
        return
    with _budget_errors(context):
        limit = None
        if privacy.budget_ceiling is not None:
            limit = (privacy.budget_ceiling, privacy.budget_delta or privacy.delta)
        budget.reserve(
            privacy.budget,
            None if records is None else np.asarray(records.hashes),
            charge,
            budget_ceiling(recipe),
            privacy.adjacency,
            name=recipe.data.name,
            limit=limit,
            enforce=enforce,
            record=record,
        )


def check_charge(
    recipe: Recipe,
    plan: PrivacyPlan,
    records: Hashed,
    context: str,
    folder: RunFolder | None = None,
) -> None:
    """Raise UserError if what a run may yet release exceeds its ceiling; charge nothing.

    folder: that of a run to continue; None for a new run, whose whole plan counts.
    """
    charge = Charge.for_plan("", recipe.name, plan, plan.phases)
    if folder is not None:
        charge = build_charge(recipe, folder, new_nonce())
    reserve_charge(recipe, records, charge, context, record=False)


def begin_charge(
    recipe: Recipe, plan: PrivacyPlan, folder: RunFolder, records: Hashed, context: str
) -> str:
    """Charge a run's whole plan before it continues, and return the nonce of this process.

    Raises UserError, without a charge, if it exceeds the recipe's ceiling.
    """
    # In the ledger first: if two copies continue, each is charged for its remaining steps.
    with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
        verify_ledger(folder, plan, ledger)
        mine = ledger.announce_process()
    reserve_charge(recipe, records, build_charge(recipe, folder, mine), context)
    return mine


def end_charge(
    recipe: Recipe, folder: RunFolder, records: Hashed, process: str | None, context: str
) -> None:
    """Charge what a run released, and, unless it has finished, what it may yet release."""
    charge = build_charge(recipe, folder, process)
    if folder.training_summary.exists():
        settle_charge(recipe, records, charge, context)
    else:
        reserve_charge(recipe, records, charge, context, enforce=False)


def settle_charge(recipe: Recipe, records: Hashed, charge: Charge, context: str) -> None:
    """Replace a run's reserved charge by what it released."""
    if recipe.privacy.budget is None:
        return
    with _budget_errors(context):
        made = charge.run, charge.phases, charge.lineage
        if not budget.settle(recipe.privacy.budget, *made):
            reserve_charge(recipe, records, charge, context, enforce=False)
            budget.settle(recipe.privacy.budget, *made)


@contextmanager
def charged(
    recipe: Recipe, plan: PrivacyPlan, folder: RunFolder, records: Hashed, context: str
) -> Iterator[None]:
    """Charge a run around its training: the whole plan before it, the actual releases after it.

    Raises UserError, before anything runs, if the run exceeds the recipe's ceiling.
    """
    mine: str | None = None
    if not folder.training_summary.exists():
        mine = begin_charge(recipe, plan, folder, records, context)
    try:
        yield
    finally:
        end_charge(recipe, folder, records, mine, context)


@contextmanager
def _budget_errors(context: str) -> Iterator[None]:
    try:
        yield
    except (BudgetExceeded, JournalError, ValueError) as error:
        raise UserError(
            f"{context}: privacy.budget: {error}",
            see="explanation/privacy.md#what-a-run-really-released",
        ) from error
