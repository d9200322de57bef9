"""One HTML page that opens offline: figures, tables, and what each was computed from."""

from __future__ import annotations

import base64
import math
import re
from datetime import date
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dpdist import __version__
from dpdist.attacks.reading import AttackTable, check_line
from dpdist.base.rounding import bound, exact, percent
from dpdist.base.storage import write_together
from dpdist.certification import population
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.radii import norm_name
from dpdist.privacy.card import EVALUATION_UNPROTECTED
from dpdist.privacy.guarantee import format_delta, format_epsilon
from dpdist.reports.attacks import Grid, grid
from dpdist.reports.baseline import beside
from dpdist.reports.charts import alone, style
from dpdist.reports.classes import by_class
from dpdist.reports.compare import privacy_grid
from dpdist.reports.facts import Facts, read_facts
from dpdist.reports.images import UNASKED, Images, picked
from dpdist.reports.in_short import (
    clean_interval,
    first_radius,
    in_short,
    main_table,
    meanings,
)
from dpdist.reports.origin import command, origin
from dpdist.reports.pictures import attacked_accuracy, certified_accuracy, privacy_spent
from dpdist.reports.searches import described
from dpdist.runs.folder import RunFolder

_HEADINGS = re.compile(r'<h2 id="([^"]+)">(.*?)</h2>')


def write_report(
    folder: RunFolder,
    images: Images | str = UNASKED,
    *,
    dated: bool = False,
) -> None:
    """Write report/index.html of a trained run, and its pictures as files of their own; where a
    baseline was named, also the page with its figures, which stays in private/.

    images: the test data, or why their inputs are not shown. dated: with today's date even where a
    date may tell how long something secret took: whoever asks for the page chose the day.
    """
    facts = read_facts(folder)
    curves = _curves(facts)
    pictures: dict[str, str] = {}
    if curves["certified"] is not None:
        pictures["certified_accuracy"] = alone(curves["certified"], _headline(facts))
    shown = dict(
        heading=folder.name,
        facts=facts,
        verdict=in_short(facts),
        tiles=_tiles(facts),
        meanings=meanings(facts),
        by_class=dict(zip(("header", "rows"), by_class(facts), strict=True)),
        curves=curves,
        tables=[_table(table, folder) for table in facts.tables],
        images=_images(facts, images),
        attacks=_attacked(facts, pictures),
        checks=_checked(facts),
        three=_three(facts),
        search=described(facts.search, folder, facts.guarantee),
        limits=_limits(facts),
        command=command(facts),
        asked=folder.read_asked().to_yaml() if folder.asked.exists() else None,
        summary=[row for row in facts.summary() if row[0] != "report"],
        **_card(facts, None if facts.times_hidden and not dated else _today()),
    )
    page = render("page.html", baseline=None, **shown)
    found = beside(facts)
    private = None if found is None else render("page.html", baseline=found, **shown)
    # Only now that nothing can be refused any more: the page and its pictures are of one report.
    files = {folder.report: page}
    files |= {folder.report.parent / f"{name}.svg": text for name, text in pictures.items()}
    if private is not None:
        files[folder.beside_baseline] = private
    write_together(files)
    if private is None:
        folder.beside_baseline.unlink(missing_ok=True)


def _attacked(
    facts: Facts, pictures: dict[str, str]
) -> list[tuple[AttackTable, str, Grid, Path, str]]:
    """Return of each attack its table, what was attacked and how, what became of the inputs, its
    file and its picture, which is added to the `pictures` that become files of their own."""
    folder, found = facts.folder, []
    for number, table in enumerate(facts.attacks):
        drawn = attacked_accuracy(table, facts.tables, f"attacked{number}")
        pictures[f"attacked_{table.name}"] = alone(drawn, f"{folder.name}: {table.classifier}")
        shown = grid(table, facts.tables, attrgetter("words"))
        words = f"{norm_name(table.norm)}, {table.classifier}"
        found.append((table, words, shown, table.path.relative_to(folder.path), drawn))
    return found


