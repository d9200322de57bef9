"""Line charts as SVG, and the report's own: certified accuracy, attacks, epsilon against step.

A chart is small, readable by machines, and in the reader's own colors, light or dark. A picture
inside a page takes its colors from the page (`stylesheet`); one that stands alone carries them.
Lines differ by dashes as well as by color. The grid of attacks shows right, abstained and wrong
answers against size, beside the certified ones.
"""

from __future__ import annotations

import math
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


# Name of a color: what it is in light and in dark. Text on `ground` and on `raised` has a contrast
# of at least 4.5 (WCAG AA), lines of at least 3; a test computes it.
PALETTE = {
    "ground": ("#ffffff", "#12161b"),
    "raised": ("#f4f6f8", "#1d232b"),
    "text": ("#1b1f24", "#e6e9ec"),
    "quiet": ("#57606a", "#a3adb7"),
    "rule": ("#d0d7de", "#3a424c"),
    "link": ("#0b5cad", "#6cb2f5"),
    "good": ("#1a6b35", "#63c987"),
    "caution": ("#805300", "#e3b341"),
    "bad": ("#a8290c", "#ff8f73"),
    "line0": ("#0b5cad", "#6cb2f5"),
    "line1": ("#b83c0b", "#ff9d6e"),
    "line2": ("#2f6f3a", "#7fd08f"),
    "line3": ("#7048a0", "#c3a0f0"),
    "line4": ("#7a5c00", "#e0c060"),
}
_NUM_COLORS, _DASHES = 5, ("", "7 3", "2 3", "9 3 2 3", "4 2")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW = 360, 190, 46, 10, 42
_LINE = 15  # of text


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

    def __post_init__(self) -> None:
        if self.begin is not None and not 0 < self.begin < self.end:
            raise ValueError(f"an axis by doublings from {self.begin} to {self.end}")

    def position(self, value: float) -> float:
        """How far along it a value lies, from 0 to 1; one beyond an end lies at the end."""
        if self.begin is None:
            return max(0.0, min(value, self.end)) / self.end
        within = min(max(value, self.begin), self.end)
        return math.log(within / self.begin) / math.log(self.end / self.begin)

    def ticks(self) -> list[float]:
        if self.begin is None:
            return ticks(self.end)
        doublings = int(math.log2(self.end / self.begin) + 1e-9)
        return [self.begin * 2**i for i in range(doublings + 1)]


def stylesheet() -> str:
    """The palette as CSS, in light and in dark, and how charts use it."""
    light, dark = (
        " ".join(f"--{name}: {shades[mode]};" for name, shades in PALETTE.items())
        for mode in (0, 1)
    )
    colors = {f"c{i}": f"line{i}" for i in range(_NUM_COLORS)} | {"q": "quiet"}
    drawn = "".join(
        f".{name} {{ stroke: var(--{of}); fill: var(--{of}); }} " for name, of in colors.items()
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        ".chart text { font: 11.5px system-ui, sans-serif; fill: var(--text); stroke: none; }\n"
        ".chart .ground { fill: var(--ground); } .chart path { fill: none; stroke-width: 1.8; }\n"
        ".chart .grid { stroke: var(--rule); stroke-width: 1; }\n"
        ".chart .block { stroke-width: 9; }\n"
        f"{drawn}\n"
        ".chart .area { stroke: none; fill: var(--rule); }\n"
    )


def chart(
    lines: Sequence[Line], x: Axis, y: Axis, *, description: str, element_id: str, title: str
) -> str:
    """An <svg> element for a page that has `stylesheet`. description: what it shows, for those who
    do not see it. element_id: of letters and digits, one of its own within the page."""
    legend, top = _legend(lines)
    body = [*legend, *_axes(x, y, top), *_curves(lines, x, y, top)]
    height = top + _HEIGHT + _BELOW
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="{element_id}-title {element_id}-about">'
        f'<title id="{element_id}-title">{escape(title)}</title>'
        f'<desc id="{element_id}-about">{escape(description)}</desc>{"".join(body)}</svg>'
    )


def standalone_svg(chart_svg: str, heading: str) -> str:
    """A chart as a file of its own, with a heading."""
    rows = textwrap.wrap(heading, 48)
    high = 10 + _LINE * len(rows)
    view = chart_svg.split('viewBox="', 1)[1].split('"', 1)[0]
    _, _, width, height = view.split()
    texts = "".join(
        f'<text x="10" y="{_LINE * (i + 1) + 3}">{escape(row)}</text>' for i, row in enumerate(rows)
    )
    inner = chart_svg.replace("<svg ", f'<svg y="{high}" width="{width}" height="{height}" ', 1)
    whole = int(height) + high
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {whole}" '
        f'width="{2 * int(width)}" height="{2 * whole}">\n<style>\n{stylesheet()}</style>\n'
        f'<rect class="ground" width="{width}" height="{whole}"/>{texts}\n{inner}\n</svg>\n'
    )


