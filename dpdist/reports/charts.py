"""Draw the report's charts as SVG: certified accuracy, attacks, epsilon by step.

In dark mode, the page's style inverts their colors. Lines differ in dashes as well as in color.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter

import numpy as np

from dpdist.attacks.table import NONE, AttackTable
from dpdist.certification.noise import norm_equivalence_factor, norm_name
from dpdist.certification.table import CertificateTable
from dpdist.core.console import format_exact, format_percent
from dpdist.privacy.guarantee import format_epsilon

# --- line charts ------------------------------------------------------------------------------


_DASHES = ("-", "--", ":", "-.")
_QUIET = "#57606a"


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    points: (x, y), x ascending. muted: a line to compare with. is_step: a point's value is also
    that of all x since the previous point. fill_down_to: the area down to these heights is filled.
    """

    label: str
    points: Sequence[tuple[float, float]]
    muted: bool = False
    is_step: bool = False
    show_markers: bool = False
    fill_down_to: Sequence[float] | None = None


@dataclass(frozen=True)
class Axis:
    """An axis from 0 to `end`."""

    title: str
    end: float


def chart(lines: Sequence[Line], x: Axis, y: Axis, *, description: str, title: str) -> str:
    """Return an <svg> element, for a page or a file. description: text for screen readers."""
    import matplotlib

    from dpdist.reports.figures import COLORS, make_panels, render_figure

    figure, (axes,) = make_panels(1)
    dashes, colors = itertools.cycle(_DASHES), itertools.cycle(COLORS)
    for line in lines:
        across, up = zip(*line.points, strict=True)
        label = textwrap.fill(line.label, 44)
        if line.fill_down_to is not None:
            axes.fill_between(across, line.fill_down_to, up, color="#d0d7de", label=label)
            continue
        axes.plot(
            across,
            up,
            color=_QUIET if line.muted else next(colors),
            linestyle=":" if line.muted else next(dashes),
            drawstyle="steps-pre" if line.is_step else "default",
            marker="o" if line.show_markers else None,
            markersize=4,
            label=label,
        )
    axes.set(xlabel=x.title, xlim=(0, x.end), ylabel=y.title, ylim=(0, y.end))
    axes.set_title(textwrap.fill(title, 60), fontsize=10)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        drawn = render_figure(figure, "svg").decode()
    drawn = drawn[drawn.index("<svg ") + len("<svg ") :]
    drawn = re.sub(r" *<metadata>.*</metadata>\n", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]+"', "<g", drawn)  # ids would not be unique in a page
    return f'<svg class="chart" role="img" aria-label="{escape(f"{title}. {description}")}" {drawn}'


# --- the table of attacks ---------------------------------------------------------------------


