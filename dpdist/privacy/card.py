"""The privacy card of a released model, and the audit results that it lists.

The card lists everything that a reader needs to judge the guarantee. It is safe to publish: it
contains no run key, seed, training score or trial of a search. An audit result is an empirical
lower bound of epsilon next to the proved and the claimed one, with everything needed to judge it:
confidence, view of the adversary, data sets to distinguish, number of trials, and the rule that
turned them into guesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpdist.core.console import format_exact
from dpdist.core.errors import UserError
from dpdist.core.files import check_shape, read_json, write_json
from dpdist.privacy.guarantee import (
    Guarantee,
    GuaranteeKind,
    check_delta,
    format_delta,
    format_epsilon,
    kind_of,
    left_out,
    shown_kind,
)
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import NOT_TRAINED_HERE, Phase, walk_phases
from dpdist.privacy.plan import PrivacyPlan, parse_plan

PRIVACY_CARD, PRIVACY_CARD_TEXT = "privacy_card.json", "privacy_card.md"  # its files

# --- results of audits ------------------------------------------------------------------------


CONSISTENT = "consistent"
EXCEEDS_PROVED = "exceeds proved: a bug"
REFUTED = "refutes the claim"

_AUDIT_SHAPE = {
    "kind": str, "method": str, "view": str, "adjacency": str, "rule": str, "verdict": str,
    "trials": int, "epsilon": float, "delta": float, "alpha": float, "exploratory": bool,
    "curve_rejected": bool, "details": dict, "assumptions": list,
}  # fmt: skip


@dataclass(frozen=True)
class AuditFinding:
    """The result of an audit. epsilon: the lower bound at `delta`, wrong with probability <= alpha.

    kind: of audit; method: the theorem. view: what the adversary saw. adjacency: which data sets
    it told apart. trials: runs, releases or guesses that were counted. rule: threshold or guesses,
    and how they were fixed. proved, claimed: epsilon at the same delta (infinite where nothing is
    proved; None if nothing is claimed). curve_rejected: whether the whole trade-off curve of
    what is proved was rejected, which needs no epsilon. assumptions: what epsilon rests on besides;
    empty: nothing. exploratory: one of more audits than alpha was divided by. model: its hash.
    """

    kind: str
    method: str
    epsilon: float
    delta: float
    alpha: float
    view: str
    adjacency: str
    trials: int
    rule: str
    proved: float
    claimed: float | None = None
    curve_rejected: bool = False
    exploratory: bool = False
    assumptions: tuple[str, ...] = ()
    model: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not (0 < self.alpha < 1 and self.trials >= 0 and 0 <= self.epsilon < math.inf):
            raise ValueError("alpha lies between 0 and 1; trials and epsilon are finite and >= 0")
        if self.proved < 0 or math.isnan(self.proved) or (self.claimed or 0) < 0:
            raise ValueError("what is proved and claimed is >= 0")

    @property
    def exceeds_proved(self) -> bool:
        """Return whether the result contradicts the proved guarantee: code or proof is wrong."""
        return not self.exploratory and (self.curve_rejected or self.epsilon > self.proved)

    @property
    def verdict(self) -> str:
        if self.exceeds_proved:
            return EXCEEDS_PROVED
        refuted = self.claimed is not None and self.epsilon > self.claimed
        return REFUTED if refuted and not self.exploratory else CONSISTENT

    @property
    def summary_line(self) -> str:
        """Return the audit in one line."""
        verdict = "exploratory, no statement" if self.exploratory else self.verdict
        return (
            f"epsilon >= {format_epsilon(self.epsilon, lower_bound=True)} at delta = "
            f"{format_exact(self.delta)}, confidence {100 * (1 - self.alpha):g} % ({self.method}; "
            f"{self.adjacency}; the adversary saw {self.view}; {self.trials:,} trials): {verdict}"
        )

    @property
    def meaning(self) -> str:
        """Return what follows from the verdict."""
        if self.exploratory:
            return "no statement: alpha was not divided by this audit"
        return {
            CONSISTENT: "this attacker contradicts nothing that is proved or claimed, and that "
            "proves nothing: another attacker may find more",
            EXCEEDS_PROVED: "the code or the proof is wrong: do not rely on the proved epsilon",
            REFUTED: "the claimed epsilon is too small",
        }[self.verdict]

    @property
    def table_cell(self) -> str:
        """Return the bound and its method for a table, with a note if it contradicts the proof."""
        bound = format_epsilon(self.epsilon, lower_bound=True)
        wrong = "" if self.verdict == CONSISTENT else f": {self.verdict}"
        return f">= {bound} ({self.kind}){wrong}"

    @property
    def comparison_line(self) -> str:
        """Return the claimed, proved and audited epsilon side by side."""
        claimed = "nothing" if self.claimed is None else format_epsilon(self.claimed)
        proved = "nothing" if math.isinf(self.proved) else format_epsilon(self.proved)
        audited = format_epsilon(self.epsilon, lower_bound=True)
        at = f"at delta = {format_exact(self.delta)}"
        return f"claimed {claimed}, proved {proved}, audited >= {audited} {at}"

    def write(self, path: Path) -> None:
        """Write the result into one JSON file; `read` inverts it."""
        record = {**asdict(self), "verdict": self.verdict}
        del record["path"]
        record["proved"] = "inf" if math.isinf(self.proved) else self.proved
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)

    @classmethod
    def read(cls, path: Path) -> AuditFinding:
        """Return the result in a JSON file.

        Raises UserError when it is damaged, or its verdict is not that of its numbers.
        """
        record = read_json(path, _AUDIT_SHAPE)
        said = record.pop("verdict")
        try:
            record["proved"] = float(record["proved"])
            record["assumptions"] = tuple(map(str, record["assumptions"]))
            found = cls(**record, path=path)
            if not isinstance(found.model, str | None):
                raise ValueError("model must be text")
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{path}: damaged: {error}") from None
        if said != found.verdict:
            raise UserError(
                f"{path}: damaged: says {said!r} where its numbers say {found.verdict!r}"
            )
        return found


# --- the card ---------------------------------------------------------------------------------


_DELTAS = (1e-4, 1e-5, 1e-6, 1e-8)
EVALUATION_UNPROTECTED = (
    "Evaluation data are not protected: scores and certificates on them are published as they are."
)


def build_card(
    plan: PrivacyPlan,
    ledger: Ledger | None = None,
    *,
    earlier: Sequence[Phase] = (),
    private: bool = True,
    unit: str = "one record",
    data_set: Guarantee | None = None,
    assumptions: Sequence[str] = (),
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    kind: GuaranteeKind = "proved",
) -> dict[str, Any]:
    """Return the privacy card as JSON types.

    ledger: the releases; without it the plan counts as executed. earlier: releases of the runs that
    the run started from. private: False for a run with a fixed key or without noise, which the card
    then states. unit: the protected unit. data_set: guarantee of all runs on the data set.
    assumptions: further conditions. extra: further facts (library versions, model, recipe). kind:
    kind of the guarantee.

    "accounted" has the released phases, as a plan: `recompute_card` computes the card from it.
    """
    from dpdist.privacy import accounting

    phases = plan.phases if ledger is None else ledger.released_phases(plan)
    phases = (*earlier, *phases)
    whole = replace(plan, phases=phases)
    paths = whole.path_events(phases)
    main = replace(whole.guarantee_for_events(paths), kind=kind)
    deltas = sorted({plan.delta, *_DELTAS}, reverse=True)
    profile = [whole.guarantee_for_events(paths, delta) for delta in deltas] if private else [main]
    described = {
        "private": private,
        "guarantee": main.to_dict(),
        "unit": _line(unit),
        "adjacency": plan.adjacency,
        "relation": main.relation,
        "epsilon_at_delta": [
            {"delta": each.delta, "epsilon": each.to_dict()["epsilon"]} for each in profile
        ],
        "accountant": main.source,
        "library": accounting.library_version(),
        "mechanism": [_line(plan.in_units(phase.description)) for phase in phases],
        "clip_norm": whole.clip_norm if whole.relies_on_clipping else "none",
        "records": None if plan.trained_elsewhere else plan.records,
        "records_are": "declared" if plan.nominal else "counted",
        "released_besides": [],  # of the format: nothing is released but the phases
        "reexecuted_releases": 0 if ledger is None else ledger.num_superseded,
        "data_set": None if data_set is None else data_set.to_dict(),
        "plan": plan.fingerprint(),
        "accounted": whole.to_dict(),
        "assumptions": [_line(each) for each in (*main.assumptions, *assumptions)],
        "notes": [_line(each) for each in (EVALUATION_UNPROTECTED, *notes)],
    }
    return described | ({"extra": {_line(k): _line(v) for k, v in extra.items()}} if extra else {})


def _line(text: Any) -> Any:
    """Return a text in one line, so that it cannot pass for a different part of the page."""
    return " ".join(text.splitlines()) if isinstance(text, str) else text


# Copied from the card, since they do not follow from the phases.
_COPIED_KEYS = ("data_set", "reexecuted_releases", "plan")
_CARD_SHAPE = {
    "private": bool, "unit": str, "relation": str, "accountant": str, "library": str,
    "guarantee.epsilon": float | str, "guarantee.delta": float, "guarantee.kind": str,
    "guarantee.adjacency": str, "adjacency": str, "plan": str,
    "epsilon_at_delta": list, "mechanism": list, "released_besides": list,
    "reexecuted_releases": int, "assumptions": list, "notes": list, "extra": dict,
    "accounted": dict, **dict.fromkeys(("data_set", "clip_norm", "records"), object),
}  # fmt: skip
_MAX_PHASES = 1000
RELATIVE_TOLERANCE = 1e-3  # between two accountants


def parse_card_plan(card_dict: dict[str, Any], context: str) -> PrivacyPlan:
    """Return the phases of a card from elsewhere, as a plan.

    Raises UserError for a damaged card, or one without phases.
    """
    check_shape(card_dict, context, _CARD_SHAPE)
    for name in ("mechanism", "released_besides", "assumptions", "notes"):
        if not all(isinstance(line, str) for line in card_dict[name]):
            raise UserError(f"{context}: damaged: {name} must be lines of text")
    _check_stated_guarantees(card_dict, context)
    plan = parse_plan(card_dict["accounted"], f"{context}: accounted")
    if len(list(walk_phases(plan.phases))) > _MAX_PHASES:
        raise UserError(f"{context}: accounted: more than {_MAX_PHASES} phases")
    return plan


def _check_stated_guarantees(card_dict: dict[str, Any], context: str) -> None:
    """Raise UserError unless the numbers of a card are possible and consistent."""
    own, delta = _parse_guarantee(card_dict, "guarantee", context)
    if card_dict["private"] and math.isinf(own):
        raise UserError(f"{context}: private: must be false with an infinite epsilon, got true")
    if card_dict["data_set"] is not None:
        total, at = _parse_guarantee(card_dict, "data_set", context)
        if at == delta and total < own * (1 - RELATIVE_TOLERANCE):
            raise UserError(
                f"{context}: data_set.epsilon: must be at least {format_epsilon(own)}, that of "
                "this run, which is one of all runs on the data set"
            )


def _parse_guarantee(card_dict: dict[str, Any], name: str, context: str) -> tuple[float, float]:
    """Return epsilon and delta of a guarantee as stated. Raises UserError for invalid numbers."""
    shape = {f"{name}.epsilon": float | str, f"{name}.delta": float}
    stated = check_shape(card_dict, context, shape)[name]
    try:
        epsilon = float(stated["epsilon"])
    except ValueError:
        epsilon = math.nan
    if not (epsilon >= 0 and 0 <= stated["delta"] < 1):
        raise UserError(
            f"{context}: damaged: {name}.epsilon must be a number >= 0, {name}.delta one below 1"
        )
    return epsilon, float(stated["delta"])


def recompute_card(stated_card: Mapping[str, Any], plan: PrivacyPlan) -> dict[str, Any]:
    """Return the card recomputed from its phases (`parse_card_plan`).

    Entries that do not follow from them are copied: whether the run key was fixed, the guarantee of
    all runs on the data set, notes. Raises UserError if no theorem covers the phases.
    """
    try:
        again = build_card(
            plan,
            private=stated_card["private"],
            unit=stated_card["unit"],
            assumptions=stated_card["assumptions"][len(plan.assumptions) :],
            notes=stated_card["notes"][1:],
            extra=stated_card["extra"],
            kind=kind_of(stated_card["assumptions"]),
        )
    except (ValueError, OverflowError) as error:
        raise UserError(f"its phases cannot be accounted: {error}") from error
    return again | {name: stated_card[name] for name in _COPIED_KEYS}


def _summary_rows(card_dict: Mapping[str, Any]) -> list[str]:
    """Return the rows of the card's first table."""
    rows = {
        "unit": card_dict["unit"],
        "neighboring relation": card_dict["relation"],
        "clip norm": card_dict["clip_norm"],
    }
    if card_dict["records"] is not None:
        counted = "users" if "user" in card_dict["guarantee"] else "records"
        rows[counted] = f"{card_dict['records']} ({card_dict['records_are']})"
    if (total := card_dict["data_set"]) is not None:
        epsilon = format_epsilon(total["epsilon"])
        rows["all runs on this data set"] = (
            f"epsilon {epsilon} at delta {format_delta(total['delta'])}"
        )
    rows["accounting library"] = card_dict["library"]
    rows["releases of re-executed steps, charged"] = card_dict["reexecuted_releases"]
    rows["plan"] = f"`{card_dict['plan'][:16]}`"
    return [f"| {name} | {value} |" for name, value in rows.items()]


