"""Sum up a run in one sentence, and explain its numbers in a line each.

Every clause is true of its run: it is made of the figures that the rest of the report shows, and
figures that take a promise back stand first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from dpdist.certification import statistics
from dpdist.certification.noise import norm_name
from dpdist.certification.statistics import ERROR
from dpdist.certification.table import CertificateTable
from dpdist.core.binomial import clopper_pearson_interval
from dpdist.core.console import format_percent
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

# --- the summary ------------------------------------------------------------------------------


Severity = Literal["good", "caution", "bad"]
_SEVERITIES: tuple[Severity, ...] = ("good", "caution", "bad")
_WEAK = 10.0  # "How to DP-fy ML" (Ponomareva et al., JAIR 2023): up to 1 strong, to 10 reasonable
_EPSILON_MEANING = (
    "how much one training record can change what is released, as a factor e^epsilon on any "
    "probability"
)
_DISTANCE_MEANINGS = {
    "l1": "the sum of the changes of all its numbers",
    "l2": "the root of the sum of the squared changes of all its numbers",
    "linf": "the largest change of any one of its numbers",
}


class Results(Protocol):
    """What is read of a run's results: `dpdist.reports.results.RunResults` has it."""

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
    """severity: good where nothing takes the promise back; bad where there is none, or one is
    false."""

    severity: Severity
    sentence: str

    @property
    def label(self) -> str:
        """The mood in words: color alone tells nobody."""
        return {"good": "Verdict", "caution": "Verdict, with reservations", "bad": "Warning"}[
            self.severity
        ]


def make_verdict(facts: Results) -> Verdict:
    """One sentence on privacy, accuracy and certificates, worst news first."""
    clauses = [
        *_contradictions(facts),
        *_doubtful(facts),
        *_privacy_clauses(facts),
        *_accuracy_clauses(facts),
        *_certificate_clauses(facts),
    ]
    mood = max((mood for mood, _ in clauses), key=_SEVERITIES.index)
    sentence = "; ".join(text for _, text in clauses)
    return Verdict(mood, f"{sentence[0].upper()}{sentence[1:]}.")


def _contradictions(facts: Results) -> list[tuple[Severity, str]]:
    """What contradicts something that is stated."""
    found: list[tuple[Severity, str]] = []
    for audit in facts.audits:
        if audit.exceeds_proved:
            measured = format_epsilon(audit.epsilon, lower_bound=True)
            found.append(
                (
                    "bad",
                    f"an audit contradicts what is proved (it measured an epsilon of at least "
                    f"{measured}), so do not rely on this epsilon until that is explained",
                )
            )
    for check in facts.certificate_checks:
        if not check["plausible"]:
            found.append(
                ("bad", "an attack contradicts more certificates than chance allows: do not rely "
                 "on them")
            )  # fmt: skip
    return found


_HUGE_LOSS = 10  # times that of answering all classes alike


def _doubtful(facts: Results) -> list[tuple[Severity, str]]:
    """Results that are rather a mistake in units or data than a finding."""
    found: list[tuple[Severity, str]] = [
        ("caution", text) for table in facts.tables for text in statistics.doubts(table)
    ]
    about = facts.evaluation
    if about is None or facts.next_token_count is not None or "correct" not in about:
        return found
    counts = [each for each, _ in about.get("by_class", [])]
    if counts and (
        text := statistics.commonest_class_doubt(about["correct"], about["inputs"], max(counts))
    ):
        found.append(("caution", text))
    loss, classes = about.get("cross_entropy"), max(2, len(counts))
    if loss is not None and loss > _HUGE_LOSS * math.log(classes):
        found.append(
            ("caution", f"its loss is huge ({loss:.3g}): the numbers of its inputs may not be "
             "those that it was trained on")
        )  # fmt: skip
    return found


def _privacy_clauses(facts: Results) -> list[tuple[Severity, str]]:
    guarantee, found = facts.guarantee, list[tuple[Severity, str]]()
    stated = f"epsilon {format_epsilon(guarantee.epsilon)} at delta {format_delta(guarantee.delta)}"
    if facts.has_fixed_key:
        found.append(
            ("bad", "nothing is private: the run key was fixed, and who knows it knows the noise")
        )
    elif facts.plan.trained_elsewhere:
        found.append(("caution", NOT_TRAINED_HERE))
    elif math.isinf(guarantee.epsilon):
        found.append(
            ("bad", f"no privacy is proved for the training records: epsilon is infinite "
             f"({facts.unproved_reason})")
        )  # fmt: skip
    else:
        # Every run assumes how its rows were made: that alone tells no run from another.
        assumed = facts.assumptions != [ROWS_MADE_ALONE]
        if_true = ", if what it assumes holds" if assumed else ""
        weak = guarantee.epsilon > _WEAK
        how = "hardly protected" if weak else "protected"
        whose = "record" if guarantee.user is None else "user"
        found.append(
            ("caution" if weak or assumed else "good",
             f"each training {whose} is {how} with {stated}{if_true} (test {whose}s are not)")
        )  # fmt: skip
    if facts.canary_notice is not None:
        found.append(("caution", "canaries of an audit were trained on, so it is not for release"))
    if facts.budget_problem:
        found.append(("caution", "what all runs on these records cost together is unknown"))
    claim = facts.claim
    if claim is not None and claim.claimed is not None:
        paper = f"the paper's epsilon {claim.claimed_text}"
        if any(audit.verdict == REFUTED for audit in facts.audits):
            found.append(("caution", f"{paper} is refuted by an audit"))
        elif claim.verdict == "not sound":
            found.append(("caution", f"{paper} does not hold"))
    return found


