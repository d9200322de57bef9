"""Read the figures of a run folder that the summary, the report and the release show.

Of a private search that chose the run, the terms are shown, never its trials.
"""

from __future__ import annotations

import dataclasses
import html
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpdist.attacks.settings import AttackSettings, CheckSettings
from dpdist.attacks.table import AttackTable, numbers_of
from dpdist.audits import registry
from dpdist.audits.target import AuditResult
from dpdist.certification import statistics, table_reader
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.evaluation import Evaluation, refuse_decisions
from dpdist.config.search import TuneRecipe
from dpdist.core.console import exact, percent
from dpdist.core.errors import UserError
from dpdist.core.fields import INDEPENDENCE, MEASURES, SCREENED, weakest
from dpdist.core.files import check_shape, read_json
from dpdist.core.version import __version__
from dpdist.privacy.budget import budgets_in, run_id
from dpdist.privacy.calibration import training_and_search
from dpdist.privacy.card import Audited, card
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import POST_PROCESSED, Guarantee, format_delta, format_epsilon
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import NOT_TRAINED_HERE, UNKNOWN_DATA, GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan, group_guarantee, plan_of
from dpdist.randomness.keys import key_id
from dpdist.runs.folder import BEGUN_WITH, SEARCHED_BY, RunFolder, open_run, read_released
from dpdist.runs.recipe import Recipe

# --- terms of a private search ----------------------------------------------------------------


_TERMS = {"plan": dict, "charge": str, "assumed": list}  # what else it says is made again


