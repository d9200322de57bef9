"""Measure a script's own loop beside a recipe's, and beside Opacus.

    OMP_NUM_THREADS=1 python benchmarks/speed/own_loop.py [--records 60000] [--batch 256] [--quick]

The first table takes the same steps twice, by the loop that trains a recipe and by
`dpdist.PrivateTraining`: the same network, records and run key, so that both end at the same bits,
which is checked. The second has Opacus' loop, with the same network, records, clip and noise: what
a step takes with all that it takes (loader, ledger), the epsilon that each prints for the steps it
took, and the sampler that each executes. Loops take turns, block by block, and medians of the
blocks are compared. Without the optional package its rows are left out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import make_images, parse_arguments, scratch_folder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpdist
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import TrainJob, prepare
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.records import records_with_canaries

DELTA, CLIP_NORM, NOISE, RATE = 1e-5, 1.0, 1.1, 0.1
LIMIT = 3.0  # percent that the own loop may take longer
Step = Callable[[], None]


def prepared(records: int, batch: int, steps: int) -> TrainJob:
    """Return the recipe's training on random pictures, which speed does not depend on."""
    root = scratch_folder() / "data"
    make_images(root, "pictures", records)
    raw = {
        "name": "recipe",
        "data": {"name": "pictures", "root": str(root), "classes": 10},
        "model": {"name": "tf-cnn"},
        "privacy": {
            "noise_multiplier": NOISE, "delta": DELTA, "clip_norm": CLIP_NORM, "run_key": "5a" * 32,
        },
        "training": {
            "batch_size": batch, "steps": steps, "learning_rate": RATE, "schedule": "constant",
        },
        "resources": {"checkpoint_seconds": 1e9},
    }  # fmt: skip
    return prepare(
        parse_recipe(raw, "own_loop"), RunFolder(scratch_folder() / "recipe"), "own_loop"
    )


def recipe_loop(job: TrainJob, stack: ExitStack) -> tuple[Step, nn.Module]:
    """Return a step of the loop that trains a recipe, and its model."""
    loop, learner = worker.restore(job, Reducer(0, 1, torch.device("cpu")), stack)

    def step() -> None:
        loop.take()

    return step, learner.model


def own_loop(job: TrainJob, dataset: Any) -> tuple[dpdist.PrivateTraining, nn.Module]:
    """Return the same training in a loop of one's own, and its model."""
    # A script's fingerprint is keyed: with the recipe's, the keys of all steps are the same.
    object.__setattr__(dataset, "keyed_fingerprint", lambda key: dataset.fingerprint)
    model = initial_model(job.recipe, model_spec(job.recipe, dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    made = dpdist.PrivateTraining(
        model, optimizer, dataset, loss="cross-entropy", privacy=job.recipe.privacy,
        batch_size=job.recipe.training.batch_size, steps=job.plan.steps,
        folder=scratch_folder() / "own", resources={"checkpoint_seconds": 1e9},
    )  # fmt: skip
    return made, model


class OpacusLoop:
    """The loop of a script with Opacus, an epoch after the other."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor, batch: int, poisson: bool):
        from opacus import PrivacyEngine

        self.engine = PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model.train(), optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=batch, shuffle=True),
            noise_multiplier=NOISE, max_grad_norm=CLIP_NORM, poisson_sampling=poisson,
        )  # fmt: skip
        self._batches = self._endless()

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.loader

    def step(self) -> None:
        inputs, labels = next(self._batches)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()

    @property
    def sampler(self) -> str:
        """Return the sampler that was executed, as its class is called."""
        inner = self.loader.batch_sampler
        names = [type(inner).__name__, type(getattr(inner, "sampler", None)).__name__]
        return names[0] if names[0] != "BatchSampler" else names[1]


def interleave(steps: dict[str, Step], rounds: int, block: int) -> dict[str, list[float]]:
    """Return seconds a step in each block; every second round in the other order."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()  # the first one allocates, and checks the pass
    for number in range(rounds):
        names = list(steps)[:: 1 if number % 2 else -1]
        for name in names:
            start = time.perf_counter()
            for _ in range(block):
                steps[name]()
            seconds[name].append((time.perf_counter() - start) / block)
    return seconds


def print_overhead(seconds: dict[str, list[float]], same: bool) -> None:
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(f"{name:24s} {1e3 * middle:8.2f} ms/step {1 / middle:8.1f} steps/s")
    recipe, own = seconds["recipe's loop"], seconds["PrivateTraining"]
    over = [100 * (b / a - 1) for a, b in zip(recipe, own, strict=True)]
    middle = statistics.median(over)
    reached = "ok" if middle <= LIMIT else "MISSED"
    print(
        f"overhead {middle:.2f} % ({min(over):.2f} to {max(over):.2f} in {len(over)} rounds; "
        f"to reach <= {LIMIT:g} %) {reached}"
    )
    print(f"both end at the same bits: {'yes' if same else 'NO'}")


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def bench(records: int, batch: int, rounds: int, block: int) -> None:
    steps = 2 * (rounds * block + 1) + 1  # of both tables, and one is left: nothing is finished
    job = prepared(records, batch, steps)
    dataset = records_with_canaries(job.recipe, job.source)
    first = initial_model(job.recipe, model_spec(job.recipe, dataset))
    with ExitStack() as stack:
        step, trained = recipe_loop(job, stack)
        training, own = own_loop(job, dataset)
        stack.callback(training.close)
        turns = {"recipe's loop": step, "PrivateTraining": lambda: training.step() and None}
        seconds = interleave(turns, rounds, block)
        print(f"{records:,} records, expected batch {batch}, {flat(own).numel():,} parameters")
        print_overhead(seconds, torch.equal(flat(trained), flat(own)))
        rows = {"dpdist": lambda: training.step() and None}
        found: dict[str, OpacusLoop] = {}
        try:
            inputs = dataset.batch(slice(None))
            labels = dataset.targets(slice(None))
            for name, poisson in (("Opacus", True), ("Opacus, poisson_sampling=False", False)):
                found[name] = OpacusLoop(copy.deepcopy(first), inputs, labels, batch, poisson)
                rows[name] = found[name].step
        except ImportError:
            print("opacus is not installed: its rows are left out (pip install 'dpdist[bench]')")
        took = training.plan.steps - training.steps_left
        seconds = interleave(rows, rounds, block)
        print_peers(seconds, training, found, took)


def print_peers(
    seconds: dict[str, list[float]], training: dpdist.PrivateTraining,
    found: dict[str, OpacusLoop], before: int,
) -> None:  # fmt: skip
    """Print steps a second, epsilon for the same number of steps, and samplers."""
    taken = training.plan.steps - training.steps_left - before
    print(f"| | steps/s | epsilon printed for {taken} steps | sampler executed |")
    print("|---|---|---|---|")
    for name, each in seconds.items():
        rate = 1 / statistics.median(each)
        if name in found:
            epsilon, sampler = found[name].engine.get_epsilon(DELTA), found[name].sampler
        else:
            epsilon, sampler = training.plan.guarantee(steps=taken).epsilon, "keyed Poisson"
        print(f"| {name} | {rate:.1f} | {epsilon:.4f} | {sampler} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A script's own loop beside a recipe's and Opacus'"
    )
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each loop")
    parser.add_argument("--block", type=int, default=10, help="steps in a block")
    parser.add_argument("--threads", type=int, default=1)
    tiny = {"records": 256, "batch": 16, "rounds": 5, "block": 2}
    options = parse_arguments(parser, tiny)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    bench(options.records, options.batch, options.rounds, options.block)


if __name__ == "__main__":
    main()
