"""Training steps of the private gradient engine and of its peers, measured in turn.

Peers are interleaved in one process, block by block, and medians of the blocks are compared, so
that a machine that is busy or changes its clock treats all alike. Every step is a whole training
step: gradients and an SGD update, without noise for anyone. The setting our engine makes
(dpdist.gradients.engine) is on for the whole process, so the peers enjoy it too; without it they
are slower.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.passes import Rounding
from dpdist.gradients.sampling import Blocks

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
    model: nn.Module, inputs: Tensor, targets: Tensor, rounding: Rounding = "standard"
) -> Step:
    """As a run executes it, in keyed blocks. With fixed rows records need a different number of
    passes under each key, so every step has a new one."""
    engine = GradientEngine(
        model, cross_entropy, clipping=FlatClipping(CLIP_NORM),
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
        command = [sys.executable, str(Path(__file__).resolve()), name, str(batch)]
        done = subprocess.run(command, capture_output=True, text=True)
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


if __name__ == "__main__":
    memory_of(sys.argv[1], int(sys.argv[2]))
