"""Write the technical file of a run: its facts under the headings that regulators require.

Annex IV of Regulation (EU) 2024/1689 (technical documentation of a high-risk AI system) and
Article 35(7) of Regulation (EU) 2016/679 (data-protection impact assessment).
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import jinja2

from dpdist.core.files import write_atomic
from dpdist.core.version import __version__
from dpdist.privacy.card import no_epsilon
from dpdist.privacy.guarantee import format_delta, format_epsilon, shown_kind
from dpdist.reports.html import limitations
from dpdist.reports.results import RunResults, load_results
from dpdist.reports.summary import explain_numbers
from dpdist.runs.folder import RunFolder

_STATED_ELSEWHERE = ("verdict", "privacy", "guarantee", "training", "data set", "report")


def technical_file(facts: RunResults) -> str:
    """Return the technical file of a run as Markdown.

    Guarantee: it states only what the report and the privacy card state. Points that they do not
    cover, or only in part, are marked as to be written by the provider.
    """
    card = facts.privacy_card()
    rows = [f"kind: {shown_kind(card['guarantee']['kind'])}"]
    for row in reversed(card["epsilon_at_delta"]):
        delta, epsilon = format_delta(row["delta"]), format_epsilon(row["epsilon"])
        rows.insert(0, f"delta {delta}: epsilon {epsilon}")
    total = facts.data_set_guarantee
    extra = card["extra"]
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    ).from_string((files("dpdist.reports") / "technical-file.md").read_text())
    page = template.render(
        name=facts.folder.name,
        version=__version__,
        method=facts.recipe.method.name,
        model=facts.recipe.model.name,
        inputs=f"Inputs: {facts.inputs}.",
        card={**card, "extra": {"training data": None, "stopped": None, **extra}},
        counted="users" if "user" in card["guarantee"] else "records",
        unknown=no_epsilon(card),
        costs=rows,
        total="not stated" if total is None else str(total),
        pretrained=[f"{k}: {v}" for k, v in extra.items() if "trained on" in k or k == "frozen"],
        measured=[
            f"{row.title}: {row.text}" for row in facts.rows() if row.name not in _STATED_ELSEWHERE
        ],
        audits=[line for line in card["notes"] if line.startswith("Audited")],
        limits=limitations(facts),
        privacy=f"{facts.privacy_statement}.",
        meanings=[f"{name}: {line}" for name, line in explain_numbers(facts)],
    )
    return re.sub(r"\n{3,}", "\n\n", page)


def write_technical_file(folder: RunFolder) -> Path:
    """Write report/technical-file.md of a trained run, and return its path."""
    path = folder.report_file.parent / "technical-file.md"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, technical_file(load_results(folder)))
    return path