def _accuracy_clauses(facts: Results) -> list[tuple[Severity, str]]:
    if facts.evaluation is None:
        return [("caution", "the accuracy was not measured")]
    inputs = facts.evaluation["inputs"]
    if facts.accuracy is None:
        said = ", ".join(f"{name} {value}" for name, value in facts.measures.items())
        return [("good", f"on {inputs:,} test inputs: {said}")]
    share = format_percent(facts.accuracy, 1)
    if facts.next_token_count is not None:
        said = f"perplexity {facts.evaluation['perplexity']:.1f}, {share} % correct"
        if (base := facts.evaluation.get("base_perplexity")) is not None:
            said += f"; the public base alone has perplexity {base:.1f}"
        return [
            (
                "good",
                f"of the {facts.next_token_count:,} next tokens of {inputs:,} test documents: "
                f"{said}",
            )
        ]
    return [("good", f"the test accuracy is {share} % of {inputs:,} inputs")]


def _certificate_clauses(facts: Results) -> list[tuple[Severity, str]]:
    if not facts.tables:
        return [("good", "and nothing is certified about changed inputs")]
    table = main_table(facts)
    assert table is not None
    return [("good", f"and, with its noise, {statistics.certified_clause(table)}")]


def main_table(facts: Results) -> CertificateTable | None:
    """The certification that stands for the run: that of most inputs, the first of several."""
    return max(facts.tables, key=lambda table: len(table.index), default=None)


def accuracy_interval(correct: int, inputs: int) -> str:
    """Of the share in all inputs of which these are an independent sample, in %, 95 %: rounded
    outwards."""
    low, high = clopper_pearson_interval(correct, inputs, ERROR)
    return f"{format_percent(float(low), 1)} to {format_percent(float(high), 1, round_up=True)}"


# --- what the numbers mean ----------------------------------------------------------------------


def explain_numbers(facts: Results) -> list[tuple[str, str]]:
    """Name and line of epsilon, delta and radius, as they are in this run."""
    found = [("epsilon", _explain_epsilon(facts)), ("delta", _explain_delta(facts))]
    if facts.plan.trained_elsewhere:
        found = [
            (
                "epsilon",
                f"{_EPSILON_MEANING}. None is known here: the model was {NOT_TRAINED_HERE}.",
            )
        ]
    norms = dict.fromkeys(table.norm for table in facts.tables)
    found += [
        (f"radius ({norm_name(n)})", _explain_radius(facts, n))
        for n in norms
        if n in _DISTANCE_MEANINGS
    ]
    return found


def _explain_epsilon(facts: Results) -> str:
    guarantee = facts.guarantee
    if facts.has_fixed_key or math.isinf(guarantee.epsilon):
        return (
            f"{_EPSILON_MEANING}. Nothing bounds it here: the model may give single records away."
        )
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
        f"{meaning}. Whoever knows all other {unit}s, sees the model and must tell at "
        f"even odds {question} is right with probability at most "
        f"{max_correct_guess_percent(guarantee)} %."
    )


def max_correct_guess_percent(guarantee: Guarantee) -> str:
    """In %, rounded up: of a guess at even odds between two neighboring data sets.

    Errors of both kinds sum to at least 2 (1 - delta) / (1 + e^epsilon) (Kairouz, Oh and Viswanath,
    ICML 2015, Theorem 2.1).
    """
    missed = (1 - guarantee.delta) * math.exp(-float(np.logaddexp(0.0, guarantee.epsilon)))
    return format_percent(1 - missed, round_up=True)


def _explain_delta(facts: Results) -> str:
    return (
        f"the probability, {format_delta(facts.guarantee.delta)}, that is left out of what epsilon "
        f"says. It should be far below one in the number of {facts.plan.counted} (here "
        f"{facts.plan.records:,}{', declared' if facts.plan.nominal else ''})."
    )


def _explain_radius(facts: Results, norm: str) -> str:
    shape = facts.input_shape
    numbers = math.prod(shape)
    unit = " Pixels count from 0 (black) to 1 (white)." if len(shape) == 3 else ""
    spread = {"l1": 1 / numbers, "l2": 1 / math.sqrt(numbers), "linf": 1.0}[norm]
    return (
        f"how far an input may be moved, whoever moves it, before the certified answer can change: "
        f"{_DISTANCE_MEANINGS[norm]}.{unit} Radius 1 is {spread:.2g} on each of its {numbers:,} "
        "numbers."
    )
