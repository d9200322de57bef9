"""The report's charts: certified accuracy, accuracy under attack, epsilon against step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from dpdist.attacks.reading import AttackTable
from dpdist.base.rounding import exact, percent
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.radii import norm_name
from dpdist.privacy.guarantee import format_epsilon
from dpdist.reports.attacks import grid
from dpdist.reports.charts import Axis, Line, chart

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
    """What is certified at so many radii: between two of them at least what is at the second."""
    held = table.certified()
    radii = np.unique(np.concatenate([[0.0], held[held > 0]]))
    if len(radii) > _FINE:
        radii = np.linspace(0.0, float(radii[-1]), _FINE)
    shares = [100 * float(np.mean(held >= radius)) for radius in radii]
    return [*zip(radii.tolist(), shares, strict=True), (float(radii[-1]), 0.0)]


def attacked_accuracy(
    table: AttackTable, certificates: Sequence[CertificateTable], name: str = "attacked"
) -> str:
    """What can still be right against attack size, a line for each attack; certified: dashed.

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
