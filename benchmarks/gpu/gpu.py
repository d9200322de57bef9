"""The first day with a GPU: is what it computes right, and how fast is it?

    python benchmarks/gpu/gpu.py                                 everything, under 20 minutes
    python benchmarks/gpu/gpu.py --only 'check-*' step-cnn       some of its parts
    python benchmarks/gpu/gpu.py --device cpu --quick            a smoke test without a GPU

It runs from a checkout, and needs torch and these wheels with what they need:

    pip install numpy scipy pydantic PyYAML cryptography

opacus, transformers, peft and torchvision add rows; a part that cannot do without says what is
missing. Ray is not needed. Each part is tried by itself and has a time limit; what it found is a
line of --results at once. The same command continues: parts that passed are not run again, parts
that failed are. float32 is float32 for all, ordinary steps included: TF32 is off.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import (
    CHECKOUT,
    RESULTS_FOLDER,
    append_line,
    choose_parts,
    describe_run,
    parse_arguments,
    read_parts,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

sys.path.insert(0, str(CHECKOUT))  # dpdist need not be installed
RESULTS = RESULTS_FOLDER / "gpu.jsonl"
WHEELS = ("numpy", "scipy", "pydantic", "PyYAML", "cryptography")  # as the head says
CHECK_SECONDS, FIGURE_SECONDS = 60, 80  # of 9 checks and 8 figures: under 20 minutes in all
DONE = ("passed", "measured")
Found = dict[str, Any]


class TimeUpError(BaseException):
    """A part took longer than its limit; no `except Exception` on the way takes it for another."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeUpError` after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeUpError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # again, where somebody swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- figures ----------------------------------------------------------------------------------


def waiting(device: torch.device) -> Callable[[], None]:
    """Return what returns when the device has done what it was given."""
    import torch

    if device.type == "cpu":
        return lambda: None
    return lambda: torch.get_device_module(device).synchronize(device)


def peak_mib(device: torch.device, step: Callable[[], object]) -> float | None:
    """Return the memory that a step takes at its peak beyond what lies there; None on a CPU."""
    import torch

    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    step()
    module.synchronize(device)
    return round((module.max_memory_allocated(device) - before) / 2**20, 1)


def compared(device: torch.device, steps: dict[str, Callable[[], None]], quick: bool) -> Found:
    """Measure steps in turn: milliseconds each, peaks of memory, and ratios to ours."""
    from _training import interleave

    named = list(steps)
    medians = interleave(steps, 1 if quick else 7, 1 if quick else 3, waiting(device))
    found: Found = {"ms": {name: round(1e3 * each, 3) for name, each in medians.items()}}
    found["peak MiB"] = {name: peak_mib(device, step) for name, step in steps.items()}
    if absent := [name for name in named if name not in medians]:
        found["did not run"] = absent
    ours = medians.get("ours")
    if ours is None:
        raise RuntimeError("our own step does not run")
    found["times ours"] = {n: round(each / ours, 3) for n, each in medians.items() if n != "ours"}
    return found


def classifier_steps(
    device: torch.device, model: nn.Module, shape: tuple[int, ...], batch: int, classes: int
) -> dict[str, Callable[[], None]]:
    """Return ours, ordinary and Opacus' steps of an image classifier on invented pictures."""
    import torch
    from _training import peers

    torch.manual_seed(0)
    inputs, targets = torch.rand(batch, *shape), torch.randint(0, classes, (batch,))
    inputs, targets = inputs.to(device), targets.to(device)
    return {
        name: build(copy.deepcopy(model).to(device), inputs, targets)
        for name, build in peers().items()
    }


def step_cnn(device: torch.device, quick: bool) -> Found:
    from dpdist.models.zoo import tf_cnn

    steps = classifier_steps(device, tf_cnn((1, 28, 28), 10), (1, 28, 28), 8 if quick else 2048, 10)
    return compared(device, steps, quick)


def step_resnet20(device: torch.device, quick: bool) -> Found:
    from dpdist.models.zoo import resnet_gn

    model = resnet_gn((3, 32, 32), 10, depth=8 if quick else 20)
    steps = classifier_steps(device, model, (3, 32, 32), 2 if quick else 1024, 10)
    return compared(device, steps, quick)