@dataclass(frozen=True)
class SearchTerms:
    """The terms of a private search.

    plan: of training and search together. fields: the searched fields. law: of the number of
    trials. one_training: epsilon of one training with the same noise. charge: id in the budget.
    assumed: of the public parts that trials may have begun with.
    """

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
    """Return the terms of the search that chose this run; None for a run that no search chose.

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
    """Return name and value of the searched fields and the search's cost; nothing without a search.

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
    """Return the search's plan with the superseded releases of the winner's ledger.

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


# --- figures of a run -------------------------------------------------------------------------


_EVALUATION = {"accuracy": float, "inputs": int, "correct": int, "data": str, "fingerprint": str}
_MEASURED = {"measures": dict, "inputs": int, "data": str, "fingerprint": str}
MOST_INPUTS = 10**9  # of an evaluation: a damaged file must not ask for all memory
_TABLES = "*/certificates.parquet"


@dataclass(frozen=True)
class Facts:
    """The facts of a run: guarantee, accuracies, certificates, attacks and audits.

    Each is read from a named file of the run folder by `dpdist.read_facts`; printed, they are the
    run's summary.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> facts = dpdist.read_facts("small")
        >>> [table.name for table in facts.tables]
        ['sigma-0.25-fixed-n-100']
        >>> str(facts).splitlines()[0]
        'run small'
    """

    folder: RunFolder
    recipe: Recipe
    plan: PrivacyPlan
    guarantee: Guarantee
    ledger: Ledger
    search: SearchTerms | None
    group: Guarantee | None
    data_set: Guarantee | None
    trained: dict[str, Any]
    evaluation: dict[str, Any] | None
    tables: list[CertificateTable]
    evaluations: dict[type[Evaluation], list[Any]]  # but for private ones: reports are published

    @property
    def attacks(self) -> list[AttackTable]:
        """Return the tables of attacks on the model."""
        return self.evaluations[AttackSettings]

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Return the verdicts of attacks on certificates."""
        return self.evaluations[CheckSettings]

    @property
    def audits(self) -> list[Audited]:
        """Return the results of privacy audits."""
        return self.evaluations[AuditResult]

    @property
    def audited_run(self) -> str | None:
        """Return a note that the run has an audit's canaries and is not for release, or None."""
        planted = self.recipe.planted
        return None if planted is None else planted.words(self.plan.records)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the input shape of the model."""
        path = self.folder.model / "model.json"
        shape = read_json(path, {"input_shape": list})["input_shape"]
        numbers_of(shape, path)
        return tuple(shape)

    @property
    def fixed_key(self) -> bool:
        """Return whether the run key is fixed in the recipe, which is for tests only."""
        return self.recipe.privacy.run_key is not None or self.folder.fixed_key.exists()

    @property
    def privacy_line(self) -> str:
        """Return the guarantee in one line, or why the run is not private."""
        if self.fixed_key:
            return "NOT PRIVATE: fixed run key (for tests only)"
        guarantee = self.guarantee
        if self.plan.trained_elsewhere:
            return NOT_TRAINED_HERE
        if math.isinf(guarantee.epsilon):
            return f"NOT PRIVATE: epsilon is infinite, nothing is proved ({self.why_not})"
        return (
            f"epsilon = {format_epsilon(guarantee.epsilon)} at delta = "
            f"{format_delta(guarantee.delta)}, {guarantee.relation} ({guarantee.kind}, "
            f"{guarantee.source})"
        )

    @property
    def times_hidden(self) -> bool:
        """Return whether the run's duration must stay hidden.

        A search's trials keep it secret; it may also tell the number of records. Of a model from
        elsewhere nobody knows it.
        """
        return self.search is not None or self.plan.nominal or self.plan.trained_elsewhere

    @property
    def budget_lost(self) -> str | None:
        """Return why nothing can be said of all runs on the data set, or None."""
        if self.recipe.privacy.budget is None or self.data_set is not None:
            return None
        return "epsilon unknown, the budget that the recipe names is gone or has lost this run"

    @property
    def why_not(self) -> str:
        """Return why nothing is proved; empty where a guarantee is."""
        reasons = self.plan.unproved
        if self.plan.steps and self.plan.step(0).noise_multiplier == 0:
            reasons.append(f"method {self.recipe.method.name}, trained without gradient privacy")
        return "; ".join(reasons) or "too little noise"

    @property
    def claim(self) -> Claim | None:
        """Return the privacy claim of the method's paper about this run, or None."""
        return self.recipe.method.claim(self.plan, self.guarantee)

    @property
    def measured(self) -> list[tuple[str, str]]:
        """Return name and value of the method's measurements of its own assumptions."""
        return self.recipe.method.measured(self.folder.private)

    @property
    def parts(self) -> dict[str, str]:
        """Return the data that each pretrained part saw; empty when all of it began at random."""
        if not self.folder.pretrained.exists():
            return {}
        about = read_json(self.folder.pretrained, {"part": str, "saw": str})
        frozen = about["part"]
        if frozen == "initial":
            check_shape(about, str(self.folder.pretrained), {"denoiser": bool})
            began = {"initial weights trained on": about["saw"]}
            came = {"frozen denoiser": "came with the initial weights"}
            return began | came if about["denoiser"] else began
        trained = "denoiser" if frozen == "classifier" else "classifier"
        saw = {
            f"{trained} trained on": f"the private records of {self.recipe.data.name}, in this run",
            f"frozen {frozen} trained on": about["saw"],
        }
        return saw | ({"put together": about["joined"]} if "joined" in about else {})

    @property
    def independence(self) -> str:
        """Return how sure it is that the model treats each record alone, in all starts of the run.

        Empty where no noisy step rests on it.
        """
        if not (self.plan.steps and self.plan.step(0).noise_multiplier):
            return ""
        return weakest([self.trained.get("independence", SCREENED)])

    @property
    def _frozen(self) -> dict[str, str]:
        count = self.trained.get("frozen_parameters", 0)
        return {"frozen": f"{count:,} parameters, public: no step changes them"} if count else {}

    @property
    def assumed(self) -> list[str]:
        """Return the assumptions of the guarantee that nobody could check."""
        about = read_json(self.folder.pretrained) if self.folder.pretrained.exists() else {}
        lines = [about["assumed"]] if about.get("assumed") else []
        lines += [line for line in self.search.assumed if line not in lines] if self.search else []
        lines += self.recipe.data.assumed + self.recipe.method.assumed(self.recipe)
        if self.independence == SCREENED:
            lines.append("the model treats each record alone")
        if self.recipe.by_script is not None:
            lines += self.recipe.by_script.assumed
        lines += self.post_processed
        if ":" in self.recipe.method.name:  # a class from elsewhere
            lines.append(f"method {self.recipe.method.name} costs what its class says")
        return lines

    @property
    def post_processed(self) -> list[str]:
        """Return a line of a script's changes between steps, whose origin nobody checked."""
        changes = " and ".join(self.ledger.changes)
        said = f"between two steps the script changed {changes} by released values alone"
        return [f"{POST_PROCESSED}: {said}"] if changes else []

    @property
    def _own_code(self) -> list[str]:
        """Notes on code of the user's that made the model."""
        notes = []
        if ":" in self.recipe.model.name:
            notes.append(f"Custom model: {self.recipe.model.name}, no architecture of dpdist's.")
        if (own := self.recipe.by_script) is not None:
            notes.append(
                f"Trained in a loop of its own, code of the user: {own.model}, {own.optimizer}, "
                f"loss {own.loss}. No command repeats the training."
            )
            notes += [f"Replaced: {line}." for line in own.replaced]
        elif self.recipe.training.own_loss:
            notes.append(f"Custom loss: {self.recipe.training.loss}, no loss of dpdist's.")
        return notes

    def card(self) -> dict[str, Any]:
        """Return the privacy card, as JSON types."""
        plan = self.plan
        notes = ["Hyper-parameters chosen by looking at private results are not counted."]
        searched = {}
        if self.search is not None:
            plan = released(self.search, plan, self.ledger)
            notes = ["The search over the fields named is counted; any other choice is not."]
            searched = {"searched": str(self.search)}
        if self.budget_lost:
            notes.append(f"All runs on this data set: {self.budget_lost}.")
        if self.plan.trained_elsewhere:
            notes = [f"Model: {self.recipe.method.words(plan)}."]
        elif math.isinf(self.guarantee.epsilon):
            notes.append(f"Nothing is proved about training records: {self.why_not}.")
        if how := self.independence:
            notes.append(f"Record independence of the model: {how} ({INDEPENDENCE[how]}).")
        notes += self._own_code
        if self.claim is not None:
            notes.append(f"Claimed by the paper, not the guarantee: {self.claim.line}.")
        notes += [f"{name[0].upper()}{name[1:]}: {value}." for name, value in self.measured]
        if self.audited_run is not None:
            notes.append(f"Audited run: {self.audited_run}.")
        notes += [f"Audited ({audited.kind}): {audited.line}." for audited in self.audits]
        return card(
            plan,
            self.ledger if self.search is None else None,
            private=not self.fixed_key and math.isfinite(self.guarantee.epsilon),
            unit=self.recipe.data.unit,
            group_size=self.recipe.privacy.group_size,
            data_set=self.data_set,
            assumptions=self.assumed,
            notes=notes,
            extra={
                "training data": (
                    UNKNOWN_DATA if self.plan.trained_elsewhere else self.recipe.data.name
                ),
                "model": self.recipe.model.title,
                **({"model hash": self.trained["model"]} if "model" in self.trained else {}),
                "method": self.recipe.method.name,
                **self.parts,
                **self._frozen,
                "dpdist": __version__,
                **searched,
            },
            kind=self.guarantee.kind,
        )

    @property
    def accuracy(self) -> float | None:
        """Return the share of test inputs answered rightly.

        None where that was not measured, or where records have no class (`measures`).
        """
        return (self.evaluation or {}).get("accuracy")

    @property
    def measures(self) -> dict[str, str]:
        """Return the measures for targets that are no classes, by name, in words."""
        measured, kind = (self.evaluation or {}).get("measures", {}), self.recipe.data.targets
        found = {name: measured[name] for name in MEASURES.get(kind, ()) if name in measured}
        shares = kind == "labels"
        return {
            name: "not finite" if value is None
            else f"{percent(value)} %" if shares else f"{value:.4g}"
            for name, value in found.items()
        }  # fmt: skip

    @property
    def next_tokens(self) -> int | None:
        """Return the number of next tokens that the evaluation asked for; None for labels."""
        return (self.evaluation or {}).get("next_tokens")

    @property
    def asked(self) -> str:
        """Return the subject of the evaluation; the bracket is left open."""
        about = self.evaluation or {}
        inputs = f"{about['inputs']:,} ({about['data']}"
        return (
            inputs if self.next_tokens is None else f"{self.next_tokens:,} next tokens of {inputs}"
        )

    def summary(self) -> list[tuple[str, str]]:
        """Return name and value of each line that a run prints at its end."""
        rows = [("privacy", self.privacy_line)]
        if self.claim is not None:
            rows.append(("claimed, not proved", self.claim.line))
        rows += self.measured
        if self.search is not None:
            rows.append(("private search", str(self.search)))
            chosen = self.recipe.model_dump(mode="json")
            found = [f"{field} {_shown(chosen, field)}" for field in self.search.fields]
            rows.append(("chosen", ", ".join(found)))
        for title, other in (("privacy of a group", self.group), ("data set", self.data_set)):
            if other is not None:
                rows.append((title, f"epsilon = {format_epsilon(other.epsilon)} ({other.source})"))
        if self.budget_lost:
            rows.append(("data set", self.budget_lost))
        took = "" if self.times_hidden else f", {self.trained['seconds']:.0f} s"
        if self.audited_run is not None:
            rows.append(("audited run", self.audited_run))
        rows.append(("training", self.recipe.method.words(self.plan) + took))
        rows += self.parts.items()
        if self.trained["fallback_layers"]:
            rows.append(("layers without a rule", ", ".join(self.trained["fallback_layers"])))
        if self.evaluation is not None:
            draws = self.evaluation.get("noise_draws")
            how = f", mean scores of {draws} draws of its noise" if draws else ""
            if self.accuracy is not None:
                said = f"{percent(self.accuracy)} % of {self.asked}{how})"
                rows.append(("clean accuracy", said))
            rows += [(name, f"{said} on {self.asked})") for name, said in self.measures.items()]
            if self.next_tokens is not None:
                rows.append(("perplexity", f"{self.evaluation['perplexity']:.2f} of {self.asked})"))
        for table in self.tables:
            rows += [_certified_row(table), statistics.line(table)]
        for kind, found in self.evaluations.items():
            rows += kind.lines(found)
        if self.folder.report.exists():
            rows.append(("report", str(self.folder.report)))
        return rows

    def __repr__(self) -> str:
        """Return the summary alone.

        A notebook is handed around, and the files of a run hold more, such as the duration
        of a training, which may be secret.
        """
        rows = "".join(f"\n  {name}: {value}" for name, value in self.summary())
        return f"run {self.folder.name}{rows}"

    def _repr_html_(self) -> str:
        """Return the summary as a table, for a notebook."""
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self.summary()
        )
        return f"<table><caption>run {html.escape(self.folder.name)}</caption>{rows}</table>"


