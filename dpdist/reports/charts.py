"""Line charts as SVG, and the report's own: certified accuracy, attacks, epsilon against step.

A chart is small, readable by machines, and in the reader's own colours, light or dark. A picture
inside a page takes its colours from the page (`style`); one that stands alone carries them. Lines
differ by dashes as well as by colour. The grid of attacks shows right, abstained and wrong answers
against size, beside the certified ones.
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
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.noise import ball_factor, norm_name
from dpdist.core.console import exact, percent
from dpdist.privacy.guarantee import format_epsilon

# --- line charts ------------------------------------------------------------------------------


# Name of a colour: what it is in light and in dark. Text on `ground` and on `raised` has a contrast
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
_COLOURS, _DASHES = 5, ("", "7 3", "2 3", "9 3 2 3", "4 2")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW = 360, 190, 46, 10, 42
_LINE = 15  # of text


@dataclass(frozen=True)
class Line:
    """points: (x, y), x ascending. quiet: a line to compare with. steps: what holds at a point
    holds all the way before it. below: the area down to these heights is filled."""

    label: str
    points: Sequence[tuple[float, float]]
    quiet: bool = False
    steps: bool = False
    dots: bool = False
    below: Sequence[float] | None = None


@dataclass(frozen=True)
class Axis:
    """From 0 to `end`; or from `begin` > 0 to `end` by doublings, all equally wide."""

    title: str
    end: float
    begin: float | None = None

    def __post_init__(self) -> None:
        if self.begin is not None and not 0 < self.begin < self.end:
            raise ValueError(f"an axis by doublings from {self.begin} to {self.end}")

    def share(self, value: float) -> float:
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


def style() -> str:
    """The palette as CSS, in light and in dark, and how charts use it."""
    light, dark = (
        " ".join(f"--{name}: {shades[mode]};" for name, shades in PALETTE.items())
        for mode in (0, 1)
    )
    colours = {f"c{i}": f"line{i}" for i in range(_COLOURS)} | {"q": "quiet"}
    drawn = "".join(
        f".{name} {{ stroke: var(--{of}); fill: var(--{of}); }} " for name, of in colours.items()
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


def chart(lines: Sequence[Line], x: Axis, y: Axis, *, about: str, name: str, title: str) -> str:
    """An <svg> element for a page that has `style`. about: what it shows, for those who do not see
    it. name: of letters and digits, one of its own within the page."""
    legend, top = _legend(lines)
    body = [*legend, *_axes(x, y, top), *_curves(lines, x, y, top)]
    height = top + _HEIGHT + _BELOW
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-about">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-about">{escape(about)}</desc>{"".join(body)}</svg>'
    )


def alone(drawn: str, heading: str) -> str:
    """A chart as a file of its own, with a heading."""
    rows = textwrap.wrap(heading, 48)
    high = 10 + _LINE * len(rows)
    view = drawn.split('viewBox="', 1)[1].split('"', 1)[0]
    _, _, width, height = view.split()
    texts = "".join(
        f'<text x="10" y="{_LINE * (i + 1) + 3}">{escape(row)}</text>' for i, row in enumerate(rows)
    )
    inner = drawn.replace("<svg ", f'<svg y="{high}" width="{width}" height="{height}" ', 1)
    whole = int(height) + high
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {whole}" '
        f'width="{2 * int(width)}" height="{2 * whole}">\n<style>\n{style()}</style>\n'
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
        at = bottom - _HEIGHT * y.share(value)
        found.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>')
        found.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x.ticks():
        at = _LEFT + (right - _LEFT) * x.share(value)
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

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across, up = x.share(point[0]), y.share(point[1])
        return round(_LEFT + wide * across, 1), round(bottom - _HEIGHT * up, 1)

    found = []
    for number, line in enumerate(lines):
        points = [place(point) for point in line.points]
        if line.below is not None:
            lower = [place((p[0], low)) for p, low in zip(line.points, line.below, strict=True)]
            outline = " ".join(f"{a:g},{b:g}" for a, b in [*points, *reversed(lower)])
            found.append(f'<polygon class="area" points="{outline}"/>')
            continue
        path = f"M{points[0][0]:g} {points[0][1]:g}"
        for across, up in points[1:]:
            path += f"V{up:g}H{across:g}" if line.steps else f"L{across:g} {up:g}"
        found.append(_stroke(line, number, path))
        if line.dots:
            dot = f'<circle class="{_shade(line, number)}" r="2.6"'
            found += [f'{dot} cx="{across:g}" cy="{up:g}"/>' for across, up in points]
    return found


def _shade(line: Line, number: int) -> str:
    return "q" if line.quiet else f"c{number % _COLOURS}"


def _stroke(line: Line, number: int, path: str) -> str:
    if line.below is not None:  # its legend is a block
        return f'<path class="grid block" d="{path}"/>'
    dash = "3 3" if line.quiet else _DASHES[number % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="{_shade(line, number)}" d="{path}"{dashed}/>'


def ticks(end: float) -> list[float]:
    """Round numbers from 0 to `end`, three to seven of them."""
    raw = end / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [round(i * step, 12) for i in range(int(end / step * (1 + 1e-9)) + 1)]


# --- the grid of attacks ----------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """A table to show: the header and rows of text, percentages without their sign."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def grid(
    table: AttackTable,
    certificates: Sequence[CertificateTable],
    called: Callable[[CertificateTable], str] = attrgetter("name"),
) -> Grid:
    """Return the outcomes of the inputs, in %, by size and attack.

    A row for each size and attack, and one for all attacks.

    Certified columns are of the same model and data, at the least radius that contains the attack's
    ball, on the inputs that both tables have. called: what a certification is called.
    """
    beside = [(other, _common(table, other)) for other in certificates if _same(table, other)]
    beside = [(other, common) for other, common in beside if common.any()]
    header = [f"{table.norm} size", "attack", "right", "abstained", "wrong"]
    header += [f"certified {called(other)}" for other, _ in beside]

    def certified(size: float) -> list[str]:
        shares = []
        for other, common in beside:
            radius = size * ball_factor(other.norm, table.norm, table.numbers)
            shares.append(percent(float(np.mean((other.certified() >= radius)[common]))))
        return shares

    rows = [["0", NONE, *table.shares(NONE, 0.0).percent(), *certified(0.0)]]
    for size in table.sizes:
        done = [name for name in table.attacks if table.has(name, size)]
        found = [(name, table.shares(name, size)) for name in done]
        if len(done) > 1:
            found.append(("all of them", table.worst(size)))
        rows += [[exact(size), name, *s.percent(), *certified(size)] for name, s in found]
    notes = [f"certified {called(o)}: {_note(table, o, int(c.sum()))}" for o, c in beside]
    return Grid(header, rows, notes)


