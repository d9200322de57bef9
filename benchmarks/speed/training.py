"""Speed and memory of the private gradient engine beside its peers.

Peers are interleaved in one process, block by block, and medians of the blocks are compared, so
that a machine that is busy or changes its clock treats all alike. Every step is a whole training
step: gradients and an SGD update, without noise for anyone. The setting our engine makes
(dpdist.gradients.engine) is on for the whole process, so the peers enjoy it too; without it they
are slower than printed here.

    python benchmarks/speed/training.py [--quick] [--threads 2] [--only cnn,memory] [--peers ours]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import parse_arguments
from torch import Tensor, nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.passes import Rounding
from dpdist.gradients.perturbations import ParameterPerturbation
from dpdist.gradients.sampling import Blocks
from dpdist.models.zoo import resnet_gn, tf_cnn

Step = Callable[[], None]
CLIP_NORM, LEARNING_RATE = 1.0, 0.05
RECORDS = 60_000  # of which the batch is a Poisson sample of its expected size


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


# ---- the steps


def ordinary_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def channels_last_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return ordinary_step(model, inputs.to(memory_format=torch.channels_last), targets)


def our_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, draws: ParameterPerturbation | None = None,
    rounding: Rounding = "standard",
) -> Step:  # fmt: skip
    """As a run executes it, in keyed blocks. With fixed rows records need a different number of
    passes under each key, so every step has a new one."""
    engine = GradientEngine(
        model, cross_entropy, clipping=FlatClipping(CLIP_NORM), perturbation=draws,
        blocks=Blocks.for_batches(RECORDS, len(inputs) / RECORDS),
    )  # fmt: skip
    engine.rounding = rounding
    ids = torch.arange(len(inputs))
    sizes = [parameter.numel() for parameter in engine.parameters]
    numbers = itertools.count() if rounding == "fixed-row" else itertools.repeat(0)

    @torch.no_grad()
    def step() -> None:
        key = next(numbers).to_bytes(32, "big")
        flat = engine.clipped_sum(inputs, targets, draw_key=key, record_ids=ids).flat
        for parameter, piece in zip(engine.parameters, flat.split(sizes), strict=True):
            parameter.add_(piece.view(parameter.shape), alpha=-LEARNING_RATE / len(inputs))

    return step


def opacus_step(mode: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    """One of Opacus' modes; noise multiplier 0, so it draws no noise either."""

    def build(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        sgd = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        common = {"noise_multiplier": 0.0, "max_grad_norm": CLIP_NORM}
        common |= {"expected_batch_size": len(inputs)}
        criterion = nn.CrossEntropyLoss()
        if mode == "ghost":
            module = GradSampleModuleFastGradientClipping(
                model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True
            )
            optimizer = DPOptimizerFastGradientClipping(sgd, **common)
            criterion = DPLossFastGradientClipping(module, optimizer, criterion)
        else:
            if mode == "ew":
                module = GradSampleModuleExpandedWeights(model)
            else:
                module = GradSampleModule(model, force_functorch=mode == "functorch")
            optimizer = DPOptimizer(sgd, **common)

        def step() -> None:
            optimizer.zero_grad()
            criterion(module(inputs), targets).backward()
            optimizer.step()

        return step

    return build


OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")
Builder = Callable[[nn.Module, Tensor, Tensor], Step]


def peers() -> dict[str, Builder]:
    found: dict[str, Builder] = {
        "ours": our_step,
        "ordinary": ordinary_step,
        "ordinary channels-last": channels_last_step,
    }
    try:
        import opacus  # noqa: F401
    except ImportError:
        print("opacus is not installed: its rows are left out (pip install 'dpdist[bench]')")
        return found
    return found | {f"opacus {mode}": opacus_step(mode) for mode in OPACUS_MODES}


# ---- measuring


def interleave(
    steps: dict[str, Step], rounds: int, block: int, wait: Step = lambda: None, *, warm: int = 2
) -> dict[str, float]:
    """Return median seconds per step of each, over `rounds` blocks of `block` steps in turn.

    A step that does not run here is named with its error and taken out of `steps`.

    Args:
        wait: returns when a device has done what it was given.
        warm: how often each runs before the first round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in list(steps):
        try:
            for _ in range(warm):
                steps[name]()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            told = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"  {name}: does not run here ({told[:80]})")
            del steps[name]
    wait()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(block):
                step()
            wait()
            seconds[name].append((time.perf_counter() - start) / block)
    return {name: statistics.median(seconds[name]) for name in steps}


def verdict(label: str, ratio: float, target: float, *, at_most: bool = False) -> None:
    reached = ratio <= target if at_most else ratio >= target
    sign = "<=" if at_most else ">="
    print(f"  {label}: {ratio:.2f} x (to reach {sign} {target}) {'ok' if reached else 'MISSED'}")


def compare(
    title: str, make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int,
    rounds: int, block: int, chosen: Sequence[str],
) -> dict[str, float]:  # fmt: skip
    print(f"{title}, batch {batch}")
    torch.manual_seed(0)
    inputs, targets = torch.rand(batch, *shape), torch.randint(0, 10, (batch,))
    model = make()
    built = {
        name: build(copy.deepcopy(model), inputs, targets)
        for name, build in peers().items()
        if not chosen or name in chosen
    }
    medians = interleave(built, rounds, block)
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        print(f"  {name:26s} {1e3 * seconds:8.2f} ms/step {batch / seconds:10.0f} examples/s")
    return medians


def versus_opacus(medians: dict[str, float], target: float) -> None:
    opacus = {name: s for name, s in medians.items() if name.startswith("opacus")}
    if opacus:
        best = min(opacus, key=lambda name: opacus[name])
        verdict(f"against {best} (its best)", opacus[best] / medians["ours"], target)


def bench_cnn(quick: bool, chosen: Sequence[str]) -> None:
    rounds, block, batch = (1, 1, 8) if quick else (25, 4, 256)
    medians = compare(
        "TF-Privacy CNN (26,010 parameters) on 1x28x28", lambda: tf_cnn((1, 28, 28), 10),
        (1, 28, 28), batch, rounds, block, chosen,
    )  # fmt: skip
    versus_opacus(medians, 1.8)
    for name, target in (("ordinary", 1.0), ("ordinary channels-last", 0.6)):
        if name in medians:
            verdict(f"against the {name} step", medians[name] / medians["ours"], target)


def bench_resnet(quick: bool, chosen: Sequence[str]) -> None:
    for depth in (8,) if quick else (8, 20):
        medians = compare(
            f"GroupNorm ResNet-{depth} on 3x32x32",
            lambda depth=depth: resnet_gn((3, 32, 32), 10, depth=depth),  # type: ignore[misc]
            (3, 32, 32), 2 if quick else 128, 1 if quick else 7, 1, chosen,
        )  # fmt: skip
        versus_opacus(medians, 1.4)


def bench_dplis(quick: bool, chosen: Sequence[str]) -> None:
    batch, draws = (8, 10) if quick else (256, 10)
    print(f"DPlis with K = {draws} against {draws} plain DP-SGD steps, CNN, batch {batch}")
    torch.manual_seed(0)
    inputs, targets = torch.rand(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    model = tf_cnn((1, 28, 28), 10)
    plain = our_step(copy.deepcopy(model), inputs, targets)

    def ten() -> None:
        for _ in range(draws):
            plain()

    smoothed = our_step(copy.deepcopy(model), inputs, targets, ParameterPerturbation(draws, 6.6e-3))
    medians = interleave({"ten": ten, "dplis": smoothed}, 1 if quick else 11, 1)
    print(f"  one step {1e3 * medians['dplis']:.1f} ms, ten plain {1e3 * medians['ten']:.1f} ms")
    verdict("against ten plain steps", medians["ten"] / medians["dplis"], 1.0)


def dropout_cnn(probability: float) -> nn.Module:
    """As many convolutions as tf_cnn has, with dropout behind each."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.Dropout(probability), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Dropout(probability), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Dropout(probability), nn.Linear(32, 10),
    )  # fmt: skip


