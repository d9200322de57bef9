"""What is told about the private search that chose a run: its terms, never its trials."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpdist.base.errors import UserError
from dpdist.base.reading import read_json
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import Phase
from dpdist.privacy.plan import PrivacyPlan, plan_of
from dpdist.privacy.releases import GaussianSteps
from dpdist.privacy.searches import training_and_search
from dpdist.runs.folder import RunFolder
from dpdist.sections.search import TuneRecipe

_TERMS = {"plan": dict, "charge": str, "assumed": list}  # what else it says is made again


@dataclass(frozen=True)
class SearchTerms:
    """plan: of training and search together. fields: what was searched. law: of the number of
    trials. one_training: epsilon of one training with the same noise. charge: id in the budget.
    assumed: of the public parts that trials may have begun with."""

    plan: PrivacyPlan
    law: str
    fields: tuple[str, ...]
    objective: str
    scored_on: str
    one_training: float
    charge: str
    assumed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{', '.join(self.fields)} by {self.objective} on {self.scored_on}; number of trials: "
            f"{self.law}; epsilon covers training and search (one such training alone: "
            f"{format_epsilon(self.one_training)})"
        )


def read_search(folder: RunFolder) -> SearchTerms | None:
    """The terms of the search that chose this run; None for a run that nothing chose.

    They are made again from what was asked for and from what a trial may cost. Raises UserError for
    one of its trials, and when they are lost: the ledger alone would prove too small an epsilon,
    that of one trial.
    """
    if (whole := folder.holder) is not None:
        raise UserError(
            f"{folder.path}: is part of run {whole.name}, and nothing is stated or released of it "
            f"alone: it is paid for together with all else that was tried; name {whole.path}"
        )
    if not folder.search.exists():
        if folder.asked.exists():
            raise UserError(
                f"{folder.search}: missing: a search chose this run, and epsilon cannot be stated "
                "without what the search cost; bring it back"
            )
        return None
    record, fixed = read_json(folder.search, _TERMS), folder.read_search_terms()
    tune = folder.read_asked().tune
    if tune is None:
        raise UserError(f"{folder.asked}: tune: must be the section of the search, got none")
    trial = plan_of(fixed["trial"], f"{folder.search_terms}: trial")
    plan = _plan_of_search(trial, tune, fixed["score_noise"], folder)
    stated = plan_of(record["plan"], f"{folder.search}: plan")
    wrong = [name for name in ("charge", "assumed") if record[name] != fixed[name]]
    if not stated == plan_of(fixed["plan"], f"{folder.search_terms}: plan") == plan:
        wrong.append("plan")
    if wrong:
        raise UserError(
            f"{folder.search}: {' and '.join(wrong)}: must be what the search was fixed to before "
            f"its first trial, by {folder.asked} and {folder.search_terms}; put back the files "
            "that the search wrote"
        )
    return SearchTerms(
        plan=plan,
        law=tune.law.in_full,
        fields=tune.searched,
        objective=tune.score.describe(),
        scored_on=tune.score.scored_on,
        one_training=trial.guarantee().epsilon,
        charge=record["charge"],
        assumed=tuple(map(str, record["assumed"])),
    )


def _plan_of_search(
    trial: PrivacyPlan, tune: TuneRecipe, score_noise: float | None, folder: RunFolder
) -> PrivacyPlan:
    """Return the plan of training and search together.

    Args:
        trial: what one trial may cost.
        tune: what was asked for.
        score_noise: of the scores on held-out records; None where they are public.
        folder: for messages.

    Raises:
        UserError: the noise is not what was asked for, or is no noise.
    """
    asked, public = tune.score.noise, tune.score.public is not None
    fits = score_noise is None if public else score_noise is not None and score_noise >= 0
    if not fits or (asked is not None and score_noise != asked):
        raise UserError(
            f"{folder.search_terms}: score_noise: must be the noise of the scores that "
            f"{folder.asked} asks for, got {score_noise}"
        )
    scoring = tune.scoring_phases(score_noise)
    phases = training_and_search(trial.phases, scoring, tune.law.secret, tune.law.runs)
    return replace(trial, phases=phases)


def described(
    search: SearchTerms | None, folder: RunFolder, whole: Guarantee
) -> list[tuple[str, str]]:
    """Name and value of what was searched and what it cost; nothing where nothing was.

    whole: of training and search together.
    """
    if search is None:
        return []
    tune = folder.read_asked().tune
    space = {} if tune is None else tune.space
    rows = [
        (field, space[field].in_words if field in space else "searched") for field in search.fields
    ]
    alone = format_epsilon(search.one_training)
    return [
        *rows,
        ("judged by", f"{search.objective} on {search.scored_on}"),
        ("number of trials", search.law),
        ("cost", f"epsilon {format_epsilon(whole.epsilon)} in all; one such training, nothing "
         f"searched: {alone}"),
    ]  # fmt: skip


def released(search: SearchTerms, plan: PrivacyPlan, ledger: Ledger) -> PrivacyPlan:
    """The search's plan with the superseded releases of the winner's ledger.

    plan: of the winner's training, which the search covers once.
    """
    others: list[Phase] = []
    for step, releases in ledger.releases.items():
        if releases > 1:
            todo = plan.step(step)
            others.append(
                GaussianSteps(releases - 1, todo.noise_multiplier, todo.sample_rate, todo.batch_cap)
            )
    return replace(search.plan, phases=(*search.plan.phases, *others), clip_norm=plan.clip_norm)
