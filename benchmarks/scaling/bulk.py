"""Bulk certification of a foreign CIFAR-10 classifier of ResNet-20 size, by the command line.

    python benchmarks/scaling/bulk.py --data-root data --out DIR [--only 'train-*'] [--quick]
    python benchmarks/scaling/bulk.py --table

A ResNet-20 is trained for each sigma by an ordinary loop on noisy pictures (Cohen et al., 2019),
without privacy; `dpdist certify --model --weights --data` then certifies each 20th test picture by
every mode. Draws are counted, and hours are draws by the `rate` of one thread, which is measured
alone; processor seconds of a training are those of its process. Each part is a line of --results;
what is there is not made again, and an interrupted part continues.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import (
    CHECKOUT,
    RESULTS_FOLDER,
    append_line,
    choose_parts,
    find_processor,
    make_images,
    parse_arguments,
    read_parts,
    require_data,
    scratch_folder,
)
from _resnet20 import resnet20
from scipy.special import ndtri
from torch import Tensor, nn

from dpdist.certification import table_reader
from dpdist.core.binomial import clopper_pearson_lower, clopper_pearson_upper, hoeffding_lower
from dpdist.reports.compare import markdown_table

RESULTS = RESULTS_FOLDER / "bulk.jsonl"
SIGMAS = (0.25, 0.5)
RADII = (0.0, 0.25, 0.5, 0.75)
MODES = {
    "fixed": ("--set", "certify.mode=fixed"),
    "target": ("--set", "certify.mode=target-radius", "--radii", "0.25,0.5,0.75"),
    "anytime": ("--set", "certify.mode=anytime", "--radii", "0.25,0.5,0.75"),
}


def pictures(path: Path) -> tuple[Tensor, Tensor]:
    """Pictures of a Parquet file, float32 (N, 3, 32, 32) in [0, 1], and their labels."""
    import pyarrow.parquet as pq
    from PIL import Image

    table = pq.read_table(path)
    coded = [Image.open(io.BytesIO(row["bytes"])) for row in table["image"].to_pylist()]
    pixels = np.stack([np.asarray(each.convert("RGB")) for each in coded])
    labels = torch.from_numpy(table["label"].to_numpy().copy()).long()
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, labels


def used() -> float:
    """Processor seconds of this process and of its children that ended."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, -1))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def processor() -> str:
    return f"{find_processor()[0]}, {len(os.sched_getaffinity(0))} CPUs"


