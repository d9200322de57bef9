"""Class by class: what is right, and what is certified."""

from __future__ import annotations

from dpdist.base.rounding import exact, percent
from dpdist.certification.verdict import ABSTAIN
from dpdist.reports.facts import Facts
from dpdist.reports.in_short import first_radius, interval, main_table

_MOST = 100  # rows of the page


def by_class(facts: Facts) -> tuple[list[str], list[list[str]]]:
    """Header and rows: of each class its test inputs, those answered rightly with an interval, and
    of those certified the shares that are right and certified, wrong, not answered.

    Without either evaluation or certificates there are no rows.
    """
    table = main_table(facts)
    plain = (facts.evaluation or {}).get("by_class") or []
    count = max(len(plain), 0 if table is None else 1 + int(table.label.max()))
    header = ["class"]
    if plain:
        header += ["test inputs", "right, %", "95 % interval"]
    if table is not None:
        at = exact(first_radius(table))
        header += [
            "with noise: inputs",
            f"right and certified at {at}, %",
            "wrong, %",
            "no answer, %",
        ]
    if len(header) == 1 or count > _MOST:
        return [], []
    rows, names = [], facts.recipe.data.class_names
    for label in range(count):
        row = [names[label] if label < len(names) else str(label)]
        if plain:
            inputs, right = plain[label] if label < len(plain) else (0, 0)
            row += [f"{inputs:,}", *_share(right, inputs)]
        if table is not None:
            here = table.label == label
            total = int(here.sum())
            answered = table.prediction[here]
            held = int((table.certified()[here] >= first_radius(table)).sum())
            wrong = int(((answered != label) & (answered != ABSTAIN)).sum())
            silent = int((answered == ABSTAIN).sum())
            row += [f"{total:,}", *(_percent(part, total) for part in (held, wrong, silent))]
        rows.append(row)
    return header, rows


def _share(hits: int, inputs: int) -> tuple[str, str]:
    return (_percent(hits, inputs), interval(hits, inputs)) if inputs else ("", "")


def _percent(part: int, whole: int) -> str:
    return percent(part / whole, 1) if whole else ""
