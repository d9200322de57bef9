"""The report's pictures, as PNG bytes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

from dpdist.attacks.reading import AttackTable
from dpdist.certification.reading import CertificateTable
from dpdist.privacy import mechanisms
from dpdist.reports.attacks import grid

matplotlib.use("Agg")

from matplotlib.figure import Figure

_COLOURS = ("#0b5cad", "#c1440e", "#3a7d44", "#7b4fa3", "#8a6d00")

Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]

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
    """What can still be right against attack size, a line for each attack; certified: dashed.

    The lines are 1 - wrong: an abstention refutes nothing. Filled down to what was answered rightly
    under all attacks.
    """
    figure, axes = _axes()
    clean = table.shares("none", 0.0)
    for name, colour in zip(table.attacks, _COLOURS * len(table.attacks), strict=False):
        found = [clean, *(table.shares(name, s) for s in table.sizes if table.has(name, s))]
        sizes = [0.0, *(s for s in table.sizes if table.has(name, s))]
        heights = [100 * (1 - shares.wrong) for shares in found]
        axes.plot(sizes, heights, "o-", color=colour, linewidth=1.5, markersize=3, label=name)
    sizes, worst = [0.0, *table.sizes], [clean, *(table.worst(size) for size in table.sizes)]
    if table.place.random:
        upper = [100 * (1 - shares.wrong) for shares in worst]
        lower = [100 * shares.right for shares in worst]
        axes.fill_between(sizes, lower, upper, color="#dddddd", label="abstained", linewidth=0)
    shown = grid(table, certificates)
    for place, name in enumerate(shown.header[5:], start=5):
        at = {float(row[0]): float(row[place]) for row in shown.rows}
        line = {"color": "#777777", "linewidth": 1, "markersize": 3, "label": name}
        axes.plot(list(at), list(at.values()), "--", **line)
    axes.set_xlim(0, max(sizes) * 1.05)
    axes.set_ylim(0, 100)
    axes.set_xlabel(f"{table.norm} size (input units)")
    axes.set_ylabel("not refuted (lines), certified (dashed), %")
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


def noise_scales(delta: float, sensitivity: float, form: str) -> bytes:
    """Noise of one release against epsilon, a line for each Gaussian mechanism (HGM, IJCAI 2019,
    Figure 1). form: png, pdf or svg."""
    epsilon = np.geomspace(0.05, 10, 200)
    proved = epsilon <= 1
    classical = mechanisms.classical_gaussian_formula(epsilon, delta, sensitivity)
    extended = mechanisms.extended_gaussian_scale(epsilon, delta, sensitivity)
    analytic = mechanisms.analytic_gaussian_scale(epsilon, delta, sensitivity)
    figure, axes = _axes()
    axes.plot(epsilon[proved], classical[proved], "C1", label="classical Gaussian")
    axes.plot(epsilon[~proved], classical[~proved], "C1:", label="its formula where unproved")
    axes.plot(epsilon, extended, "C0", label="extended / HGM")
    axes.plot(epsilon, analytic, "C2", label="analytic Gaussian")
    axes.set(xscale="log", yscale="log", xlabel="epsilon", ylabel="noise standard deviation")
    axes.set_title(f"Noise for one release, delta {delta:g}")
    axes.legend()
    return png(figure, form)


def roc_curves(panels: Sequence[tuple[str, Curves, Curves]], form: str = "png") -> bytes:
    """ROC curves of membership attacks on logarithmic axes, a panel for each bank: its title, the
    curves and the ceilings (dashed) by name, as false and true positive rates."""
    figure, found = axes_of(len(panels))
    for axes, (title, curves, ceilings) in zip(found, panels, strict=True):
        for (name, (false, true)), colour in zip(curves.items(), itertools.cycle(_COLOURS)):
            axes.plot(false, true, color=colour, linewidth=1.2, label=name)
        for name, (false, true) in ceilings.items():
            axes.plot(false, true, "--", color="#777777", linewidth=1, label=name)
        axes.plot([1e-4, 1], [1e-4, 1], color="#cccccc", linewidth=1)
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.05), title=title)
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return png(figure, form)


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


def png(figure: Figure, form: str = "png") -> bytes:
    """The picture as a file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form)
    return buffer.getvalue()
