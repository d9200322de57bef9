"""What other ways of drawing and bounding are worth on trained models: draws, seconds, accuracy.

    python benchmarks/draws.py scores     early stopping of certified scores against all n draws
    python benchmarks/draws.py looks      smaller batches, more looks and another futility at votes
    python benchmarks/draws.py two-class  the runner-up's own bound against p_b <= 1 - p_a
    python benchmarks/draws.py --quick    all three, a smoke test

One process, one thread, processor seconds; digits, or with --mnist MNIST under DPDIST_DATA_ROOT.
Models are trained here, by ordinary SGD on noisy inputs (for scores: on noisy hidden layers).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from _common import parse_arguments
from torch import Tensor, nn

from dpdist import models
from dpdist.certification import sequential, variants
from dpdist.certification.noise import Gaussian
from dpdist.certification.registry import kind_of, settings_of
from dpdist.certification.variants import certify_against_runner_up
from dpdist.certification.worker import Assignment, InputWorkUnit, Worker, probe
from dpdist.core.errors import UserError
from dpdist.randomness.keys import StreamKeys

HIDDEN = 0.3  # standard deviation behind the first layer
ARCHITECTURE = {False: ("small-cnn", {"width": 8}), True: ("tf-cnn", {})}
EPOCHS = {False: 40, True: 4}


def records(mnist: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and labels, test inputs and labels."""
    if mnist:
        from certification import images

        return *images(6000, "train"), *images(1000, "test")
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images.astype(np.float32) / 16)[:, None]
    y = torch.from_numpy(digits.target).long()
    held = torch.arange(len(x)) % 5 == 0
    return x[~held], y[~held], x[held], y[held]


