"""Where the milliseconds of a training step go: alone, in two processes that talk, and on Ray.

    OMP_NUM_THREADS=1 python benchmarks/scaling/training_phases.py [--steps 300] [--rounds 3]
        [--quick]

The work is that of `training_ray.py`, an expected 512 examples per worker and step of the
TF-Privacy CNN, one thread each, by the loop that trains runs: `alone` two processes that never
talk, `gloo` two that meet through gloo on loopback without Ray, `ray` two of Ray Train. Of each
phase: wall milliseconds a step and processor milliseconds of the thread that runs the loop, means
over both workers and the last two thirds of the steps. `waiting` is a collective of one number put
before the sum, so that a worker that comes early waits there. `queued_seconds` is how long the
thread was ready to run and had no core (Linux's schedstat): of other processes' making. Then the
processor time, in per cent of one core, of all other processes that Ray started. `--asleep` lets
the two workers on Ray sleep for half a minute and prints that, theirs included: what Ray itself
takes.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import make_images, parse_arguments, processor_seconds
from training_ray import RECORDS, lines, recipe

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
PHASES = (
    "sample", "records", "gradients", "waiting", "sum", "digest", "ledger", "noise", "update",
    "check", "write", "step",
)  # fmt: skip


def queued_seconds() -> float:
    """Seconds that this thread was ready and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class PhaseTimer:
    """Takes the times of one worker's phases from step `first` on."""

    def __init__(self, first: int) -> None:
        self.first, self.is_active, self.steps = first, False, 0
        self.wall = dict.fromkeys(PHASES, 0.0)
        self.processor = dict.fromkeys(PHASES, 0.0)
        self.others = self.queued = self.began = self.ended = 0.0

    def wrap(self, phase: str, do: Any) -> Any:
        def done(*arguments: Any, **options: Any) -> Any:
            wall, processor = time.perf_counter(), time.thread_time()
            try:
                return do(*arguments, **options)
            finally:
                if self.is_active:
                    self.wall[phase] += time.perf_counter() - wall
                    self.processor[phase] += time.thread_time() - processor

        return done

    def attach(self, one: Any, learner: Any) -> None:
        """Wrap what a `Loop` calls in a step."""
        import torch

        from dpdist.training import private_step

        of = one.step
        of.members = self.wrap("sample", of.members)
        fetch = self.wrap("records", of.data.batch)
        object.__setattr__(of.data, "batch", fetch)  # a frozen dataclass
        of.engine.clipped_sum = self.wrap("gradients", of.engine.clipped_sum)
        private_step._announce = self.wrap("ledger", private_step._announce)
        private_step.add_noise = self.wrap("noise", private_step.add_noise)
        learner.update = self.wrap("update", learner.update)
        learner.not_finite = self.wrap("check", learner.not_finite)
        if one.monitor is not None:
            one.monitor.record_step = self.wrap("write", one.monitor.record_step)
        total, meet = self.wrap("sum", of.reducer.sum_rows), of.reducer.all_reduce
        private_step.leaf_digests = self.wrap("digest", private_step.leaf_digests)
        waits = self.wrap("waiting", meet)

        def summed(*arguments: Any) -> Any:
            waits(torch.zeros(1))
            return total(*arguments)

        of.reducer.sum_rows = summed
        whole = self.wrap("step", one.take)

        def step(flag: bool) -> Any:
            number = one.done
            if number == self.first:
                self.is_active, self.began = True, time.perf_counter()
                self.queued, self.others = -queued_seconds(), -time.process_time()
            self.steps += self.is_active
            taken = whole(flag)
            if number + 1 == one.last:
                self.queued, self.others = (
                    self.queued + queued_seconds(),
                    self.others + time.process_time(),
                )
                self.ended = time.perf_counter()
            return taken

        one.take = step

    def to_dict(self) -> dict[str, Any]:
        each = 1e3 / self.steps
        return {
            "wall": {name: each * seconds for name, seconds in self.wall.items()},
            "processor": {name: each * seconds for name, seconds in self.processor.items()},
            "queued": each * self.queued,
            "other threads": each * (self.others - self.processor["step"]),
            "per second": self.steps / (self.ended - self.began),
        }


