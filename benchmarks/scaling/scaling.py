"""How training and certification scale with workers, and whether the driver keeps up.

Five parts, each by its own flag (all without one):

* --train: TF-Privacy CNN, one thread per worker, 1, 2, 4 ... workers up to the cores here. Strong
  scaling: the same expected batch shared out. Weak scaling: the same expected batch per worker.
  Then the model  step(W) = sampling + batch/(W rate) + reduce(W)  is fitted to what was measured,
  two more batch sizes included, and says what 8 to 512 workers would do, with the ring
  all-reduce's 2(W-1)/W of the gradient's bytes over a link plus a latency per hop. Each point is
  also predicted from the others, and the prediction is given with the range of those fits.
* --predict: the same model for GPU workers, with rate, link and fixed cost as given in arguments:
  assumptions. The sampling is measured, and so is the release, digest and noise, the whole of
  which each worker makes on its CPU.
* --paper: a calculation, not a measurement: where the time of a step would go on 1, 8 and 64 GPUs.
  Constants are measured on this machine with one worker, or read from --constants if that file is
  there (else it is written): sampling, digest, noise, the ledger's write, what a step costs besides
  its records, Ray's start. The GPU and its links are assumed, as for --predict.
* --certify: draws per second of 1, 2, 4 ... actors.
* --driver: a million chunks without models through the actor pool, first its scheduling alone (for
  2, 64 and 512 actors that answer at once), then with Ray: chunks per second, the driver's CPU time
  per chunk, its memory.

    python benchmarks/scaling/scaling.py [--train] [--predict] [--paper [--constants FILE]]
        [--certify] [--driver] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import make_images, parse_arguments, train_small_run
from training_ray import _ALONE, RECORDS, recipe

from dpdist.reports.compare import markdown_table

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

_COMMAND = [sys.executable, "-c", "from dpdist.cli.main import main; main()"]


def worker_counts(limit: int | None) -> list[int]:
    """1, 2, 4 ... up to the cores of this machine."""
    cores = limit or len(os.sched_getaffinity(0))
    return [2**k for k in range(cores.bit_length()) if 2**k <= cores]


# --- training


def train_rate(folder: Path, batch: int, workers: int, steps: int, ray: bool = True) -> float:
    """Steps per second over the last two thirds of a run on Ray Train; or of one without Ray."""
    path = recipe(folder, "random", batch, workers, steps)
    runs = folder / f"runs-{time.monotonic_ns()}"
    metrics = runs / path.stem / "private" / "metrics.jsonl"
    command = [*_COMMAND, "run", "--until", "train", str(path), "--runs", str(runs)]
    if not ray:
        command = [sys.executable, "-c", _ALONE, str(path), str(runs / path.stem)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seen: list[tuple[float, int]] = []
    while process.poll() is None:
        time.sleep(0.02)
        done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        if done and (not seen or done != seen[-1][1]):
            seen.append((time.perf_counter(), done))
    if process.returncode:
        raise SystemExit(process.stderr.read().decode() if process.stderr else "failed")
    late = [entry for entry in seen if entry[1] >= steps // 3]
    return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


def sampling_seconds(records: int) -> float:
    """Seconds to draw one step's members out of `records`."""
    from dpdist.gradients.sampling import poisson_sample

    took = []
    for key in range(20):
        began = time.perf_counter()
        poisson_sample(key.to_bytes(32, "big"), 0, records, 0.01)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def release_seconds(entries: int) -> float:
    """Processor seconds for each entry of what workers do on their CPUs behind the sum: its digest
    for the ledger, and noise."""
    import numpy as np

    from dpdist.gradients.noise import add_noise
    from dpdist.training.collectives import leaf_digests

    total = np.zeros(entries)

    def release(key: int) -> None:
        leaf_digests("benchmark", total)
        add_noise(total, key.to_bytes(32, "big"), 1.0)

    return processor_seconds_of(release) / entries


def processor_seconds_of(work: Callable[[int], object]) -> float:
    """Return the median of nine calls' processor seconds."""
    took = []
    for number in range(9):
        began = time.process_time()
        work(number)
        took.append(time.process_time() - began)
    return statistics.median(took)


