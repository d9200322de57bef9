"""Figures that commands write into files of their own, by matplotlib.

The report's own charts are in `dpdist.reports.charts`.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from dpdist.core.errors import UserError
from dpdist.core.files import quoted

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLORS = ("#0b5cad", "#c1440e", "#3a7d44", "#7b4fa3", "#8a6d00")

_DATES: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # none
RocCurves = Mapping[str, tuple[np.ndarray, np.ndarray]]


def plot_roc_curves(
    panels: Sequence[tuple[str, RocCurves, RocCurves]],
) -> bytes:
    """ROC curves of membership attacks on logarithmic axes, a panel for each bank: its title, the
    curves and the ceilings (dashed) by name, as false and true positive rates."""
    figure, found = make_panels(len(panels))
    for axes, (title, curves, ceilings) in zip(found, panels, strict=True):
        for (name, (false, true)), color in zip(curves.items(), itertools.cycle(_COLORS)):
            axes.plot(false, true, color=color, linewidth=1.2, label=name)
        for name, (false, true) in ceilings.items():
            axes.plot(false, true, "--", color="#777777", linewidth=1, label=name)
        axes.plot([1e-4, 1], [1e-4, 1], color="#cccccc", linewidth=1)
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.05), title=title)
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return render_figure(figure)


def make_panels(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with that many panels beside one another, in the house style."""
    figure = Figure(figsize=(5.2 * panels, 4.2), dpi=110, layout="constrained")
    found = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in found:
        _apply_style(axes)
    return figure, found


def _apply_style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)


def render_figure(figure: Figure, file_format: str = "png") -> bytes:
    """Return the picture as a file's bytes, the same ones each time.

    It has no date but that of SOURCE_DATE_EPOCH. Raises UserError where that is no number of
    seconds.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if epoch and not re.fullmatch(r"[0-9]{1,11}", epoch):
        raise UserError(
            f"SOURCE_DATE_EPOCH: must be a whole number of seconds, got {quoted(epoch)}; unset it"
        )
    buffer = io.BytesIO()
    dated = None if "SOURCE_DATE_EPOCH" in os.environ else _DATES.get(file_format)
    with matplotlib.rc_context({"svg.hashsalt": "dpdist"}):
        figure.savefig(buffer, format=file_format, metadata=dated)
    return buffer.getvalue()