def make_watched_run(steps: int, answer: Path) -> Any:
    """`dpdist.training.worker.run_training`, watched."""
    from contextlib import ExitStack

    from dpdist.training import worker

    def run(job: Any, reducer: Any, until: int | None = None, host_leaves: Any = None) -> None:
        watch = PhaseTimer(steps // 3)
        with ExitStack() as stack:
            one, learner = worker.restore(job, reducer, stack, until)
            watch.attach(one, learner)
            worker.take_steps(one, learner, host_leaves)
            one.finish()
        (answer / f"{os.getpid()}.json").write_text(json.dumps(watch.to_dict()))

    return run


def one_process(path: Path, folder: Path, rank: int, workers: int, answer: Path) -> None:
    """A worker without Ray."""
    from datetime import timedelta

    import ray.train  # noqa: F401  (a worker on Ray has it in memory)
    import torch
    import torch.distributed as dist

    from dpdist.training.collectives import Reducer

    torch.set_num_threads(1)
    if workers > 1:
        store = dist.FileStore(f"{folder}.store", workers)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=600)
        )
    job = pickle.loads(path.read_bytes())
    steps = job.recipe.training.steps
    make_watched_run(steps, answer)(job, Reducer(rank, workers, torch.device("cpu")))
    if workers > 1:
        dist.destroy_process_group()


def prepare_job(recipe: Path, folder: Path) -> Any:
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import load_recipe
    from dpdist.training.job import prepare

    return prepare(load_recipe(recipe), RunFolder(folder), str(recipe))


def on_ray(path: Path, answer: Path) -> None:
    """The driver of a training on Ray; its workers watch themselves."""
    from dpdist.cluster.session import connect
    from dpdist.cluster.work import WorkerPlace
    from dpdist.training import worker
    from dpdist.training.trainer import train

    job = pickle.loads(path.read_bytes())
    steps = job.recipe.training.steps

    def train_worker(config: dict[str, Any], place: WorkerPlace) -> None:
        from dpdist.training import worker

        worker.run_training = make_watched_run(steps, answer)
        worker.train_worker(config, place)  # the worker's own, which is not this one

    worker.train_worker = train_worker
    with connect(job.folder.private / "ray.log") as session:
        train(job, session)


def measure_idle_group(folder: Path) -> None:
    """Print what every process of a Ray Train group takes while its two workers sleep."""
    import threading

    import ray.train
    from ray.train.torch import TorchTrainer

    from dpdist.cluster.session import connect
    from dpdist.training.rendezvous import ManualProcessGroupConfig

    def sleeps(config: dict[str, Any]) -> None:
        (folder / str(os.getpid())).touch()
        time.sleep(45)

    with connect(folder / "log" / "ray.log"):
        trainer = TorchTrainer(
            sleeps,
            train_loop_config={},
            torch_config=ManualProcessGroupConfig(),
            scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(name="asleep", storage_path=str(folder / "ray")),
        )
        thread = threading.Thread(target=trainer.fit)
        thread.start()
        while len([path for path in folder.iterdir() if path.name.isdigit()]) < 2:
            time.sleep(0.2)
        time.sleep(10)
        before, began = processor_seconds(os.getpid()), time.monotonic()
        time.sleep(30)
        shares = processor_shares(before, processor_seconds(os.getpid()), time.monotonic() - began)
        thread.join()
    show_shares({title: [share] for title, share in shares.items()})
    print(f"{sum(shares.values()):6.1f} %  in all")


def processor_shares(
    before: dict[tuple[str, str], float], after: dict[tuple[str, str], float], seconds: float
) -> dict[str, float]:
    """Per cent of a core by name."""
    shares: dict[str, float] = {}
    for key, spent in after.items():
        share = 100 * (spent - before.get(key, 0.0)) / seconds
        shares[key[1]] = shares.get(key[1], 0.0) + share
    return shares


def show_shares(shares: dict[str, list[float]]) -> None:
    for title, seen in sorted(shares.items(), key=lambda item: -statistics.median(item[1])):
        if statistics.median(seen) >= 0.05:
            print(f"{statistics.median(seen):6.1f} %  {title}")


