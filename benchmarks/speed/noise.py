"""Speed and memory of a release's noise beside generators that keep no secrets.

Processor seconds of one thread. The ways are interleaved in one process, round by round, and the
medians of the rounds compared, so that a machine that is busy treats all alike. Peers draw N(0, 1)
and nothing else: numpy's Philox and SFC64 in float64, torch's generator in float64 and float32 (its
seeds have 32 bits; docs/explanation/sharp-edges.md). Ours draws from a 256-bit key, and `add_noise`
also scales, adds to a sum and rounds to the grid. `add_device_noise` is what `resources.noise:
device` does, here on the CPU: hundreds of calls of torch a piece, whose speed says nothing about a
GPU's. Memory is the peak of a process of its own, the sum and the result included.

    python benchmarks/speed/noise.py [--entries 4000000] [--rounds 9] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import parse_arguments

from dpdist.gradients.engine import raise_malloc_thresholds
from dpdist.gradients.noise import add_device_noise, add_noise, standard_normal

KEY, STD = bytes(range(32)), 1.3
OURS, RELEASE = "standard_normal (ours)", "add_noise (ours: scale, add, round)"
THERE = "add_noise_on (ours, for GPUs, here on the CPU)"
AIM = 80e6  # entries per second and core


def ways(entries: int) -> dict[str, Callable[[], object]]:
    philox, sfc = (np.random.Generator(kind(1)) for kind in (np.random.Philox, np.random.SFC64))
    generator = torch.Generator().manual_seed(1)
    total = np.linspace(-1.0, 1.0, entries)
    return {
        RELEASE: lambda: add_noise(total, KEY, STD),
        OURS: lambda: standard_normal(KEY, 0, entries),
        THERE: lambda: add_device_noise(torch.from_numpy(total.copy()), KEY, STD),
        "numpy Philox": lambda: philox.standard_normal(entries),
        "numpy SFC64": lambda: sfc.standard_normal(entries),
        "torch.randn float64": lambda: torch.randn(
            entries, generator=generator, dtype=torch.float64
        ),
        "torch.randn float32": lambda: torch.randn(entries, generator=generator),
    }


def seconds(entries: int, rounds: int) -> dict[str, float]:
    """Median processor seconds of each way."""
    took: dict[str, list[float]] = {name: [] for name in ways(1)}
    todo = ways(entries)
    for turn in range(rounds + 1):
        for name, way in todo.items():
            began = time.process_time()
            way()
            if turn:  # the first round warms up
                took[name].append(time.process_time() - began)
    return {name: statistics.median(found) for name, found in took.items()}


def peak(entries: int) -> float:
    """Bytes an entry at the peak of a release, in this process: the sum and the result included."""
    add_noise(np.zeros(100_000), KEY, STD)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _peak()
    total = np.ones(entries)
    add_noise(total, KEY, STD)
    return (_peak() - before) / entries


def _peak() -> int:
    """Most bytes that this process has had in memory."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return 1024 * int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak", action="store_true", help="print the peak of this process alone")
    options = parse_arguments(parser, {"entries": 100_000, "rounds": 1})
    if options.peak:
        print(peak(options.entries))
        return
    torch.set_num_threads(1)
    raise_malloc_thresholds()  # as the engine does
    found = seconds(options.entries, options.rounds)
    print(f"{options.entries:,} entries, load average {os.getloadavg()[0]:.1f}")
    print("| way | million a second and core | times numpy's Philox |")
    print("|---|---|---|")
    for name, took in found.items():
        speed = found["numpy Philox"] / took
        print(f"| {name} | {options.entries / took / 1e6:.1f} | {speed:.2f} |")
    command = [sys.executable, __file__, "--peak", "--entries", str(options.entries)]
    bytes_each = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rate = options.entries / found[RELEASE]
    print(f"a release: {rate / 1e6:.1f} million a second (aim {AIM / 1e6:.0f}); {bytes_each:.1f} "
          f"bytes an entry at the peak (aim 16, the sum and the result included)")  # fmt: skip


if __name__ == "__main__":
    main()
