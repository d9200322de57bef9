"""Ways to count the votes of a smoothed classifier: our engine, and the published plain loop.

They are measured in one process, in interleaved rounds, and medians are compared, so that a busy
machine slows all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification.inference import ExecutedClassifier, choose_backend
from dpdist.certification.noise import Gaussian
from dpdist.certification.sequential import TargetTest, planned_looks
from dpdist.certification.worker import InputNoiseCounter
from dpdist.randomness import keys
from dpdist.randomness.keys import StreamKeys

SIGMA, ALPHA, CAP, RADIUS = 0.25, 0.001, 100_000, 0.5
BATCH, STEP = 1000, 500
SOURCE = StreamKeys("benchmark", "1", "model", "data", "gaussian", SIGMA)


def plain_loop(model: nn.Module, x: Tensor, draws: int) -> np.ndarray:
    """Cohen et al.'s sampling as published: repeat, add noise, forward, count one by one."""
    counts = np.zeros(10, dtype=int)
    with torch.no_grad():
        for _ in range(draws // BATCH):
            batch = x.repeat(BATCH, 1, 1, 1)
            for label in model(batch + torch.randn_like(batch) * SIGMA).argmax(1).numpy():
                counts[label] += 1
    return counts


def rates(works: dict[str, Callable[[], Any]], draws: int, rounds: int) -> dict[str, float]:
    """Draws per second of each, medians over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: draws / statistics.median(values) for name, values in times.items()}


def sampler(model: nn.Module, rows: int, backend: str, shape: tuple[int, ...]) -> InputNoiseCounter:
    shapes = [(size, *shape) for size in (rows, 100)]
    classify = ExecutedClassifier(model, backend, shapes)
    return InputNoiseCounter(classify, Gaussian(SIGMA), SOURCE, 10, shape)


def fixed_n(model: nn.Module, x: Tensor, draws: int, rounds: int) -> dict[str, float]:
    """Return draws a second of the engine, the bare forward pass and the published loop.

    x: the input, (channels, height, width).
    """
    return rates(ways_to_count(model, x, draws), draws, rounds)


def ways_to_count(model: nn.Module, x: Tensor, draws: int) -> dict[str, Callable[[], Any]]:
    """Return what makes so many draws, by name."""
    shape = tuple(x.shape)
    check = torch.rand(BATCH, *shape) + SIGMA * torch.randn(BATCH, *shape)
    spec, bare = choose_backend(model, check)
    print(f"executed classifier: {spec.backend} {spec.notes or ''}")
    engine = sampler(model, BATCH, spec.backend, shape)
    blocks = draws // BATCH

    def count() -> None:
        for block in range(blocks):
            engine.histogram(x, 0, keys.ESTIMATE, block, BATCH, BATCH)

    def forward() -> None:
        for _ in range(blocks):
            bare(check)

    return {
        "bare forward, best form": forward,
        "engine": count,
        "plain loop as published": lambda: plain_loop(model, x, draws),
    }


def early_stopping(p: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return draws and whether the radius was certified, of an input for each probability."""
    p0 = Gaussian(SIGMA).probability_for_radius(RADIUS)
    looks = planned_looks(CAP, STEP)
    paths = rng.binomial(np.diff((0, *looks)), p[:, None], size=(len(p), len(looks))).cumsum(1)
    draws, passed = [], []
    for path in paths:
        test = TargetTest((p0,), ALPHA, looks)
        place = next(i for i, hits in enumerate(path) if test.update(i, int(hits)))
        draws.append(looks[place])
        passed.append(test.passed())
    return np.array(draws), np.array(passed)