@dataclass(frozen=True)
class TextTable:
    """Header, rows and notes of a table of text, with percentages without their sign."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def attack_outcome_table(
    table: AttackTable,
    certificates: Sequence[CertificateTable],
    label_of: Callable[[CertificateTable], str] = attrgetter("name"),
) -> TextTable:
    """Return the outcomes of the inputs in %, by size and attack and for all attacks together.

    Columns of certified accuracy are those of the same model and data, at the smallest radius that
    contains the attack's ball, on the common inputs. label_of: the name of a certification.
    """
    certified = [
        (other, common)
        for other in certificates
        if _same_model_and_data(table, other)
        and (common := np.isin(other.index, table.index)).any()
    ]
    header = [f"{table.norm} size", "attack", "correct", "abstained", "incorrect"]
    header += [f"certified {label_of(other)}" for other, _ in certified]

    def certified_at(size: float) -> list[str]:
        shares = []
        for other, common in certified:
            radius = size * norm_equivalence_factor(other.norm, table.norm, table.dimension)
            held = (other.size_if_correct() >= radius)[common]
            shares.append(format_percent(float(np.mean(held)), round_down=True))
        return shares

    rows = [["0", NONE, *table.outcome_shares(NONE, 0.0).percent(), *certified_at(0.0)]]
    for size in table.sizes:
        done = [name for name in table.attacks if table.has(name, size)]
        found = [(name, table.outcome_shares(name, size)) for name in done]
        if len(done) > 1:
            found.append(("all of them", table.worst(size)))
        columns = certified_at(size)
        rows += [[format_exact(size), name, *shares.percent(), *columns] for name, shares in found]
    notes = [
        f"certified {label_of(o)}: {_comparison_note(table, o, int(c.sum()))}" for o, c in certified
    ]
    return TextTable(header, rows, notes)


def _same_model_and_data(table: AttackTable, other: CertificateTable) -> bool:
    """Return whether both are of the same model and data, so that an index is the same input."""
    record = other.job_record
    return (record.get("model"), record.get("data")) == (table.model, table.data)


def is_same_classifier(table: AttackTable, other: CertificateTable) -> bool:
    """Return whether the attacked classifier is the certified one.

    Model, data, noise, and whether the class is chosen by votes or by mean scores must agree.
    Attacks smooth by Gaussian noise, and keep a model's own noise, which is part of it.
    """
    return (
        _same_model_and_data(table, other)
        and table.certificate_noise == other.attack_noise
        and table.predicts_by_vote == other.predicts_by_vote
    )


def _comparison_note(table: AttackTable, other: CertificateTable, common: int) -> str:
    note = f"{common:,} of these inputs"
    if other.norm != table.norm:
        factor = norm_equivalence_factor(other.norm, table.norm, table.dimension)
        note += f", {table.norm} size s by {other.norm} radius {factor:.4g} s"
    if not is_same_classifier(table, other):
        by = "smoothed by that noise"
        if table.certificate_noise == other.attack_noise:
            by = "which answers by " + ("votes" if other.predicts_by_vote else "mean scores")
        note += f"; of a different classifier than the attacked one ({by})"
    return note


# --- charts of the report ---------------------------------------------------------------------


_PERCENT_TITLE = "of test inputs, %"
_MAX_CURVE_POINTS = 180


def certified_accuracy_chart(
    tables: Sequence[CertificateTable],
    clean_accuracy: float | None,
    title: str = "Certified accuracy by radius",
) -> str:
    """Draw certified accuracy by radius, a line per certification; clean accuracy is dotted."""
    widest = max((float(table.size_if_correct().max()) for table in tables), default=0.0)
    end = 1.05 * widest if widest > 0 else 1.0
    lines = [
        Line(table.description, _certified_steps(table, end), is_step=True) for table in tables
    ]
    if clean_accuracy is not None:
        share = 100 * clean_accuracy
        flat = [(0, share), (end, share)]
        lines.append(Line("accuracy without noise or attack", flat, muted=True))
    norms, texts = sorted({norm_name(table.norm) for table in tables}), []
    for table in tables:
        at = [(r, table.certified_accuracy(r)) for r in table.reported_radii]
        shares = ", ".join(
            f"{format_percent(share, 1, round_down=True)} % at {format_exact(r)}" for r, share in at
        )
        texts.append(f"{table.description}: {shares}")
    return chart(
        lines,
        Axis(f"{' or '.join(norms)} radius, in units of the input", end),
        Axis(_PERCENT_TITLE, 100.0),
        description=f"The larger the radius, the fewer inputs are certified. {'; '.join(texts)}.",
        title=title,
    )


def _certified_steps(table: CertificateTable, end: float) -> list[tuple[float, float]]:
    """Return radii and certified accuracies in %; between two radii, the second's is a bound."""
    held = table.size_if_correct()
    radii = np.unique(np.concatenate([[0.0], held[held > 0]]))
    if len(radii) > _MAX_CURVE_POINTS:
        radii = np.linspace(0.0, float(radii[-1]), _MAX_CURVE_POINTS)
    shares = [100 * float(np.mean(held >= radius)) for radius in radii]
    return [*zip(radii.tolist(), shares, strict=True), (float(radii[-1]), 0.0)]


def attacked_accuracy_chart(table: AttackTable, certificates: Sequence[CertificateTable]) -> str:
    """Draw the fraction of inputs that are not wrong by attack size, a line per attack.

    Abstentions count as not wrong. The area below is filled down to the fraction of inputs that
    are correct under all attacks. Certified accuracy is dotted.
    """
    clean, lines, texts = table.outcome_shares("none", 0.0), [], []
    for attack in table.attacks:
        found = [(s, table.outcome_shares(attack, s)) for s in table.sizes if table.has(attack, s)]
        left = [(s, 1 - shares.wrong) for s, shares in [(0.0, clean), *found]]
        points = [(s, 100 * share) for s, share in left]
        lines.append(Line(attack, points, show_markers=True))
        percents = [
            f"{format_percent(share, 1, round_up=True)} % at {format_exact(s)}" for s, share in left
        ]
        texts.append(f"{attack}: {', '.join(percents)}")
    if table.location_class.is_random:
        worst = [(0.0, clean), *((size, table.worst(size)) for size in table.sizes)]
        upper = [(size, 100 * (1 - shares.wrong)) for size, shares in worst]
        below = [100 * shares.correct for _, shares in worst]
        lines.insert(0, Line("no answer under one or more attacks", upper, fill_down_to=below))
    shown = attack_outcome_table(table, certificates, attrgetter("description"))
    for place, column in enumerate(shown.header[5:], start=5):
        at = {float(row[0]): float(row[place]) for row in shown.rows}
        lines.append(Line(column, list(at.items()), muted=True, show_markers=True))
    end = 1.05 * max(table.sizes, default=1.0)
    return chart(
        lines,
        Axis(f"{norm_name(table.norm)} size of the attack", end),
        Axis(_PERCENT_TITLE, 100.0),
        description=f"Fraction not wrong under attack. {'; '.join(texts)}.",
        title="Not wrong under attack, by size",
    )


def epsilon_chart(curve: Sequence[tuple[int, float]], delta: float) -> str:
    """Draw epsilon by training step. curve: finite values, the last one above 0."""
    points = [(0.0, 0.0), *((float(step), epsilon) for step, epsilon in curve)]
    steps, last = points[-1]
    return chart(
        [Line(f"epsilon at delta = {delta:g}", points)],
        Axis("step", steps),
        Axis("epsilon", 1.05 * last),
        description=f"Rises with every step, to {format_epsilon(last)} after {steps:,.0f} steps.",
        title="Epsilon by step",
    )
