"""What one run can show: lower bounds of a plain Gaussian mechanism, by canaries and true epsilon.

Each canary has a coordinate of its own; the 4 % most extreme scores on either side are guessed,
confidence 95 %, delta 1e-5. Columns: by counting (no assumption about the mechanism) and by
trade-off curves (the mechanism is Gaussian), mean of the runs and how many exceeded the truth.

    python benchmarks/quality/one_run_audits.py [--runs 40] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import parse_arguments

from dpdist.privacy.audit_bounds import OneRunGuesses, mu_to_epsilon, one_run_mu

DELTA = 1e-5
ROWS = [(0.5, 1_000), (0.5, 5_000), (1.0, 1_000), (1.0, 5_000), (2.0, 1_000), (2.0, 5_000)]
# Means of forty runs of a prototype written apart from this project's code: counting, curves.
REFERENCE = [(0.61, 0.85), (0.88, 1.21), (1.72, 2.56), (2.03, 2.87), (3.10, 4.81), (4.20, 6.40)]


def row(mu: float, canaries: int, runs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lower bounds (runs,) by counting and by curves."""
    rng = np.random.default_rng([seed, canaries, round(100 * mu)])
    guesses = round(0.08 * canaries)
    audits = []
    for _ in range(runs):
        coins = rng.random(canaries) < 0.5
        audits.append(
            OneRunGuesses.from_scores(mu * coins + rng.standard_normal(canaries), coins, guesses)
        )
    found = one_run_mu(canaries, guesses, [audit.correct for audit in audits])
    counted = [audit.epsilon(DELTA) for audit in audits]
    return np.array(counted), np.array([mu_to_epsilon(mu, DELTA) for mu in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    runs = parse_arguments(parser, {"runs": 2}).runs
    began = time.perf_counter()
    print("| true epsilon (mu) | canaries | counting | curves | reference | exceeded the truth |")
    print("|---|---|---|---|---|---|")
    for (mu, canaries), reference in zip(ROWS, REFERENCE, strict=True):
        truth = mu_to_epsilon(mu, DELTA)
        found = row(mu, canaries, runs)
        means = " | ".join(f"{values.mean():.2f}" for values in found)
        above = ", ".join(str(int((values > truth).sum())) for values in found)
        print(
            f"| {truth:.3f} ({mu:g}) | {canaries:,} | {means} | {reference[0]:.2f}, "
            f"{reference[1]:.2f} | {above} of {runs} |"
        )
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
