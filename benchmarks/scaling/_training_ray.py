"""What synchronization costs: 2 Ray Train workers against two processes that never talk.

Both run the TF-Privacy CNN with one thread each and the same work per step (an expected 512
examples per process; the Ray run's expected batch is 1,024). Steps per second over the last two
thirds of each run: during the first Ray's own processes are still starting up on the same cores.
An eighth of the records is the expected batch: fewer make another work, for a test.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import make_images

RECORDS = 8192
CLI = "from dpdist.cli.main import main; main()"
_ALONE = """
import sys, torch
from pathlib import Path
from dpdist.runs.recipe import load_recipe
from dpdist.runs.folder import RunFolder
from dpdist.training.job import prepare
from dpdist.training.worker import run_training
from dpdist.training.collectives import Reducer
torch.set_num_threads(1)
path = Path(sys.argv[1])
job = prepare(load_recipe(path), RunFolder(Path(sys.argv[2])), str(path))
run_training(job, Reducer(0, 1, torch.device("cpu")))
"""


def recipe(folder: Path, data: str, batch_size: int, workers: int, steps: int) -> Path:
    raw = {
        "name": f"{data}-{workers}",
        "data": {"name": data, "root": str(folder / "data")},
        "model": "tf-cnn",
        "privacy": {"noise_multiplier": 1.1, "delta": 1e-5},
        "training": {"batch_size": batch_size, "steps": steps, "learning_rate": 0.1},
        "resources": {"workers": workers, "checkpoint_seconds": 3600},
    }
    path = folder / f"{raw['name']}.yaml"
    path.write_text(json.dumps(raw))
    return path


class Clock:
    """Watches a run's per-step file and times its last two thirds."""

    def __init__(self, run: Path, steps: int) -> None:
        self.file, self.steps = run / "private" / "metrics.jsonl", steps
        self.seen: list[tuple[float, int]] = []

    def look(self) -> None:
        done = lines(self.file)
        if done >= self.steps // 3 and (not self.seen or done > self.seen[-1][1]):
            self.seen.append((time.monotonic(), done))

    def rate(self) -> float:
        (began, first), (ended, last) = self.seen[0], self.seen[-1]
        return (last - first) / (ended - began)


def watch(processes: list[subprocess.Popen], clocks: list[Clock]) -> list[float]:
    """Steps per second of each run; ends the benchmark if a process fails."""
    while any(process.poll() is None for process in processes):
        for clock in clocks:
            clock.look()
        time.sleep(0.02)
    if any(process.returncode for process in processes):
        sys.exit("a run failed")
    return [clock.rate() for clock in clocks]


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def start(code: str, *arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=environment)


def rounds_of(folder: Path, rounds: int, steps: int, records: int) -> Iterator[float]:
    """Yield, round by round, steps a second of two workers on Ray over those of two processes."""
    make_images(folder / "data", "whole", records)
    make_images(folder / "data", "half", records // 2)
    together = recipe(folder, "whole", records // 8, 2, steps)
    alone = recipe(folder, "half", records // 16, 1, steps)
    for number in range(rounds):
        runs = folder / f"round-{number}"
        training = start(CLI, "run", "--until", "train", together, "--runs", runs)
        (on_ray,) = watch([training], [Clock(runs / "whole-2", steps)])
        folders = [runs / f"alone-{side}" for side in range(2)]
        pair = [start(_ALONE, alone, each) for each in folders]
        separate = statistics.mean(watch(pair, [Clock(each, steps) for each in folders]))
        print(f"round {number}: Ray {on_ray:.2f} steps/s, alone {separate:.2f}", flush=True)
        yield on_ray / separate


def until_first_step(folder: Path, records: int, ray: bool) -> float:
    """Return the seconds from the command to the first step of a training of 30 steps.

    Args:
        ray: two workers on Ray; otherwise one, in the command's own process.
    """
    make_images(folder / "data", "whole", records)
    workers = 2 if ray else 1
    path = recipe(folder, "whole", records // 8, workers, 30)
    began = time.monotonic()
    os.environ["DPDIST_EXECUTOR"] = "ray" if ray else "local"
    process = start(CLI, "run", "--until", "train", path, "--runs", folder / "runs")
    metrics = folder / "runs" / f"whole-{workers}" / "private" / "metrics.jsonl"
    while not lines(metrics):
        if process.poll() is not None:
            sys.exit("the training failed")
        time.sleep(0.02)
    found = time.monotonic() - began
    process.wait()
    return found
