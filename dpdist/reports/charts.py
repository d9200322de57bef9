"""The report's charts as SVG: certified accuracy, attacks, epsilon against step.

matplotlib draws them. In a page that is shown dark, the page's style turns their colors around.
Lines differ by dashes as well as by color. The grid of attacks shows right, abstained and wrong
answers against size, beside the certified ones.
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
    """points: (x, y), x ascending. muted: a line to compare with. is_step: what holds at a point
    holds all the way before it. fill_down_to: the area down to these heights is filled."""

    label: str
    points: Sequence[tuple[float, float]]
    muted: bool = False
    is_step: bool = False
    show_markers: bool = False
    fill_down_to: Sequence[float] | None = None


@dataclass(frozen=True)
class Axis:
    """From 0 to `end`; or from `begin` > 0 to `end` by doublings, all equally wide."""

    title: str
    end: float
    begin: float | None = None


def chart(lines: Sequence[Line], x: Axis, y: Axis, *, description: str, title: str) -> str:
    """Return an <svg> element, for a page or as a file.

    description: what it shows, for those who do not see it.
    """
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
    if x.begin is not None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=x.title, xlim=(x.begin or 0, x.end), ylabel=y.title, ylim=(y.begin or 0, y.end))
    axes.set_title(textwrap.fill(title, 60), fontsize=10)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        drawn = render_figure(figure, "svg").decode()
    drawn = drawn[drawn.index("<svg ") + len("<svg ") :]
    drawn = re.sub(r" *<metadata>.*</metadata>\n", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]+"', "<g", drawn)  # a page has several: no id is there twice
    return f'<svg class="chart" role="img" aria-label="{escape(f"{title}. {description}")}" {drawn}'


# --- the grid of attacks ----------------------------------------------------------------------


@dataclass(frozen=True)
class TextTable:
    """A table to show: the header and rows of text, percentages without their sign."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def attack_outcome_table(
    table: AttackTable,
    certificates: Sequence[CertificateTable],
    label_of: Callable[[CertificateTable], str] = attrgetter("name"),
) -> TextTable:
    """Return the outcomes of the inputs, in %, by size and attack.

    A row for each size and attack, and one for all attacks.

    Certified columns are of the same model and data, at the least radius that contains the attack's
    ball, on the inputs that both tables have. label_of: what a certification is called.
    """
    beside = [
        (other, np.isin(other.index, table.index))
        for other in certificates
        if _same_model_and_data(table, other)
    ]
    beside = [(other, common) for other, common in beside if common.any()]
    header = [f"{table.norm} size", "attack", "correct", "abstained", "incorrect"]
    header += [f"certified {label_of(other)}" for other, _ in beside]

    def certified(size: float) -> list[str]:
        shares = []
        for other, common in beside:
            radius = size * norm_equivalence_factor(other.norm, table.norm, table.dimension)
            shares.append(
                format_percent(float(np.mean((other.size_if_correct() >= radius)[common])))
            )
        return shares

    rows = [["0", NONE, *table.outcome_shares(NONE, 0.0).percent(), *certified(0.0)]]
    for size in table.sizes:
        done = [name for name in table.attacks if table.has(name, size)]
        found = [(name, table.outcome_shares(name, size)) for name in done]
        if len(done) > 1:
            found.append(("all of them", table.worst(size)))
        rows += [[format_exact(size), name, *s.percent(), *certified(size)] for name, s in found]
    notes = [
        f"certified {label_of(o)}: {_comparison_note(table, o, int(c.sum()))}" for o, c in beside
    ]
    return TextTable(header, rows, notes)


def _same_model_and_data(table: AttackTable, other: CertificateTable) -> bool:
    """Whether both are of one model and one data set, so that an index names one input."""
    return (other.job_record.get("model"), other.job_record.get("data")) == (
        table.model,
        table.data,
    )


def is_same_classifier(table: AttackTable, other: CertificateTable) -> bool:
    """Whether the attacked classifier is the certified one: model, data, kind of noise and scale,
    and whether it answers by votes of draws or by their mean scores.

    Attacks smooth by Gaussian noise, and take a model's own noise, which is part of it.
    """
    if not _same_model_and_data(table, other):
        return False
    return _has_same_noise(table, other) and table.predicts_by_vote == other.predicts_by_vote


def _has_same_noise(table: AttackTable, other: CertificateTable) -> bool:
    return table.certificate_noise == other.attack_noise


def _comparison_note(table: AttackTable, other: CertificateTable, common: int) -> str:
    note = f"{common:,} of these inputs"
    if other.norm != table.norm:
        factor = norm_equivalence_factor(other.norm, table.norm, table.dimension)
        note += f", {table.norm} size s by {other.norm} radius {factor:.4g} s"
    if not is_same_classifier(table, other):
        by = "smoothed by that noise"
        if _has_same_noise(table, other):
            by = "that answers by " + ("votes" if other.predicts_by_vote else "mean scores")
        note += f"; of another classifier than the attacked one ({by})"
    return note