def _checked(facts: Facts) -> list[tuple[dict[str, Any], str, str]]:
    """Of each check what it is of, in words, and what it came to."""
    words = {table.name: table.words for table in facts.tables}
    return [
        (check, words.get(check["certificates"], check["certificates"]), check_line(check))
        for check in facts.checks
    ]


def _card(facts: Facts, written: date | None) -> dict[str, Any]:
    """The privacy card, its rows, and where the page comes from."""
    card = facts.card()
    return {
        "card": card, "card_rows": _card_rows(facts, card), "origin": origin(facts, card, written)
    }  # fmt: skip


def render(template: str, *, width: str = "62rem", script: bool = False, **shown: Any) -> str:
    """A template of this folder; everything that is shown is escaped but for our own pictures.

    Raises jinja2.UndefinedError for what a template needs and was not given.
    """
    loader = jinja2.FunctionLoader(lambda name: (files("dpdist.reports") / name).read_text())
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["base64"] = lambda raw: base64.b64encode(raw).decode()
    return environment.get_template(template).render(
        version=__version__, style=Markup(style()), width=width, script=script, contents=_contents,
        **shown,
    )  # fmt: skip


def _contents(body: str) -> list[tuple[str, Markup]]:
    """Name and title of every section of a page, in order."""
    return [(name, Markup(title)) for name, title in _HEADINGS.findall(body)]


def _today() -> date:
    from datetime import UTC, datetime

    return datetime.now(UTC).date()


def _curves(facts: Facts) -> dict[str, Any]:
    """The charts of the whole run, None for one that there is nothing to draw of, and why."""
    clean = facts.evaluation["accuracy"] if facts.evaluation else None
    certified = certified_accuracy(facts.tables, clean) if facts.tables else None
    spent, why = None, "no steps were taken"
    if facts.search is not None:
        why = "the search is paid for as a whole, and its trials are not shown"
    elif facts.plan.steps:
        curve = facts.plan.epsilon_curve()
        why = "nothing is proved at any step"
        if math.isfinite(curve[-1][1]) and curve[-1][1] > 0:
            spent = privacy_spent(curve, facts.plan.delta)
    return {"certified": certified, "spent": spent, "why": why}


def _headline(facts: Facts) -> str:
    """Of a picture that stands alone."""
    guarantee = facts.guarantee
    private = (
        f"epsilon {format_epsilon(guarantee.epsilon)} at delta {format_delta(guarantee.delta)}"
    )
    if facts.fixed_key or math.isinf(guarantee.epsilon):
        private = "not private"
    right = ""
    if facts.evaluation is not None:
        right = f", {percent(facts.evaluation['accuracy'], 1)} % right"
    return f"{facts.folder.name}: {private}{right}"


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """The figures that a reader looks for first: name, value, and how sure it is."""
    guarantee = facts.guarantee
    private = not facts.fixed_key and math.isfinite(guarantee.epsilon)
    found = [
        (
            "epsilon (proved)",
            format_epsilon(guarantee.epsilon),
            f"at delta {format_delta(guarantee.delta)}",
        )
        if private
        else ("epsilon (proved)", "none", "not private")
    ]
    if facts.evaluation is not None:
        share = f"{percent(facts.evaluation['accuracy'], 1)} %"
        sure = f"{clean_interval(facts)}\u00a0% of inputs like these, 95\u00a0% sure"
        if facts.next_tokens is not None:
            sure = f"of {facts.next_tokens:,} next tokens"
            found.append(("perplexity", f"{facts.evaluation['perplexity']:.1f}", sure))
        found.append(("right", share, sure))
    table = main_table(facts)
    if table is not None:
        radius = first_radius(table)
        share = f"{percent(table.certified_accuracy(radius), 1)} %"
        name = f"right and certified at {norm_name(table.norm)} {exact(radius)}"
        sure, stated = "the inputs share one noise bank: nothing is said of others", _stated(table)
        if radius in stated:
            low = percent(stated[radius].low)
            sure = f"at least {low}\u00a0% of inputs like these, 95\u00a0% sure"
        found.append((name, share, sure))
    return found


