"""Create matplotlib figures in one style, render them as files, and plot ROC curves."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = ("#0b5cad", "#c1440e", "#3a7d44", "#7b4fa3", "#8a6d00")

_UNDATED: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None},
}
RocCurves = Mapping[str, tuple[np.ndarray, np.ndarray]]


def plot_roc_curves(title: str, curves: RocCurves, ceilings: RocCurves) -> bytes:
    """Return a PNG file of ROC curves of membership attacks on logarithmic axes.

    curves, ceilings (dashed): false and true positive rates by name.
    """
    figure, (axes,) = make_panels(1)
    for (name, (false, true)), color in zip(curves.items(), itertools.cycle(COLORS)):
        axes.plot(false, true, color=color, linewidth=1.2, label=name)
    for name, (false, true) in ceilings.items():
        axes.plot(false, true, "--", color="#777777", linewidth=1, label=name)
    axes.plot([1e-4, 1], [1e-4, 1], color="#cccccc", linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.05), title=title)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    return render_figure(figure)


def make_panels(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure and the axes of its panels, which are next to each other."""
    figure = Figure(figsize=(5.2 * panels, 4.2), dpi=110, layout="constrained")
    row = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in row:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, row


def render_figure(figure: Figure, file_format: str = "png") -> bytes:
    """Return a figure as the bytes of a file, without a date, so that they are reproducible."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dpdist"}):
        figure.savefig(buffer, format=file_format, metadata=_UNDATED.get(file_format))
    return buffer.getvalue()
