"""A small training by a script's own loop: what its tests change, they give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpdist
from dpdist import PrivateTraining
from support.training import KEY

WIDTH = 6
PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-3, "run_key": KEY}


def rows(count: int = 80, seed: int = 1, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of (count, width), and as labels whether their sum is above its mean."""
    inputs = torch.rand(count, width, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs.sum(1) > width / 2).long()


class Rows(dpdist.Records):
    """Inputs and targets of one length each, as records of a class of one's own."""

    name = "rows"

    def __init__(self, arrays: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def batch(self, indices: Any) -> torch.Tensor:
        return self.arrays[0][indices]

    def targets(self, indices: Any) -> torch.Tensor:
        return self.arrays[1][indices]


class Shaken(torch.utils.data.Dataset[Any]):
    """Items under a random transform, which no key repeats."""

    def __init__(self, start: int, count: int) -> None:
        self.inputs, self.labels = (each[start : start + count] for each in rows())

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        shake = int.from_bytes(os.urandom(4), "little") / 2**32
        return self.inputs[index] * (0.5 + shake), int(self.labels[index])

    def unshaken(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.labels[index])


def shaken(start: int = 0, count: int = 80) -> Any:
    items = Shaken(start, count)
    return dpdist.as_records(items, target=None, before_transform=items.unshaken)


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 2))


def begin(
    folder: Path | str, model: nn.Module | None = None, optimizer: Any = None, *,
    rate: float = 0.3, **given: Any,
) -> PrivateTraining:  # fmt: skip
    """Begin the training; by SGD of this rate, if no optimizer is given."""
    model = model or net()
    trained = [each for each in model.parameters() if each.requires_grad]
    options = {
        "data": rows(), "loss": "cross-entropy", "privacy": PRIVATE, "batch_size": 16, "steps": 6,
        "folder": folder, **given,
    }  # fmt: skip
    optimizer = optimizer or torch.optim.SGD(trained, lr=rate)
    return PrivateTraining(model, optimizer, options.pop("data"), **options)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def ended(training: PrivateTraining) -> PrivateTraining:
    """Return the training after its last step."""
    training.run_all()
    return training


def left(training: PrivateTraining, steps: int) -> PrivateTraining:
    """Return the training as a process leaves it that ends after so many steps."""
    for _ in range(steps):
        training.step()
    training.close()
    return training


SCRIPT = """
import json, os, signal, sys
import torch
import dpdist


class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)

    def forward(self, inputs):
        return self.two(self.one(inputs).relu())


def train_loop_per_worker(config):
    grouped = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if grouped else 0
    inputs = torch.rand(80, 6, generator=torch.Generator().manual_seed(1))
    labels = (inputs.sum(1) > 3).long()
    if config["seed"] is not None:
        torch.manual_seed(config["seed"])
    model = Mine()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    training = dpdist.PrivateTraining(
        model, optimizer, (inputs, labels), loss="cross-entropy", batch_size=16, steps=12,
        privacy={"noise_multiplier": 1.0, "delta": 1e-3, "run_key": config["key"]},
        folder=config["folder"], state=[scheduler], reproducible=config["reproducible"],
        resources={"checkpoint_seconds": config["seconds"]},
    )
    if config["scored"]:
        training.score((inputs[:20] + 1, labels[:20]), every=3, noise=2.0)
    scores, mark = [], config["mark"]
    while training.remaining_steps:
        at = [12 - training.remaining_steps, rank]
        if at == config["kill"] and not os.path.exists(mark):
            open(mark, "w").close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), config["signal"])
        scores.append(training.step().score)
        scheduler.step()
    rate = optimizer.param_groups[0]["lr"].hex()
    with open(f"{config['folder']}.{rank}", "w") as file:
        file.write(f"{training.guarantee} {rate} {scores[-3:]} {scheduler.last_epoch}")


if __name__ == "__main__":
    how, config = sys.argv[1], json.loads(sys.argv[2])
    if how == "ray":
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        ray.init("local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
        place = config["folder"] + ".ray"
        TorchTrainer(
            train_loop_per_worker, train_loop_config=config,
            run_config=RunConfig(
                storage_path=place, failure_config=FailureConfig(max_failures=1)
            ),
            scaling_config=ScalingConfig(num_workers=2),
        ).fit()
    else:
        if how == "torchrun":
            torch.distributed.init_process_group("gloo")
        train_loop_per_worker(config)
        if how == "torchrun":
            torch.distributed.destroy_process_group()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]


def run_script(
    folder: Path, how: str = "alone", *, kill: tuple[int, int] = (-1, 0), **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run a training of a script in processes of its own: "alone", with two workers by "torchrun",
    or by "ray".

    kill: before which step, and the process of which worker, gets the signal; the first time only.
    """
    config = {
        "folder": str(folder), "kill": kill, "mark": f"{folder}.killed-{kill[0]}", "seed": 0,
        "key": KEY, "seconds": 1e-6, "reproducible": False, "scored": False,
        "signal": signal.SIGKILL, **given,
    }  # fmt: skip
    (folder.parent / "mine.py").write_text(SCRIPT)
    before = [*TORCHRUN, "--nproc-per-node", "2"] if how == "torchrun" else []
    return subprocess.run(
        [sys.executable, *before, "mine.py", how, json.dumps(config)], cwd=folder.parent,
        capture_output=True, text=True, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
             "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
