"""Plots of trainings, certificates and searches: matplotlib axes in, axes out.

They show public and released values only. Without axes they draw into the current ones of pyplot,
so a notebook shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.core.errors import UserError

if TYPE_CHECKING:
    from dpdist.certification.table import CertificateTable
    from dpdist.privacy.plan import PrivacyPlan
    from dpdist.runs.accounting import PublishedTrial

_POINTS = 200  # of a curve of certified accuracy


def _axes(given: Any) -> Any:
    if given is not None:
        return given
    from matplotlib import pyplot

    return pyplot.gca()


def plot_history(
    columns: Mapping[str, Sequence[Any]], names: Sequence[str], plan: PrivacyPlan, ax: Any = None
) -> Any:
    """Draw columns of a training's history against its steps; "epsilon" is that of the plan."""
    axes = _axes(ax)
    for name in names:
        if name == "epsilon":
            curve = plan.epsilon_curve()
            axes.plot([n for n, _ in curve], [e for _, e in curve], label=name)
            continue
        if name not in columns:
            known = ", ".join([*(each for each in columns if each != "step"), "epsilon"])
            raise UserError(f"plot: must be of {known}, got {name!r}")
        there = [
            (step, value)
            for step, value in zip(columns["step"], columns[name], strict=True)
            if value is not None
        ]
        marker = "o" if len(there) < len(columns["step"]) else None
        axes.plot([step + 1 for step, _ in there], [v for _, v in there], marker=marker, label=name)
    axes.set_xlabel("steps")
    if len(names) == 1:
        axes.set_ylabel(names[0].replace("_", " "))
    else:
        axes.legend()
    return axes


def plot_certificates(table: CertificateTable, ax: Any = None) -> Any:
    """Draw certified accuracy against the radius."""
    axes = _axes(ax)
    largest = float(np.max(table.size_if_correct(), initial=0.0))
    radii = np.linspace(0.0, largest * 1.05 or 1.0, _POINTS)
    axes.plot(radii, [table.certified_accuracy(radius) for radius in radii],
              label=f"{table.mode}, sigma {table.sigma:g}, n {table.n:,}")  # fmt: skip
    axes.set_xlabel(f"radius ({table.norm})")
    axes.set_ylabel("certified accuracy")
    axes.set_ylim(0, 1)
    axes.legend()
    return axes


def plot_trials(trials: Sequence[PublishedTrial], ax: Any = None) -> Any:
    """Draw the last score of each trial; the chosen one is marked, failed ones are left out."""
    axes = _axes(ax)
    scored = [(n, each) for n, each in enumerate(trials, 1) if each.scores and not each.failed]
    for chosen, marker in ((False, "o"), (True, "*")):
        some = [(n, each.scores[-1]) for n, each in scored if each.chosen is chosen]
        label = "chosen" if chosen else "other trials"
        axes.plot([n for n, _ in some], [s for _, s in some], marker, label=label)
    axes.set_xlabel("trial")
    axes.set_ylabel("score")
    axes.legend()
    return axes
