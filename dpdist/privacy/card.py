"""The privacy card: everything a reader of a released model needs to judge its guarantee.

Safe to publish: it holds no run key, no seed, no training score and no trial of a search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpdist.base.errors import UserError
from dpdist.base.reading import check_shape
from dpdist.privacy.group import group_guarantee
from dpdist.privacy.guarantee import Guarantee, format_delta, format_epsilon
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import walk
from dpdist.privacy.plan import PrivacyPlan, plan_of

_DELTAS = (1e-4, 1e-5, 1e-6, 1e-8)
EVALUATION_UNPROTECTED = (
    "Evaluation data are not protected: scores and certificates on them are published as they are."
)


def card(
    plan: PrivacyPlan,
    ledger: Ledger | None = None,
    *,
    private: bool = True,
    show_records: bool = True,
    unit: str = "one record",
    group_size: int = 1,
    data_set: Guarantee | None = None,
    assumptions: Sequence[str] = (),
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The card as JSON types.

    ledger: what was really released; without it the plan is taken as executed. private: False for a
    run with a fixed key or without noise, which the card then says. show_records: False keeps the
    number of records (and with it the sampling rate's meaning) out. unit: what is protected.
    group_size: of up to so many records the guarantee is stated as well. data_set: what the data
    set has cost in all runs. assumptions: what must hold besides. extra: further facts (library
    versions, model, recipe).

    "accounted" are the phases that were released, as a plan: `recomputed` makes the card of it.
    """
    from dpdist.privacy import accounting

    phases = plan.phases if ledger is None else ledger.phases(plan)
    whole = replace(plan, phases=phases)
    paths = whole.alternatives(phases)
    main = whole.guarantee_of(paths)
    group = None if group_size == 1 else group_guarantee(whole, group_size)
    if group is not None:
        unit += f"; {group_size} records: epsilon {format_epsilon(group.epsilon)}"
    if not show_records:
        kept = tuple(line for line in main.assumptions if "is public" not in line)
        main = replace(main, assumptions=kept)
    deltas = sorted({plan.delta, *_DELTAS}, reverse=True)
    profile = [whole.guarantee_of(paths, delta) for delta in deltas] if private else [main]
    described = {
        "private": private,
        "guarantee": main.to_dict(),
        "unit": _line(unit),
        "group": group and {"size": group_size, "guarantee": group.to_dict()},
        "neighbours": plan.neighbours,
        "relation": main.relation,
        "epsilon_at_delta": [
            {"delta": g.delta, "epsilon": g.to_dict()["epsilon"]} for g in profile
        ],
        "accountant": main.source,
        "library": accounting.library_version(),
        "mechanism": [_line(phase.words) for phase in phases],
        "clip_norm": whole.clip_norm if whole.clips else "none",
        "records": plan.records if show_records else None,
        "records_are": "declared" if plan.nominal else "counted",
        "released_besides": [],  # of the format: nothing is released but the phases
        "superseded_releases": 0 if ledger is None else ledger.superseded,
        "data_set": None if data_set is None else data_set.to_dict(),
        # With the other entries at hand, the fingerprint would give N away to a search.
        "plan": plan.fingerprint() if show_records else None,
        "accounted": whole.to_dict() if show_records else None,
        "assumptions": [_line(each) for each in (*main.assumptions, *assumptions)],
        "notes": [_line(each) for each in (EVALUATION_UNPROTECTED, *notes)],
    }
    return described | ({"extra": {_line(k): _line(v) for k, v in extra.items()}} if extra else {})


def _line(text: Any) -> Any:
    """A text in one line: on a page, none passes for another part of it."""
    return " ".join(text.splitlines()) if isinstance(text, str) else text


# Stated, and not to be had from the phases: of other runs, of the run's recipe and its faults.
_STATED = ("data_set", "superseded_releases", "plan")
_SHAPE = {
    "private": bool, "unit": str, "relation": str, "accountant": str, "library": str,
    "guarantee.epsilon": float | str, "guarantee.delta": float, "guarantee.kind": str,
    "guarantee.neighbours": str, "neighbours": str, "plan": str,
    "epsilon_at_delta": list, "mechanism": list, "released_besides": list,
    "superseded_releases": int, "assumptions": list, "notes": list, "extra": dict,
    "accounted": dict, **dict.fromkeys(("data_set", "group", "clip_norm", "records"), object),
}  # fmt: skip
_MOST_PHASES = 1000
_ROUNDING = 1e-3  # relative: of what two accountants make of the same


def accounted(described: dict[str, Any], where: str) -> PrivacyPlan:
    """The phases that a card from elsewhere speaks of, as a plan. Raises UserError for a card that
    is damaged, or names none."""
    check_shape(described, where, _SHAPE)
    for name in ("mechanism", "released_besides", "assumptions", "notes"):
        if not all(isinstance(line, str) for line in described[name]):
            raise UserError(f"{where}: damaged: {name} must be lines of text")
    _check_stated(described, where)
    plan = plan_of(described["accounted"], f"{where}: accounted")
    if len(list(walk(plan.phases))) > _MOST_PHASES:
        raise UserError(f"{where}: accounted: more than {_MOST_PHASES} phases")
    return plan


