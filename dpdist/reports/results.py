"""Read the results in a run folder that the summary, the report and the release show.

Epsilon is computed in `dpdist.runs.accounting`, not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist.attacks.settings import AttackSettings, CheckSettings
from dpdist.attacks.table import AttackTable
from dpdist.audits import registry
from dpdist.audits.target import AuditResult
from dpdist.certification import statistics, table_reader
from dpdist.certification.evaluation import Evaluation
from dpdist.certification.table import CertificateTable
from dpdist.config.training import Stage
from dpdist.core.console import Row, format_html_table, format_percent, format_table
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    DRAWS_BY_ROW,
    INDEPENDENCE,
    MEASURES,
    SCREENED,
    describe_input_fields,
    describe_rounding,
)
from dpdist.core.files import check_shape, read_json
from dpdist.core.result_rows import accuracy_rows
from dpdist.core.version import __version__
from dpdist.privacy.card import AuditFinding, build_card
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import (
    FIXED_KEY,
    ROWS_MADE_ALONE,
    Guarantee,
    format_delta,
    format_epsilon,
    left_out,
    privacy_row,
)
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import NOT_TRAINED_HERE, UNKNOWN_DATA
from dpdist.privacy.plan import PrivacyPlan
from dpdist.reports.summary import make_verdict
from dpdist.runs.accounting import RunAccount, SearchTerms, read_account
from dpdist.runs.folder import RunFolder, open_run
from dpdist.runs.recipe import Recipe

# --- terms of a private search ----------------------------------------------------------------


def trial_table(facts: RunResults) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a search's trials in order; both empty if their number is secret.

    The last column shows which trial was chosen, and why a trial does not count.
    """
    if facts.search is None or not facts.search.trials:
        return [], []
    fields, tune = facts.search.fields, facts.folder.read_search_recipe().tune
    space = {} if tune is None else tune.space
    linked = {field: key for key, domain in space.items() for field in domain.linked}
    header = ["trial", *fields, "noise multiplier", "score", "outcome"]
    rows = []
    for number, trial in enumerate(facts.search.trials):
        drawn = dict(trial.values)
        for field, key in linked.items():
            drawn[field] = space[key].value_of(field, drawn[key])
        values = [_format_value(drawn.get(field)) for field in fields]
        score = f"{trial.scores[-1]:.4g}" if trial.scores else "none"
        outcome = trial.failed or ("chosen" if trial.chosen else "")
        rows.append([str(number), *values, f"{trial.noise_multiplier:.4g}", score, outcome])
    return header, rows


def describe_search(
    search: SearchTerms | None, folder: RunFolder, guarantee: Guarantee
) -> list[tuple[str, str]]:
    """Return name and value of the searched fields and of the search's privacy cost.

    Empty without a search. guarantee: that of training and search together.
    """
    if search is None:
        return []
    tune = folder.read_search_recipe().tune
    space = {} if tune is None else tune.space
    total, one = format_epsilon(guarantee.epsilon), format_epsilon(search.one_training_epsilon)
    return [
        *((f, space[f].description if f in space else "searched") for f in search.fields),
        ("judged by", f"{search.objective} on {search.scored_on}"),
        ("number of trials", search.num_trials),
        ("cost", f"epsilon {total} in total; one such training without the search: {one}"),
    ]


# --- the results of a run ---------------------------------------------------------------------


_STATELESS = "the model and the loss are the user's code, and keep no state between passes"
_BEGAN_WITH = "initial weights trained on"
_TABLES = "*/certificates.parquet"