def step_vit_small(device: torch.device, quick: bool) -> Found:
    from _networks import vit_small

    side, classes = (28, 10) if quick else (224, 1000)
    model = vit_small(side, classes, quick)
    steps = classifier_steps(device, model, (3, side, side), 2 if quick else 64, classes)
    return compared(device, steps, quick)


def step_gpt2_small_lora(device: torch.device, quick: bool) -> Found:
    import torch
    from _language_models import documents, language_model_loss, opacus_step, ordinary_step
    from _networks import gpt2

    from dpdist.gradients.clipping import FlatClipping
    from dpdist.gradients.engine import GradientEngine
    from dpdist.gradients.hooks import OwnLoss

    rows, length = (2, 8) if quick else (16, 512)

    def our_step(model: nn.Module, fields: dict[str, torch.Tensor]) -> Callable[[], None]:
        engine = GradientEngine(
            model, OwnLoss(language_model_loss), clipping=FlatClipping(1.0), micro_batch=rows
        )
        few = {name: each[:2].repeat(17, 1)[:33, :16] for name, each in fields.items()}
        engine.validate(few, torch.zeros(33, dtype=torch.int64, device=device))
        targets = torch.zeros(rows, dtype=torch.int64, device=device)
        return lambda: engine.clipped_sum(fields, targets) and None

    steps, missing = {}, {}
    ways = {"ours": our_step, "ordinary": ordinary_step, "opacus hooks": opacus_step}
    for name, build in ways.items():
        model = gpt2(12, lora=True, quick=quick).to(device)
        fields = {key: each.to(device) for key, each in documents(model, rows, length).items()}
        try:
            steps[name] = build(model, fields)
        except ImportError as error:
            missing[name] = str(error)
    found = compared(device, steps, quick)
    milliseconds = found["ms"]
    found["tokens/s"] = {n: round(1e3 * rows * length / each) for n, each in milliseconds.items()}
    return found | ({"missing": missing} if missing else {})


def noise_speed(device: torch.device, quick: bool) -> Found:
    """Entries a second of a release's noise where it is drawn, and of torch's own generator."""
    import torch

    from dpdist.gradients.noise import add_device_noise, add_noise

    count, key = 10_000 if quick else 20_000_000, bytes(range(32))
    total = torch.zeros(count, dtype=torch.float64)
    there = total.to(device, copy=True)
    works: dict[str, Callable[[], object]] = {
        "add_device_noise": lambda: add_device_noise(there, key, 1.0),
        "add_noise on the CPU": lambda: add_noise(total.numpy(), key, 1.0),
        "torch.randn": lambda: torch.randn(count, device=device),
    }
    from _training import interleave

    medians = interleave(works, 1 if quick else 5, 1, waiting(device))  # type: ignore[arg-type]
    found: Found = {"entries": count}
    found["million/s"] = {name: round(count / each / 1e6, 2) for name, each in medians.items()}
    return found | {"peak MiB": {name: peak_mib(device, each) for name, each in works.items()}}


# --- certification ----------------------------------------------------------------------------


def counted(
    device: torch.device, model: nn.Module, shape: tuple[int, ...], inputs: int, quick: bool
) -> Found:
    """Measure draws a second by inference backend, and what a test set takes at that rate.

    Args:
        inputs: of the test set.
    """
    import torch
    from _certification import BATCH, CAP, SOURCE

    from dpdist.certification import inference
    from dpdist.certification.inference import ExecutedClassifier, Philox
    from dpdist.certification.noise import Gaussian
    from dpdist.certification.worker import InputNoiseCounter
    from dpdist.randomness import keys

    model, x = model.eval().to(device), torch.rand(shape, device=device)
    rows = 4 if quick else BATCH
    if device.type == "cuda":
        rows = inference.max_batch_rows(model, x[None], 1 << 14, 1.0)
    found: Found = {"rows of a batch": rows, "draws/s": {}, "bare forward/s": {}}
    wait, lasting = waiting(device), 0.0 if quick else 5.0
    for backend in ("eager", "channels-last", "bf16"):
        classify = ExecutedClassifier(model, backend, [(rows, *shape)], device)
        counter = InputNoiseCounter(
            classify, Gaussian(0.25), SOURCE, 10, shape, noise_stream=Philox(device)
        )
        batch = torch.rand(rows, *shape, device=device)
        works = {
            "draws/s": lambda block, c=counter: c.histogram(x, 0, keys.ESTIMATE, block, rows, rows),
            "bare forward/s": lambda block, c=classify, b=batch: c.logits(b),
        }
        for name, work in works.items():
            work(0)
            wait()
            began, blocks = time.perf_counter(), 0
            while not blocks or time.perf_counter() - began < lasting:
                work(blocks)
                wait()
                blocks += 1
            found[name][backend] = round(blocks * rows / (time.perf_counter() - began), 1)
    best = max(found["draws/s"].values())
    found["images/s, fixed n"] = round(best / CAP, 4)
    found[f"hours for {inputs:,} inputs, fixed n = {CAP:,}"] = round(inputs * CAP / best / 3600, 3)
    found["early stopping"] = {
        f"p = {p}": {"draws": round(draws), "hours": round(inputs * draws / best / 3600, 4)}
        for p, draws in stopping_draws(20 if quick else 400).items()
    }
    return found