def bench_dropout(quick: bool, chosen: Sequence[str]) -> None:
    batch = 8 if quick else 256
    print(f"Dropout 0.5 behind three layers against probability 0, CNN, batch {batch}")
    torch.manual_seed(0)
    inputs, targets = torch.rand(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    builders: dict[str, Builder] = {"ours": our_step, "ordinary": ordinary_step}
    steps = {
        f"{name}, {probability}": build(dropout_cnn(probability), inputs, targets)
        for probability in (0.5, 0.0)
        for name, build in builders.items()
    }
    medians = interleave(steps, 1 if quick else 9, 1 if quick else 4)
    for name, seconds in medians.items():
        print(f"  {name:26s} {1e3 * seconds:8.2f} ms/step")
    drawn = medians["ordinary, 0.5"] - medians["ordinary, 0.0"]  # what dropout costs anyway
    ratio = (medians["ours, 0.5"] - drawn) / medians["ours, 0.0"]
    verdict("but for an ordinary dropout's cost", ratio, 1.1, at_most=True)


# ---- memory: each peer in a process of its own, peak resident size


def linear_heavy(width: int = 2048) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def resident_kib(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def memory_of(name: str, batch: int) -> None:
    """Child process: print KiB at rest and at the peak of training."""
    build = peers()[name]
    nn.Linear(8, 8)(torch.rand(8, 8)).sum().backward()
    base = resident_kib("VmRSS")
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # forget the peak of the imports
    model = linear_heavy()
    inputs, targets = torch.rand(batch, 2048), torch.randint(0, 10, (batch,))
    step = build(model, inputs, targets)
    for _ in range(3):
        step()
    print(json.dumps({"base": base, "peak": resident_kib("VmHWM")}))


def net_memory(names: Sequence[str], batch: int) -> dict[str, float]:
    """Return KiB above the libraries at the peak of each peer, in a process of its own."""
    net = {}
    for name in names:
        command = [sys.executable, str(Path(__file__).resolve()), "--memory-of", name]
        done = subprocess.run([*command, "--batch", str(batch)], capture_output=True, text=True)
        if done.returncode:
            print(f"  {name}: does not run here ({done.stderr.strip()[-80:]})")
            continue
        sizes = json.loads(done.stdout.strip().splitlines()[-1])
        net[name] = sizes["peak"] - sizes["base"]
        print(
            f"  {name:26s} {net[name] / 2**10:8.0f} MiB above the libraries, "
            f"{sizes['peak'] / 2**10:6.0f} MiB in all"
        )
    return net


def bench_memory(quick: bool, chosen: Sequence[str]) -> None:
    batch = 16 if quick else 512
    print(f"Linear-heavy model (4 x 2048), batch {batch}: peak memory")
    # Opacus' other modes hold (batch x parameters): 34 GB here.
    names = ["ordinary", "ours"] if quick else ["ordinary", "ours", "opacus ghost"]
    net = net_memory([name for name in names if not chosen or name in chosen], batch)
    verdict("against the ordinary step", net["ours"] / net["ordinary"], 1.7, at_most=True)


BENCHES = {
    "cnn": bench_cnn,
    "resnet": bench_resnet,
    "dplis": bench_dplis,
    "dropout": bench_dropout,
    "memory": bench_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory beside peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default=",".join(BENCHES), help="rows, comma-separated")
    parser.add_argument("--peers", default="", help="only these, comma-separated")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=512, help=argparse.SUPPRESS)
    options = parse_arguments(parser, {"threads": 1})
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    if options.memory_of:
        memory_of(options.memory_of, options.batch)
        return
    print(f"torch {torch.__version__}, {options.threads} threads")
    chosen = [name for name in options.peers.split(",") if name]
    for name in options.only.split(","):
        BENCHES[name](options.quick, chosen)


if __name__ == "__main__":
    main()