class StepModel:
    """step(W) = sample/W + batch/(W rate) + [W > 1] (2 (W-1) latency + 2 (W-1)/W bytes/bandwidth)
    + release + fixed. Every worker samples its own share of the records.
    Times in seconds; release: for all entries, digest and noise."""

    def __init__(
        self, sample: float, rate: float, fixed: float, size: int, latency: float,
        bandwidth: float, release: float = 0.0,
    ) -> None:  # fmt: skip
        self.sample, self.rate, self.fixed = sample, rate, fixed
        self.size, self.latency, self.bandwidth = size, latency, bandwidth
        self.release = release

    def reduce(self, workers: int) -> float:
        """A ring all-reduce of the float64 sum."""
        if workers == 1:
            return 0.0
        return 2 * (workers - 1) * self.latency + self.sent(workers) / self.bandwidth

    def sent(self, workers: int) -> float:
        """Bytes that each worker sends for one reduction."""
        return 2 * (workers - 1) / workers * 8 * self.size

    def step(self, workers: int, batch: float) -> float:
        compute = batch / (workers * self.rate)
        return self.sample / workers + compute + self.reduce(workers) + self.release + self.fixed

    def efficiency(self, workers: int, batch: float) -> float:
        """Of strong scaling: speed-up over workers."""
        return self.step(1, batch) / (workers * self.step(workers, batch))

    def pays_until(self, batch: float, least: float = 0.5) -> int:
        """The most workers (a power of two up to 4,096) with at least this efficiency."""
        good = [2**k for k in range(13) if self.efficiency(2**k, batch) >= least]
        return max(good)


def fit(steps: dict[tuple[int, float], float], sample: float, size: int) -> StepModel:
    """From measured seconds per step, (workers, batch) -> seconds, by least squares in rate, fixed
    cost and latency (relative errors, non-negative); bandwidth is taken as 10 Gbit/s: the local
    gradients here are too small to show it."""
    import numpy as np
    from scipy.optimize import lsq_linear

    bandwidth = 10e9 / 8
    rows, wanted = [], []
    for (workers, batch), seconds in steps.items():
        hops = 2 * (workers - 1)
        known = sample / workers + hops / workers * 8 * size / bandwidth
        rows.append(np.array([batch / workers, 1.0, hops]) / seconds)
        wanted.append((seconds - known) / seconds)
    solved = lsq_linear(np.array(rows), np.array(wanted), bounds=(1e-12, np.inf)).x
    return StepModel(sample, 1 / solved[0], solved[1], size, solved[2], bandwidth)


@dataclass(frozen=True)
class Assumed:
    """A GPU worker and its links, for the prediction: assumptions, never measured here.

    rate: examples per second of one worker. gbit: of the link between two hosts. hop: seconds that
    one message takes. parameters: of the model that is trained. fixed: seconds of a step that no
    worker shares (the ledger's write, the update).
    """

    rate: float
    gbit: float
    hop: float
    parameters: int
    fixed: float

    def model(self, sample: float, release: float = 0.0) -> StepModel:
        """Sampling and release take what they take on this machine's CPU."""
        bandwidth = self.gbit * 1e9 / 8
        return StepModel(
            sample, self.rate, self.fixed, self.parameters, self.hop, bandwidth, release
        )  # fmt: skip

    def predict(self) -> None:
        """For a data set of 60,000 records; their sampling is measured here, and the release."""
        sample, each = sampling_seconds(60_000), release_seconds(1_000_000)
        release = each * self.parameters
        print(
            f"ASSUMED: {self.rate:,.0f} examples/s per GPU, {self.parameters:,} parameters, "
            f"{self.gbit:g} Gbit/s, {1e6 * self.hop:g} us per hop, {1e3 * self.fixed:g} ms fixed; "
            f"measured: {1e3 * sample:.2f} ms to sample 60,000 records on one core, digest "
            f"and noise of {1e-6 / each:,.0f} million parameters a second on one core"
        )
        predict("model", self.model(sample, release), 60_000)


# --- on paper