@dataclass(frozen=True)
class RunResults:
    """The results of a finished run: guarantee, accuracies, certificates, attacks and audits.

    `dpdist.load_results` reads them from the files of the run folder; `print` shows a summary.

    Attributes:
        folder: the `RunFolder`.
        recipe: the `Recipe` of the run.
        account: the privacy cost of the run, a `RunAccount`; `plan`, `guarantee`, `ledger`,
            `search` and `data_set_guarantee` read its parts.
        training_summary: private/trained.json, a dict with keys such as "steps", "seconds" and
            "model".
        evaluation: evaluation.json, a dict with keys such as "accuracy", "inputs" and "data"; None
            if nothing was evaluated.
        tables: list of one `CertificateTable` for each finished certification; empty without one.
        evaluations: dict from the kind of attack or audit to the list of its results.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> facts = dpdist.load_results("small")
        >>> [table.name for table in facts.tables]
        ['sigma-0.25-fixed-n-100']
        >>> str(facts).splitlines()[0]
        'Run small (runs/small)'
    """

    folder: RunFolder
    recipe: Recipe
    account: RunAccount
    training_summary: dict[str, Any]
    evaluation: dict[str, Any] | None
    tables: list[CertificateTable]
    evaluations: dict[type[Evaluation], list[Any]]  # without private ones: reports are published

    @property
    def plan(self) -> PrivacyPlan:
        """Return the `PrivacyPlan` that was executed, with `steps`, `records` and `delta`."""
        return self.account.plan

    @property
    def guarantee(self) -> Guarantee:
        """Return the `Guarantee` of the run, with `epsilon` and `delta`.

        If a private search chose the run, it covers training and search together.
        """
        return self.account.guarantee

    @property
    def ledger(self) -> Ledger:
        """Return the `Ledger` of the run: the record of everything that the run released.

        `released_phases(plan)` returns the plan's phases with the releases that were made, a tuple
        of `Phase`.
        """
        return self.account.ledger

    @property
    def search(self) -> SearchTerms | None:
        """Return the terms of the private search that chose the run; None without a search.

        Returns:
            A `SearchTerms`: `plan` (of training and search together), `num_trials` (its
            distribution, a str), `fields` (names of the searched settings, a tuple of str),
            `one_training_epsilon` (float, without the search) and `trials` (a tuple; empty if their
            number is secret).
        """
        return self.account.search

    @property
    def data_set_guarantee(self) -> Guarantee | None:
        """Return the `Guarantee` of all runs on the data set together; None without a budget.

        The budget is the file that the recipe names. Also None if that file is missing or does not
        contain this run: see `budget_problem`.
        """
        return self.account.data_set

    @property
    def attacks(self) -> list[AttackTable]:
        """Return the attacks on the model, a list of `AttackTable`; empty without attacks.

        A table has arrays with one entry for each attack, size and input: `attack` (its name;
        "none" for the unchanged input), `size` (distance in the norm `norm`, a str), `index`
        (position of the input), `label` (true class) and `prediction` (-1 if the classifier
        abstains).
        """
        return self.evaluations[AttackSettings]

    @property
    def certificate_checks(self) -> list[dict[str, Any]]:
        """Return the results of attacks on certificates, a list of dicts; or empty without any.

        Keys of a dict are "certificates" (name of the table), "certified" and "inputs" (numbers of
        inputs), "contradictions" (inputs whose certificate an attack contradicted), "plausible"
        (bool: whether so many can be chance), "path" (a `Path`) and others.
        """
        return self.evaluations[CheckSettings]

    @property
    def audits(self) -> list[AuditFinding]:
        """Return the privacy audits, a list of `AuditFinding`; empty without audits.

        An `AuditFinding` has `epsilon` (a lower bound measured on the trained mechanism), `delta`,
        `alpha` (probability that the bound is wrong) and `proved` (the epsilon that the run states
        at this delta), all float.
        """
        return self.evaluations[AuditResult]

    @property
    def canary_notice(self) -> str | None:
        """Return the sentence that this run must not be released, a str; None without canaries.

        Canaries are records that an audit plants in the training data.
        """
        audit = self.recipe.canary_audit
        return None if audit is None else audit.report_note(self.plan.records, self.plan.counted)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one input of the model, a tuple of int such as (1, 8, 8)."""
        path = self.folder.model_folder / "model.json"
        return tuple(read_json(path, {"input_shape": list})["input_shape"])

    @property
    def inputs(self) -> str:
        """Return a description of one input of the model, a str such as "1 x 8 x 8 numbers"."""
        spec = read_json(self.folder.model_folder / "model.json", {"input_shape": list})
        if fields := spec.get("signature", {}).get("fields"):
            return describe_input_fields(
                {name: (field["shape"], field["dtype"]) for name, field in fields.items()}
            )
        kind = "tokens" if self.recipe.data.text is not None else "numbers"
        return f"{' x '.join(map(str, spec['input_shape']))} {kind}"

    @property
    def has_fixed_key(self) -> bool:
        """Return whether the recipe fixed the run key, a bool; a fixed key is for tests only.

        Anyone who knows the key can subtract the noise.
        """
        return self.guarantee.fixed_key

    @property
    def privacy_statement(self) -> str:
        """Return the guarantee in one line, a str, or the reason why the run is not private."""
        if self.has_fixed_key:
            return FIXED_KEY
        guarantee = self.guarantee
        if self.plan.trained_elsewhere:
            return NOT_TRAINED_HERE
        if math.isinf(guarantee.epsilon):
            return f"NOT PRIVATE: epsilon is infinite ({self.unproved_reason})"
        return (
            f"epsilon = {format_epsilon(guarantee.epsilon)} at delta = "
            f"{format_delta(guarantee.delta)}, {guarantee.relation} ({guarantee.kind}, "
            f"{guarantee.source}){left_out(guarantee.assumptions)}"
        )

    @property
    def is_duration_secret(self) -> bool:
        """Return whether the training's duration must stay hidden, a bool.

        It is True for a run that a search chose, for a run whose number of records is secret, and
        for a model that was trained elsewhere.
        """
        return self.search is not None or self.plan.nominal or self.plan.trained_elsewhere

    @property
    def training_took(self) -> str:
        """Return the duration of training, a str such as "12 s" or "12 s since step 300".

        After a restart it counts from the first step of the restart, since the duration of earlier
        attempts is not kept.
        """
        since = self.training_summary.get("timed_from", 0)
        took = f"{self.training_summary['seconds']:.0f} s"
        return f"{took} since step {since:,}" if since else took

    @property
    def budget_problem(self) -> str | None:
        """Return why the cost of all runs on the data set is unknown, a str; None if it is known.

        Also None for a recipe without a budget, for which only the cost of this run is known.
        """
        if self.recipe.privacy.budget is None or self.data_set_guarantee is not None:
            return None
        return "epsilon unknown: the recipe's budget is missing or does not contain this run"

    @property
    def unproved_reason(self) -> str:
        """Return why epsilon is infinite, a str. It means nothing if epsilon is finite."""
        reasons = self.plan.unproved_reasons
        if self.plan.steps and self.plan.step(0).noise_multiplier == 0:
            reasons.append(f"method {self.recipe.method.name}, trained without gradient privacy")
        return "; ".join(reasons) or "too little noise"

    @property
    def claim(self) -> Claim | None:
        """Return what the method's paper claims about this run, a `Claim`; None without a claim.

        A `Claim` has `claimed` (a `Guarantee`; None if the paper has no formula), `proved` (a
        `Guarantee`), `verdict` ("sound", "sound if" or "not sound") and `reason` (str).
        """
        return self.recipe.method.claim(self.plan, self.guarantee)

    @property
    def reported_values(self) -> list[tuple[str, str]]:
        """Return what the method measured of its own assumptions, a list of pairs; often empty.

        A pair is (name, value), both str.
        """
        return self.recipe.method.reported_values(self.folder.private)

    @property
    def training_data_by_part(self) -> dict[str, str]:
        """Return the data that each pretrained part was trained on, a dict from part to data (str).

        A key is a phrase such as "frozen denoiser trained on". The dict is empty if the whole model
        was initialized at random.
        """
        if not self.folder.pretraining_record.exists():
            stated = "; ".join(each.stated for each in self.recipe.stages)  # by a script
            return {_BEGAN_WITH: f"private records, in run {stated}"} if stated else {}
        about = read_json(self.folder.pretraining_record, {"part": str, "pretraining_data": str})
        frozen = about["part"]
        if frozen == "features":
            return {"features by a network trained on": about["pretraining_data"]}
        if frozen == "initial":
            check_shape(about, str(self.folder.pretraining_record), {"denoiser": bool})
            parts = {_BEGAN_WITH: about["pretraining_data"]}
            return parts | (
                {"frozen denoiser": "came with the initial weights"} if about["denoiser"] else {}
            )
        trained = "denoiser" if frozen == "classifier" else "classifier"
        pretraining_data = {
            f"{trained} trained on": f"the private records of {self.recipe.data.name}, in this run",
            f"frozen {frozen} trained on": about["pretraining_data"],
        }
        return pretraining_data | ({"put together": about["joined"]} if "joined" in about else {})

    @property
    def record_independence(self) -> str:
        """Return how certain it is that the model treats each record independently, a str.

        It is "screened" (a few examples had the same gradient alone and among others, no proof),
        "known layers" (the model has only layer types that treat records alone, or is dpdist's
        own), "per-example" (each record ran alone), or "" if no noisy step depends on it. If the
        run was started several times, the least certain start counts.
        """
        if not (self.plan.steps and self.plan.step(0).noise_multiplier):
            return ""
        level: str = self.training_summary.get("independence", SCREENED)
        return level

    @property
    def assumptions(self) -> list[str]:
        """Return what the guarantee assumes and dpdist cannot check, a list of sentences (str)."""
        recipe, record = self.recipe, self.folder.pretraining_record
        lines = [] if self.plan.trained_elsewhere else [ROWS_MADE_ALONE]
        if record.exists() and (assumed := read_json(record).get("assumed")):
            lines.append(assumed)
        if self.search:
            lines += [line for line in self.search.assumptions if line not in lines]
        lines += recipe.data.unverified_assumptions + recipe.method.assumptions(recipe)
        if self.record_independence == SCREENED:
            lines.append("the model and the loss treat each record independently")
        if self.record_independence and "draws" in (self.training_summary.get("rounding") or {}):
            lines.append(DRAWS_BY_ROW)
        own_code = recipe.by_script or recipe.training.own_loss or ":" in recipe.model.name
        if own_code and not self.plan.trained_elsewhere:
            lines.append(_STATELESS)
        if recipe.by_script is not None:
            lines += recipe.by_script.assumed
        lines += self.ledger.post_processed
        known = [*lines, *self.plan.assumptions]
        lines += [line for line in recipe.stage_assumptions(self.plan) if line not in known]
        if ":" in recipe.method.name:  # a user's class
            lines.append(f"the class {recipe.method.name} states its privacy cost correctly")
        return lines

    def privacy_card(self) -> dict[str, Any]:
        """Return the privacy card, a dict of JSON values.

        Its keys are those of privacy_card.json of a release: "private" (bool), "guarantee" (a dict
        with "epsilon", "inf" if nothing is proved, and "delta"), "unit" (str), "assumptions" and
        "notes" (lists of sentences) and others.
        """
        plan, elsewhere = self.account.whole, self.plan.trained_elsewhere
        notes = ["Hyper-parameters chosen by looking at private results are not counted."]
        searched = {}
        if self.search is not None:
            notes = ["The search over the listed fields is counted, and no other choice."]
            searched = {"searched": str(self.search)}
        if self.budget_problem:
            notes.append(f"All runs on this data set: {self.budget_problem}.")
        if elsewhere:
            notes = [f"Model: {self.recipe.method.describe(plan)}."]
        elif math.isinf(self.guarantee.epsilon):
            notes.append(f"Nothing is proved about training records: {self.unproved_reason}.")
        notes += [*_step_notes(self), *_own_code(self)]
        if self.claim is not None:
            notes.append(f"Claimed by the paper, not guaranteed: {self.claim.summary_line}.")
        notes += [f"{name[0].upper()}{name[1:]}: {value}." for name, value in self.reported_values]
        if self.canary_notice is not None:
            notes.append(f"Audited run: {self.canary_notice}.")
        notes += [f"Audited ({audited.kind}): {audited.summary_line}." for audited in self.audits]
        summary = self.training_summary
        return build_card(
            plan,
            self.account.card_ledger,
            earlier=self.recipe.earlier_phases(plan),
            private=not self.has_fixed_key and math.isfinite(self.guarantee.epsilon),
            unit=self.recipe.privacy_unit,
            data_set=self.data_set_guarantee,
            assumptions=self.assumptions,
            notes=notes,
            extra={
                "training data": UNKNOWN_DATA if elsewhere else self.recipe.data.name,
                "model": self.recipe.model.display_name,
                **({"model hash": summary["model"]} if "model" in summary else {}),
                "method": self.recipe.method.name,
                **self.training_data_by_part,
                **_frozen_parameters(self),
                **_steps_taken(self),
                "dpdist": __version__,
                **searched,
            },
            kind=self.guarantee.kind,
        )

    @property
    def accuracy(self) -> float | None:
        """Return the fraction of correct answers on test data, a float in [0, 1], or None.

        An answer is the class of a test input, or the next token for a language model. None if
        nothing was measured, or if records have no class: see `measures`.
        """
        return (self.evaluation or {}).get("accuracy")

    @property
    def measures(self) -> dict[str, str]:
        """Return the test results for targets that are not classes, a dict from name to str.

        Names are "mean squared error" and "mean absolute error" for numbers, "labels right" and
        "records with all labels right" (in percent) for labels. The dict is empty for classes, or
        if nothing was measured.
        """
        measured, kind = (self.evaluation or {}).get("measures", {}), self.recipe.data.targets

        def text(value: float | None) -> str:
            if value is None:
                return "not finite"
            return f"{format_percent(value)} %" if kind == "labels" else f"{value:.4g}"

        return {name: text(measured[name]) for name in MEASURES.get(kind, ()) if name in measured}

    @property
    def next_token_count(self) -> int | None:
        """Return the number of next tokens that were evaluated, an int, or None.

        None if the model predicts no next tokens, or if nothing was evaluated.
        """
        return (self.evaluation or {}).get("next_tokens")

    @property
    def evaluation_scope(self) -> str:
        """Return the number and the source of the test inputs, a str like "360 (digits, test".

        The parenthesis is left open, so that callers can add to it.

        Raises:
            KeyError: nothing was evaluated.
        """
        about = self.evaluation or {}
        inputs, data = f"{about['inputs']:,}", f"({about['data']}"
        if self.next_token_count is None:
            return f"{inputs} {data}"
        return f"{self.next_token_count:,} next tokens of {inputs} documents {data}"

    def rows(self) -> list[Row]:
        """Return the results that commands and pages show, a list of `Row`, the verdict first.

        A `Row` has `name`, `value` and `beside` (how to read the value), all str, and `brief`
        (bool): whether `print` shows it. The verdict is brief if something is wrong or doubtful.
        """
        verdict = make_verdict(self)
        rows = [Row("verdict", verdict.sentence, brief=verdict.severity != "good")]
        rows += _privacy_rows(self)
        if self.canary_notice is not None:
            rows.append(Row("audited run", self.canary_notice, brief=True))
        rows += _accuracy_rows(self)
        several = len(self.tables) > 1
        for table in self.tables:
            rows += statistics.certified_rows(table, table.name if several else "")
        for kind, found in self.evaluations.items():
            rows += [Row(*pair, brief=True) for pair in kind.summary_rows(found)]
        if self.folder.report_file.exists():
            path = self.folder.path
            name = path.name if path.parent.name == "runs" else path
            details = f"details: dpdist report {name}"
            rows.append(Row("report", str(self.folder.report_file), details, brief=True))
        return rows + _detail_rows(self)

    def summary(self) -> list[tuple[str, str]]:
        """Return each row's name and text, a list of pairs of str in the order of `rows`.

        The text is the row's value and how to read it, in one line.
        """
        return [(row.name, row.text) for row in self.rows()]

    def __repr__(self) -> str:
        """Return all rows, and not the fields, which may contain secrets such as a duration."""
        return format_table(self.rows(), _caption(self))

    def __str__(self) -> str:
        """Return the brief rows, as a run prints them at its end."""
        return format_table([row for row in self.rows() if row.brief], _caption(self))

    def _repr_html_(self) -> str:
        """Return all rows as a table, for a notebook."""
        return format_html_table(self.rows(), _caption(self))


def _frozen_parameters(facts: RunResults) -> dict[str, str]:
    count = facts.training_summary.get("frozen_parameters", 0)
    return {"frozen": f"{count:,} parameters, not changed by this run"} if count else {}


def _steps_taken(facts: RunResults) -> dict[str, str]:
    taken = facts.training_summary.get("steps_taken")
    if taken is None or facts.is_duration_secret:
        return {}
    return {"stopped": f"after {taken:,} of {facts.plan.steps:,} steps; epsilon counts all of them"}


def _step_notes(facts: RunResults) -> list[str]:
    """Return notes on how a record's contribution to a step is bounded."""
    notes, resources = [], facts.recipe.resources
    if how := facts.record_independence:
        notes.append(f"Record independence of the model: {how} ({INDEPENDENCE[how]}).")
        if measured := facts.training_summary.get("rounding"):
            nominal = facts.recipe.privacy.nominal_records is not None
            change = measured["precision"], measured.get("moves")
            notes.append(
                describe_rounding(resources.rounding, resources.micro_batch, *change, nominal)
            )
    if facts.plan.relies_on_clipping and (rule := facts.recipe.privacy.clipping_description):
        notes.append(f"Clipping: {rule}.")
    return notes


