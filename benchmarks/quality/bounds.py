"""Radius in units of sigma against the share of hits, by four bounds at an equal number of draws.

    python benchmarks/quality/bounds.py                                  computes, into bounds.jsonl
    python benchmarks/quality/bounds.py --figure benchmarks/results/pictures/bounds.png

Nothing is drawn at random: each bound is a function of hits and draws. Clopper-Pearson and
Hoeffding are of a number of draws fixed in advance; anytime holds at all numbers of draws together;
target is the least share at which the test of one radius passes at its last look, where no look
before has decided.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import RESULTS_FOLDER, parse_arguments
from scipy.special import ndtr

from dpdist.certification.noise import gaussian_l2_radius
from dpdist.certification.sequential import anytime_lower, compute_thresholds, planned_looks
from dpdist.core.binomial import clopper_pearson_lower, hoeffding_lower

RESULTS = RESULTS_FOLDER / "bounds.jsonl"
DRAWS, ALPHA, BATCH = (1_000, 10_000, 100_000), 0.001, 250
SHARES = (0.55, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
BOUNDS = {
    "Clopper-Pearson": clopper_pearson_lower, "Hoeffding": hoeffding_lower,
    "anytime": anytime_lower,
}  # fmt: skip
COLORS = dict(zip((*BOUNDS, "target"), ("#0b5cad", "#c1440e", "#3a7d44", "#7b4fa3"), strict=True))


def rows(draws: int) -> list[dict[str, Any]]:
    """Return a row for each share and bound: draws, hits, bound, radius / sigma; 0 abstains."""
    found: list[dict[str, Any]] = []
    for share in SHARES:
        hits = round(share * draws)
        for name, bound in BOUNDS.items():
            lower = float(bound(hits, draws, ALPHA))
            radius = float(gaussian_l2_radius(lower, 1.0)) if lower > 0.5 else 0.0
            found.append({"draws": draws, "hits": hits, "bound": name, "radius": radius})
    looks = planned_looks(draws, min(BATCH, draws))
    for radius in np.arange(0.25, 3.51, 0.25):
        p0 = float(ndtr(radius))
        needed = compute_thresholds(p0, ALPHA, looks).critical_counts[-1]
        if needed <= draws:
            found.append({"draws": draws, "hits": needed, "bound": "target", "radius": radius})
    return found


def figure(found: list[dict[str, Any]]) -> bytes:
    """PNG, a panel for each number of draws."""
    from dpdist.reports.figures import make_panels, render_figure  # its fonts are sought once

    shown = sorted({row["draws"] for row in found})
    picture, panels = make_panels(len(shown))
    for axes, draws in zip(panels, shown, strict=True):
        for name, color in COLORS.items():
            mine = [row for row in found if (row["draws"], row["bound"]) == (draws, name)]
            missed = [1 - row["hits"] / draws for row in mine]
            line = "o" if name == "target" else ".-"
            axes.plot(np.maximum(missed, 1e-4), [r["radius"] for r in mine], line,
                      color=color, linewidth=1.2, markersize=4, label=name)  # fmt: skip
        axes.set(xscale="log", xlim=(0.5, 8e-5), title=f"n = {draws:,}, alpha = {ALPHA:g}")
        axes.set_xlabel("share of draws of another class (none: at 0.0001)")
    panels[0].set_ylabel("certified radius / sigma")
    panels[0].legend(frameon=False, fontsize=8)
    return render_figure(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, nargs="+", default=list(DRAWS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, help="draw what the results hold, and stop")
    options = parse_arguments(parser, {"draws": [2000]}, ["results"])
    if options.figure is not None:
        found = [json.loads(line) for line in options.results.read_text().splitlines()]
        options.figure.write_bytes(figure(found))
        return
    found = [row for draws in options.draws for row in rows(draws)]
    options.results.write_text("".join(json.dumps(row) + "\n" for row in found))
    print("| n | hits | Clopper-Pearson | Hoeffding | anytime |\n|---|---|---|---|---|")
    for draws in options.draws:
        for share in SHARES:
            hits = round(share * draws)
            cells = [r["radius"] for r in found if (r["draws"], r["hits"]) == (draws, hits)
                     and r["bound"] in BOUNDS]  # fmt: skip
            print(f"| {draws:,} | {hits:,} | " + " | ".join(f"{c:.3f}" for c in cells) + " |")


if __name__ == "__main__":
    main()
