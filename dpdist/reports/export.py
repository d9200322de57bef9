"""Export runs, tables of certificates and comparisons as JSON, for --json of commands.

The JSON has the privacy card, the evaluation on named test data and the tables of certificates, and
nothing from private/ that the card does not state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dpdist.certification import statistics
from dpdist.certification.statistics import holm
from dpdist.certification.table import CertificateTable
from dpdist.reports.compare import accuracy_differences, curve_differences
from dpdist.reports.results import RunResults
from dpdist.reports.summary import make_verdict

_EVALUATION_KEYS = (
    "data",
    "inputs",
    "correct",
    "accuracy",
    "cross_entropy",
    "measures",
    "metrics",
    "noise_draws",
)
_NEXT_TOKEN_KEYS = ("next_tokens", "perplexity", "base_perplexity")


def run_as_json(facts: RunResults) -> dict[str, Any]:
    """Return a run's privacy card, accuracy on test data, certificates and other results."""
    found = facts.evaluation
    names: tuple[str, ...] = _EVALUATION_KEYS
    if facts.next_token_count is not None:
        names += _NEXT_TOKEN_KEYS
    return {
        "run": facts.folder.name,
        "folder": str(facts.folder.path),
        "method": facts.recipe.method.name,
        "verdict": dataclasses.asdict(make_verdict(facts)),
        "privacy_card": facts.privacy_card(),
        "evaluation": found and {name: found[name] for name in names if name in found},
        "certificates": [table_as_json(table) for table in facts.tables],
        "rows": [{"name": row.name, "value": row.text, "brief": row.brief} for row in facts.rows()],
        "report": str(facts.folder.report_file) if facts.folder.report_file.exists() else None,
    }


def table_as_json(table: CertificateTable) -> dict[str, Any]:
    """Return a table of certificates as JSON.

    For each radius, it has the fraction of inputs that are correct and certified, and a lower bound
    for the population (all radii together).
    """
    return {
        "name": table.name,
        "title": table.title,
        "table": str(table.path),
        "norm": table.norm,
        "sigma": table.sigma,
        "mode": table.mode,
        "alpha": table.alpha,
        "verdict": statistics.verdict(table),
        "inputs": len(table.index),
        "clean_accuracy": table.clean_accuracy,
        "input_range": table.input_range,
        "abstained": table.abstention_rate,
        "average_radius": table.average_radius,
        "certified": [
            {"radius": radius, "accuracy": table.certified_accuracy(radius)}
            for radius in table.reported_radii
        ],
        "population": [
            {"radius": each.radius, "at_least": each.accuracy_lower_bound}
            for each in statistics.stated_bounds(table)
        ],
    }


def comparison_as_json(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return several runs, and the differences of each later run from the first, as JSON.

    Raises as `dpdist.reports.compare.accuracy_differences`.
    """
    rows, notes = accuracy_differences(runs, sizes)
    corrected = holm([row.comparison.p_value for row in rows])
    first = runs[0].folder.name
    return {
        "runs": [run_as_json(facts) for facts in runs],
        "differences": [
            {
                "run": row.run,
                "less": first,
                "what": row.quantity,
                "size": float(row.size) if row.size else None,
                **dataclasses.asdict(row.comparison),
                "difference": row.comparison.difference,
                "p_holm": p,
            }
            for row, p in zip(rows, corrected, strict=True)
        ],
        "whole_curves": [
            {
                "run": two.run,
                "less": first,
                "what": two.certificate,
                "sizes": found.knots.tolist(),
                "low": found.low.tolist(),
                "high": found.high.tolist(),
                "better": [list(stretch) for stretch in found.better_ranges],
                "worse": [list(stretch) for stretch in found.worse_ranges],
            }
            for two, found in curve_differences(runs, sizes)
        ],
        "notes": notes,
    }