def _certified_row(table: CertificateTable) -> tuple[str, str]:
    at = ", ".join(
        f"{percent(table.certified_accuracy(radius))} % at {exact(radius)}"
        for radius in table.shown_radii
    )
    about = f"{table.norm}, {len(table.index):,} inputs, alpha {table.alpha:g} each"
    return f"certified, {table.title}", f"{at} ({about})"


def read_facts(folder: RunFolder | str | Path) -> Facts:
    """Read what a finished run proves, measured and certified.

    Args:
        folder: the run's folder, or its name under runs/.

    Returns:
        Its facts, each from a named file of the folder.

    Raises:
        UserError: there is no such run, its training has not finished, or a file was changed.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> facts = dpdist.read_facts("small")
        >>> facts.plan.steps, facts.guarantee.kind
        (5, 'proved')
    """
    if not isinstance(folder, RunFolder):
        folder = open_run(str(folder), Path("runs"))
    trained, search = folder.require_trained(), read_search(folder)
    recipe = folder.read_recipe()
    if search is None:  # a search keeps its durations secret
        check_shape(trained, str(folder.trained), {"seconds": float})
    if recipe.method.withheld is None:
        check_shape(trained, str(folder.trained), {"model": str})
    by_run = read_released(folder)
    plan, ledger = by_run.plan, by_run.ledger
    _check_trained_by(folder, ledger)
    evaluation = None
    if folder.evaluation.exists():
        evaluation = _read_evaluation(folder.evaluation, recipe.data.targets)
    whole = dataclasses.replace(plan, phases=ledger.phases(plan))
    if search is not None:
        whole = released(search, plan, ledger)
    refuse_decisions(folder)
    tables = [table_reader.read(path) for path in sorted(folder.certificates.glob(_TABLES))]
    public = [kind for kind in registry.EVALUATIONS if not kind.private]
    evaluations = {kind: kind.results(folder) for kind in public}
    found = [each for some in evaluations.values() for each in some if hasattr(each, "model")]
    if evaluation is not None:
        _check_models(trained, [(folder.evaluation, evaluation.get("model"))])
    _check_models(trained, [(t.path, t.about.get("model")) for t in tables])
    _check_models(trained, [(each.path, each.model) for each in found])
    guarantee = ledger.guarantee(plan) if search is None else whole.guarantee()
    checks = evaluations[CheckSettings]
    _check_models(trained, [(each["path"], each["model"]) for each in checks])
    return Facts(
        folder=folder,
        recipe=recipe,
        plan=plan,
        guarantee=guarantee,
        ledger=ledger,
        search=search,
        group=_group_guarantee(recipe, whole),
        data_set=_data_set_guarantee(recipe, plan, folder, search),
        trained=trained,
        evaluation=evaluation,
        tables=tables,
        evaluations=evaluations,
    )


