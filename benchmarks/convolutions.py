"""Per-example weight gradients of a convolution by each exact form, milliseconds.

    python benchmarks/convolutions.py [--quick] [--repeats 7] [--threads 1]

The shapes are those of CIFAR-10's residual networks, in the memory format that the engine runs
them in. Forms take turns; a figure is the median of --repeats turns, and `whole` is the gradient of
the whole batch, which no private step can use. Each shape is a line of --results, in the place of
that of the same processor and number of threads. --clock processor
counts processor time, of all threads, for a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import parse_arguments, processor
from torch import Tensor, nn

from dpdist.gradients.engine import raise_malloc_thresholds
from dpdist.gradients.layer_rules import CONVOLUTION_FORMS, Rule
from dpdist.gradients.per_example import LayerCall, PerExampleGradient

# channels in and out, side, stride
SHAPES = ((16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2), (64, 64, 8, 1),
          (3, 16, 32, 1))  # fmt: skip
RESULTS = Path(__file__).with_suffix(".jsonl")


def ways(
    shape: tuple[int, int, int, int], batch: int
) -> tuple[dict[str, Callable[[], object]], int]:
    """Return what makes a convolution's weight gradients, by form; and the positions."""
    width_in, width_out, side, stride = shape
    generator = torch.Generator().manual_seed(0)
    module = nn.Conv2d(width_in, width_out, 3, stride, 1, bias=False)
    last = torch.channels_last
    x = torch.randn(batch, width_in, side, side, generator=generator).to(memory_format=last)
    weight = module.weight.detach().to(memory_format=last).requires_grad_()
    outputs = nn.functional.conv2d(x, weight, None, stride, 1)
    signal = torch.randn(outputs.shape, generator=generator).to(memory_format=last)
    call = LayerCall(module, (x,), {}, [signal], {"weight": weight.detach()}, frozenset({"weight"}))

    def per_example(rule: Rule) -> Tensor | None:
        gradient = PerExampleGradient(module.weight.shape)
        for _, contribution in rule(call):
            gradient.add(contribution)
        gradient._merge()
        return gradient._dense

    found: dict[str, Callable[[], object]] = {
        name: lambda rule=rule: per_example(rule) for name, rule in CONVOLUTION_FORMS.items()
    }
    found["whole"] = lambda: torch.autograd.grad(outputs, weight, signal, retain_graph=True)
    return found, outputs.shape[2] * outputs.shape[3]


def measure(shape: tuple[int, int, int, int], options: argparse.Namespace) -> dict[str, object]:
    found, positions = ways(shape, options.batch)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    for turn in range(options.repeats + 1):
        for name, make in found.items():
            began = clock()
            make()
            if turn:  # the first one warms up
                seconds[name].append(clock() - began)
    each = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    return {"shape": shape, "positions": positions, "milliseconds": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parse_arguments(parser, {"batch": 4, "repeats": 1}, ["results"])
    torch.set_num_threads(options.threads)
    raise_malloc_thresholds()  # as the engine does: else new memory is what is measured
    conditions = {
        "batch": options.batch,
        "repeats": options.repeats,
        "threads": options.threads,
        "clock": options.clock,
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    lines = [measure(shape, options) | conditions for shape in SHAPES]
    same = ("processor", "threads")
    before = options.results.read_text().splitlines() if options.results.exists() else []
    kept = [
        line
        for line in map(json.loads, before)
        if any(line[key] != conditions[key] for key in same)
    ]
    options.results.write_text("".join(json.dumps(line) + "\n" for line in [*kept, *lines]))
    names = [*CONVOLUTION_FORMS, "whole"]
    print("| in, out, side, stride | " + " | ".join(names) + " |\n|" + "---|" * (1 + len(names)))
    for line in lines:
        cells = [f"{line['milliseconds'][name]:.1f}" for name in names]
        print(f"| {', '.join(map(str, line['shape']))} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