def _common(table: AttackTable, other: CertificateTable) -> np.ndarray:
    return np.isin(other.index, table.index)


def _same(table: AttackTable, other: CertificateTable) -> bool:
    """Whether both are of one model and one data set, so that an index names one input."""
    return (other.about.get("model"), other.about.get("data")) == (table.model, table.data)


def same_classifier(table: AttackTable, other: CertificateTable) -> bool:
    """Whether the attacked classifier is the certified one: model, data, kind of noise and scale,
    and whether it answers by votes of draws or by their mean scores.

    Attacks smooth by Gaussian noise, and take a model's own noise, which is part of it.
    """
    if not _same(table, other):
        return False
    return _same_noise(table, other) and table.votes == other.by_votes


def _same_noise(table: AttackTable, other: CertificateTable) -> bool:
    return table.certified_as == other.attacked_as


def _note(table: AttackTable, other: CertificateTable, common: int) -> str:
    note = f"{common:,} of these inputs"
    if other.norm != table.norm:
        factor = ball_factor(other.norm, table.norm, table.numbers)
        note += f", {table.norm} size s by {other.norm} radius {factor:.4g} s"
    if not same_classifier(table, other):
        by = "smoothed by that noise"
        if _same_noise(table, other):
            by = "that answers by " + ("votes" if other.by_votes else "mean scores")
        note += f"; of another classifier than the attacked one ({by})"
    return note


# --- charts of the report ---------------------------------------------------------------------


_SHARE = "of test inputs, %"
_FINE = 180  # a step is drawn no finer than this part of the width