def _legend(lines: Sequence[Line]) -> tuple[list[str], int]:
    """A row or more for each line, and where the plot begins below them."""
    found, at = [], 4
    for number, line in enumerate(lines):
        middle = at + _LINE // 2
        found.append(_stroke(line, number, f"M10 {middle}h24"))
        for row in textwrap.wrap(line.label, 44) or [""]:
            found.append(f'<text x="40" y="{at + 11}">{escape(row)}</text>')
            at += _LINE
    return found, at + 10


def _axes(x: Axis, y: Axis, top: int) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, top + _HEIGHT
    found = []
    for value in y.ticks():
        at = bottom - _HEIGHT * y.position(value)
        found.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>')
        found.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x.ticks():
        at = _LEFT + (right - _LEFT) * x.position(value)
        found.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    middle = (_LEFT + right) / 2
    found.append(
        f'<text x="{middle:.0f}" y="{bottom + 34}" text-anchor="middle">{escape(x.title)}</text>'
    )
    across = top + _HEIGHT / 2
    return [
        *found,
        f'<text transform="translate(11 {across:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.title)}</text>",
    ]


def _curves(lines: Sequence[Line], x: Axis, y: Axis, top: int) -> list[str]:
    wide, bottom = _WIDTH - _RIGHT - _LEFT, top + _HEIGHT

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        across, up = x.position(point[0]), y.position(point[1])
        return round(_LEFT + wide * across, 1), round(bottom - _HEIGHT * up, 1)

    found = []
    for number, line in enumerate(lines):
        points = [to_pixels(point) for point in line.points]
        if line.fill_down_to is not None:
            lower = [
                to_pixels((p[0], low))
                for p, low in zip(line.points, line.fill_down_to, strict=True)
            ]
            outline = " ".join(f"{a:g},{b:g}" for a, b in [*points, *reversed(lower)])
            found.append(f'<polygon class="area" points="{outline}"/>')
            continue
        path = f"M{points[0][0]:g} {points[0][1]:g}"
        for across, up in points[1:]:
            path += f"V{up:g}H{across:g}" if line.is_step else f"L{across:g} {up:g}"
        found.append(_stroke(line, number, path))
        if line.show_markers:
            dot = f'<circle class="{_color_class(line, number)}" r="2.6"'
            found += [f'{dot} cx="{across:g}" cy="{up:g}"/>' for across, up in points]
    return found


def _color_class(line: Line, number: int) -> str:
    return "q" if line.muted else f"c{number % _NUM_COLORS}"


def _stroke(line: Line, number: int, path: str) -> str:
    if line.fill_down_to is not None:  # its legend is a block
        return f'<path class="grid block" d="{path}"/>'
    dash = "3 3" if line.muted else _DASHES[number % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="{_color_class(line, number)}" d="{path}"{dashed}/>'


def ticks(end: float) -> list[float]:
    """Round numbers from 0 to `end`, three to seven of them."""
    raw = end / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [round(i * step, 12) for i in range(int(end / step * (1 + 1e-9)) + 1)]


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
    header = [f"{table.norm} size", "attack", "right", "abstained", "wrong"]
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
    tables: Sequence[CertificateTable], clean_accuracy: float | None
) -> str:
    """Certified accuracy against radius, a line for each certification; clean accuracy dashed."""
    widest = max((float(table.size_if_correct().max()) for table in tables), default=0.0)
    end = 1.05 * widest if widest > 0 else 1.0
    lines = [
        Line(table.description, _certified_steps(table, end), is_step=True) for table in tables
    ]
    if clean_accuracy is not None:
        share = 100 * clean_accuracy
        lines.append(Line("right without noise or attack", [(0, share), (end, share)], muted=True))
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
        element_id="certified",
        title="Right and certified, against radius",
    )


def _certified_steps(table: CertificateTable, end: float) -> list[tuple[float, float]]:
    """Return the certified shares at so many radii: between two of them at least the second's."""
    held = table.size_if_correct()
    radii = np.unique(np.concatenate([[0.0], held[held > 0]]))
    if len(radii) > _MAX_CURVE_POINTS:
        radii = np.linspace(0.0, float(radii[-1]), _MAX_CURVE_POINTS)
    shares = [100 * float(np.mean(held >= radius)) for radius in radii]
    return [*zip(radii.tolist(), shares, strict=True), (float(radii[-1]), 0.0)]


def attacked_accuracy_chart(
    table: AttackTable, certificates: Sequence[CertificateTable], element_id: str = "attacked"
) -> str:
    """Draw the share that can still be right against attack size.

    There is a line for each attack; certified: dashed.

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
        element_id=element_id,
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
        element_id="spent",
        title="Privacy spent, against step",
    )