def processes(way: str, folder: Path, recipe: Path) -> list[list[str]]:
    """Command lines of the round's processes."""
    answer = folder / "answer"
    answer.mkdir(parents=True)
    count = 2 if way == "alone" else 1
    jobs = []
    for number in range(count):
        jobs.append(folder / f"{number}.job")
        jobs[-1].write_bytes(pickle.dumps(prepare_job(recipe, folder / f"run-{number}")))
    me = [sys.executable, __file__]
    if way == "ray":
        return [[*me, "--ray", str(jobs[0]), str(answer)]]
    workers = 1 if way == "alone" else 2
    return [
        [*me, "--one", str(jobs[rank if way == "alone" else 0]), str(folder / "meet"),
         str(0 if way == "alone" else rank), str(workers), str(answer)]
        for rank in range(2)
    ]  # fmt: skip


def run_round(
    way: str, folder: Path, recipe: Path, steps: int
) -> tuple[list[Any], dict[str, float]]:
    """What both workers kept, and per cent of a core of all other processes of Ray's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(line, env=environment) for line in processes(way, folder, recipe)]
    metrics = folder / "run-0" / "private" / "metrics.jsonl"
    looks: list[tuple[float, dict[tuple[str, str], float]]] = []
    while any(process.poll() is None for process in started):
        time.sleep(0.5)
        if way == "ray" and steps // 3 <= lines(metrics) < steps:
            looks.append((time.monotonic(), processor_seconds(started[0].pid)))
    if any(process.returncode for process in started):
        raise SystemExit(f"{way}: a run failed")
    shares: dict[str, float] = {}
    if len(looks) > 1:
        (began, before), (ended, after) = looks[0], looks[-1]
        shares = processor_shares(before, after, ended - began)
    return [json.loads(p.read_text()) for p in (folder / "answer").glob("*.json")], shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=RECORDS, help="eight times a step's")
    parser.add_argument("--ways", nargs="+", default=["alone", "gloo", "ray"])
    parser.add_argument("--asleep", action="store_true", help="what Ray takes while workers sleep")
    options = parse_arguments(parser, {"steps": 30, "rounds": 1, "records": 256})
    if options.asleep:
        with tempfile.TemporaryDirectory() as name:
            measure_idle_group(Path(name))
        return
    found: dict[str, list[list[Any]]] = {way: [] for way in options.ways}
    shares: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        os.environ["DPDIST_CACHE"] = str(top / "cache")
        make_images(top / "data", "whole", options.records)
        make_images(top / "data", "half", options.records // 2)
        two = recipe(top, "whole", options.records // 8, 2, options.steps)
        one = recipe(top, "half", options.records // 16, 1, options.steps)
        for number in range(options.rounds):
            for way in options.ways:
                kept, others = run_round(
                    way, top / f"{way}-{number}", one if way == "alone" else two, options.steps
                )
                found[way].append(kept)
                for title, share in others.items():
                    shares.setdefault(title, []).append(share)
                rate = statistics.mean(worker["per second"] for worker in kept)
                print(f"round {number}: {way} {rate:.2f} steps/s", flush=True)
    show(found, shares)


def show(found: dict[str, list[list[Any]]], shares: dict[str, list[float]]) -> None:
    from dpdist.core.console import format_columns

    def typical(way: str, *names: str) -> float:
        per_round = []
        for kept in found[way]:
            values = []
            for worker in kept:
                value = worker
                for name in names:
                    value = value[name]
                values.append(value)
            per_round.append(statistics.mean(values))
        return statistics.median(per_round)

    heads = ["ms a step: wall (processor)", *found]
    rows = [
        [name, *(f"{typical(w, 'wall', name):.2f} ({typical(w, 'processor', name):.2f})"
                 for w in found)]
        for name in PHASES
    ]  # fmt: skip
    for name in ("queued", "other threads"):
        rows.append([name, *(f"{typical(way, name):.2f}" for way in found)])
    rows.append(["steps/s", *(f"{typical(way, 'per second'):.2f}" for way in found)])
    print(format_columns(heads, rows))
    show_shares(shares)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        job, folder, rank, workers, answer = sys.argv[2:]
        one_process(Path(job), Path(folder), int(rank), int(workers), Path(answer))
    elif sys.argv[1:2] == ["--ray"]:
        on_ray(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