def certified_accuracy(
    tables: Sequence[CertificateTable], clean: float | None, name: str = "certified"
) -> str:
    """Certified accuracy against radius, a line for each certification; clean accuracy dashed."""
    widest = max((float(table.certified().max()) for table in tables), default=0.0)
    end = 1.05 * widest if widest > 0 else 1.0
    lines = [Line(table.words, _steps(table, end), steps=True) for table in tables]
    if clean is not None:
        share = 100 * clean
        lines.append(Line("right without noise or attack", [(0, share), (end, share)], quiet=True))
    norms, said = sorted({norm_name(table.norm) for table in tables}), []
    for table in tables:
        at = [(r, table.certified_accuracy(r)) for r in table.shown_radii]
        shares = ", ".join(f"{percent(share, 1)} % at {exact(r)}" for r, share in at)
        said.append(f"{table.words}: {shares}")
    return chart(
        lines,
        Axis(f"{' or '.join(norms)} radius, in units of the input", end),
        Axis(_SHARE, 100.0),
        about=f"The larger the radius, the fewer inputs are certified. {'; '.join(said)}.",
        name=name,
        title="Right and certified, against radius",
    )


def _steps(table: CertificateTable, end: float) -> list[tuple[float, float]]:
    """Return the certified shares at so many radii: between two of them at least the second's."""
    held = table.certified()
    radii = np.unique(np.concatenate([[0.0], held[held > 0]]))
    if len(radii) > _FINE:
        radii = np.linspace(0.0, float(radii[-1]), _FINE)
    shares = [100 * float(np.mean(held >= radius)) for radius in radii]
    return [*zip(radii.tolist(), shares, strict=True), (float(radii[-1]), 0.0)]


def attacked_accuracy(
    table: AttackTable, certificates: Sequence[CertificateTable], name: str = "attacked"
) -> str:
    """Draw the share that can still be right against attack size.

    There is a line for each attack; certified: dashed.

    The lines are 1 - wrong: an abstention refutes nothing. Filled down to what was answered rightly
    under all attacks.
    """
    clean, lines, said = table.shares("none", 0.0), [], []
    for attack in table.attacks:
        found = [(s, table.shares(attack, s)) for s in table.sizes if table.has(attack, s)]
        left = [(s, 1 - shares.wrong) for s, shares in [(0.0, clean), *found]]
        points = [(s, 100 * share) for s, share in left]
        lines.append(Line(attack, points, dots=True))
        percents = [f"{percent(share, 1, up=True)} % at {exact(s)}" for s, share in left]
        said.append(f"{attack}: {', '.join(percents)}")
    if table.place.random:
        worst = [(0.0, clean), *((size, table.worst(size)) for size in table.sizes)]
        upper = [(size, 100 * (1 - shares.wrong)) for size, shares in worst]
        below = [100 * shares.right for _, shares in worst]
        lines.insert(0, Line("not answered, under one of them at least", upper, below=below))
    shown = grid(table, certificates, attrgetter("words"))
    for place, column in enumerate(shown.header[5:], start=5):
        at = {float(row[0]): float(row[place]) for row in shown.rows}
        lines.append(Line(column, list(at.items()), quiet=True, dots=True))
    end = 1.05 * max(table.sizes, default=1.0)
    return chart(
        lines,
        Axis(f"{norm_name(table.norm)} size of the attack", end),
        Axis(_SHARE, 100.0),
        about=f"Not refuted under attack. {'; '.join(said)}.",
        name=name,
        title="Not refuted under attack, against its size",
    )


def privacy_spent(curve: Sequence[tuple[int, float]], delta: float, name: str = "spent") -> str:
    """Epsilon against training step. curve: finite, ends above 0."""
    points = [(0.0, 0.0), *((float(step), epsilon) for step, epsilon in curve)]
    steps, last = points[-1]
    return chart(
        [Line(f"epsilon at delta = {delta:g}", points)],
        Axis("step", steps),
        Axis("epsilon", 1.05 * last),
        about=f"Rises with every step, to {format_epsilon(last)} after {steps:,.0f} steps.",
        name=name,
        title="Privacy spent, against step",
    )
