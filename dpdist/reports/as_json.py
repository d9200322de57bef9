"""What a run may publish, as JSON types: what commands print with --json.

It is made of the privacy card, the evaluation on named test data and the tables of certificates;
nothing that lies in private/ is in it but what the card says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dpdist.certification import population
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.paired import holm
from dpdist.reports.differences import differences, whole_curves
from dpdist.reports.facts import Facts

_EVALUATED = ("data", "inputs", "correct", "accuracy", "cross_entropy", "noise_draws")
_OF_NEXT = ("next_tokens", "perplexity")


def published(facts: Facts) -> dict[str, Any]:
    """A run: its privacy card, accuracy on test data, certificates and what else was measured."""
    found = facts.evaluation
    names = _EVALUATED if facts.next_tokens is None else (*_EVALUATED, *_OF_NEXT)
    return {
        "run": facts.folder.name,
        "folder": str(facts.folder.path),
        "method": facts.recipe.method.name,
        "privacy_card": facts.card(),
        "evaluation": found and {name: found[name] for name in names if name in found},
        "certificates": [certified(table) for table in facts.tables],
        "measured": [
            {"kind": kind.name, "name": name, "value": value}
            for kind, results in facts.evaluations.items()
            for name, value in kind.lines(results)
        ],
        "report": str(facts.folder.report) if facts.folder.report.exists() else None,
    }


def certified(table: CertificateTable) -> dict[str, Any]:
    """Return what is printed of a table of certificates, as JSON.

    At each radius the share of its inputs that are right and certified, and what that says at least
    of the population (all radii together).
    """
    bank = bool(table.terms["noise_bank"])  # its inputs are then no independent sample
    return {
        "name": table.name,
        "title": table.title,
        "table": str(table.path),
        "norm": table.norm,
        "sigma": table.sigma,
        "mode": table.mode,
        "alpha": table.alpha,
        "inputs": len(table.index),
        "abstained": table.abstained,
        "average_radius": table.average_radius,
        "certified": [
            {"radius": radius, "accuracy": table.certified_accuracy(radius)}
            for radius in table.shown_radii
        ],
        "population": []
        if bank
        else [
            {"radius": each.radius, "at_least": each.low}
            for each in population.population_bounds(table)
        ],
    }


def compared(runs: Sequence[Facts], sizes: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Several runs, and each later one less the first on the same inputs. Raises as
    `dpdist.reports.differences.differences`."""
    rows, notes = differences(runs, sizes)
    corrected = holm([row.found.p_value for row in rows])
    first = runs[0].folder.name
    return {
        "runs": [published(facts) for facts in runs],
        "differences": [
            {
                "run": row.run, "less": first, "what": row.what,
                "size": float(row.size) if row.size else None,
                **dataclasses.asdict(row.found), "difference": row.found.difference, "p_holm": p,
            }
            for row, p in zip(rows, corrected, strict=True)
        ],
        "whole_curves": [
            {
                "run": two.run, "less": first, "what": two.what,
                "sizes": found.knots.tolist(),
                "low": found.low.tolist(), "high": found.high.tolist(),
                "better": [list(stretch) for stretch in found.ahead],
                "worse": [list(stretch) for stretch in found.behind],
            }
            for two, found in whole_curves(runs, sizes)
        ],
        "notes": notes,
    }  # fmt: skip
