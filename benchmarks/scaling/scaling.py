"""How training and certification scale with workers.

Three parts, each by its own flag (all without one):

* --train: TF-Privacy CNN, one thread per worker, 1, 2, 4 ... workers up to the cores here. Strong
  scaling: the same expected batch shared out. Weak scaling: the same expected batch per worker.
  Then the model  step(W) = sampling + batch/(W rate) + reduce(W)  is fitted to what was measured,
  two more batch sizes included, and says what 8 to 512 workers would do, with the ring
  all-reduce's 2(W-1)/W of the gradient's bytes over a link plus a latency per hop. Each point is
  also predicted from the others, and the prediction is given with the range of those fits.
* --predict: the same model for GPU workers, with rate, link and fixed cost as given in arguments:
  assumptions. The sampling is measured, and so is the release, digest and noise, the whole of
  which each worker makes on its CPU.
* --certify: draws per second of 1, 2, 4 ... actors.

    python benchmarks/scaling/scaling.py [--train] [--predict] [--certify] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import make_images, parse_arguments, train_small_run
from _training_ray import _ALONE, RECORDS, recipe

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
    from dpdist.training.collectives import release_id

    total = np.zeros(entries)

    took = []
    for key in range(9):
        began = time.process_time()
        release_id("benchmark", total)
        add_noise(total, key.to_bytes(32, "big"), 1.0)
        took.append(time.process_time() - began)
    return statistics.median(took) / entries


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
        sent = 2 * (workers - 1) / workers * 8 * self.size  # bytes of each worker
        return 2 * (workers - 1) * self.latency + sent / self.bandwidth

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for part in ("train", "predict", "certify"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--workers", type=int, help="go up to so many (default: the cores here)")
    parser.add_argument("--records", type=int, default=RECORDS, help="of --train")
    gpu = parser.add_argument_group("the predicted GPU worker (assumptions)")
    gpu.add_argument("--gpu-rate", type=float, default=50_000, help="examples per second")
    gpu.add_argument("--link-gbit", type=float, default=100, help="between two hosts")
    gpu.add_argument("--hop-us", type=float, default=20, help="one message, microseconds")
    gpu.add_argument("--parameters", type=int, default=11_000_000, help="of the model")
    gpu.add_argument("--fixed-ms", type=float, default=5, help="of a step, on every worker")
    options = parse_arguments(parser, {"workers": 1, "records": 256})
    assumed = Assumed(
        options.gpu_rate,
        options.link_gbit,
        1e-6 * options.hop_us,
        options.parameters,
        1e-3 * options.fixed_ms,
    )
    everything = not (options.train or options.predict or options.certify)
    if options.train or everything:
        training(options.quick, options.workers, options.records)
    if options.predict or everything:
        assumed.predict()
    if options.certify or everything:
        certification(options.quick, options.workers)


if __name__ == "__main__":
    main()
