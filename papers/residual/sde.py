"""What "irreversible" means for residual perturbation: a picture carried along a swirl, and back.

x' = F(x), 100 Euler steps of 0.01; with noise of deviation gamma sqrt(dt) added in each step, or
multiplied with the pixels. The paper reverses the noisy steps with fresh noise and finds nothing.
Beside it: the reversal that adds none, and that of the mean of 25 noisy answers. Peak signal to
noise ratios in dB, of the picture that comes with scikit-learn, pixels in [0, 1].

    python papers/residual/sde.py [--out FOLDER]      # rows, and all in one
    python papers/residual/sde.py --picture papers/residual/pictures/swirl.jpg
    python papers/residual/sde.py --quick                                      # a smoke test
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import parse_arguments
from PIL import Image
from sklearn.datasets import load_sample_image

STEPS, DT, QUERIES, SOLVER = 100, 0.01, 25, 9


def picture(every: int = 4) -> np.ndarray:
    """Return a picture in [0, 1] at every `every`-th pixel, by default float64 (107, 160, 3)."""
    return load_sample_image("china.jpg")[::every, ::every].astype(np.float64) / 255


@cache
def _swirl(rows: int, columns: int) -> np.ndarray:
    """Return which pixel of the flattened picture comes to each place."""
    i, j = np.ogrid[:rows, :columns]
    right = ((j + 50 * np.cos(2 * np.pi * i / 180)) % columns).astype(int)
    down = ((i + 50 * np.sin(2 * np.pi * i / 180)) % rows).astype(int)
    return (i + right) % rows * columns + (j + down) % columns


def field(x: np.ndarray) -> np.ndarray:
    """Apply the paper's swirl: linear, but no permutation (pixels are dropped and repeated)."""
    return x.reshape(-1, x.shape[2]).take(_swirl(*x.shape[:2]), 0)


def noise(x: np.ndarray, gamma: float, times: bool, rng: np.random.Generator) -> np.ndarray:
    """Draw the noise of one step; with `times` it is multiplied with the pixels."""
    drawn = gamma * np.sqrt(DT) * rng.standard_normal(x.shape)
    return x * drawn if times else drawn


def forward(x: np.ndarray, gamma: float, times: bool, rng: np.random.Generator) -> np.ndarray:
    """Return the features; gamma 0 solves the differential equation without noise."""
    for _ in range(STEPS):
        x = x + DT * field(x) + noise(x, gamma, times, rng)
    return x


def backward(x: np.ndarray, gamma: float, times: bool, rng: np.random.Generator) -> np.ndarray:
    """Take Euler steps back, with fresh noise unless gamma is 0."""
    for _ in range(STEPS):
        x = x - DT * field(x) + noise(x, gamma, times, rng)
    return x


def inverse(x: np.ndarray) -> np.ndarray:
    """Invert the steps without noise exactly, each by fixed-point iteration."""
    for _ in range(STEPS):
        before = x
        for _ in range(SOLVER):
            before = x - DT * field(before)
        x = before
    return x


def psnr(x: np.ndarray, original: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in dB."""
    return float(-10 * np.log10(np.mean((x - original) ** 2)))


def noisy_panels(
    x: np.ndarray, gamma: float, times: bool, queries: int = QUERIES
) -> dict[str, np.ndarray]:
    """Return the noisy features and three reversals, by name."""
    rng = np.random.default_rng(0)
    features = [forward(x, gamma, times, rng) for _ in range(queries)]
    return {
        "features": features[0],
        "reversed with fresh noise": backward(features[0], gamma, times, rng),
        "reversed without": backward(features[0], 0.0, times, rng),
        f"mean of {queries} reversed": backward(np.mean(features, 0), 0.0, times, rng),
    }


def row(panels: list[np.ndarray]) -> np.ndarray:
    """Put the pictures side by side, as bytes."""
    return (255 * np.concatenate(panels, 1).clip(0, 1)).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--every", type=int, default=4, help="pixels of the picture on each side")
    asked = parse_arguments(parser, {"queries": 2, "every": 16}, output_options=["out"])
    x, out, pictures = picture(asked.every), asked.out, []
    flowed = forward(x, 0.0, False, np.random.default_rng(0))
    back = backward(flowed, 0.0, False, np.random.default_rng(0))
    rows = {"no noise": {"features": flowed, "reversed": back, "exact inverse": inverse(flowed)}}
    for times in (False, True):
        for gamma in (1.0, 0.1):
            name = f"{'multiplicative' if times else 'additive'}, gamma {gamma:g}"
            rows[name] = noisy_panels(x, gamma, times, asked.queries)
    for name, panels in rows.items():
        print(f"{name}: " + ", ".join(f"{what} {psnr(p, x):.1f}" for what, p in panels.items()))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            Image.fromarray(row([x, *panels.values()])).save(out / f"{name}.png")
        pictures.append(row([x, *panels.values(), *[np.ones_like(x)] * (4 - len(panels))]))
    if asked.picture is not None:
        Image.fromarray(np.concatenate(pictures)).save(asked.picture)


if __name__ == "__main__":
    main()