def _three(facts: Facts) -> list[list[str]]:
    """What is claimed, proved and audited, as runs are compared by it."""
    _, (_, _, claimed, proved, audited, said) = privacy_grid([facts])
    stated = facts.claim is not None and facts.claim.claimed is not None
    paper = f"by the method's paper: {said}" if stated else "its paper claims none of its own"
    measured = "measured on the executed mechanism: a lower bound"
    return [
        ["claimed", claimed, paper],
        ["proved", proved, "defended, of what was really executed: an upper bound"],
        ["audited", audited, measured if facts.audits else "not measured; dpdist audit does it"],
    ]


def _card_rows(facts: Facts, card: dict[str, Any]) -> list[tuple[str, str]]:
    superseded = card["superseded_releases"]
    deltas = card["epsilon_at_delta"]
    rows = [
        ("guarantee", facts.privacy_line),
        ("unit", card["unit"]),
        ("all runs on this data set", "" if facts.data_set is None else str(facts.data_set)),
        ("mechanism", f"{'; '.join(card['mechanism'])}; clipping: {card['clip_norm']}"),
        (
            "epsilon at other deltas",
            "; ".join(
                f"{format_epsilon(row['epsilon'])} at {format_delta(row['delta'])}"
                for row in deltas
            ),
        ),
        (
            "superseded attempts",
            f"{superseded} releases{', included in the guarantee' if superseded else ''}",
        ),
        ("holds if", "; ".join(card["assumptions"])),
        ("notes", " ".join(card["notes"])),
    ]
    return [row for row in rows if row[1]]


def _limits(facts: Facts) -> list[str]:
    """What the page does not promise."""
    found = [
        "Privacy is of single training records: what is true of the whole population may be "
        "learned, and several records of one person are less protected than one.",
        "It holds if what the privacy card lists under holds if is true, and for this model: other "
        "runs on the same records cost on top.",
        EVALUATION_UNPROTECTED,
        "Accuracy is of inputs like the test data; nothing is said of others, and classes differ.",
    ]
    if facts.tables:
        norms = sorted({norm_name(table.norm) for table in facts.tables})
        found.append(
            "Certificates are of the model together with its noise, as dpdist predict answers, "
            f"not of the bare network; of changes within {' or '.join(norms)} distance, not of "
            "rotated, cropped or otherwise different inputs; and each may be wrong with its alpha."
        )
    else:
        found.append("Nothing is certified: a small change of an input may change the answer.")
    if facts.recipe.method.withheld is not None:
        found.append(f"No model may leave: {facts.recipe.method.withheld}")
    if facts.audited_run is not None:
        found.append(f"Audited run: {facts.audited_run}.")
    return found


def _images(facts: Facts, images: Images | str) -> dict[str, Any]:
    if not facts.tables:
        return {"rows": [], "why": None}
    if isinstance(images, str):
        return {"rows": [], "why": images}
    return {
        "rows": picked(facts.tables, images, facts.recipe.data.class_names),
        "why": "the certificates are of other data",
    }


def _table(table: CertificateTable, folder: RunFolder) -> dict[str, object]:
    stated = _stated(table)
    return {
        "words": table.words,
        "mode": table.mode,
        "n0": table.n0,
        "n": table.n,
        "alpha": table.alpha,
        "norm": norm_name(table.norm),
        "inputs": len(table.index),
        "abstained": percent(table.abstained),
        "average_radius": bound(table.average_radius, 4),
        "rows": [
            (exact(r), percent(table.certified_accuracy(r)), *_bounds(stated.get(r)))
            for r in table.shown_radii
        ],
        "file": table.path.relative_to(folder.path),
    }


def _stated(table: CertificateTable) -> dict[float, population.OfPopulation]:
    """Of inputs like these, at every radius that is shown, all together; nothing where the inputs
    are no independent sample."""
    if table.terms["noise_bank"]:
        return {}
    return {at.radius: at for at in population.population_bounds(table)}


def _bounds(stated: population.OfPopulation | None) -> tuple[str, str]:
    """Right and robust, at least; not certifiable, at least: both in %, of the population."""
    if stated is None:
        return "", ""
    spared = "" if stated.certifiable is None else percent(1 - stated.certifiable)
    return percent(stated.low), spared