def trained(
    options: argparse.Namespace, sigma: float, inside: bool = False
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model that saw Gaussian noise of `sigma` on its inputs (inside: of HIDDEN behind its first
    layer, which it keeps), with the test data."""
    x, y, test, labels = records(options.mnist)
    name, network = ARCHITECTURE[options.mnist]
    shape = tuple(x.shape[1:])
    model = models.initialise(models.ModelSpec(name, shape, 10, network), 1)
    split = models.require_split(model) if inside else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.epochs or EPOCHS[options.mnist]):
        for rows in torch.randperm(len(x), generator=generator).split(100):
            if split is None:
                out = model(x[rows] + sigma * torch.randn(x[rows].shape, generator=generator))
            else:
                hidden = split.first(x[rows])
                out = split.rest(hidden + HIDDEN * torch.randn(hidden.shape, generator=generator))
            loss = nn.functional.cross_entropy(out, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if split is not None:
        models.attach_noise(model, torch.full(split.hidden_shape(shape), HIDDEN))
    return model.eval(), test[:: options.every], labels[:: options.every]


class Counting:
    """Certifies inputs by settings, as an actor does."""

    def __init__(self, model: nn.Module, section: dict[str, Any], shape: tuple[int, ...]) -> None:
        settings = settings_of({"seed": "1", "form": "frozen", **section})
        place = settings.build_sampler(model, shape)
        source = StreamKeys("benchmark", "1", "", "", settings.noise, place.sigma)
        grey = np.full((1, *shape), 0.5, np.float32)
        assignment = Assignment(model, settings, place, source, 10, shape, grey)
        self.assignment = replace(assignment, spec=probe(assignment))
        self._worker = Worker(self.assignment)

    def all(self, x: Tensor, labels: Tensor) -> tuple[list[dict[str, Any]], float]:
        """Rows of a table, and processor seconds."""
        units, rows, settings = self.assignment.num_units, [], self.assignment.settings
        table = kind_of(type(settings)).table_format
        began = time.process_time()
        for index, (each, label) in enumerate(zip(x.numpy(), labels.tolist(), strict=True)):
            (found,) = self._worker([InputWorkUnit(index, 0, units, each)])
            verdict = self.assignment.decide(found["partial"])
            rows.append(table.row(settings, index, label, verdict, self.assignment.sampler))
        return rows, time.process_time() - began


def report(name: str, rows: list[dict[str, Any]], seconds: float, radii: list[float]) -> None:
    draws = sum(row["n"] for row in rows)
    shares = [
        np.mean([row["prediction"] == row["label"] and row["radius"] >= r for row in rows])
        for r in radii
    ]
    held = ", ".join(f"{100 * s:.2f} % at {r:g}" for s, r in zip(shares, radii, strict=True))
    print(f"{name:44} {draws:11,} draws {seconds:7.1f} s  {held}", flush=True)


def scores(options: argparse.Namespace) -> None:
    model, x, labels = trained(options, 0.0, inside=True)
    section = {"n": options.n, "alpha": 0.05, "radii": options.radii}
    for name, more in (
        ("hoeffding", {"bound": "hoeffding"}),
        ("bernstein", {"bound": "bernstein"}),
        ("betting, one-sided", {"bound": "betting", "one_sided": True}),
        ("target-scores", {"mode": "target-scores"}),
        ("target-scores, batch 100", {"mode": "target-scores", "batch": 100}),
    ):
        scored(name, model, {**section, **more}, x, labels)
    for radius in options.radii:
        more = {"mode": "target-scores", "radii": [radius]}
        scored(f"target-scores, {radius:g} alone", model, {**section, **more}, x, labels)


def scored(name: str, model: nn.Module, section: dict[str, Any], x: Tensor, labels: Tensor) -> None:
    """Report on one way of scoring, or why this model's noise cannot have it (a first layer of a
    large norm leaves radii out of reach)."""
    try:
        counting = Counting(model, section, tuple(x.shape[1:]))
    except UserError as refused:
        print(f"{name:44} {refused}", flush=True)
        return
    report(name, *counting.all(x, labels), section["radii"])


@contextmanager
def looks_of(count: int, futile: float) -> Iterator[None]:
    planned = sequential.planned_looks

    def more(cap: int, step: int) -> tuple[int, ...]:
        return planned(cap, step, count)

    with (
        mock.patch.object(sequential, "planned_looks", more),
        mock.patch.object(sequential, "FUTILITY_ALPHA", futile),
    ):
        yield


def looks(options: argparse.Namespace) -> None:
    model, x, labels = trained(options, options.sigma)
    section = {"sigma": options.sigma, "n": options.n, "radii": options.radii, "mode": "target"}
    ways = [(500, 26, 0.01), (100, 26, 0.01), (100, 50, 0.01), (100, 50, 0.03), (200, 50, 0.03),
            (500, 50, 0.03), (500, 26, 0.03)]  # fmt: skip
    seconds: dict[Any, list[float]] = {way: [] for way in ways}
    found = {}
    for _ in range(options.rounds):  # interleaved
        for way in ways:
            batch, count, futile = way
            with looks_of(count, futile):
                counting = Counting(model, {**section, "batch": batch}, tuple(x.shape[1:]))
                found[way], took = counting.all(x, labels)
            seconds[way].append(took)
    for way in ways:
        name = "batch {}, {} looks, futility {:g}".format(*way)
        report(name, found[way], float(np.median(seconds[way])), options.radii)


def two_class(options: argparse.Namespace) -> None:
    model, x, labels = trained(options, options.sigma)
    section = {"sigma": options.sigma, "n": options.n}
    counting = Counting(model, section, tuple(x.shape[1:]))
    rows, _ = counting.all(x, labels)
    counts, selected = np.array([r["histogram"] for r in rows]), [r["selected"] for r in rows]
    noise, alpha = Gaussian(options.sigma), rows[0]["alpha"]
    one = np.array([row["radius"] for row in rows])
    both = {}
    for share in (0.02, 0.1, 0.3, 0.5):
        with mock.patch.object(variants, "_OF_RUNNER_UP", share):
            made = [
                certify_against_runner_up(a, c, alpha, noise)
                for a, c in zip(selected, counts, strict=True)
            ]
        both[share] = made
    for share, made in both.items():
        right = np.array([v.prediction for v in made]) == labels.numpy()
        radius = np.array([v.radius for v in made])
        print(f"p_b at {share} alpha: mean radius {np.mean(radius * right):.4f}, larger on "
              f"{100 * np.mean(radius > one * (1 + 1e-6)):.1f} %, smaller on "
              f"{100 * np.mean(radius < one * (1 - 1e-6)):.1f} %, certified "
              + ", ".join(f"{100 * np.mean(right & (radius >= r)):.2f} % at {r:g}"
                          for r in (1e-9, *options.radii)))  # fmt: skip
    right = np.array([row["prediction"] for row in rows]) == labels.numpy()
    print(f"one-sided: mean radius {np.mean(one * right):.4f}, certified "
          + ", ".join(f"{100 * np.mean(right & (one >= r)):.2f} % at {r:g}"
                      for r in (1e-9, *options.radii)), flush=True)  # fmt: skip


KINDS = {"scores": scores, "looks": looks, "two-class": two_class}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="scores", choices=list(KINDS))
    parser.add_argument("--mnist", action="store_true")
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sigma", type=float, default=0.25)
    parser.add_argument("--radii", type=lambda text: [float(r) for r in text.split(",")],
                        default=[0.1, 0.2])  # fmt: skip
    parser.add_argument("--epochs", type=int, help="of training, by default 40, on MNIST 4")
    options = parse_arguments(parser, {"n": 1000, "every": 60, "rounds": 1, "epochs": 1})
    torch.set_num_threads(1)
    for kind in KINDS if options.quick else [options.what]:
        KINDS[kind](options)


if __name__ == "__main__":
    main()
