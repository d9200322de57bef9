"""DPlis' toy example (Equation 1): a flat minimum and a sharp one, by private SGD with smoothing
and without.

    loss = F_u w_u + F_v w_v,  F_u = S(r_u / 5 - 5 / r_u),  F_v = S(2 r_v / 5 - 5 / (2 r_v))

r_u and r_v are the distances to the flat minimum u and the sharp one v, w the softmax of -r / 2, S
the logistic function. Not printed in the paper, and chosen here: where u and v lie, the start, the
learning rate, the noise, the steps, and how much is smoothed.

    python papers/dplis/toy.py [--out FILE] [--quick]     # FILE: the six pictures
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import parse_arguments
from scipy.special import expit

FLAT, SHARP = np.array([-8.0, 0.0]), np.array([8.0, 0.0])
START, CLIP, NOISE, RATE, STEPS, DRAWS = 2.0, 1.0, 0.1, 5.0, 400, 10
RUNS = 1000


def _parts(theta: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return distances (..., 2), directions and losses for the flat and the sharp minimum."""
    apart = np.stack([theta - FLAT, theta - SHARP], -2)
    distance = np.maximum(np.linalg.norm(apart, axis=-1), 1e-9)
    scaled = distance * [1 / 5, 2 / 5]
    return distance, apart / distance[..., None], expit(scaled - 1 / scaled)


def loss(theta: np.ndarray) -> np.ndarray:
    """Return the losses (...) of parameters (..., 2)."""
    distance, _, parts = _parts(theta)
    weight = expit((distance[..., 1] - distance[..., 0]) / 2)
    return weight * parts[..., 0] + (1 - weight) * parts[..., 1]


def gradient(theta: np.ndarray) -> np.ndarray:
    """Return the gradients (..., 2) at parameters (..., 2)."""
    distance, toward, parts = _parts(theta)
    scale = np.array([1 / 5, 2 / 5])
    slopes = parts * (1 - parts) * (scale + 1 / (scale * distance**2))
    weight = expit((distance[..., 1] - distance[..., 0]) / 2)
    tilt = weight * (1 - weight) * (parts[..., 0] - parts[..., 1]) / 2
    pulls = np.stack([weight * slopes[..., 0] - tilt, (1 - weight) * slopes[..., 1] + tilt], -1)
    return (pulls[..., None] * toward).sum(-2)


def train(smoothing: float, runs: int = RUNS, seed: int = 0) -> np.ndarray:
    """Return where trainings end, (runs, 2); `smoothing` is the noise's standard deviation."""
    rng = np.random.default_rng(seed)
    theta = START * rng.standard_normal((runs, 2))
    for _ in range(STEPS):
        if smoothing:
            moved = theta + smoothing * rng.standard_normal((DRAWS, runs, 2))
            found = gradient(moved).mean(0)
        else:
            found = gradient(theta)
        norm = np.linalg.norm(found, axis=1, keepdims=True)
        found = found * np.minimum(1, CLIP / np.maximum(norm, 1e-12))
        theta = theta - RATE * (found + NOISE * CLIP * rng.standard_normal((runs, 2)))
    return theta


def nearer_flat(theta: np.ndarray) -> float:
    """Return the share of parameters that are nearer to the flat minimum."""
    distance, _, _ = _parts(theta)
    return float((distance[:, 0] < distance[:, 1]).mean())


def draw(ends: dict[str, np.ndarray], path: Path) -> None:
    """Draw the loss, where trainings end, and their losses."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(ends), figsize=(4 * len(ends), 6.5))
    side = np.linspace(-20, 20, 161)
    grid = np.stack(np.meshgrid(side, side), -1)
    for (name, theta), (above, below) in zip(ends.items(), axes.T, strict=True):
        above.contourf(side, side, loss(grid), 20, cmap="Blues")
        above.scatter(*theta[:100].T, s=6, color="C1")
        above.set(title=f"{name}: {nearer_flat(theta):.0%} nearer the flat")
        above.set(xlim=(-20, 20), ylim=(-20, 20))
        below.hist(loss(theta), 40, range=(0, 1), color="C1")
        below.set(xlabel="loss at the end")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parse_arguments(parser, {"runs": 20}, output_options=["out"])
    ends = {f"smoothing {s:g}": train(s, given.runs) for s in (0, 3, 5)}
    for name, theta in ends.items():
        at = loss(theta)
        print(
            f"{name}: {100 * nearer_flat(theta):.1f} % nearer the flat minimum; loss: mean "
            f"{at.mean():.3f}, deviation {at.std():.3f}, 95 % below {np.quantile(at, 0.95):.3f}"
        )
    if given.out is not None:
        draw(ends, given.out)


if __name__ == "__main__":
    main()
