"""Line charts as SVG: small, readable by machines, in the reader's own colours, light or dark.

A picture inside a page takes its colours from the page (`style`); one that stands alone carries
them. Lines differ by dashes as well as by colour.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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
