"""What a recipe says about the budget of its records, and the charges of its run or search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dpdist.base.errors import UserError
from dpdist.data import Dataset
from dpdist.privacy import budgets
from dpdist.privacy.budget import BudgetExceeded, Charge, Terms
from dpdist.privacy.filter import RenyiFilter
from dpdist.privacy.journal import JournalError
from dpdist.runs.recipe import Recipe


def terms_of(recipe: Recipe) -> Terms:
    """How the budget counts that this recipe opens. Raises ValueError for an impossible ceiling."""
    privacy = recipe.privacy
    if privacy.budget_ceiling is None or privacy.budget_composition == "non-adaptive":
        return Terms()
    delta = privacy.budget_delta or privacy.delta
    return Terms(RenyiFilter.fixed(privacy.budget_ceiling, delta, privacy.neighbours))


def reserve(recipe: Recipe, records: Dataset, charge: Charge, where: str, *, enforce: bool) -> None:
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
            np.asarray(records.hashes),
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
        if not budgets.settle(recipe.privacy.budget, charge.run, charge.phases):
            reserve(recipe, records, charge, where, enforce=False)
            budgets.settle(recipe.privacy.budget, charge.run, charge.phases)


@contextmanager
def _complaints(where: str) -> Iterator[None]:
    try:
        yield
    except (BudgetExceeded, JournalError, ValueError) as error:
        raise UserError(f"{where}: privacy.budget: {error}") from error