@dataclass(frozen=True)
class Constants:
    """Hold what one worker was measured to take on a machine.

    Of a step, in seconds: sampling of 60,000 records, digest and noise per parameter, one durable
    entry of a ledger, and what a step costs besides records and those (fixed). rate: examples per
    second of a CPU worker, which the fixed cost was told apart from. ray_start: until the first
    answer of a session's actor. load: of the machine before and after.
    """

    sampling: float
    digest: float
    noise: float
    ledger: float
    fixed: float
    rate: float
    ray_start: float
    load: tuple[float, float]

    @classmethod
    def measure(cls, quick: bool) -> Constants:
        """Measure all of them here; minutes, of which most are two trainings of one worker."""
        import numpy as np

        from dpdist.gradients.noise import add_noise
        from dpdist.training.collectives import leaf_digests

        before, entries = os.getloadavg()[0], 10_000 if quick else 1_000_000
        total = np.zeros(entries)
        digest = processor_seconds_of(lambda key: leaf_digests("benchmark", total)) / entries
        noise = processor_seconds_of(
            lambda key: add_noise(total, key.to_bytes(32, "big"), 1.0)
        ) / entries  # fmt: skip
        sampling, ledger = sampling_seconds(60_000), ledger_seconds(5 if quick else 100)
        rate, fixed = worker_constants(quick)
        start, besides = ray_start_seconds(), max(0.0, fixed - ledger)  # the runs had a ledger
        return cls(
            sampling, digest, noise, ledger, besides, rate, start, (before, os.getloadavg()[0])
        )

    @classmethod
    def of(cls, path: Path | None, quick: bool) -> Constants:
        """Return those of a file; where it is not there, measure them and write it."""
        if path is not None and path.exists():
            known = json.loads(path.read_text())
            return cls(**known | {"load": tuple(known["load"])})
        found = cls.measure(quick)
        if path is not None:
            path.write_text(json.dumps(asdict(found), indent=1) + "\n")
        return found

    def describe(self) -> str:
        """Return the constants in words."""
        return (
            f"MEASURED with one worker (load average {self.load[0]:.1f} to {self.load[1]:.1f}): "
            f"{1e3 * self.sampling:.2f} ms to sample 60,000 records, digest of "
            f"{1e-6 / self.digest:,.0f} and noise for {1e-6 / self.noise:,.0f} million parameters "
            f"a second and core, {1e3 * self.ledger:.2f} ms for a ledger entry, "
            f"{1e3 * self.fixed:.2f} ms of a step besides, {self.ray_start:.1f} s until Ray's "
            "first answer"
        )


