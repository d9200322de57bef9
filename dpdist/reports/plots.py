"""Plot trainings, certificates and searches; each function takes and returns matplotlib axes.

The plots show only public and released values. Without axes, they use the current axes of pyplot,
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

_POINTS = 200  # of a curve


def _axes(given: Any) -> Any:
    if given is not None:
        return given
    from matplotlib import pyplot

    return pyplot.gca()


def plot_history(
    columns: Mapping[str, Sequence[Any]], names: Sequence[str], plan: PrivacyPlan, ax: Any = None
) -> Any:
    """Plot columns of a training's history by step; "epsilon" is that of the plan."""
    axes = _axes(ax)
    for name in names:
        if name == "epsilon":
            curve = plan.epsilon_curve()
            axes.plot([n for n, _ in curve], [e for _, e in curve], label=name)
            continue
        if name not in columns:
            known = ", ".join([*(each for each in columns if each != "step"), "epsilon"])
            raise UserError(f"plot: must be one of {known}, got {name!r}")
        steps, values = columns["step"], columns[name]
        points = [(s + 1, v) for s, v in zip(steps, values, strict=True) if v is not None]
        marker = "o" if len(points) < len(steps) else None
        axes.plot([s for s, _ in points], [v for _, v in points], marker=marker, label=name)
    axes.set_xlabel("steps")
    if len(names) == 1:
        axes.set_ylabel(names[0].replace("_", " "))
    else:
        axes.legend()
    return axes


def plot_certificates(table: CertificateTable, ax: Any = None) -> Any:
    """Plot certified accuracy by radius."""
    axes = _axes(ax)
    largest = float(np.max(table.size_if_correct(), initial=0.0))
    radii = np.linspace(0.0, largest * 1.05 or 1.0, _POINTS)
    label = f"{table.mode}, sigma {table.sigma:g}, n {table.n:,}"
    axes.plot(radii, [table.certified_accuracy(radius) for radius in radii], label=label)
    axes.set_xlabel(f"radius ({table.norm})")
    axes.set_ylabel("certified accuracy")
    axes.set_ylim(0, 1)
    axes.legend()
    return axes


def plot_trials(trials: Sequence[PublishedTrial], ax: Any = None) -> Any:
    """Plot the last score of each trial that did not fail; the chosen one is marked."""
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