# --- charts of the report ---------------------------------------------------------------------


_PERCENT_TITLE = "of test inputs, %"
_MAX_CURVE_POINTS = 180  # a step is drawn no finer than this part of the width


def certified_accuracy_chart(
    tables: Sequence[CertificateTable],
    clean_accuracy: float | None,
    title: str = "Right and certified, against radius",
) -> str:
    """Certified accuracy against radius, a line for each certification; clean accuracy dotted."""
    widest = max((float(table.size_if_correct().max()) for table in tables), default=0.0)
    end = 1.05 * widest if widest > 0 else 1.0
    lines = [
        Line(table.description, _certified_steps(table, end), is_step=True) for table in tables
    ]
    if clean_accuracy is not None:
        share = 100 * clean_accuracy
        flat = [(0, share), (end, share)]
        lines.append(Line("accuracy without noise or attack", flat, muted=True))
    norms, said = sorted({norm_name(table.norm) for table in tables}), []
    for table in tables:
        at = [(r, table.certified_accuracy(r)) for r in table.reported_radii]
        shares = ", ".join(f"{format_percent(share, 1)} % at {format_exact(r)}" for r, share in at)
        said.append(f"{table.description}: {shares}")
    return chart(
        lines,
        Axis(f"{' or '.join(norms)} radius, in units of the input", end),
        Axis(_PERCENT_TITLE, 100.0),
        description=f"The larger the radius, the fewer inputs are certified. {'; '.join(said)}.",
        title=title,
    )


def _certified_steps(table: CertificateTable, end: float) -> list[tuple[float, float]]:
    """Return the certified shares at so many radii: between two of them at least the second's."""
    held = table.size_if_correct()
    radii = np.unique(np.concatenate([[0.0], held[held > 0]]))
    if len(radii) > _MAX_CURVE_POINTS:
        radii = np.linspace(0.0, float(radii[-1]), _MAX_CURVE_POINTS)
    shares = [100 * float(np.mean(held >= radius)) for radius in radii]
    return [*zip(radii.tolist(), shares, strict=True), (float(radii[-1]), 0.0)]


def attacked_accuracy_chart(table: AttackTable, certificates: Sequence[CertificateTable]) -> str:
    """Draw the share that can still be right against attack size.

    There is a line for each attack; certified: dotted.

    The lines are 1 - wrong: an abstention refutes nothing. Filled down to what was answered rightly
    under all attacks.
    """
    clean, lines, said = table.outcome_shares("none", 0.0), [], []
    for attack in table.attacks:
        found = [(s, table.outcome_shares(attack, s)) for s in table.sizes if table.has(attack, s)]
        left = [(s, 1 - shares.wrong) for s, shares in [(0.0, clean), *found]]
        points = [(s, 100 * share) for s, share in left]
        lines.append(Line(attack, points, show_markers=True))
        percents = [
            f"{format_percent(share, 1, round_up=True)} % at {format_exact(s)}" for s, share in left
        ]
        said.append(f"{attack}: {', '.join(percents)}")
    if table.location_class.is_random:
        worst = [(0.0, clean), *((size, table.worst(size)) for size in table.sizes)]
        upper = [(size, 100 * (1 - shares.wrong)) for size, shares in worst]
        below = [100 * shares.correct for _, shares in worst]
        lines.insert(0, Line("not answered, under one of them at least", upper, fill_down_to=below))
    shown = attack_outcome_table(table, certificates, attrgetter("description"))
    for place, column in enumerate(shown.header[5:], start=5):
        at = {float(row[0]): float(row[place]) for row in shown.rows}
        lines.append(Line(column, list(at.items()), muted=True, show_markers=True))
    end = 1.05 * max(table.sizes, default=1.0)
    return chart(
        lines,
        Axis(f"{norm_name(table.norm)} size of the attack", end),
        Axis(_PERCENT_TITLE, 100.0),
        description=f"Not refuted under attack. {'; '.join(said)}.",
        title="Not refuted under attack, against its size",
    )


def epsilon_chart(curve: Sequence[tuple[int, float]], delta: float) -> str:
    """Epsilon against training step. curve: finite, ends above 0."""
    points = [(0.0, 0.0), *((float(step), epsilon) for step, epsilon in curve)]
    steps, last = points[-1]
    return chart(
        [Line(f"epsilon at delta = {delta:g}", points)],
        Axis("step", steps),
        Axis("epsilon", 1.05 * last),
        description=f"Rises with every step, to {format_epsilon(last)} after {steps:,.0f} steps.",
        title="Privacy spent, against step",
    )