def _check_trained_by(folder: RunFolder, ledger: Ledger) -> None:
    """Raise UserError where the recipe or search was exchanged since the model was trained."""
    last = ledger.attempts[-1]["identity"] if ledger.attempts else {}
    folder.check_trained_by(last.get(BEGUN_WITH))
    folder.check_searched_by(last.get(SEARCHED_BY))


def _read_evaluation(path: Path, targets: str) -> dict[str, Any]:
    if targets != "class":
        return _read_measures(path, targets)
    found = read_json(path, _EVALUATION)
    pairs = found.get("by_class", [])
    sound = 1 <= found["inputs"] <= MOST_INPUTS and 0 <= found["accuracy"] <= 1
    if "next_tokens" in found:
        check_shape(found, str(path), {"next_tokens": int, "perplexity": float})
    asked = max(1, found.get("next_tokens", found["inputs"]))
    sound &= found["accuracy"] == found["correct"] / asked
    if not sound or not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise UserError(f"{path}: damaged: its accuracy is not that of its inputs and classes")
    return found


def _read_measures(path: Path, targets: str) -> dict[str, Any]:
    found = read_json(path, _MEASURED)
    values = found["measures"]
    sound = sorted(values) == sorted(MEASURES[targets]) and 1 <= found["inputs"] <= MOST_INPUTS
    most = 1.0 if targets == "labels" else math.inf
    for value in values.values() if sound else ():
        sound &= value is None or (isinstance(value, float | int) and 0 <= value <= most)
    if not sound:
        raise UserError(f"{path}: damaged: its measures are not those of data.targets: {targets}")
    return found


