"""Compute the privacy cost of a run: its releases, the search that chose it, all runs on its data.

A run is accounted from its ledger: the plan's phases with their actual counts, including restarts.
If a private search chose the run, its terms are rebuilt from the search recipe and the plan of a
trial; its trials are read only if their number is fixed, since epsilon then covers all of them.
Readers of results (`dpdist.reports`) take every number from here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from dpdist.config.search import TuneRecipe
from dpdist.core.errors import UserError
from dpdist.core.fields import FileShape, Keys, Number
from dpdist.core.files import read_json
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import Phase
from dpdist.privacy.plan import PrivacyPlan, parse_plan
from dpdist.runs.charging import run_charge_id
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe

# --- the terms of a private search ------------------------------------------------------------


# other keys are rebuilt from the search recipe
_SEARCH_RECORD_SHAPE = {"plan": dict, "charge": str, "assumed": list}


class PublishedTrial(FileShape):
    """A trial of a search whose number of trials is fixed: one entry of trials.json.

    Attributes:
        values: Values of the searched fields, by dotted key.
        noise_multiplier: Noise multiplier of the trial's training.
        scores: Scores at its rungs. Scores on private records are noisy counts, divided by a public
            number of held-out records.
        failed: Why the trial does not count; null if it does.
        chosen: Whether the search chose this trial.
    """

    values: Keys
    noise_multiplier: Number
    scores: list[Number]
    failed: str | None
    chosen: bool


@dataclass(frozen=True)
class SearchTerms:
    """The terms of a private search.

    plan: that of training and search together. fields: the searched fields. num_trials: the
    distribution of the number of trials. one_training_epsilon: epsilon of one training with the
    same noise. charge_id: id in the budget. assumptions: about public parts that trials started
    from, and about a function that built them. trials: all of them if their number is fixed, else
    empty. chosen: the winner's values in a search over a function, which no recipe has.
    """

    plan: PrivacyPlan
    num_trials: str
    fields: tuple[str, ...]
    objective: str
    scored_on: str
    one_training_epsilon: float
    charge_id: str
    assumptions: tuple[str, ...] = ()
    trials: tuple[PublishedTrial, ...] = ()
    chosen: dict[str, Any] | None = None

    def values_of(self, winner: Recipe) -> dict[str, Any]:
        """Return the winner's values of the searched fields, from its recipe or `chosen`."""
        if self.chosen is not None:
            return {field: self.chosen.get(field) for field in self.fields}
        recipe = winner.model_dump(mode="json")
        return {field: reduce(operator.getitem, field.split("."), recipe) for field in self.fields}

    def __str__(self) -> str:
        return (
            f"{', '.join(self.fields)} by {self.objective} on {self.scored_on}; number of trials: "
            f"{self.num_trials}; epsilon covers training and search (one such training alone: "
            f"{format_epsilon(self.one_training_epsilon)})"
        )


def read_search(folder: RunFolder) -> SearchTerms | None:
    """Return the terms of the search that chose this run; None if no search chose it.

    Raises UserError for a trial of a search, and if the terms are lost: from the ledger only, a too
    small epsilon would be stated, that of one trial.
    """
    if (whole := folder.parent_run) is not None:
        raise UserError(
            f"{folder.path}: is a trial of run {whole.name}; its epsilon cannot be stated, since "
            f"it covers the whole search: use {whole.path}",
            see="explanation/tuning.md#which-rules-make-it-true",
        )
    if not folder.search_record.exists():
        if folder.search_recipe_file.exists():
            raise UserError(
                f"{folder.search_record}: is missing: a search chose this run, and epsilon must "
                "cover the search; restore the file"
            )
        return None
    record = read_json(folder.search_record, _SEARCH_RECORD_SHAPE)
    fixed = folder.read_search_terms()
    tune = folder.read_search_recipe().tune
    if tune is None:
        raise UserError(f"{folder.search_recipe_file}: tune: must be given")
    trial = parse_plan(fixed["trial"], f"{folder.search_terms}: trial")
    plan = parse_plan(record["plan"], f"{folder.search_record}: plan")
    return SearchTerms(
        plan=plan,
        num_trials=tune.num_trials.full_description,
        fields=tune.searched_fields,
        objective=tune.score.describe(),
        scored_on=tune.score.describe_records(plan.counted),
        one_training_epsilon=trial.guarantee().epsilon,
        charge_id=record["charge"],
        assumptions=tuple(map(str, record["assumed"])),
        trials=()
        if tune.num_trials.name != "fixed"
        else _parse_trials(record.get("trials"), tune, folder.search_record),
        chosen=record.get("chosen"),
    )


