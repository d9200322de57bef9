"""The privacy card: everything a reader of a released model needs to judge its guarantee.

Safe to publish: it holds no run key, no seed, no training score and no trial of a search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import PrivacyPlan

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
    data_set: Guarantee | None = None,
    assumptions: Sequence[str] = (),
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The card as JSON types.

    ledger: what was really released; without it the plan is taken as executed. private: False for a
    run with a fixed key or without noise, which the card then says. show_records: False keeps the
    number of records (and with it the sampling rate's meaning) out. data_set: what the data set has
    cost in all runs. assumptions: what must hold besides. extra: further facts (library versions,
    model, recipe).
    """
    from dpdist.privacy import accounting

    phases = plan.phases if ledger is None else ledger.phases(plan)
    paths = plan.alternatives(phases)
    main = plan.guarantee_of(paths)
    if not show_records:
        kept = tuple(line for line in main.assumptions if "is public" not in line)
        main = replace(main, assumptions=kept)
    deltas = sorted({plan.delta, *_DELTAS}, reverse=True)
    profile = [plan.guarantee_of(paths, delta) for delta in deltas] if private else [main]
    described = {
        "private": private,
        "guarantee": main.to_dict(),
        "unit": unit,
        "neighbours": plan.neighbours,
        "relation": main.relation,
        "epsilon_at_delta": [
            {"delta": g.delta, "epsilon": g.to_dict()["epsilon"]} for g in profile
        ],
        "accountant": main.source,
        "library": accounting.library_version(),
        "mechanism": [phase.words for phase in phases],
        "clip_norm": plan.clip_norm if plan.clips else "none",
        "records": plan.records if show_records else None,
        "records_are": "declared" if plan.nominal else "counted",
        "released_besides": [] if ledger is None else [e["name"] for e in ledger.events],
        "superseded_releases": 0 if ledger is None else ledger.superseded,
        "data_set": None if data_set is None else data_set.to_dict(),
        # With the other entries at hand, the fingerprint would give N away to a search.
        "plan": plan.fingerprint() if show_records else None,
        "assumptions": [*main.assumptions, *assumptions],
        "notes": [EVALUATION_UNPROTECTED, *notes],
    }
    return described | ({"extra": dict(extra)} if extra else {})


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
        rows["all runs on this data set"] = f"epsilon {epsilon} at delta {total['delta']:g}"
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
        f"({format_epsilon(guarantee['epsilon'])}, {guarantee['delta']:g})-differential privacy, "
        f"{guarantee['kind']} by {described['accountant']}.",
        "",
        "| | |",
        "|---|---|",
        *_terms(described),
        "",
        "## Mechanism",
        "",
        *[f"* {line}" for line in described["mechanism"]],
        *[f"* besides: {name}" for name in described["released_besides"]],
        "",
        "## Epsilon at other deltas",
        "",
        "| delta | epsilon |",
        "|---|---|",
        *[
            f"| {row['delta']:g} | {format_epsilon(row['epsilon'])} |"
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
    for key, value in described.get("extra", {}).items():
        lines.append(f"* {key}: {value}")
    return "\n".join(lines) + "\n"
