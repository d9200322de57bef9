"""Summarize a run in one sentence, and explain its numbers in a line each.

Each clause is built from the values in the rest of the report; warnings come first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from dpdist.certification import statistics
from dpdist.certification.noise import norm_name
from dpdist.certification.statistics import ERROR
from dpdist.certification.table import CertificateTable
from dpdist.core.binomial import clopper_pearson_interval
from dpdist.core.console import format_percent
from dpdist.core.files import read_json
from dpdist.privacy.card import REFUTED, AuditFinding
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import (
    ROWS_MADE_ALONE,
    Guarantee,
    format_delta,
    format_epsilon,
)
from dpdist.privacy.phases import NOT_TRAINED_HERE
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder

# --- the summary ------------------------------------------------------------------------------


Severity = Literal["good", "caution", "bad"]
_SEVERITIES: tuple[Severity, ...] = ("good", "caution", "bad")
_WEAK = 10.0  # "How to DP-fy ML" (Ponomareva et al., JAIR 2023): up to 1 strong, to 10 reasonable
_EPSILON_MEANING = (
    "the limit on how much one training record can change the probability of any released result, "
    "as a factor e^epsilon"
)
_DISTANCE_MEANINGS = {
    "l1": "the sum of the changes of all its values",
    "l2": "the square root of the sum of the squared changes of all its values",
    "linf": "the largest change of one of its values",
}


class Results(Protocol):
    """The attributes of `dpdist.reports.results.RunResults` that the summary reads."""

    @property
    def plan(self) -> PrivacyPlan: ...
    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def tables(self) -> list[CertificateTable]: ...
    @property
    def audits(self) -> list[AuditFinding]: ...
    @property
    def certificate_checks(self) -> list[dict[str, Any]]: ...
    @property
    def claim(self) -> Claim | None: ...
    @property
    def assumptions(self) -> list[str]: ...
    @property
    def evaluation(self) -> dict[str, Any] | None: ...
    @property
    def accuracy(self) -> float | None: ...
    @property
    def measures(self) -> dict[str, str]: ...
    @property
    def next_token_count(self) -> int | None: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def has_fixed_key(self) -> bool: ...
    @property
    def canary_notice(self) -> str | None: ...
    @property
    def budget_problem(self) -> str | None: ...
    @property
    def unproved_reason(self) -> str: ...


@dataclass(frozen=True)
class Verdict:
    """The summary of a run.

    severity: "good" without reservations; "bad" if nothing is proved, or something is contradicted.
    """

    severity: Severity
    sentence: str

    @property
    def label(self) -> str:
        """Return the severity in words, for readers who do not see the color."""
        words = {"good": "Verdict", "caution": "Verdict, with reservations", "bad": "Warning"}
        return words[self.severity]


def make_verdict(facts: Results) -> Verdict:
    """Return one sentence on privacy, accuracy and certificates, warnings first."""
    clauses = [
        *_contradictions(facts),
        *_doubtful(facts),
        *_privacy_clauses(facts),
        *_accuracy_clauses(facts),
        *_certificate_clauses(facts),
    ]
    severity = max((one for one, _ in clauses), key=_SEVERITIES.index)
    sentence = "; ".join(text for _, text in clauses)
    return Verdict(severity, f"{sentence[0].upper()}{sentence[1:]}.")


def _contradictions(facts: Results) -> list[tuple[Severity, str]]:
    """Return clauses for results that contradict a stated guarantee."""
    clauses: list[tuple[Severity, str]] = []
    for audit in facts.audits:
        if audit.exceeds_proved:
            measured = format_epsilon(audit.epsilon, lower_bound=True)
            text = f"an audit measured an epsilon of at least {measured}, which contradicts the "
            text += "proved one: do not rely on this epsilon until that is explained"
            clauses.append(("bad", text))
    for check in facts.certificate_checks:
        if not check["plausible"]:
            text = "an attack contradicts more certificates than chance allows: do not rely on them"
            clauses.append(("bad", text))
    return clauses


_HUGE_LOSS = 10  # times the loss of equal probabilities for all classes


def _doubtful(facts: Results) -> list[tuple[Severity, str]]:
    """Return clauses for results that suggest a mistake in units or data."""
    main = main_table(facts)
    texts = [] if main is None else statistics.doubts(main)
    if more := [
        each.title for each in facts.tables if each is not main and statistics.doubts(each)
    ]:
        texts.append(f"there are doubts about {', '.join(more)}, which `report --json` states")
    texts += evaluation_doubts(facts.evaluation or {})
    return [("caution", text) for text in texts]


def evaluation_doubts(about: Mapping[str, Any]) -> list[str]:
    """Return what is doubtful about a model's answers on test inputs with classes.

    about: the content of evaluation.json.
    """
    counts = [inputs for inputs, _ in about.get("by_class", [])]
    if not counts:
        return []
    doubt = statistics.commonest_class_doubt(about["correct"], about["inputs"], max(counts))
    value, *interval = about.get("metrics", {}).get("AUC", [0.0])
    if doubt is not None and interval and interval[0] > 0.5:  # of a rare class accuracy says little
        doubt += f", but it ranks better than chance (AUC {value:.3f})"
    texts, loss = [] if doubt is None else [doubt], about.get("cross_entropy", 0.0)
    if loss is None or loss > _HUGE_LOSS * math.log(max(2, len(counts))):
        texts.append(
            f"its loss is {'not finite' if loss is None else f'huge ({loss:.3g})'}: the learning "
            "rate may be too high, or the test inputs are scaled differently than the training "
            "inputs"
        )
    return texts


_MUCH = 30  # times the norm of the first weights; useful models had up to 17 times, at rate 4


def result_doubts(run: RunFolder, growth: float) -> list[str]:
    """Return why a script's training may have learned nothing, by public records or its weights.

    growth: norm of the released weights, relative to that of the first ones.
    """
    texts = evaluation_doubts(read_json(run.evaluation)) if run.evaluation.exists() else []
    if growth > _MUCH:
        texts.append(
            f"the trained weights are {growth:,.0f} times as large as the first ones: the learning "
            "rate may be too high for the noise"
        )
    return texts


def _privacy_clauses(facts: Results) -> list[tuple[Severity, str]]:
    guarantee, clauses = facts.guarantee, list[tuple[Severity, str]]()
    stated = f"epsilon {format_epsilon(guarantee.epsilon)} at delta {format_delta(guarantee.delta)}"
    if facts.has_fixed_key:
        text = "nothing is private: the run key was fixed, and anyone who knows it knows the noise"
        clauses.append(("bad", text))
    elif facts.plan.trained_elsewhere:
        clauses.append(("caution", NOT_TRAINED_HERE))
    elif math.isinf(guarantee.epsilon):
        text = "no privacy is proved for the training records: epsilon is infinite "
        clauses.append(("bad", f"{text}({facts.unproved_reason})"))
    else:
        # Every run assumes this about its rows, so it is no reason for caution.
        assumed = facts.assumptions != [ROWS_MADE_ALONE]
        if_true = ", if its assumptions are true" if assumed else ""
        weak = guarantee.epsilon > _WEAK
        how = "hardly protected" if weak else "protected"
        whose = "record" if guarantee.user is None else "user"
        text = f"each training {whose} is {how} with {stated}{if_true} (test {whose}s are not)"
        clauses.append(("caution" if weak or assumed else "good", text))
    if facts.canary_notice is not None:
        clauses.append(("caution", "it was trained on an audit's canaries, so do not release it"))
    if facts.budget_problem:
        clauses.append(("caution", "the total epsilon of all runs on these records is unknown"))
    claim = facts.claim
    if claim is not None and claim.claimed is not None:
        paper = f"the paper's epsilon {claim.claimed_text}"
        if any(audit.verdict == REFUTED for audit in facts.audits):
            clauses.append(("caution", f"{paper} is refuted by an audit"))
        elif claim.verdict == "not sound":
            clauses.append(("caution", f"{paper} is not valid"))
    return clauses


def _accuracy_clauses(facts: Results) -> list[tuple[Severity, str]]:
    if facts.evaluation is None:
        return [("caution", "the accuracy was not measured")]
    inputs = facts.evaluation["inputs"]
    if facts.accuracy is None:
        measures = ", ".join(f"{name} {value}" for name, value in facts.measures.items())
        return [("good", f"on {inputs:,} test inputs: {measures}")]
    share = format_percent(facts.accuracy, 1)
    if facts.next_token_count is None:
        return [("good", f"the test accuracy is {share} % of {inputs:,} inputs")]
    text = f"of the {facts.next_token_count:,} next tokens of {inputs:,} test documents: "
    text += f"perplexity {facts.evaluation['perplexity']:.1f}, {share} % correct"
    if (base := facts.evaluation.get("base_perplexity")) is not None:
        text += f"; the perplexity of the public base is {base:.1f}"
    return [("good", text)]


def _certificate_clauses(facts: Results) -> list[tuple[Severity, str]]:
    table = main_table(facts)
    if table is None:
        return [("good", "and nothing is certified about changed inputs")]
    return [("good", f"and, with its noise, {statistics.certified_clause(table)}")]


def main_table(facts: Results) -> CertificateTable | None:
    """Return the certification with the most inputs, the first of several; None without one."""
    return max(facts.tables, key=lambda table: len(table.index), default=None)


def accuracy_interval(correct: int, inputs: int) -> str:
    """Return a 95 % interval of the accuracy in %, rounded outwards.

    It is about the population that the inputs are an independent sample of.
    """
    low, high = clopper_pearson_interval(correct, inputs, ERROR)
    most = format_percent(high, 1, round_up=True)
    return f"{format_percent(low, 1, round_down=True)} to {most}"


# --- what the numbers mean ----------------------------------------------------------------------


def explain_numbers(facts: Results) -> list[tuple[str, str]]:
    """Return name and explanation of epsilon, delta and radius, with the values of this run."""
    lines = [("epsilon", _explain_epsilon(facts)), ("delta", _explain_delta(facts))]
    if facts.plan.trained_elsewhere:
        unknown = f"It is unknown here: the model was {NOT_TRAINED_HERE}."
        lines = [("epsilon", f"{_EPSILON_MEANING}. {unknown}")]
    norms = dict.fromkeys(table.norm for table in facts.tables)
    known = [norm for norm in norms if norm in _DISTANCE_MEANINGS]
    return lines + [(f"radius ({norm_name(n)})", _explain_radius(facts, n)) for n in known]


def _explain_epsilon(facts: Results) -> str:
    guarantee = facts.guarantee
    if facts.has_fixed_key or math.isinf(guarantee.epsilon):
        return f"{_EPSILON_MEANING}. It is unlimited here: the model may reveal single records."
    unit = "record" if guarantee.user is None else "user"
    question = f"whether a {unit} was in the training"
    if guarantee.adjacency == "replace-one":
        question = "which of two records was in the training"
    elif guarantee.size_public:
        question += ", or blanked out,"
    meaning = _EPSILON_MEANING
    if guarantee.user is not None:
        meaning = meaning.replace("training record", "user")
    return (
        f"{meaning}. An attacker who knows all other {unit}s, sees the model and guesses at even "
        f"odds {question} is correct with probability at most "
        f"{max_correct_guess_percent(guarantee)} %."
    )


def max_correct_guess_percent(guarantee: Guarantee) -> str:
    """Return the largest probability of a correct guess at even odds, in %, rounded up.

    The guess is between two neighboring data sets.

    Errors of both kinds sum to at least 2 (1 - delta) / (1 + e^epsilon) (Kairouz, Oh and Viswanath,
    ICML 2015, Theorem 2.1).
    """
    missed = (1 - guarantee.delta) * math.exp(-float(np.logaddexp(0.0, guarantee.epsilon)))
    return format_percent(1 - missed, round_up=True)


def _explain_delta(facts: Results) -> str:
    return (
        f"the probability, {format_delta(facts.guarantee.delta)}, with which the limit of epsilon "
        f"may fail. It should be far below 1 divided by the number of {facts.plan.counted} "
        f"({facts.plan.records:,}{', declared' if facts.plan.nominal else ''})."
    )


def _explain_radius(facts: Results, norm: str) -> str:
    shape = facts.input_shape
    numbers = math.prod(shape)
    unit = " Pixels count from 0 (black) to 1 (white)." if len(shape) == 3 else ""
    spread = {"l1": 1 / numbers, "l2": 1 / math.sqrt(numbers), "linf": 1.0}[norm]
    return (
        "how far an input can be changed, by anyone, before the certified answer can change: "
        f"{_DISTANCE_MEANINGS[norm]}.{unit} Radius 1 is a change of {spread:.2g} in each of its "
        f"{numbers:,} values."
    )
