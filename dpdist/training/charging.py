"""What a recipe says about the budget of its records, and the charges of its run or search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dpdist.base.errors import UserError
from dpdist.data import Dataset
from dpdist.privacy import budgets
from dpdist.privacy.budget import BudgetExceeded, Charge, Lineage, Terms, run_id
from dpdist.privacy.filter import RenyiFilter
from dpdist.privacy.journal import JournalError
from dpdist.randomness.keys import key_id
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.runs.released import read_released


def terms_of(recipe: Recipe) -> Terms:
    """How the budget counts that this recipe opens. Raises ValueError for an impossible ceiling."""
    privacy = recipe.privacy
    if privacy.budget_ceiling is None or privacy.budget_composition == "non-adaptive":
        return Terms()
    delta = privacy.budget_delta or privacy.delta
    return Terms(RenyiFilter.fixed(privacy.budget_ceiling, delta, privacy.neighbours))


def charge_of(recipe: Recipe, folder: RunFolder, process: str | None = None) -> Charge:
    """Return what a run has released by its ledger, and what its process of this nonce (default:
    the last that wrote there) may yet release."""
    by_run = read_released(folder)
    plan, ledger = by_run.plan, by_run.ledger
    lineage = Lineage.of(
        plan.phases,
        folder.ledger,
        ledger.made(plan),
        process or next(iter(ledger.processes[-1:]), None),
        ledger.left(plan),
    )
    run = run_id(key_id(folder.read_key()), plan)
    return Charge.of(run, recipe.name, plan, (), lineage)


def reserve(
    recipe: Recipe, records: Dataset | None, charge: Charge, where: str, *, enforce: bool = True
) -> None:
    """Charge the records before anything is released; see `dpdist.privacy.budgets.reserve`.

    Raises UserError, and nothing was charged.
    """
    privacy = recipe.privacy
    if privacy.budget is None:
        return
    with _complaints(where):
        limit = None
        if privacy.budget_ceiling is not None:
            limit = (privacy.budget_ceiling, privacy.budget_delta or privacy.delta)
        budgets.reserve(
            privacy.budget,
            None if records is None else np.asarray(records.hashes),
            charge,
            terms_of(recipe),
            privacy.neighbours,
            name=recipe.data.name,
            limit=limit,
            enforce=enforce,
        )


def settle(recipe: Recipe, records: Dataset, charge: Charge, where: str) -> None:
    """Charge what was really released, when all of it was."""
    if recipe.privacy.budget is None:
        return
    with _complaints(where):
        made = charge.run, charge.phases, charge.lineage
        if not budgets.settle(recipe.privacy.budget, *made):
            reserve(recipe, records, charge, where, enforce=False)
            budgets.settle(recipe.privacy.budget, *made)


@contextmanager
def _complaints(where: str) -> Iterator[None]:
    try:
        yield
    except (BudgetExceeded, JournalError, ValueError) as error:
        raise UserError(f"{where}: privacy.budget: {error}") from error
