"""Several runs side by side: privacy claimed and proved, accuracy clean, certified and attacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpdist.base.rounding import exact, percent
from dpdist.base.storage import write_result
from dpdist.certification.radii import norm_name
from dpdist.privacy.guarantee import format_epsilon
from dpdist.reports.facts import Facts

NORMS = {norm: norm_name(norm) for norm in ("l2", "linf")}
SIZES = {"l2": (0.1, 0.25, 0.5), "linf": (0.003, 0.01, 0.02)}  # shown where none are asked for
_COLOURS = ("#0b5cad", "#c1440e", "#3a7d44", "#7b4fa3", "#8a6d00", "#444444")


@dataclass(frozen=True)
class Curve:
    """Certified sizes of a run's inputs by one certificate, 0 where the answer is wrong.

    title: what is certified by what. sizes: (N,) in input units. line: how it is drawn, if at all.
    """

    run: str
    title: str
    norm: str
    sizes: np.ndarray
    line: str | None

    def accuracy(self, size: float) -> float:
        """Certified accuracy at a size above 0."""
        return float(np.mean(self.sizes >= size))


def curves(facts: Facts) -> list[Curve]:
    """Every certificate of a run in both norms, from its finished tables."""
    return [
        Curve(
            facts.folder.name, found.title, norm,
            np.maximum(found.certified(table.label), 0.0), found.line,
        )
        for table in facts.tables
        for norm in NORMS
        for found in table.kind.sizes_in(table.table, norm, math.prod(facts.input_shape))
    ]  # fmt: skip


def privacy_grid(runs: Sequence[Facts]) -> list[list[str]]:
    """Header and one row for each run: clean accuracy, epsilon claimed, proved and audited (the
    largest lower bound), verdict."""
    header = ["run", "clean, %", "claimed epsilon", "proved epsilon", "audited epsilon", "verdict"]
    rows = [header]
    for facts in runs:
        clean = "" if facts.evaluation is None else percent(facts.evaluation["accuracy"])
        claim = facts.claim
        claimed, verdict = "none", "nothing claimed"
        if claim is not None and claim.claimed is not None:
            claimed = format_epsilon(claim.claimed.epsilon)
            verdict = f"{claim.verdict}: {claim.reason}"
        elif math.isfinite(facts.guarantee.epsilon):
            verdict = "proved"
        proved = format_epsilon(facts.guarantee.epsilon)
        audits = [audited for audited in facts.audits if not audited.exploratory]
        strongest = max(audits, key=lambda audited: audited.epsilon, default=None)
        audited = "none" if strongest is None else strongest.short
        rows.append([facts.folder.name, clean, claimed, proved, audited, verdict])
    return rows


def certified_grid(runs: Sequence[Facts], norm: str, sizes: Sequence[float]) -> list[list[str]]:
    """Header and rows: certified accuracy in % of each run by each certificate at the sizes."""
    rows = [["run", f"certificate, {NORMS[norm]}", *map(exact, sizes)]]
    for facts in runs:
        for curve in curves(facts):
            if curve.norm == norm:
                shares = [percent(curve.accuracy(size), 1) for size in sizes]
                rows.append([curve.run, curve.title, *shares])
    return rows


def attacked_grid(runs: Sequence[Facts], norm: str) -> list[list[str]]:
    """Header and rows in %: what became of each run's inputs at each size, under all its attacks.

    right: under each of them; wrong: another class under one at least; abstained: the others.
    """
    rows = [["run", "attacked", f"{NORMS[norm]} size", "attacks", "right", "abstained", "wrong"]]
    for facts in runs:
        for table in facts.attacks:
            if table.norm != norm:
                continue
            name, of = facts.folder.name, table.classifier
            rows.append([name, of, "0", "none", *table.shares("none", 0.0).percent()])
            for size in table.sizes:
                done = ", ".join(a for a in table.attacks if table.has(a, size))
                rows.append([name, of, exact(size), done, *table.worst(size).percent()])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A grid as a table of Markdown."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def picture(runs: Sequence[Facts]) -> bytes:
    """PNG, a panel for each norm: certified accuracy (lines) and accuracy under attack (dots)."""
    from dpdist.reports.figures import axes_of, png

    figure, panels = axes_of(len(NORMS))
    for axes, (norm, title) in zip(panels, NORMS.items(), strict=True):
        widest = 0.0
        for facts, colour in zip(runs, _COLOURS * len(runs), strict=False):
            mine = [curve for curve in curves(facts) if curve.norm == norm and curve.line]
            for curve in {curve.line: curve for curve in mine}.values():
                sizes = np.sort(curve.sizes[curve.sizes > 0])
                if len(sizes) == 0:
                    continue
                shares = 100 * np.arange(len(sizes), 0, -1) / len(curve.sizes)
                axes.plot(
                    sizes, shares, curve.line, color=colour, linewidth=1.4,
                    label=f"{facts.folder.name}, {curve.title}",
                )  # fmt: skip
                widest = max(widest, float(sizes[-1]))
            for table in facts.attacks:
                if table.norm == norm:
                    worst = [100 * (1 - table.worst(size).wrong) for size in table.sizes]
                    axes.plot(table.sizes, worst, "o", color=colour, markersize=4)
                    widest = max(widest, table.sizes[-1])
        axes.set_xlim(0, widest * 1.05 or 1)
        axes.set_ylim(0, 100)
        axes.set_xlabel(f"{title} size (input units)")
    panels[0].set_ylabel("certified (lines), not refuted by attack (dots), %")
    panels[-1].legend(frameon=False, fontsize=6)
    return png(figure)


def write_picture(runs: Sequence[Facts], path: Path) -> None:
    """`picture` into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, picture(runs))
