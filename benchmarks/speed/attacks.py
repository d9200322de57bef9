"""Attacks side by side with the Adversarial Robustness Toolbox: speed, success, sizes.

The same network, images, steps and blocks of 100 in one process with one thread, in interleaved
rounds; medians are compared, so that a busy machine slows both sides. MNIST under DPDIST_DATA_ROOT
(default ../shared/data); without it, and with --quick, scikit-learn's digits enlarged.

    pip install -e '.[bench]'; python benchmarks/speed/attacks.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import data_root, parse_arguments
from torch import Tensor, nn

import dpdist.data
from dpdist import models
from dpdist.attacks.gradient_attacks import Ball, RandomizedClassifier, attack, distance
from dpdist.certification.worker import KeyedGenerator
from dpdist.core.fields import ATTACKS
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import InputNoise

BLOCK = 100
SIZES = {"linf": 0.1, "l2": 1.5}


def data(train: int, test: int, built_in: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then test images and labels."""
    root = data_root()
    source = dpdist.data.DataSource("mnist", 10, root)
    if built_in or not (root / "mnist").is_dir():
        print("digits enlarged to 28x28" + ("" if built_in else f": no MNIST under {root}"))
        source = dpdist.data.DataSource("digits", 10)
    parts = [dpdist.data.load(source, split) for split in ("train", "test")]
    found: list[Tensor] = []
    for part, limit in zip(parts, (train, test), strict=True):
        rows = slice(0, limit)
        x = nn.functional.interpolate(part.batch(rows), size=(28, 28))
        found += [x.clamp(0, 1), part.targets(rows)]
    return found[0], found[1], found[2], found[3]


def train(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    model = models.initialize(models.ModelSpec("tf-cnn", (1, 28, 28), 10), 0)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


def ours(model: nn.Module, name: str, norm: str, steps: int, x: Tensor, y: Tensor) -> Tensor:
    """As a worker does it: blocks of 100, keyed randomness, float64 projections."""
    randomness = KeyedGenerator(StreamKeys("benchmark", "1", "", "", "", 0.0))
    classifier = RandomizedClassifier(model)
    found = []
    for low in range(0, len(x), BLOCK):
        part = x[low : low + BLOCK]
        ball = Ball(part, torch.full((len(part),), SIZES[norm], dtype=torch.float64), norm)  # type: ignore[arg-type]
        targets, names = y[low : low + BLOCK], range(low, low + len(part))
        found.append(attack(name, classifier, ball, targets, names, randomness, steps=steps))  # type: ignore[arg-type]
    return torch.cat(found)


def theirs(estimator: Any, name: str, norm: str, steps: int) -> Callable:
    from art.attacks import evasion

    p, size = (np.inf if norm == "linf" else 2), SIZES[norm]
    common = {
        "norm": p, "eps": size, "eps_step": size / steps, "max_iter": steps, "batch_size": BLOCK,
        "verbose": False,
    }  # fmt: skip
    if name == "fgsm":
        it = evasion.FastGradientMethod(estimator, norm=p, eps=size, batch_size=BLOCK)
    elif name == "mim":
        it = evasion.MomentumIterativeMethod(estimator, decay=1.0, **common)
    elif name == "i-fgsm":
        it = evasion.ProjectedGradientDescentPyTorch(estimator, **common)
    else:
        common["eps_step"] = 2.5 * size / steps
        it = evasion.ProjectedGradientDescentPyTorch(estimator, num_random_init=1, **common)
    return it.generate


def seconds(call: Callable, *arguments: object) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    found = call(*arguments)
    return time.perf_counter() - start, np.asarray(found)


def side_by_side(model: nn.Module, x: Tensor, y: Tensor, steps: int, rounds: int) -> None:
    from art.estimators.classification import PyTorchClassifier  # writes a file on import

    estimator = PyTorchClassifier(
        model, nn.CrossEntropyLoss(), (1, 28, 28), 10, clip_values=(0.0, 1.0), device_type="cpu"
    )
    print(
        f"\n{len(x)} images, {steps} steps, ours | Adversarial Robustness Toolbox, "
        f"medians of {rounds} interleaved rounds"
    )
    print("norm  attack   images/s        ratio   fooled, %        largest distance / size - 1")
    for norm in SIZES:
        for name in ATTACKS:
            generate = theirs(estimator, name, norm, steps)
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                taken, mine = seconds(ours, model, name, norm, steps, x, y)
                times[0].append(taken)
                np.random.seed(0)
                taken, other = seconds(generate, x.numpy(), y.numpy())
                times[1].append(taken)
            rates = [len(x) / statistics.median(some) for some in times]
            ratios = [b / a for a, b in zip(*times, strict=True)]
            fooled, over = [], []
            for points in (mine, other):
                with torch.no_grad():
                    answers = model(torch.from_numpy(points)).argmax(1)
                fooled.append(100 * float((answers != y).double().mean()))
                over.append(distance(points, x.numpy(), norm).max() / SIZES[norm] - 1)
            print(
                f"{norm:5} {name:7} {rates[0]:6.0f} | {rates[1]:6.0f} "
                f"{statistics.median(ratios):7.2f}   {fooled[0]:6.2f} | {fooled[1]:6.2f} "
                f"  {over[0]:+9.1e} | {over[1]:+9.1e}"
            )


def expectation(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """What EOT costs: PGD on the smoothed classifier, by draws per gradient."""
    randomness = KeyedGenerator(StreamKeys("benchmark", "1", "", "", "", 0.0))
    classifier = RandomizedClassifier(model, InputNoise(0.25))
    ball = Ball(x, torch.full((len(x),), SIZES["l2"], dtype=torch.float64), "l2")
    print(f"\nPGD in L2 on the smoothed classifier, sigma 0.25, {len(x)} images, {steps} steps")
    for draws in (1, 4, 16, 64):
        taken, _ = seconds(
            lambda k=draws: attack(
                "pgd", classifier, ball, y, range(len(x)), randomness, steps=steps, samples=k
            )
        )
        passes = len(x) * steps * draws / taken
        print(f"  {draws:3} draws: {len(x) / taken:7.1f} images/s, {passes:8.0f} gradients/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    quick = parse_arguments(parser, {}).quick
    torch.set_num_threads(1)
    x_train, y_train, x, y = data(*((300, 40) if quick else (6000, 200)), built_in=quick)
    model = train(x_train, y_train, 1 if quick else 3)
    with torch.no_grad():
        print(f"clean accuracy {(model(x).argmax(1) == y).float().mean():.2%}")
    side_by_side(model, x, y, 2 if quick else 10, 1 if quick else 5)
    expectation(model, x[:20] if quick else x[:100], y[: 20 if quick else 100], 2 if quick else 10)


if __name__ == "__main__":
    main()
