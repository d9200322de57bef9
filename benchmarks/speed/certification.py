"""Speed of certification, side by side with the published procedure as a plain loop.

Everything is measured in one process with one thread, in interleaved rounds, and medians are
compared, so that a busy machine slows both sides. MNIST under DPDIST_DATA_ROOT (default
../shared/data); without it, and with --quick, random images.

    python benchmarks/speed/certification.py [--quick] [--only local|ray]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
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

from dpdist import models
from dpdist.certification.inference import ExecutedClassifier, choose_backend
from dpdist.certification.noise import Gaussian
from dpdist.certification.sequential import (
    FUTILITY_ALPHA,
    TargetRadius,
    TargetTest,
    beta_mixture_rejects,
    planned_looks,
)
from dpdist.certification.worker import InputNoiseCounter
from dpdist.core.binomial import clopper_pearson_lower, clopper_pearson_upper
from dpdist.randomness import keys
from dpdist.randomness.keys import StreamKeys

SIGMA, ALPHA, CAP, RADIUS = 0.25, 0.001, 100_000, 0.5
BATCH, STEP = 1000, 500
SOURCE = StreamKeys("benchmark", "1", "model", "data", "gaussian", SIGMA)


def images(count: int, split: str, invented: bool = False) -> tuple[Tensor, Tensor]:
    """MNIST images in [0, 1] and labels, or random ones."""
    path = data_root() / "mnist" / f"{split}.parquet"
    if invented or not path.exists():
        why = "" if invented else f"{path} is absent: "
        print(f"{why}random images, the counts are not realistic")
        generator = torch.Generator().manual_seed(0)
        return torch.rand(count, 1, 28, 28, generator=generator), torch.arange(count) % 10
    import io

    import pyarrow.parquet as pq
    from PIL import Image

    table = pq.read_table(path)
    every = max(1, table.num_rows // count)
    rows = table.take(list(range(0, table.num_rows, every))[:count]).to_pylist()
    pixels = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))) for row in rows]
    stack = torch.from_numpy(np.stack(pixels)[:, None].astype(np.float32) / 255)
    return stack, torch.tensor([row["label"] for row in rows])


def train(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """The TF-Privacy tutorial's CNN, trained on noisy images (plain SGD: speed is the subject)."""
    spec = models.ModelSpec("tf-cnn", (1, 28, 28), 10)
    model = models.initialize(spec, 0)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(128):
            noise = SIGMA * torch.randn(x[rows].shape, generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows] + noise), y[rows]).backward()
            optimizer.step()
    return model.eval()