def _score_rows(facts: RunResults) -> list[tuple[str, str]]:
    """Return a row about a script's scores on held-out private records, if it has any."""
    if (score := facts.recipe.score) is None:
        return []
    text = (
        f"every {score.every:,} steps, {score.value} on {score.records:,} held-out "
        f"{facts.plan.counted}, noise {score.noise:.4g} on their sum; epsilon covers them"
    )
    return [("private scores", text)]


def _own_code(facts: RunResults) -> list[str]:
    """Return notes on the user's code that trained the model."""
    notes = []
    if ":" in facts.recipe.model.name:
        notes.append(f"Custom model: {facts.recipe.model.name}, the user's code.")
    if (own := facts.recipe.by_script) is not None:
        notes.append(
            f"Trained in a custom loop, the user's code: {own.model}, {own.optimizer}, loss "
            f"{own.loss}. Commands cannot repeat the training."
        )
        notes += [f"Replaced: {line}." for line in own.replaced]
        if own.unused:
            notes.append(
                f"Not trained, since the loss does not depend on it: {', '.join(own.unused)}."
            )
        notes += [f"Private scores: {text}." for _, text in _score_rows(facts)]
    elif facts.recipe.training.own_loss:
        notes.append(f"Custom loss: {facts.recipe.training.loss}, the user's code.")
    return notes