def stopping_draws(replays: int) -> dict[float, float]:
    """Return the mean draws that early stopping takes, by the probability of the top class.

    For the radius and the deviation of `_certification.py`, where 0.977 is needed.
    """
    import numpy as np
    from _certification import early_stopping

    rng = np.random.default_rng(0)
    return {
        p: float(early_stopping(np.full(replays, p), rng)[0].mean())
        for p in (0.8, 0.95, 0.97, 0.985, 0.999)
    }


def certify_cifar10(device: torch.device, quick: bool) -> Found:
    from _resnet20 import resnet20

    return counted(device, resnet20(), (3, 32, 32), 10_000, quick)


def certify_imagenet(device: torch.device, quick: bool) -> Found:
    """ViT-S/16, and ResNet-50 where torchvision is installed."""
    from _networks import vit_small

    side = 28 if quick else 224
    found: Found = {}
    networks: dict[str, Callable[[], nn.Module]] = {"ViT-S": lambda: vit_small(side, 1000, quick)}
    try:
        from dpdist.core.optional_imports import import_torchvision

        library = import_torchvision("models")
        if not quick:
            networks["ResNet-50"] = library.resnet50
    except Exception as error:
        found["missing"] = f"torchvision ({type(error).__name__}): no ResNet-50"
    for name, make in networks.items():
        found[name] = counted(device, make(), (3, side, side), 50_000, quick)
    return found


def memory(device: torch.device, quick: bool) -> Found:
    """Peaks of steps of the linear-heavy model, batch 512, beyond parameters and data."""
    import torch
    from _training import linear_heavy, peers

    batch, width = (4, 64) if quick else (512, 2048)
    torch.manual_seed(0)
    model, found = linear_heavy(width), {}
    inputs, targets = torch.rand(batch, width).to(device), torch.randint(0, 10, (batch,))
    for name, build in peers().items():
        if name in ("ordinary", "ours", "opacus ghost"):
            step = build(copy.deepcopy(model).to(device), inputs, targets.to(device))
            step()
            found[name] = peak_mib(device, step)
            del step
    ratio = {} if found["ours"] is None else {"ratio": found["ours"] / found["ordinary"]}
    return {"peak MiB": found, **ratio}


FIGURES: dict[str, Callable[[torch.device, bool], Found]] = {
    "step-cnn": step_cnn,
    "step-resnet20": step_resnet20,
    "step-vit-small": step_vit_small,
    "step-gpt2-small-lora": step_gpt2_small_lora,
    "noise-speed": noise_speed,
    "certify-cifar10": certify_cifar10,
    "certify-imagenet": certify_imagenet,
    "memory": memory,
}
CHECKS = ("rules", "forms", "ways", "validation", "generators", "noise", "certificates", "bf16",
          "steps")  # fmt: skip
PARTS = {**{f"check-{name}": CHECK_SECONDS for name in CHECKS},
         **dict.fromkeys(FIGURES, FIGURE_SECONDS)}  # fmt: skip


# --- parts ------------------------------------------------------------------------------------


def run_part(name: str, device: torch.device, quick: bool) -> Found:
    """Run a part within its limit; return its state and what it found, whatever happens."""
    from dpdist.core.errors import UserError

    try:
        with time_limit(PARTS[name]):
            if name in FIGURES:
                return {"state": "measured", "found": FIGURES[name](device, quick)}
            from _gpu_checks import CHECKS as checks

            return {"state": "passed", "found": checks[name.removeprefix("check-")](device, quick)}
    except TimeUpError as error:
        return {"state": "out of time", "error": str(error)}
    except Exception as error:
        optional = isinstance(error, UserError) and "pip install" in str(error)
        missing = name in FIGURES and (optional or isinstance(error, ImportError))
        place = "".join(traceback.format_exception(error)[-3:])
        told = {} if missing else {"place": place[-1500:]}
        return {"state": "missing" if missing else "failed", "error": str(error)[:1500], **told}


