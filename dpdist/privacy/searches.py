"""What choosing the best of several runs costs: two bounds for a secret number of them, and plain
composition for a public one."""

from __future__ import annotations

from collections.abc import Sequence

from dpdist.privacy.accounting import grid_for, library_version
from dpdist.privacy.best_of import best_of
from dpdist.privacy.combined import RepeatAndSelect
from dpdist.privacy.guarantee import Guarantee, Neighbours
from dpdist.privacy.losses import Loss, LossTooLarge, loss_of
from dpdist.privacy.phases import Phase
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.selection import SelectionLaw


def best_of_guarantee(
    phases: Sequence[Phase],
    law: SelectionLaw,
    *,
    records: int,
    delta: float,
    neighbours: Neighbours = "add-or-remove-one",
) -> Guarantee:
    """What is proved for the best of K runs of `phases`, by this bound.

    Raises dpdist.privacy.accounting.Unsupported when a run has no privacy loss distribution.
    """
    search = RepeatAndSelect(tuple(phases), law.mean, law.shape)
    plan = PrivacyPlan(records, (search,), delta, neighbours=neighbours)
    worst = 0.0
    for path in plan.alternatives(search.phases):
        try:
            one = loss_of(path, neighbours, grid_for(path, neighbours))
        except LossTooLarge:
            one = Loss(None, 0.0)
        pld = None if one.pld is None else best_of(one.pld, law)
        # What rounding takes from one run's deltas it takes E[K] times.
        worst = max(worst, Loss(pld, law.mean * one.rounding).epsilon(delta))
    source = f"PLD of best-of-K ({library_version()})"
    return Guarantee(worst, delta, neighbours, "proved", source, plan.assumptions)


def search_guarantee(
    phases: Sequence[Phase],
    law: SelectionLaw,
    *,
    records: int,
    delta: float,
    neighbours: Neighbours = "add-or-remove-one",
) -> Guarantee:
    """What a search with a secret K costs; Theorem 2 (finite shape) or 6 (Poisson), by RDP.

    Raises dpdist.privacy.accounting.Unsupported when a run has no Renyi bound.
    """
    search = RepeatAndSelect(tuple(phases), law.mean, law.shape)
    return PrivacyPlan(records, (search,), delta, neighbours=neighbours).guarantee()


def cheapest(
    phases: Sequence[Phase], law: SelectionLaw, *, records: int, delta: float
) -> Guarantee:
    """The smaller of both bounds on a search with a secret K. Raises as they do."""
    bounds = (best_of_guarantee, search_guarantee)
    found = [bound(phases, law, records=records, delta=delta) for bound in bounds]
    return min(found, key=lambda guarantee: guarantee.epsilon)


def fixed_runs_guarantee(
    phases: Sequence[Phase],
    runs: int,
    *,
    records: int,
    delta: float,
    neighbours: Neighbours = "add-or-remove-one",
) -> Guarantee:
    """What a fixed, public number of runs costs: plain composition; all runs may be shown."""
    if runs < 1:
        raise ValueError(f"the number of runs must be at least 1, got {runs}")
    return PrivacyPlan(records, tuple(phases) * runs, delta, neighbours=neighbours).guarantee()
