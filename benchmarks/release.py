"""What a step's release costs as models grow: memory stated and measured, noise, processor time.

    OMP_NUM_THREADS=1 python benchmarks/release.py [--millions 0.03 1 25] [--steps 6] [--quick]

Dense networks with Adam on the built-in digits, expected batch 64; workers are processes of one
thread that meet through gloo on loopback, without Ray, by the loop that trains runs. Memory is the
peak of the largest worker beside what a dry run states for it; the first step's self-check is in
it. A step is the median of the steps without self-check, in processor time of one worker (of two,
the one that took longer), of which the release is everything behind the clipped sums. Noise is in
million entries per second and core. `--ray` trains by `dpdist train` and measures memory alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from _common import parse_arguments

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
HEADS = (
    "parameters", "workers", "stated MiB", "measured MiB", "stated / measured",
    "noise M/s", "step ms", "release ms",
)  # fmt: skip


def hidden(millions: float) -> list[int]:
    """Layers of a dense network with about so many parameters."""
    if millions < 0.1:
        return [int(1e6 * millions / 75)]
    width = (-74 + (74**2 + 4e6 * millions) ** 0.5) / 2
    return [int(width), int(width)]


def asked(millions: float, workers: int, steps: int) -> dict[str, Any]:
    return {
        "name": "release",
        "data": {"name": "digits"},
        "model": {"name": "mlp", "options": {"hidden": hidden(millions)}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {
            "batch_size": 64, "steps": steps, "learning_rate": 1e-4, "optimizer": "adam"
        },
        "resources": {"workers": workers, "checkpoint_seconds": 1e9},
    }  # fmt: skip


def stated(recipe: Any, plan: Any) -> float:
    """MiB for a worker, of a dry run."""
    from dpdist.training.model_setup import describe_cost

    said = dict(describe_cost(recipe, plan))["memory per worker"]
    return float(said.split()[1].replace(",", ""))


def peak(pid: str = "self") -> float:
    """MiB that a process had at most."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def work(job: Any, rank: int, workers: int, folder: str, answers: Any) -> None:
    """One worker: processor seconds of its steps and what they are made of, entries
    that it releases, and its peak."""
    import ray.train  # noqa: F401  (a worker on Ray has it in memory)
    import torch
    import torch.distributed as dist

    from dpdist.training import private_step, worker
    from dpdist.training.collectives import Reducer

    torch.set_num_threads(1)
    if workers > 1:
        store = dist.FileStore(f"{folder}/store", workers)
        wait = timedelta(seconds=600)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=wait)
    took: dict[str, list[float]] = {"step": [], "sums": [], "noise": []}

    def timed(kind: str, do: Any) -> Any:
        def done(*arguments: Any) -> Any:
            began = time.process_time()
            result = do(*arguments)
            took[kind].append(time.process_time() - began)
            return result

        return done

    with ExitStack() as stack:
        one = worker.restore(job, Reducer(rank, workers, torch.device("cpu")), stack)
        private_step.add_noise = timed("noise", private_step.add_noise)
        one._step = timed("step", one._step)
        one.step._clipped_sums = timed("sums", one.step._clipped_sums)
        job.recipe.method.execution().learn(one)
        one.finish()
        answers.put((took, len(one.flat), peak()))
    if workers > 1:
        dist.destroy_process_group()


def alone(raw: dict[str, Any], folder: str) -> list[str]:
    """A row: without Ray."""
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import parse_recipe
    from dpdist.training.job import prepare

    recipe, workers = parse_recipe(raw, "benchmark"), raw["resources"]["workers"]
    job = prepare(recipe, RunFolder(Path(folder) / "run"), "benchmark")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=work, args=(job, rank, workers, folder, answers))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=3600) for _ in processes]
    for process in processes:
        process.join()
    most, said = max(has for *_, has in found), stated(recipe, job.plan)
    size = found[0][1]

    def typical(kind: str, took: dict[str, list[float]]) -> float:
        return statistics.median(took[kind][1:])  # the first step checks the model

    step = max(typical("step", took) for took, *_ in found)
    behind = max(typical("step", took) - typical("sums", took) for took, *_ in found)
    rate = max(size / typical("noise", took) for took, *_ in found)
    return [
        f"{size:,}", str(workers), f"{said:,.0f}", f"{most:,.0f}",
        f"{said / most:.2f}", f"{rate / 1e6:.0f}", f"{1e3 * step:,.1f}", f"{1e3 * behind:,.1f}",
    ]  # fmt: skip


def on_ray(raw: dict[str, Any], folder: str) -> list[str]:
    """A row: the peaks of Ray's training workers."""
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import parse_recipe
    from dpdist.training.job import check_training

    path = Path(folder) / "r.yaml"
    path.write_text(json.dumps(raw))
    code = "from dpdist.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", str(path), "--runs", f"{folder}/runs"],
        stdout=subprocess.DEVNULL,
    )
    most: dict[str, float] = {}
    while process.poll() is None:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                title = (entry / "cmdline").read_bytes()
                if b"RayTrainWorker" in title and _below(entry.name, process.pid):
                    most[entry.name] = max(most.get(entry.name, 0.0), peak(entry.name))
            except OSError:
                continue
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit("the training failed")
    recipe = parse_recipe(raw, "benchmark")
    plan = check_training(recipe, RunFolder(Path(folder) / "other"), "benchmark").plan
    said, largest = stated(recipe, plan), max(most.values())
    return [
        "", f"{raw['resources']['workers']}, on Ray", f"{said:,.0f}", f"{largest:,.0f}",
        f"{said / largest:.2f}", "", "", "",
    ]  # fmt: skip


def _below(pid: str, root: int) -> bool:
    """Whether a process descends from another."""
    while int(pid) > 1 and int(pid) != root:
        pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return int(pid) == root


def main() -> None:
    from dpdist.core.console import format_columns

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[0.03, 1.0, 25.0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ray", action="store_true", help="memory of workers on Ray")
    options = parse_arguments(parser, {"millions": [0.03], "steps": 3, "workers": [2]})
    rows = []
    for millions in options.millions:
        for workers in options.workers:
            with tempfile.TemporaryDirectory() as folder:
                raw = asked(millions, workers, options.steps)
                rows.append((on_ray if options.ray else alone)(raw, folder))
                print("  ".join(rows[-1]), flush=True)
    print(format_columns(HEADS, rows))


if __name__ == "__main__":
    main()
