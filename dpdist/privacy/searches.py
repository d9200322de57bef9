"""What choosing the best of several runs costs: of a secret number of them, or of a public one."""

from __future__ import annotations

from collections.abc import Sequence

from dpdist.privacy.combined import ParallelParts, RepeatAndSelect
from dpdist.privacy.guarantee import Guarantee, Neighbours
from dpdist.privacy.phases import Phase
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.selection import SelectionLaw


def repeated(
    phases: Sequence[Phase], law: SelectionLaw | None, runs: int | None
) -> tuple[Phase, ...]:
    """Return the phases of a search over trials that each execute the given ones.

    Args:
        phases: of one trial.
        law: of a secret number of trials; None where the number is public.
        runs: the public number of trials, of which all may be shown.
    """
    if law is not None:
        return (RepeatAndSelect(tuple(phases), law.mean, law.shape),)
    if runs is None:
        raise ValueError("a search has a law of its number of trials, or the number")
    return tuple(again for phase in phases for again in phase.times(runs))


def training_and_search(
    training: Sequence[Phase],
    scoring: Sequence[Phase],
    law: SelectionLaw | None,
    runs: int | None,
) -> tuple[Phase, ...]:
    """Return the phases of training and search together.

    Args:
        training: phases that cover the training of every trial.
        scoring: of a trial's scores on records that no trial trains on; empty for public records.
        law: of a secret number of trials; None where the number is public.
        runs: the public number of trials.
    """
    if not scoring:
        return repeated(training, law, runs)
    if law is None:
        parts = (repeated(training, law, runs), repeated(scoring, law, runs))
        return (ParallelParts(parts),)
    return repeated((ParallelParts((tuple(training), tuple(scoring))),), law, runs)


def search_guarantee(
    phases: Sequence[Phase],
    law: SelectionLaw,
    *,
    records: int,
    delta: float,
    neighbours: Neighbours = "add-or-remove-one",
) -> Guarantee:
    """What a search with a secret K costs: the smaller of two bounds, from the loss distribution of
    one run (`dpdist.privacy.best_of`) and by Renyi DP (Papernot and Steinke 2022, Theorems 2 and
    6); its source says which.

    Raises dpdist.privacy.accounting.Unsupported when a run has neither.
    """
    search = RepeatAndSelect(tuple(phases), law.mean, law.shape)
    return PrivacyPlan(records, (search,), delta, neighbours=neighbours).guarantee()


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
