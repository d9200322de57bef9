"""What `equal_classes` of PATE's spreading does where classes are unequal: scikit-learn's digits.

    python papers/pate/spreading.py [--draws 20] [--quick]

The digits 5 to 9 are thinned out to a share of the others. --asked of all inputs, drawn evenly, get
their label, one in ten of them a wrong one; the labels spread over all others. Printed are the
labels right, in %, with and without `equal_classes`: of all inputs, and of the rare classes; mean
over draws of the thinning, the questions and the wrong answers, with Student's interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import parse_arguments
from scipy import stats
from sklearn.datasets import load_digits

from dpdist.methods.pate import SpreadingRecipe, similarity_graph
from dpdist.reports.compare import markdown_table

SHARES = (1.0, 0.5, 0.3, 0.1)
CLASSES, WRONG = 10, 0.1


def thinned(share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, 64) and labels (N,), the upper half of the classes at that share."""
    points, labels = load_digits(return_X_y=True)
    kept = (labels < CLASSES // 2) | (rng.random(len(labels)) < share)
    return points[kept] / 16, labels[kept]


def told_of(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """These labels, some of them wrong by one to nine classes."""
    wrong = rng.random(len(labels)) < WRONG
    return np.where(wrong, (labels + rng.integers(1, CLASSES, len(labels))) % CLASSES, labels)


def right(share: float, asked: int, seed: int) -> np.ndarray:
    """Shares right of all inputs and of the rare classes (columns), without equal_classes and with
    (rows): float64 (2, 2).
    """
    rng = np.random.default_rng(seed)
    points, labels = thinned(share, rng)
    places = rng.choice(len(labels), asked, replace=False)
    told, graph = told_of(labels[places], rng), similarity_graph(points, 10)
    hits = [
        SpreadingRecipe(equal_classes=equal).spread_labels(graph, places, told, CLASSES) == labels
        for equal in (False, True)
    ]
    return np.array([[one.mean(), one[labels >= CLASSES // 2].mean()] for one in hits])


def lines(asked: int, draws: int) -> Iterator[list[str]]:
    """Of the table, head first."""
    yield [
        "share of the rare",
        "all: without",
        "with",
        "difference",
        "rare: without",
        "with",
        "difference",
    ]
    for share in SHARES:
        found = 100 * np.array([right(share, asked, seed) for seed in range(draws)])
        cells = [f"{share:g}"]
        for column in (0, 1):
            gain = found[:, 1, column] - found[:, 0, column]
            half = stats.t.ppf(0.975, draws - 1) * gain.std(ddof=1) / draws**0.5
            cells += [f"{mean:.1f}" for mean in found[:, :, column].mean(axis=0)]
            cells += [f"{gain.mean():+.1f} [{gain.mean() - half:+.1f}, {gain.mean() + half:+.1f}]"]
        yield cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--asked", type=int, default=100)
    parser.add_argument("--draws", type=int, default=20)
    given = parse_arguments(parser, {"asked": 20, "draws": 2})
    print(markdown_table(list(lines(given.asked, given.draws))))


if __name__ == "__main__":
    main()