def _parse_trials(rows: Any, tune: TuneRecipe, path: Path) -> tuple[PublishedTrial, ...]:
    """Return the trials in a file. Raises UserError."""
    if not isinstance(rows, list) or len(rows) != tune.num_trials.runs:
        raise UserError(
            f"{path}: trials: must be the {tune.num_trials.runs:,} trials of the search; restore "
            "the file that the search wrote"
        )
    return tuple(
        PublishedTrial.parse(row if isinstance(row, dict) else {}, f"{path}: trial {number}")
        for number, row in enumerate(rows)
    )


# --- the account of a run ---------------------------------------------------------------------


@dataclass(frozen=True)
class RunAccount:
    """The plan, the releases and the guarantee of a run.

    plan: the executed plan. ledger: its releases. search: terms of the search that chose the run.
    guarantee: that of everything that counts. whole: the plan that the privacy card states.
    card_ledger: the releases of `whole`; None if all of it counts. data_set: the guarantee of all
    runs on the data set; None without a budget, or if the budget has lost this run.
    """

    plan: PrivacyPlan
    ledger: Ledger
    search: SearchTerms | None
    guarantee: Guarantee
    whole: PrivacyPlan
    card_ledger: Ledger | None
    data_set: Guarantee | None


def read_account(folder: RunFolder, recipe: Recipe, finished: bool) -> RunAccount:
    """Return the privacy cost of a run; an unfinished run counts with its whole plan.

    Raises UserError if a file is damaged or lost.
    """
    search, by_run = read_search(folder), read_verified_ledger(folder)
    plan, ledger = by_run.plan, by_run.ledger
    whole, released = plan, ledger.released_phases(plan)
    if search is not None:
        others = list(ledger.superseded_phases(plan))
        others += _superseded_of_others(folder, ledger) if search.trials else []
        phases = (*search.plan.phases, *others)
        whole, released = replace(search.plan, phases=phases, clip_norm=plan.clip_norm), phases
    elif not finished:
        whole = replace(plan, phases=(*plan.phases, *ledger.superseded_phases(plan)))
    guarantee = recipe.guarantee_of(
        replace(whole, phases=released), released, ledger.post_processed
    )
    if folder.fixed_key_marker.exists():
        guarantee = replace(guarantee, fixed_key=True)
    return RunAccount(
        plan,
        ledger,
        search,
        guarantee,
        whole,
        ledger if finished and search is None else None,
        _data_set_guarantee(recipe, plan, folder, search),
    )


def _superseded_of_others(folder: RunFolder, winner: Ledger) -> list[Phase]:
    """Return the re-executed releases of all other trials, which count if their number is fixed."""
    found: list[Phase] = []
    trials = folder.private / "search" / "trials"
    for place in sorted(trials.iterdir()) if trials.exists() else ():
        trial = RunFolder(place)
        if trial.ledger.exists():
            by_run = read_verified_ledger(trial)
            if by_run.ledger.anchor != winner.anchor:  # the winner's is a copy
                found += by_run.ledger.superseded_phases(by_run.plan)
    return found


def _data_set_guarantee(
    recipe: Recipe, plan: PrivacyPlan, folder: RunFolder, search: SearchTerms | None
) -> Guarantee | None:
    """Return the guarantee of all recorded runs on the data set, including this one, or None."""
    if recipe.privacy.budget is None:
        return None
    run = run_charge_id(folder, plan) if search is None else search.charge_id
    try:
        totals = [
            budget.guarantee(plan.delta, plan.adjacency)
            for budget in read_budgets(recipe.privacy.budget)
            if any(charge.run == run for charge in budget.charges)
        ]
    except ValueError as error:  # no theorem covers all of its charges
        raise UserError(f"{recipe.privacy.budget}: {error}") from error
    return max(totals, key=lambda total: total.epsilon, default=None)