def _is_pair(value: Any) -> bool:
    """Return whether the value is a number of inputs and the number of right answers."""
    whole = isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)
    return whole and 0 <= value[1] <= value[0] <= MOST_INPUTS


def _check_models(trained: dict[str, Any], found: list[tuple[Path, str | None]]) -> None:
    """Raise UserError for results of another model than the run's; None where it never leaves."""
    own = trained.get("model")
    for path, model in found:
        if model != own:
            alone = (path.parent / "run.json").exists()
            raise UserError(
                f"{path}: of another model than this run's (it comes from another run, or the run "
                f"was trained anew); remove {path if alone else path.parent}"
            )


def _shown(recipe: dict[str, Any], field: str) -> str:
    """Return a field's value in few digits."""
    value: Any = recipe
    for part in field.split("."):
        value = value[part]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _group_guarantee(recipe: Recipe, whole: PrivacyPlan) -> Guarantee | None:
    size = recipe.privacy.group_size
    if size == 1:
        return None
    return group_guarantee(whole, size)


def _data_set_guarantee(
    recipe: Recipe, plan: PrivacyPlan, folder: RunFolder, search: SearchTerms | None
) -> Guarantee | None:
    """Return the guarantee of all recorded runs on the data set, this one included, or None."""
    if recipe.privacy.budget is None:
        return None
    run = run_id(key_id(folder.read_key()), plan)
    if search is not None:
        run = search.charge
    try:
        totals = [
            budget.guarantee(plan.delta, plan.neighbours)
            for budget in budgets_in(recipe.privacy.budget)
            if any(charge.run == run for charge in budget.charges)
        ]
    except ValueError as error:  # no theorem covers all that is on it
        raise UserError(f"{recipe.privacy.budget}: {error}") from error
    return max(totals, key=lambda total: total.epsilon, default=None)
