"""One HTML page that opens offline: figures, tables, and what each was computed from."""

from __future__ import annotations

import base64
from importlib.resources import files

import jinja2

from dpdist import __version__
from dpdist.attacks.reading import check_line
from dpdist.base.storage import write_atomic
from dpdist.certification import population
from dpdist.certification.reading import CertificateTable
from dpdist.privacy.guarantee import format_epsilon
from dpdist.reports.attacks import grid
from dpdist.reports.facts import read_facts
from dpdist.reports.figures import attacked_accuracy, certified_accuracy, privacy_spent
from dpdist.runs.folder import RunFolder


def write_report(folder: RunFolder) -> None:
    """Write report/index.html and report/certified_accuracy.png of a trained run."""
    facts = read_facts(folder)
    clean = facts.evaluation["accuracy"] if facts.evaluation else None
    pictures = []
    if facts.search is None and facts.plan.steps:  # what else there is, is paid for as a whole
        curve = privacy_spent(facts.plan.epsilon_curve(), facts.plan.delta)
        pictures.append(("Privacy spent", curve))
    if facts.tables:
        curve = certified_accuracy(facts.tables, clean)
        pictures.insert(0, ("Certified accuracy", curve))
        write_atomic(folder.report.parent / "certified_accuracy.png", curve)
    for table in facts.attacks:
        curve = attacked_accuracy(table, facts.tables)
        pictures.append((f"Accuracy under attack, {table.name}", curve))
        write_atomic(folder.report.parent / f"attacked_{table.name}.png", curve)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        (files("dpdist.reports") / "page.html").read_text()
    )
    page = template.render(
        version=__version__,
        facts=facts,
        card=facts.card(),
        format_epsilon=format_epsilon,
        pictures=[(title, base64.b64encode(png).decode()) for title, png in pictures],
        tables=[_table(table, folder) for table in facts.tables],
        attacks=[
            (table, grid(table, facts.tables), table.path.relative_to(folder.path))
            for table in facts.attacks
        ],
        checks=[(check, check_line(check)) for check in facts.checks],
    )
    write_atomic(folder.report, page)


def _table(table: CertificateTable, folder: RunFolder) -> dict[str, object]:
    radii = (0.0, *table.shown_radii)
    shared = table.terms["noise_bank"]
    stated = {} if shared else {at.radius: at for at in population.of_population(table, radii)}
    return {
        "name": table.name,
        "mode": table.mode,
        "n0": table.n0,
        "n": table.n,
        "alpha": table.alpha,
        "norm": table.norm,
        "inputs": len(table.index),
        "abstained": f"{100 * table.abstained:.2f}",
        "average_radius": f"{table.average_radius:.4f}",
        "rows": [
            (f"{r:g}", f"{100 * table.certified_accuracy(r):.2f}", *_bounds(stated.get(r)))
            for r in radii
        ],
        "file": table.path.relative_to(folder.path),
    }


def _bounds(stated: population.OfPopulation | None) -> tuple[str, str]:
    """Right and robust, at least; not certifiable, at least: both in %, of the population."""
    if stated is None:
        return "", ""
    spared = "" if stated.certifiable is None else population.floored(1 - stated.certifiable)
    return population.floored(stated.low), spared