def _privacy_rows(facts: RunResults) -> list[Row]:
    guarantee, proved = facts.guarantee, math.isfinite(facts.guarantee.epsilon)
    private = proved and not facts.has_fixed_key and not facts.plan.trained_elsewhere
    statement = facts.privacy_statement
    rows = [privacy_row(guarantee.to_dict(), None if private else statement)]
    if private:
        rows.append(Row("guarantee", statement))
    if facts.claim is not None:
        rows.append(Row("claimed, not proved", facts.claim.summary_line, brief=True))
    pairs = (*facts.training_data_by_part.items(), *facts.reported_values)
    rows += [Row(*pair, brief=True) for pair in pairs]
    if facts.search is not None:
        rows.append(Row("private search", str(facts.search)))
        values = facts.search.values_of(facts.recipe)
        chosen = ", ".join(f"{field} {_format_value(value)}" for field, value in values.items())
        rows.append(Row("chosen", chosen, brief=True))
    if (total := facts.data_set_guarantee) is not None:
        text = f"epsilon = {format_epsilon(total.epsilon)} ({total.source})"
        rows.append(Row("data set", text, brief=True))
    if facts.budget_problem:
        rows.append(Row("data set", facts.budget_problem, brief=True))
    return rows


def _accuracy_rows(facts: RunResults) -> list[Row]:
    about = facts.evaluation
    if about is None:
        return []
    # A run that releases only answers keeps no model.
    kept = (facts.folder.model_folder / "model.json").exists()
    unit = "images" if kept and len(facts.input_shape) == 3 else "inputs"
    of_tokens = {}
    if facts.next_token_count is not None:
        names = ("next_tokens", "perplexity", "base_perplexity")
        of_tokens = {name: about.get(name) for name in names}
    of_classes = [inputs for inputs, _ in about.get("by_class", [])]
    rows = accuracy_rows(
        facts.accuracy,
        about["inputs"],
        unit,
        **of_tokens,
        metrics=about.get("metrics"),
        commonest=max(of_classes, default=0),
    )
    measures = ((name, f"{v} on {facts.evaluation_scope})") for name, v in facts.measures.items())
    return [*rows, *(Row(*measure, brief=True) for measure in measures)]


