"""HGM, Figure 1: the noise of one release against epsilon, a line for each Gaussian mechanism.

python papers/secure-sgd/mechanisms.py mechanisms.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import parse_arguments, scratch_folder

from dpdist.privacy import mechanisms
from dpdist.reports.figures import make_panels, render_figure

DELTA, SENSITIVITY = 1e-5, 1.0


def main() -> None:
    """Draw the figure into the file that the command names, a .png, .pdf or .svg."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", nargs="?", type=Path, help="a .png, .pdf or .svg")
    path = parse_arguments(parser, {"path": scratch_folder() / "mechanisms.png"}).path
    if path is None:
        parser.error("PATH is needed")
    epsilon = np.geomspace(0.05, 10, 200)
    proved = epsilon <= 1
    classical = mechanisms.classical_gaussian_formula(epsilon, DELTA, SENSITIVITY)
    figure, (axes,) = make_panels(1)
    axes.plot(epsilon[proved], classical[proved], "C1", label="classical Gaussian")
    axes.plot(epsilon[~proved], classical[~proved], "C1:", label="its formula where unproved")
    extended = mechanisms.extended_gaussian_scale(epsilon, DELTA, SENSITIVITY)
    axes.plot(epsilon, extended, "C0", label="extended / HGM")
    analytic = mechanisms.analytic_gaussian_scale(epsilon, DELTA, SENSITIVITY)
    axes.plot(epsilon, analytic, "C2", label="analytic Gaussian")
    axes.set(xscale="log", yscale="log", xlabel="epsilon", ylabel="noise standard deviation")
    axes.set_title(f"Noise for one release, delta {DELTA:g}")
    axes.legend()
    path.write_bytes(render_figure(figure, path.suffix[1:]))


if __name__ == "__main__":
    main()