def plain_loop(model: nn.Module, x: Tensor, draws: int, *, published_count: bool) -> np.ndarray:
    """Cohen et al.'s sampling as published: repeat, add noise, forward, count one by one."""
    counts = np.zeros(10, dtype=int)
    with torch.no_grad():
        for _ in range(draws // BATCH):
            batch = x.repeat(BATCH, 1, 1, 1)
            predictions = model(batch + torch.randn_like(batch) * SIGMA).argmax(1)
            if published_count:
                for label in predictions.numpy():
                    counts[label] += 1
            else:
                counts += torch.bincount(predictions, minlength=10).numpy()
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


def sampler(
    model: nn.Module, rows: int, backend: str = "frozen", shape: tuple[int, ...] = (1, 28, 28)
) -> InputNoiseCounter:
    shapes = [(size, *shape) for size in (rows, 100)]
    classify = ExecutedClassifier(model, backend, shapes)
    return InputNoiseCounter(classify, Gaussian(SIGMA), SOURCE, 10, shape)


def fixed_n(
    model: nn.Module, x: Tensor, draws: int, rounds: int, loops: bool = True
) -> dict[str, float]:
    """Return draws a second of the engine and of the bare forward pass.

    Args:
        x: the input, (channels, height, width).
        loops: whether the published loop is measured too.
    """
    return rates(ways_to_count(model, x, draws, loops), draws, rounds)


def ways_to_count(
    model: nn.Module, x: Tensor, draws: int, loops: bool
) -> dict[str, Callable[[], Any]]:
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

    works: dict[str, Callable[[], Any]] = {"bare forward, best form": forward, "engine": count}
    if loops:
        works = {
            "plain loop as published": lambda: plain_loop(model, x, draws, published_count=True),
            "plain loop, bincount": lambda: plain_loop(model, x, draws, published_count=False),
            **works,
        }
    return works


def early_stopping(p: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return draws and whether the radius was certified, of an input for each probability."""
    p0 = Gaussian(SIGMA).probability_for_radius(RADIUS)
    looks = planned_looks(CAP, STEP)
    paths = rng.binomial(np.diff((0, *looks)), p[:, None], size=(len(p), len(looks))).cumsum(1)
    draws, passed = [], []
    for path in paths:
        test = TargetTest((p0,), ALPHA, looks, FUTILITY_ALPHA)
        place = next(i for i, hits in enumerate(path) if test.update(i, int(hits)))
        draws.append(looks[place])
        passed.append(test.passed())
    return np.array(draws), np.array(passed)


def replay(p: np.ndarray, rng: np.random.Generator) -> None:
    """Mean draws and certified share of the three modes, for inputs with these probabilities."""
    p0 = Gaussian(SIGMA).probability_for_radius(RADIUS)
    fixed = clopper_pearson_lower(rng.binomial(CAP, p), CAP, ALPHA) > p0
    draws, passed = early_stopping(p, rng)
    steps = np.arange(STEP, CAP + 1, STEP)
    walks = rng.binomial(STEP, p[:, None], size=(len(p), len(steps))).cumsum(1)
    rejects = beta_mixture_rejects(walks, steps, p0, ALPHA)
    stop = rejects | (clopper_pearson_upper(walks, steps, FUTILITY_ALPHA) <= p0)
    stop[:, -1] = True
    first = stop.argmax(1)
    any_draws, any_passed = steps[first], rejects[np.arange(len(p)), first]
    print(f"\nradius {RADIUS}, sigma {SIGMA}, alpha {ALPHA}, cap {CAP:,}, {len(p)} replays")
    for name, used, share in (
        ("fixed n", CAP, fixed.mean()),
        ("early stopping", np.mean(draws), np.mean(passed)),
        ("anytime", any_draws.mean(), any_passed.mean()),
    ):
        print(f"  {name:15s} {used:10,.0f} draws (1/{CAP / used:.1f})   certified {share:8.2%}")


def one_radius(model: nn.Module, xs: Tensor, loop_rate: float) -> None:
    """Time to decide every input at one radius, against the plain loop's fixed n."""
    settings = TargetRadius(sigma=SIGMA, n=CAP, alpha=ALPHA, radii=(RADIUS,))
    engine, place = sampler(model, STEP), settings.build_sampler(model, (1, 28, 28))
    start = time.perf_counter()
    draws = [settings.sample(engine, x, i, 0, 1, STEP, place)["n"] for i, x in enumerate(xs)]
    seconds = (time.perf_counter() - start) / len(xs)
    plain = (CAP + 100) / loop_rate
    print(f"\ndeciding {len(xs)} inputs at radius {RADIUS}: {seconds * 1e3:.1f} ms each, ")
    print(f"  {np.mean(draws):,.0f} draws each; plain loop {plain:.2f} s each")
    print(f"  ratio {plain / seconds:.0f} x (to reach: 100)")


# Process, begin and end of a chunk, CPU seconds.
Record = tuple[int, float, float, float]


class ChunkWorker:
    """A second of counting; says when it began and ended."""

    def __init__(self, shared: tuple[nn.Module, Tensor, int]) -> None:
        model, self.x, self.blocks = shared
        self.sampler = sampler(model, BATCH)

    def __call__(self, number: int) -> Record:
        start, cpu = time.time(), time.process_time()
        for block in range(self.blocks):
            self.sampler.histogram(self.x, number, keys.ESTIMATE, block, BATCH, BATCH)
        return os.getpid(), start, time.time(), time.process_time() - cpu


def _process(shared: tuple[nn.Module, Tensor, int], barrier: Any, chunks: int, queue: Any) -> None:
    worker = ChunkWorker(shared)
    worker(0)
    barrier.wait()
    queue.put([worker(number) for number in range(chunks)])


def _rate(records: list[Record], blocks: int) -> float:
    """Draws per second while every worker was at work."""
    by_worker: dict[int, list[tuple[float, float]]] = {}
    for worker, start, end, _ in records:
        by_worker.setdefault(worker, []).append((start, end))
    begin = max(min(s for s, _ in spans) for spans in by_worker.values())
    finish = min(max(e for _, e in spans) for spans in by_worker.values())
    inside = sum(
        max(0.0, min(e, finish) - max(s, begin)) / (e - s) for _, s, e, _ in records if e > s
    )
    return inside * blocks * BATCH / (finish - begin)


def actors_against_processes(
    model: nn.Module, x: Tensor, blocks: int, chunks: int, rounds: int
) -> None:
    import ray

    from dpdist.cluster.actor_pool import run_chunks
    from dpdist.cluster.work import Chunk, ChunkJob, PoolSettings

    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    context = multiprocessing.get_context("spawn")
    shared = (model, x, blocks)
    ratios, cpu_ratios, overheads, lengths = [], [], [], []
    ray.init(
        "local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False
    )
    for _ in range(rounds):
        records: list[Record] = []
        job = ChunkJob(
            ChunkWorker,
            shared,
            [Chunk(str(i), i, i) for i in range(2 * chunks)],
            lambda _, record, into=records: into.append(record),  # type: ignore[misc]
            PoolSettings(actors=2),
        )
        run_chunks(job)
        by_worker: dict[int, list[tuple[float, float]]] = {}
        for worker, start, end, _ in sorted(records, key=lambda record: record[1]):
            by_worker.setdefault(worker, []).append((start, end))
        spans = list(by_worker.values())
        busy = sum(e - s for span in spans for s, e in span)
        total = sum(span[-1][1] - span[0][0] for span in spans)
        overheads.append(1 - busy / total)
        lengths.append(busy / len(records))
        barrier, queue = context.Barrier(2), context.Queue()
        processes = [
            context.Process(target=_process, args=(shared, barrier, chunks, queue))
            for _ in range(2)
        ]
        for process in processes:
            process.start()
        independent = [record for _ in processes for record in queue.get()]
        for process in processes:
            process.join()
        ratios.append(_rate(records, blocks) / _rate(independent, blocks))
        seconds = [statistics.median(r[3] for r in some) for some in (independent, records)]
        cpu_ratios.append(seconds[0] / seconds[1] * (1 - overheads[-1]))
    ray.shutdown()
    length = statistics.median(lengths)
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"\n2 actors against 2 processes: {statistics.median(ratios):.3f} x (to reach: 0.95)")
    print(f"  by round: {each}")
    print(
        f"  by CPU time and idle gaps (other load counts less): {statistics.median(cpu_ratios):.3f}"
    )
    print(f"pool overhead at {length:.2f} s chunks: {statistics.median(overheads):.2%} (<= 5 %)")


def sequential(model: nn.Module, xs: Tensor, draws: int, loop_rate: float) -> None:
    engine = sampler(model, BATCH)
    hits = []
    for i, x in enumerate(xs):
        top = int(engine.histogram(x, i, keys.SELECT, 0, 100, 100).argmax())
        blocks = range(draws // BATCH)
        counts = sum(engine.histogram(x, i, keys.ESTIMATE, b, BATCH, BATCH) for b in blocks)
        hits.append(int(counts[top]))  # type: ignore[index]
    rng = np.random.default_rng(0)
    k = np.repeat(np.array(hits), 5)
    # Each input's p is drawn from what its counts leave open, five times.
    replay(rng.beta(k + 0.5, draws - k + 0.5), rng)
    one_radius(model, xs, loop_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("all", "local", "ray"), default="all")
    arguments = parse_arguments(parser, {})
    quick = arguments.quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = train(*images(500 if quick else 60_000, "train", quick), 1 if quick else 2)
    xs, labels = images(20 if quick else 400, "test", quick)
    with torch.no_grad():
        print(f"clean accuracy {(model(xs).argmax(1) == labels).float().mean():.2%}")
    found = fixed_n(model, xs[0], BATCH if quick else 10 * BATCH, 2 if quick else 15)
    print("\nfixed n, draws per second, 1 thread")
    for name, rate in found.items():
        print(f"  {name:25s} {rate:10,.0f}")
    for name, least in (
        ("plain loop as published", 5),
        ("plain loop, bincount", 5),
        ("bare forward, best form", 0.75),
    ):
        print(f"  engine / {name}: {found['engine'] / found[name]:.2f} x (to reach: {least})")
    if arguments.only != "ray":
        sequential(model, xs, 1000 if quick else 10_000, found["plain loop as published"])
    if arguments.only != "local":
        blocks = max(1, int((0.1 if quick else 1.0) * found["engine"] / BATCH))
        actors_against_processes(model, xs[0], blocks, *((2, 1) if quick else (6, 5)))


if __name__ == "__main__":
    main()