def ledger_seconds(entries: int) -> float:
    """Return the median seconds of a line that is appended to a file and made durable."""
    took = []
    with tempfile.TemporaryDirectory() as scratch, open(Path(scratch) / "ledger", "ab") as file:
        for number in range(entries):
            began = time.perf_counter()
            file.write(b'{"step": %d, "release": "%s"}\n' % (number, b"0" * 64))
            file.flush()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def worker_constants(quick: bool) -> tuple[float, float]:
    """Return one CPU worker's examples per second, and a step's seconds besides its records.

    Of two trainings without Ray whose batches differ by a factor of eight.
    """
    records, steps = (256, 30) if quick else (RECORDS, 150)
    batches = (records // 64, records // 8)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_images(folder / "data", "random", records)
        small, large = (
            1 / train_rate(folder, batch, 1, steps, ray=False) for batch in batches
        )  # fmt: skip
    rate = (batches[1] - batches[0]) / max(large - small, 1e-9)
    return rate, max(0.0, small - batches[0] / rate)


def ray_start_seconds() -> float:
    """Return the seconds from a session's start to the first answer of an actor that has torch."""
    code = """
import time
began = time.perf_counter()
import dpdist
with dpdist.connect(cpus=1):
    import ray
    class Worker:
        def ready(self):
            import torch
            return torch.__version__
    ray.get(ray.remote(Worker).remote().ready.remote())
    print(time.perf_counter() - began)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def paper(assumed: Assumed, constants: Constants, batch: int, steps: int) -> None:
    """Print the parts of a step on 1, 8 and 64 GPUs, as the model has them."""
    print("\nON PAPER: a calculation from constants and assumptions, nothing here ran on a GPU")
    print(constants.describe())
    print(
        f"ASSUMED: {assumed.rate:,.0f} examples/s per GPU at any batch, {assumed.parameters:,} "
        f"parameters, {assumed.gbit:g} Gbit/s and {1e6 * assumed.hop:g} us per hop between any "
        "two workers, all workers equally fast and one core each for digest and noise; ledger and "
        "fixed cost as measured, shared by nobody; workers start side by side, as fast as one"
    )
    print(f"{batch:,} records expected in a step, {steps:,} steps; milliseconds of a step")
    rows = [[
        "workers", "sampling", "passes", "MiB sent", "reduction", "digest, noise",
        "ledger, fixed", "step", "efficiency", "start and run, s",
    ]]  # fmt: skip
    model = StepModel(
        constants.sampling, assumed.rate, constants.fixed + constants.ledger,
        assumed.parameters, assumed.hop, assumed.gbit * 1e9 / 8,
        (constants.digest + constants.noise) * assumed.parameters,
    )  # fmt: skip
    for workers in (1, 8, 64):
        parts = [
            constants.sampling / workers, batch / (workers * assumed.rate),
            model.reduce(workers), model.release, model.fixed,
        ]  # fmt: skip
        step = model.step(workers, batch)
        shown = [f"{1e3 * part:.2f}" for part in parts]
        shown.insert(2, f"{model.sent(workers) / 2**20:.0f}")
        rows.append([
            str(workers), *shown, f"{1e3 * step:.1f}",
            f"{model.efficiency(workers, batch):.0%}",
            f"{constants.ray_start + steps * step:,.0f}",
        ])  # fmt: skip
    print(markdown_table(rows))


def leave_one_out(
    steps: dict[tuple[int, float], float], sample: float, size: int
) -> tuple[list[StepModel], float]:
    """The fits that each lack one point, and the worst relative error with which one predicts the
    point that it lacks."""
    models, errors = [], []
    for (workers, batch), seconds in steps.items():
        model = fit({k: v for k, v in steps.items() if k != (workers, batch)}, sample, size)
        models.append(model)
        errors.append(abs(model.step(workers, batch) / seconds - 1))
    return models, max(errors)


def load() -> str:
    """How busy the machine is: what was measured beside other work says so."""
    return f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def training(quick: bool, limit: int | None, records: int) -> None:
    """records: of which a sixteenth is the expected batch of one worker. quick: without Ray, so
    with one worker."""
    limit = 1 if quick else limit
    base_batch, steps = records // 16, 30 if quick else 150
    measured: dict[tuple[int, float], float] = {}
    size = 26_010
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_images(folder / "data", "random", records)
        print(f"training: TF-Privacy CNN, {size:,} parameters, {records:,} records; {load()}")
        print(f"{'workers':>8} {'batch':>6} {'steps/s':>8} {'examples/s':>11} {'efficiency':>11}")
        for kind in ("strong", "weak"):
            base = 0.0
            for workers in worker_counts(limit):
                batch = base_batch if kind == "strong" else base_batch * workers
                if (workers, batch) not in measured:
                    rate = train_rate(folder, batch, workers, steps, ray=not quick)
                    measured[workers, batch] = 1 / rate
                rate = 1 / measured[workers, batch]
                base = base or rate
                ideal = workers if kind == "strong" else 1
                _row(workers, batch, rate, f"{rate / base / ideal:10.0%}  {kind}")
        # With one batch size, compute and fixed cost of a step could not be told apart.
        for batch in (base_batch // 4, 2 * base_batch):
            for workers in worker_counts(limit):
                if (workers, batch) not in measured:
                    more = steps if batch > base_batch else 2 * steps
                    rate = train_rate(folder, batch, workers, more, ray=not quick)
                    measured[workers, batch] = 1 / rate
                    _row(workers, batch, rate, f"{'':11} for the fit")
        sample = sampling_seconds(records)
        model = fit(measured, sample, size)
    worst = max(abs(model.step(w, b) / s - 1) for (w, b), s in measured.items())
    others, unseen = leave_one_out(measured, sample, size)
    print(f"\nmodel: {_words(model)} (this machine, CPU); worst error {worst:.0%}")
    for point, other in zip(measured, others, strict=True):
        print(f"without {point[0]} workers, batch {point[1]:g}: {_words(other)}")
    print(f"worst error for the point left out: {unseen:.0%}")
    predict("this CPU worker", model, 60_000, others)


def _row(workers: int, batch: int, rate: float, rest: str) -> None:
    print(f"{workers:8} {batch:6} {rate:8.2f} {rate * batch:11,.0f} {rest}; {load()}", flush=True)


def _words(model: StepModel) -> str:
    return (
        f"{model.rate:,.0f} examples/s per worker, {1e3 * model.fixed:.2f} ms fixed, "
        f"{1e6 * model.latency:.0f} us per hop"
    )


def predict(title: str, model: StepModel, largest: int, others: Sequence[StepModel] = ()) -> None:
    """The table of strong-scaling efficiency for 8 to 512 workers. others: fits that lack a point,
    for the range of where it stops paying."""
    print(f"\npredicted strong-scaling efficiency, {title}")
    counts = [8, 16, 32, 64, 128, 256, 512]
    print(f"{'batch':>8} " + " ".join(f"{w:>6}" for w in counts) + "   50 % up to")
    for batch in (512, 4096, 16_384, largest):
        cells = " ".join(f"{model.efficiency(w, batch):6.0%}" for w in counts)
        limits = [other.pays_until(batch) for other in others]
        spread = f" ({min(limits):,} to {max(limits):,} with a point left out)" if limits else ""
        print(f"{batch:8,} {cells}   {model.pays_until(batch):,} workers{spread}")


# --- certification


def certification(quick: bool, limit: int | None) -> None:
    """Draws per second over a run's second half, actors 1, 2, 4 ..."""
    raw = {
        "name": "scaling",
        "data": {"name": "digits"},
        "model": {"name": "small-cnn", "options": {"width": 8}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 100, "steps": 20, "learning_rate": 0.5},
    }
    n, inputs = (5_000, 60) if quick else (50_000, 200)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "scaling.yaml"
        path.write_text(yaml.safe_dump(raw))
        runs = ["--runs", str(train_small_run(str(path), {}).parent)]
        print(f"\ncertification: small CNN, {inputs} inputs, {n:,} draws each")
        print(f"{'actors':>8} {'draws/s':>10} {'efficiency':>11}")
        base = 0.0
        for actors in worker_counts(limit):
            output = Path(scratch) / f"table-{actors}"
            process = subprocess.Popen(
                [*_COMMAND, "certify", "scaling", *runs, "--sigma", "0.25", "--n", str(n),
                 "--set", f"certify.max_inputs={inputs}", "--workers", str(actors),
                 "--output", str(output)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            rate = _draw_rate(process, output / "journal.jsonl", n * inputs)
            base = base or rate
            print(f"{actors:8} {rate:10,.0f} {rate / base / actors:10.0%}  {load()}", flush=True)


def _draw_rate(process: subprocess.Popen, journal: Path, total: int) -> float:
    """Draws per second between the first answer and the last, from the journal's growth."""
    seen: list[tuple[float, int]] = []
    while process.poll() is None:
        time.sleep(0.1)
        if journal.exists():
            size = journal.stat().st_size
            if size and (not seen or size != seen[-1][1]):
                seen.append((time.perf_counter(), size))
    if process.returncode or len(seen) < 3:
        raise SystemExit("certification failed, or was too short to time")
    (begun, first), (ended, last) = seen[0], seen[-1]
    return total * (last - first) / last / (ended - begun)


# --- the driver


def driver(chunks: int, actors: int) -> dict[str, float]:
    """Chunks without work through the pool: chunks/s, driver CPU us per chunk, and by how many MiB
    its memory had grown when nine tenths were done."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    from dpdist.cluster.actor_pool import run_chunks
    from dpdist.cluster.work import Chunk, ChunkJob, PoolSettings

    ray.init(
        "local", num_cpus=actors, include_dashboard=False, configure_logging=False,
        log_to_driver=False,
    )  # fmt: skip
    begun = cpu = 0.0
    done, grew = 0, 0

    def factory(shared: object) -> object:
        return lambda payload: payload

    def stream() -> Iterator[Chunk]:
        return (Chunk(f"inputs {i}..", i, float(i)) for i in range(chunks))

    def on_result(key: str, result: int) -> None:
        nonlocal begun, cpu, done, grew
        if not done:
            begun, cpu = time.perf_counter(), time.process_time()
        done += 1
        if done == chunks * 9 // 10:
            grew = resident() - before

    before = resident()
    run_chunks(ChunkJob(factory, None, stream(), on_result, PoolSettings(actors=actors)))
    seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    result = {
        "chunks": done,
        "per_second": done / seconds,
        "cpu_us": 1e6 * used / done,
        "grew_mib": grew / 2**20,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    ray.shutdown()
    return result


class _Instant:
    """Stands in for Ray in the pool: every call is answered at once, so that what is left is the
    pool's own scheduling."""

    def __init__(self, actors: int) -> None:
        self.actors, self.made = actors, 0
        self.answers: dict[int, object] = {}

    def put(self, value: object) -> object:
        return value

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.actors)}

    def remote(self, runner: type) -> _Instant:
        return self

    def options(self, **_: object) -> _Instant:
        return _Factory(self)  # type: ignore[return-value]

    def wait(self, refs: list, num_returns: int, timeout: float) -> tuple[list, list]:
        return refs[:num_returns], []

    def get(self, refs: object) -> object:
        if isinstance(refs, list):
            return [self.answers.pop(ref) for ref in refs]
        return self.answers.pop(refs)

    def kill(self, actor: object, no_restart: bool) -> None:
        pass

    def answer(self, value: object) -> int:
        self.made += 1
        self.answers[self.made] = value
        return self.made


class _Factory:
    def __init__(self, ray: _Instant) -> None:
        self._ray = ray

    def remote(self, *arguments: object) -> _Actor:
        return _Actor(self._ray)


class _Actor:
    """`ready` and `run` are called as actor.ready.remote() and actor.run.remote(payload)."""

    def __init__(self, ray: _Instant) -> None:
        self.ready = self.run = self
        self._ray = ray

    def remote(self, payload: object = True) -> int:
        return self._ray.answer(payload)


def scheduling(chunks: int, actors: int, stored: bool = False) -> dict[str, float]:
    """Many chunks through the pool's own code, for a cluster of `actors` instant actors.

    grew_mib: by how much the process was larger than before when nine tenths were done. stored:
    hand the chunks over as a list, for comparison.
    """
    from dpdist.cluster import actor_pool
    from dpdist.cluster.work import ChunkJob, PoolSettings

    real, done, grew = actor_pool.ray, 0, 0

    def on_result(key: str, result: object) -> None:
        nonlocal done, grew
        done += 1
        if done == chunks * 9 // 10:
            grew = resident() - before

    actor_pool.ray = _Instant(actors)
    before, begun = resident(), time.process_time()
    try:
        stream = (actor_pool.Chunk(f"inputs {i}..", i, float(i)) for i in range(chunks))
        given = list(stream) if stored else stream
        settings = PoolSettings(actors=actors)
        actor_pool.run_chunks(ChunkJob(int, None, given, on_result, settings))
    finally:
        actor_pool.ray = real
    used = time.process_time() - begun
    return {"chunks": done, "per_second": done / used, "grew_mib": grew / 2**20}


def resident() -> int:
    """Bytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for part in ("train", "predict", "paper", "certify", "driver"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--workers", type=int, help="go up to so many (default: the cores here)")
    parser.add_argument("--records", type=int, default=RECORDS, help="of --train")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="of --driver")
    parser.add_argument("--constants", type=Path, help="of --paper: read, or measured and written")
    parser.add_argument("--batch", type=int, default=16_384, help="of --paper: expected records")
    parser.add_argument("--steps", type=int, default=1_000, help="of --paper")
    gpu = parser.add_argument_group("the predicted GPU worker (assumptions)")
    gpu.add_argument("--gpu-rate", type=float, default=50_000, help="examples per second")
    gpu.add_argument("--link-gbit", type=float, default=100, help="between two hosts")
    gpu.add_argument("--hop-us", type=float, default=20, help="one message, microseconds")
    gpu.add_argument("--parameters", type=int, default=11_000_000, help="of the model")
    gpu.add_argument("--fixed-ms", type=float, default=5, help="of a step, on every worker")
    options = parse_arguments(parser, {"workers": 1, "records": 256, "chunks": 5_000})
    assumed = Assumed(
        options.gpu_rate,
        options.link_gbit,
        1e-6 * options.hop_us,
        options.parameters,
        1e-3 * options.fixed_ms,
    )
    chosen = options.train, options.predict, options.paper, options.certify, options.driver
    everything = not any(chosen)
    if options.train or everything:
        training(options.quick, options.workers, options.records)
    if options.predict or everything:
        assumed.predict()
    if options.paper or everything:
        constants = Constants.of(options.constants, options.quick)
        paper(assumed, constants, options.batch, options.steps)
    if options.certify or everything:
        certification(options.quick, options.workers)
    if options.driver or everything:
        chunks = options.chunks
        for actors in (2, 64, 512):
            alone = scheduling(chunks, actors)
            print(
                f"scheduling alone, {actors} instant actors: "
                f"{alone['chunks']:,} chunks, {alone['per_second']:,.0f} per CPU second; memory "
                f"grew by {alone['grew_mib']:.1f} MiB",
                flush=True,
            )
        found = driver(chunks, 2)
        print(
            f"\ndriver with Ray, 2 actors, {load()}: {found['chunks']:,} chunks, "
            f"{found['per_second']:,.0f}/s, "
            f"{found['cpu_us']:.0f} us of its CPU each; memory peaked at {found['peak_mib']:.0f} "
            f"MiB and grew by {found['grew_mib']:.0f} MiB"
        )


if __name__ == "__main__":
    main()
