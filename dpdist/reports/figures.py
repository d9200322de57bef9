"""The report's pictures, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
import numpy as np

from dpdist.reports.attacks import AttackTable, grid
from dpdist.reports.facts import CertificateTable

matplotlib.use("Agg")

from matplotlib.figure import Figure

_COLOURS = ("#0b5cad", "#c1440e", "#3a7d44", "#7b4fa3", "#8a6d00")

_NORMS = {"l1": "L1", "l2": "L2", "linf": "L-infinity"}


def certified_accuracy(tables: Sequence[CertificateTable], clean: float | None) -> bytes:
    """Certified accuracy against radius, a line for each certification; clean accuracy dashed."""
    figure, axes = _axes()
    widest = 0.0
    for table, colour in zip(tables, _COLOURS * len(tables), strict=False):
        radii = np.unique(np.concatenate([[0.0], table.radius[table.correct]]))
        heights = [100 * table.certified_accuracy(radius) for radius in radii]
        # A step function: what holds at a radius holds at every smaller one.
        axes.step(
            np.append(radii, radii[-1]),
            np.append(heights, 0.0),
            where="pre",
            color=colour,
            label=table.name,
        )
        widest = max(widest, float(radii[-1]))
    if clean is not None:
        axes.axhline(100 * clean, color="#777777", linestyle="--", linewidth=1, label="clean")
    axes.set_xlim(0, widest * 1.05 or 1)
    axes.set_ylim(0, 100)
    norms = sorted({_NORMS.get(table.norm, table.norm) for table in tables})
    axes.set_xlabel(f"{' or '.join(norms)} radius (input units)")
    axes.set_ylabel("certified accuracy, %")
    axes.legend(frameon=False)
    return png(figure)


def attacked_accuracy(table: AttackTable, certificates: Sequence[CertificateTable]) -> bytes:
    """Accuracy against attack size, a line for each attack; certified accuracy dashed."""
    shown = grid(table, certificates)
    sizes = [float(row[0]) for row in shown.rows]
    figure, axes = _axes()
    columns = [name for name in shown.header[1:] if name not in ("worst", "abstained")]
    for name, colour in zip(columns, _COLOURS * len(columns), strict=False):
        place = shown.header.index(name)
        points = [
            (size, float(row[place]))
            for size, row in zip(sizes, shown.rows, strict=True)
            if row[place]
        ]
        certified = name not in table.attacks
        axes.plot(
            *zip(*points, strict=True),
            "--" if certified else "o-",
            color="#777777" if certified else colour,
            linewidth=1 if certified else 1.5,
            markersize=3,
            label=name,
        )
    axes.set_xlim(0, max(sizes) * 1.05)
    axes.set_ylim(0, 100)
    axes.set_xlabel(f"{table.norm} size (input units)")
    axes.set_ylabel("accuracy, %")
    axes.legend(frameon=False)
    return png(figure)


def privacy_spent(curve: Sequence[tuple[int, float]], delta: float) -> bytes:
    """Epsilon against training step."""
    figure, axes = _axes()
    steps, epsilons = zip(*curve, strict=True)
    axes.plot(steps, epsilons, color=_COLOURS[0])
    axes.plot(steps[-1:], epsilons[-1:], "o", color=_COLOURS[0])
    axes.annotate(
        f"{epsilons[-1]:.3g}", (steps[-1], epsilons[-1]), (-8, -14), textcoords="offset points",
        ha="right",
    )  # fmt: skip
    axes.set_xlim(0, steps[-1] * 1.03)
    axes.set_ylim(0, max(epsilons) * 1.08 if np.isfinite(max(epsilons)) else 1)
    axes.set_xlabel("step")
    axes.set_ylabel(f"epsilon at delta = {delta:g}")
    return png(figure)


def loss_landscape(alphas: Sequence[float], losses: Sequence[float]) -> bytes:
    """Mean loss along a filter-normalised random direction through the parameters."""
    figure, axes = _axes()
    axes.plot(alphas, losses, color=_COLOURS[0])
    axes.set_xlabel("alpha: distance along a filter-normalised random direction")
    axes.set_ylabel("mean loss on test data")
    return png(figure)


def _axes():
    figure = Figure(figsize=(6.4, 3.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    _house_style(axes)
    return figure, axes


def axes_of(panels: int):
    """A figure with that many panels beside one another, in the house style."""
    figure = Figure(figsize=(5.2 * panels, 4.2), dpi=110, layout="constrained")
    found = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in found:
        _house_style(axes)
    return figure, found


def _house_style(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)


def png(figure: Figure) -> bytes:
    """The picture as a file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