def no_epsilon(described: Mapping[str, Any]) -> str | None:
    """Return why a card has no epsilon; None if it has one, finite or not."""
    return NOT_TRAINED_HERE if described["mechanism"] == [NOT_TRAINED_HERE] else None


def bounding_guarantee(card_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the guarantee, as JSON types, that bounds what the model reveals of its records.

    If a run's own guarantee does not include an earlier release on which its model depends, it is
    that of all releases of the data set.
    """
    total: Mapping[str, Any] | None = card_dict["data_set"]
    own: Mapping[str, Any] = card_dict["guarantee"]
    return total if total is not None and left_out(card_dict["assumptions"]) else own


def card_markdown(card_dict: Mapping[str, Any]) -> str:
    """Return the card as a page of Markdown."""
    guarantee = card_dict["guarantee"]
    lines = ["# Privacy card", ""]
    if (why := no_epsilon(card_dict)) is not None:
        lines += [
            f"**{why[0].upper()}{why[1:]}.** Nothing is known of the records that this "
            "model was trained on, nor of how; it may give single ones away.",
            "",
            "## Notes",
            "",
            *[f"* {line}" for line in card_dict["notes"]],
        ]
        lines += [f"* {key}: {value}" for key, value in sorted(card_dict["extra"].items())]
        return "\n".join(lines) + "\n"
    if not card_dict["private"]:
        lines += [
            "**This model is NOT private.** Its run key was fixed or no noise was added; the "
            "figures below only describe the mechanism.",
            "",
        ]
    lines += [
        f"({format_epsilon(guarantee['epsilon'])}, {format_delta(guarantee['delta'])})"
        "-differential privacy, "
        f"{shown_kind(guarantee['kind'])} by {card_dict['accountant']}"
        f"{left_out(card_dict['assumptions'])}.",
        "",
        "| | |",
        "|---|---|",
        *_summary_rows(card_dict),
        "",
        "## Mechanism",
        "",
        *[f"* {line}" for line in card_dict["mechanism"]],
        "",
        "## Epsilon at other deltas",
        "",
        "| delta | epsilon |",
        "|---|---|",
        *[
            f"| {format_delta(row['delta'])} | {format_epsilon(row['epsilon'])} |"
            for row in card_dict["epsilon_at_delta"]
        ],
        "",
        "## This holds if",
        "",
        *[f"* {line}" for line in card_dict["assumptions"]],
        "",
        "## Notes",
        "",
        *[f"* {line}" for line in card_dict["notes"]],
    ]
    for key, value in sorted(card_dict.get("extra", {}).items()):
        lines.append(f"* {key}: {value}")
    return "\n".join(lines) + "\n"