def crop_and_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each picture by up to four pixels, and mirror half of them."""
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    shifts = torch.randint(0, 9, (len(x), 2), generator=generator)
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    rows = shifts[:, :1] + torch.arange(32)
    columns = shifts[:, 1:] + torch.arange(32)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    each = torch.arange(len(x))[:, None, None]
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def train(options: argparse.Namespace, sigma: float) -> dict[str, Any]:
    """Train on noisy pictures; the last epoch's state is kept, and an interrupted one goes on."""
    file, kept = options.out / f"resnet-{sigma:g}.pt", options.out / f"state-{sigma:g}.pt"
    x, labels = pictures(options.data / "train.parquet")
    torch.manual_seed(0)
    model = resnet20().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = -(-len(x) // options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=steps * options.epochs, pct_start=0.2
    )
    done, spent = 0, 0.0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        done, spent = state["epochs"], state["seconds"]
    for epoch in range(done, options.epochs):
        began, total = used(), 0.0
        generator = torch.Generator().manual_seed(epoch)
        model.train()
        for rows in torch.randperm(len(x), generator=generator).split(options.batch):
            batch = crop_and_flip(x[rows], generator)
            noisy = batch + sigma * torch.randn(batch.shape, generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(noisy.contiguous(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(logits.float(), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        spent += used() - began
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "schedule": schedule.state_dict(), "epochs": epoch + 1,
                 "seconds": spent}  # fmt: skip
        torch.save(state, kept.with_suffix(".new"))
        kept.with_suffix(".new").replace(kept)
        print(f"sigma {sigma:g}, epoch {epoch + 1}: loss {total / steps:.3f}", flush=True)
    torch.save(model.state_dict(), file)
    return {"epochs": options.epochs, "processor_seconds": spent, **judge(options, model, sigma)}


def judge(options: argparse.Namespace, model: nn.Module, sigma: float) -> dict[str, float]:
    """Accuracy on clean test pictures, and on one noisy copy of each."""
    x, labels = pictures(options.data / "test.parquet")
    generator = torch.Generator().manual_seed(0)
    model.eval()
    right = np.zeros(2)
    with torch.inference_mode():
        for rows in torch.arange(len(x)).split(500):
            noisy = x[rows] + sigma * torch.randn(x[rows].shape, generator=generator)
            for k, inputs in enumerate((x[rows], noisy)):
                right[k] += (model(inputs).argmax(1) == labels[rows]).sum().item()
    return {"accuracy": right[0] / len(x), "noisy_accuracy": right[1] / len(x)}


def command(options: argparse.Namespace, sigma: float, mode: str) -> list[str]:
    """The words after `dpdist`."""
    return [
        "certify", "--model", "_resnet20:resnet20", "--weights", f"resnet-{sigma:g}.pt",
        "--data", str(options.data), "--sigma", f"{sigma:g}", "--n", str(options.n),
        "--set", f"certify.every={options.every}", "--set", f"certify.backend={options.backend}",
        *MODES[mode],
        "--output", f"{mode}-{sigma:g}",
    ]  # fmt: skip


def certify(options: argparse.Namespace, sigma: float, mode: str) -> dict[str, Any]:
    """Certify by the command, and read its table."""
    words = command(options, sigma, mode)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "benchmarks"), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [sys.executable, "-m", "dpdist", *words], cwd=options.out, env=environment
    )
    try:
        code = running.wait()
    except KeyboardInterrupt:
        running.send_signal(signal.SIGINT)
        running.wait()
        raise
    if code:
        raise SystemExit(f"dpdist {' '.join(words)}: ended with {code}")
    shown = " ".join(words).replace(str(options.data), "data/cifar10")
    return {"command": f"dpdist {shown}", **count(options, mode, sigma)}


def count(
    options: argparse.Namespace, mode: str, sigma: float, by_hoeffding: bool = False
) -> dict[str, Any]:
    """Certified inputs of a table; by Hoeffding's bound of the same votes if asked."""
    table = table_reader.read(options.out / f"{mode}-{sigma:g}" / "certificates.parquet").table
    columns = {
        name: table[name].to_numpy() for name in ("prediction", "label", "k", "n", "n0", "radius")
    }
    radius, answered = columns["radius"], columns["prediction"] >= 0
    right = columns["prediction"] == columns["label"]
    if by_hoeffding:
        alpha = table["alpha"][0].as_py()
        bounds = hoeffding_lower(columns["k"], columns["n"], alpha)
        radius = sigma * ndtri(bounds)
        answered, right = bounds > 0.5, table["selected"].to_numpy() == columns["label"]
    held = [int(np.sum(answered & right & (radius >= r))) for r in RADII]
    return {
        "inputs": len(table), "certified": dict(zip(map("{:g}".format, RADII), held, strict=True)),
        "abstained": int(np.sum(~answered)), "draws": int((columns["n"] + columns["n0"]).sum()),
        "mean_radius": float(np.mean(np.where(answered & right, radius, 0.0))),
    }  # fmt: skip


def by_hoeffding(options: argparse.Namespace, sigma: float) -> dict[str, Any]:
    """Certify the votes of `fixed` by Hoeffding's bound: no network runs."""
    return count(options, "fixed", sigma, by_hoeffding=True)


def rate(options: argparse.Namespace, sigma: float) -> dict[str, Any]:
    """Draws a second of the command and of Cohen's loop, by one thread, in turn, nothing beside.

    The command's include its start: of Python, of torch and of what it checks.
    """
    torch.set_num_threads(1)
    x, _ = pictures(options.data / "test.parquet")
    model = resnet20()
    model.load_state_dict(torch.load(options.out / f"resnet-{sigma:g}.pt", weights_only=True))
    model.eval()
    few = max(1, len(x) // options.rate_inputs)
    found: dict[str, list[float]] = {backend: [] for backend in ("frozen", "bf16", "loop")}
    for number in range(options.rounds):
        for backend, rates in found.items():
            began = time.monotonic()
            if backend == "loop":
                draws = cohen_loop(model, x[::few], sigma, options.n)
            else:
                asked = {**vars(options), "every": few, "backend": backend}
                words = command(argparse.Namespace(**asked), sigma, "fixed")
                words[-1] = f"rate-{backend}-{number}"
                environment = {
                    **os.environ,
                    "PYTHONPATH": str(CHECKOUT / "benchmarks"),
                    "OMP_NUM_THREADS": "1",
                    "DPDIST_EXECUTOR": "local",
                }
                subprocess.run(
                    [sys.executable, "-m", "dpdist", *words],
                    cwd=options.out, env=environment, check=True, capture_output=True,
                )  # fmt: skip
                draws = len(x[::few]) * (options.n + 100)
            rates.append(draws / (time.monotonic() - began))
            print(f"round {number}, {backend}: {rates[-1]:,.0f} draws/s", flush=True)
    return {"draws_per_second": found, "inputs": len(x[::few])}


def cohen_loop(model: nn.Module, x: Tensor, sigma: float, n: int) -> int:
    """Count votes as Cohen's code does, in batches of 1,000, and return the draws."""
    draws = 0
    with torch.inference_mode():
        for image in x:
            counts = torch.zeros(10, dtype=torch.long)
            for size in [100] + [1000] * (n // 1000):
                noisy = image.repeat(size, 1, 1, 1)
                noisy = noisy + torch.randn_like(noisy) * sigma
                counts += torch.bincount(model(noisy).argmax(1), minlength=10)
            draws += int(counts.sum())
    return draws


def parts(options: argparse.Namespace) -> dict[str, Any]:
    """Every part by name, in order."""
    found: dict[str, Any] = {}
    for sigma in SIGMAS:
        found[f"train-{sigma:g}"] = (train, sigma)
        for mode in MODES:
            found[f"{mode}-{sigma:g}"] = (certify, sigma, mode)
        found[f"hoeffding-{sigma:g}"] = (by_hoeffding, sigma)
    found[f"rate-{SIGMAS[0]:g}"] = (rate, SIGMAS[0])
    return choose_parts(found, options.only)


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the tables, with Clopper and Pearson's 95 % interval of each share."""
    rows = []
    rates = {
        backend: float(np.median(each))
        for line in found.values()
        for backend, each in line.get("draws_per_second", {}).items()
    }
    for name, line in found.items():
        if "certified" not in line:
            continue
        shares = []
        for count in line["certified"].values():
            low = float(clopper_pearson_lower(count, line["inputs"], 0.025))
            high = float(clopper_pearson_upper(count, line["inputs"], 0.025))
            share = 100 * count / line["inputs"]
            shares.append(f"{share:.1f} ({100 * low:.1f} to {100 * high:.1f})")
        mode, _, sigma = name.rpartition("-")
        hours = f"{line['draws'] / rates['bf16'] / 3600:.2f}" if rates else ""
        rows.append([sigma, mode, f"{line['draws'] / line['inputs']:,.0f}", hours, *shares])
    heads = ["sigma", "mode", "draws an image", "hours", *(f"at {r:g}, %" for r in RADII)]
    print(markdown_table([heads, *rows]))
    for name, line in found.items():
        if name.startswith("train"):
            print(f"{name}: {line['epochs']} epochs, {line['processor_seconds'] / 60:.0f} minutes "
                  f"of processor time, accuracy {100 * line['accuracy']:.1f} %, under noise "
                  f"{100 * line['noisy_accuracy']:.1f} %")  # fmt: skip
    if rates:
        listed = ", ".join(f"{backend} {each:,.0f}" for backend, each in rates.items())
        hours = 1e4 * 1.001e5 / rates["bf16"] / 3600
        print(f"draws/s of one thread: {listed}; 10,000 images at n = 100,000 by bf16: "
              f"{hours:,.0f} hours (extrapolated)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bulk"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", default=["*"], help="parts: 'fixed-*'")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--backend", default="bf16", help="of the certified network")
    parser.add_argument("--rate-inputs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print what --results holds")
    tiny = {"epochs": 1, "n": 1000, "every": 5, "rate_inputs": 2, "rounds": 1, "batch": 10,
            "only": ["train-0.25", "target-0.25", "rate-0.25"]}  # fmt: skip
    options = parse_arguments(parser, tiny, ("out", "results"))
    if options.table:
        return show(read_parts(options.results))
    if options.quick:
        make_images(scratch_folder() / "data", "cifar10", 20, shape=(32, 32, 3))
        options.data = scratch_folder() / "data" / "cifar10"
    else:
        options.data = require_data(options.data_root, "cifar10").resolve() / "cifar10"
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name, (work, *arguments) in parts(options).items():
        if name in read_parts(options.results):
            continue
        line = {"part": name, **work(options, *arguments), "processor": processor()}
        append_line(options.results, line)
        print(f"{name}: done", flush=True)
    show(read_parts(options.results))
    return None


if __name__ == "__main__":
    main()