def _detail_rows(facts: RunResults) -> list[Row]:
    took = "" if facts.is_duration_secret else f", {facts.training_took}"
    rows = [Row("training", facts.recipe.method.describe(facts.plan) + took)]
    rows += [Row(*pair) for pair in (*_steps_taken(facts).items(), *_score_rows(facts))]
    if layers := facts.training_summary["fallback_layers"]:
        rows.append(Row("layers without a rule", ", ".join(layers)))
    if facts.evaluation is not None:
        draws = facts.evaluation.get("noise_draws")
        how = f", mean scores over {draws} samples of its noise" if draws else ""
        rows.append(Row("test data", f"{facts.evaluation_scope}{how})"))
    for table in facts.tables:
        about = [
            *statistics.input_rows(table),
            statistics.radius_row(table),
            statistics.population_row(table),
        ]
        which = f", {table.name}" if len(facts.tables) > 1 else ""
        rows += [row._replace(name=row.name + which) for row in about]
    return rows


def _caption(facts: RunResults) -> str:
    return f"Run {facts.folder.name} ({facts.folder.path})"


def load_results(folder: RunFolder | str | Path) -> RunResults:
    """Return the results of a finished run, a `RunResults`.

    Args:
        folder: the run's folder, or its name under runs/.

    Returns:
        A `RunResults`, with `guarantee` (a `Guarantee`), `accuracy` (float in [0, 1]; None if not
        measured), `tables` (list of `CertificateTable`), `attacks` (list of `AttackTable`),
        `audits` (list of `AuditFinding`) and `summary()` (all results as pairs of str).

    Raises:
        UserError: there is no such run, its training has not finished, or a file was changed.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> facts = dpdist.load_results("small")
        >>> facts.plan.steps, facts.guarantee.kind
        (5, 'proved')
    """
    if not isinstance(folder, RunFolder):
        folder = open_run(str(folder), Path("runs"))
    return _read_facts(folder, folder.require_trained())