def _check_stated(described: dict[str, Any], where: str) -> None:
    """Whether what a card states in numbers can be, and does not contradict itself."""
    own, delta = _stated(described, "guarantee", where)
    if described["private"] and math.isinf(own):
        raise UserError(f"{where}: calls private what has an infinite epsilon")
    if (group := described["group"]) is not None:
        size = check_shape({"group": group}, where, {"group.size": int})["group"]["size"]
        if not 1 < size <= 1000:
            raise UserError(f"{where}: damaged: group.size must be 2 to 1000, got {size}")
        check_shape(group, f"{where}: group", {"guarantee.neighbours": str})
        _stated(group, "guarantee", f"{where}: group")
    if described["data_set"] is not None:
        total, at = _stated(described, "data_set", where)
        if at == delta and total < own * (1 - _ROUNDING):
            raise UserError(
                f"{where}: data_set: all runs on the data set, this one included, cannot cost "
                f"less than this one, epsilon {format_epsilon(own)}"
            )


def _stated(described: dict[str, Any], name: str, where: str) -> tuple[float, float]:
    """Epsilon and delta of a guarantee as it is stated. Raises UserError for what is none."""
    shape = {f"{name}.epsilon": float | str, f"{name}.delta": float}
    stated = check_shape(described, where, shape)[name]
    try:
        epsilon = float(stated["epsilon"])
    except ValueError:
        epsilon = math.nan
    if not (epsilon >= 0 and 0 <= stated["delta"] < 1):
        raise UserError(
            f"{where}: damaged: {name}.epsilon must be a number >= 0, {name}.delta one below 1"
        )
    return epsilon, float(stated["delta"])


def recomputed(described: Mapping[str, Any], plan: PrivacyPlan) -> dict[str, Any]:
    """A card again, from the phases that it speaks of (`accounted`), by this project's accounting.

    What does not follow from them is taken from the card: whether the run key was fixed, what all
    runs on the data set cost, notes. Raises UserError when no theorem covers the phases.
    """
    group = described["group"]
    try:
        again = card(
            plan,
            private=described["private"],
            unit=described["unit"].partition("; ")[0],  # what follows is of a group
            group_size=1 if group is None else group["size"],
            assumptions=described["assumptions"][len(plan.assumptions) :],
            notes=described["notes"][1:],
            extra=described["extra"],
        )
    except (ValueError, OverflowError) as error:
        raise UserError(f"its phases cannot be accounted: {error}") from error
    return again | {name: described[name] for name in _STATED}


def _terms(described: Mapping[str, Any]) -> list[str]:
    """Rows of the card's first table."""
    rows = {
        "unit": described["unit"],
        "neighbouring relation": described["relation"],
        "clip norm": described["clip_norm"],
    }
    if described["records"] is not None:
        rows["records"] = f"{described['records']} ({described['records_are']})"
    if (total := described["data_set"]) is not None:
        epsilon = format_epsilon(total["epsilon"])
        rows["all runs on this data set"] = (
            f"epsilon {epsilon} at delta {format_delta(total['delta'])}"
        )
    rows["accounting library"] = described["library"]
    rows["releases of superseded attempts, charged"] = described["superseded_releases"]
    if described["plan"]:
        rows["plan"] = f"`{described['plan'][:16]}`"
    return [f"| {name} | {value} |" for name, value in rows.items()]


def card_markdown(described: Mapping[str, Any]) -> str:
    """The card as a page of Markdown."""
    guarantee = described["guarantee"]
    lines = ["# Privacy card", ""]
    if not described["private"]:
        lines += [
            "**This model is NOT private.** Its run key was fixed or no noise was added; the "
            "figures below only describe the mechanism.",
            "",
        ]
    lines += [
        f"({format_epsilon(guarantee['epsilon'])}, {format_delta(guarantee['delta'])})"
        "-differential privacy, "
        f"{guarantee['kind']} by {described['accountant']}.",
        "",
        "| | |",
        "|---|---|",
        *_terms(described),
        "",
        "## Mechanism",
        "",
        *[f"* {line}" for line in described["mechanism"]],
        "",
        "## Epsilon at other deltas",
        "",
        "| delta | epsilon |",
        "|---|---|",
        *[
            f"| {format_delta(row['delta'])} | {format_epsilon(row['epsilon'])} |"
            for row in described["epsilon_at_delta"]
        ],
        "",
        "## This holds if",
        "",
        *[f"* {line}" for line in described["assumptions"]],
        "",
        "## Notes",
        "",
        *[f"* {line}" for line in described["notes"]],
    ]
    for key, value in sorted(described.get("extra", {}).items()):
        lines.append(f"* {key}: {value}")
    return "\n".join(lines) + "\n"