def is_broken(device: torch.device) -> bool:
    """Whether the device answers nothing any more: an error of its own ends a process' context."""
    import torch

    try:
        waiting(device)()
        torch.zeros(1, device=device).cpu()
    except Exception:
        return True
    return False


def choose_device(asked: str | None) -> torch.device:
    """Return the device that is asked for, or the GPU; end the script where there is none."""
    import torch

    if asked is None and not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no GPU here; --device cpu --quick tries the script itself")
    device = torch.device(asked or "cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return device


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog="parts: " + ", ".join(PARTS)
    )
    parser.add_argument("--device", help="of torch; without it a GPU is asked for")
    parser.add_argument("--only", nargs="+", default=["*"], help="parts: 'check-*'")
    parser.add_argument("--results", type=Path, default=RESULTS)
    # A smoke test's: what tests with --only run is not run twice.
    tiny = {"device": "cpu", "only": ["step-cnn", "step-vit-small", "step-gpt2-small-lora"]}
    options = parse_arguments(parser, tiny, ("results",), arguments)
    chosen = choose_parts(PARTS, options.only)
    if not chosen:
        parser.error(f"none of {', '.join(options.only)} is a part: {', '.join(PARTS)}")
    print(f"{len(chosen)} parts; results in {options.results}; torch is loaded ...", flush=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = choose_device(options.device)
    warnings.filterwarnings("ignore")
    if options.quick:
        set_one_thread()
    began, names = time.monotonic(), list(chosen)
    about = {**describe_run(), "device": name_of(device), "quick": options.quick}
    print(f"on {about['device']}, torch {about['versions'].get('torch')}", flush=True)
    for number, name in enumerate(names):
        before = read_parts(options.results).get(name, {})
        if before.get("state") in DONE and before.get("device") == about["device"]:
            print(f"{name}: {before['state']} before", flush=True)
            continue
        start = time.monotonic()
        if before.get("state") == "begun":
            told = "the process died in it; the next call tries it again"
            line = {"part": name, "state": "failed", "error": told}
        else:
            print(f"{name}: at most {chosen[name]} s ...", flush=True)
            append_line(options.results, {"part": name, "state": "begun", "seconds": 0.0})
            line = {"part": name, **run_part(name, device, options.quick)}
        line["seconds"] = round(time.monotonic() - start, 1)
        append_line(options.results, line | about)
        told = line.get("error") or json.dumps(line["found"])
        print(f"{name}: {line['state']}, {line['seconds']} s: {told}", flush=True)
        if line["state"] == "failed" and number + 1 < len(names) and is_broken(device):
            print("the device gives no answer any more: the other parts begin anew", flush=True)
            given = ["--device", str(device), "--results", str(options.results)]
            script = [sys.executable, str(Path(__file__).resolve()), *given]
            os.execv(sys.executable, [*script, "--only", *names[number + 1 :]])
    finish(options.results, names, time.monotonic() - began)


def set_one_thread() -> None:
    """Let a smoke test leave the other cores alone: threads that wait for each other crawl."""
    import torch

    torch.set_num_threads(1)


def name_of(device: torch.device) -> str:
    """Return the device's name, as certificates say it."""
    from dpdist.certification.inference import device_name

    return device_name(device)


def finish(results: Path, names: list[str], seconds: float) -> None:
    """Print how the parts ended; exit with 1 where a check failed or a part ran out of time."""
    lines = read_parts(results)
    states = {name: lines[name]["state"] for name in names}
    by_state = {state: [n for n in names if states[n] == state] for state in states.values()}
    counts = "; ".join(
        f"{len(each)} {state}" + ("" if state in DONE else f" ({', '.join(each)})")
        for state, each in by_state.items()
    )
    slow = sum(lines[name]["seconds"] for name in names)
    print(f"{counts}; {seconds / 60:.1f} minutes now, {slow / 60:.1f} for all parts: {results}")
    if set(states.values()) & {"failed", "out of time"}:
        sys.exit(1)


if __name__ == "__main__":
    main()