def read_stage(folder: RunFolder) -> Stage:
    """Return what a later run that starts from this run's weights states about it.

    An unfinished run counts with its whole plan. Raises UserError as `load_results` does.
    """
    summary = folder.training_summary
    facts = _read_facts(folder, read_json(summary) if summary.exists() else {})
    places = [str(folder.path.resolve())]
    places += [place for each in facts.recipe.stages for place in each.places]
    return stage_of_card(facts.privacy_card(), folder.name, places)


def stage_of_card(card: Mapping[str, Any], name: str, places: list[str]) -> Stage:
    """Return what a later run states about the run or release of a privacy card."""
    guarantee = card["guarantee"]
    return Stage(
        name=name,
        places=places,
        plan=card["accounted"],
        unit=card["unit"],
        guarantee=guarantee,
        fixed_key=not card["private"] and math.isfinite(float(guarantee["epsilon"])),
        assumed=card["assumptions"],
    )


def _read_facts(folder: RunFolder, trained: dict[str, Any]) -> RunResults:
    """Return the results of a run. trained: its private/trained.json; {} before it is finished."""
    recipe = folder.read_recipe()
    account = read_account(folder, recipe, finished=bool(trained))
    if account.search is None and trained:  # a search keeps its durations secret
        check_shape(trained, str(folder.training_summary), {"seconds": float})
    if trained and recipe.method.capabilities.not_releasable_reason is None:
        check_shape(trained, str(folder.training_summary), {"model": str})
    evaluation = read_json(folder.evaluation) if folder.evaluation.exists() else None
    tables = [table_reader.read(path) for path in sorted(folder.certificates.glob(_TABLES))]
    public = [kind for kind in registry.EVALUATIONS if not kind.private]
    evaluations = {kind: kind.read_all(folder) for kind in public}
    models = [(table.path, table.job_record.get("model")) for table in tables]
    models += [(one["path"], one["model"]) for one in evaluations[CheckSettings]]
    for some in evaluations.values():
        models += [(one.path, one.model) for one in some if hasattr(one, "model")]
    if evaluation is not None:
        models.append((folder.evaluation, evaluation.get("model")))
    for path, model in models:
        if model != trained.get("model"):
            stale = path if (path.parent / "run.json").exists() else path.parent
            raise UserError(
                f"{path}: must be of this run's model, got a different one (it comes from a "
                f"different run, or the run was trained again); remove {stale}"
            )
    return RunResults(folder, recipe, account, trained, evaluation, tables, evaluations)


def _format_value(value: Any) -> str:
    """Return a value in few digits; of a section, the keys with their values."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} {_format_value(each)}" for key, each in value.items())
        return f"({inner})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
