"""How long a private training takes until its first step, and where the seconds go, beside Opacus.

    python benchmarks/speed/start_up.py [--only WORD] [--rounds N] [CHECKOUT ...]
    python benchmarks/speed/start_up.py --quick                          a smoke test

Each start is a process of its own with one thread. Printed are medians over the rounds, in which
the ways take turns: processor seconds from the imports of torch and of the model's library to the
end of the first step, a usual step less; what the import, the construction and the first step take
of them; and the usual step. With several checkouts of dpdist each is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import CHECKOUT, parse_arguments

STEPS = 5  # whose median is a usual step

# --- models -----------------------------------------------------------------------------------


def cnn() -> tuple[Any, Any, Any, int]:
    """The network of TF-Privacy's tutorial, 26,010 parameters, on 28 x 28 grey images."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, torch.rand(2048, 1, 28, 28), torch.randint(10, (2048,)), 256


def mlp() -> tuple[Any, Any, Any, int]:
    """A small network for a table of 14 columns."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    return model, torch.rand(4096, 14), torch.randint(2, (4096,)), 256


def resnet18() -> tuple[Any, Any, Any, int]:
    """ResNet-18 with GroupNorm, 11.2 million parameters, on 64 x 64 images."""
    import torch
    from torch import Tensor, nn

    def norm(width: int) -> nn.Module:
        return nn.GroupNorm(32, width)

    class Block(nn.Module):
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Conv2d(before, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, width, 3, 1, 1, bias=False),
            )
            self.norms = nn.ModuleList([norm(width), norm(width)])
            self.skip = nn.Sequential()
            if stride > 1 or before != width:
                self.skip = nn.Sequential(
                    nn.Conv2d(before, width, 1, stride, bias=False), norm(width)
                )

        def forward(self, x: Tensor) -> Tensor:
            found = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(self.norms[1](self.second(found)) + self.skip(x))

    blocks, before = [], 64
    for place, width in enumerate((64, 128, 256, 512)):
        blocks += [Block(before, width, 1 if place == 0 else 2), Block(width, width, 1)]
        before = width
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    return model, torch.rand(256, 3, 64, 64), torch.randint(10, (256,)), 32


def bert() -> tuple[Any, Any, Any, int]:
    """A transformer encoder of two layers, 128 wide as BERT-Tiny, that classifies 64 tokens."""
    import torch
    from _networks import Layer
    from torch import Tensor, nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(8000, 128), nn.Embedding(64, 128)
            self.layers = nn.Sequential(Layer(128, 2), Layer(128, 2))
            self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
            found = self.layers(self.words(tokens) + self.positions(places))
            logits: Tensor = self.head(self.norm(found).mean(1))
            return logits

    return Encoder(), torch.randint(8000, (1024, 64)), torch.randint(2, (1024,)), 32


MODELS: dict[str, Callable[[], tuple[Any, Any, Any, int]]] = {
    "CNN": cnn, "table MLP": mlp, "ResNet-18": resnet18, "BERT-2": bert,
}  # fmt: skip

# --- one start, in a process of its own -------------------------------------------------------


def ours(model: Any, inputs: Any, labels: Any, batch: int) -> Callable[[], Any]:
    """Return a step of a `PrivateTraining`."""
    import torch

    import dpdist

    training_class = dpdist.PrivateTraining  # loads what it needs
    stamp("import")
    training = training_class(
        model, torch.optim.SGD(model.parameters(), lr=0.1), (inputs, labels), loss="cross-entropy",
        privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-5), batch_size=batch,
        steps=STEPS + 3, folder=tempfile.mkdtemp() + "/run",
    )  # fmt: skip
    return training.step


def opacus(mode: str) -> Callable[[Any, Any, Any, int], Callable[[], Any]]:
    """Return what makes a step of Opacus in one of its modes."""

    def made(model: Any, inputs: Any, labels: Any, batch: int) -> Callable[[], Any]:
        import torch
        from opacus import PrivacyEngine

        stamp("import")
        ghost = {"criterion": torch.nn.CrossEntropyLoss()} if mode == "ghost" else {}
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, labels), batch_size=batch
        )
        found = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode=mode, **ghost,
        )  # fmt: skip
        if ghost:
            model, optimizer, criterion, loader = found
        else:
            (model, optimizer, loader), criterion = found, torch.nn.CrossEntropyLoss()
        batches = iter(loader)

        def step() -> None:
            some, wanted = next(batches)
            optimizer.zero_grad()
            criterion(model(some), wanted).backward()
            optimizer.step()

        return step

    return made


WAYS = {"dpdist": ours, "Opacus hooks": opacus("hooks"), "Opacus ghost": opacus("ghost")}
_STAMPS: dict[str, float] = {}


def stamp(name: str) -> None:
    """Note the processor time of this process."""
    _STAMPS[name] = time.process_time()


def one_start(name: str, way: str) -> dict[str, float]:
    """Return the seconds of one start of this process, by part."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = MODELS[name]()
    stamp("begin")
    step = WAYS[way](*made)
    stamp("construction")
    step()
    stamp("first step")
    times = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    usual, order = statistics.median(times), ["begin", "import", "construction", "first step"]
    parts = {after: _STAMPS[after] - _STAMPS[before] for before, after in pairwise(order)}
    parts["first step"] -= usual
    return {"all": sum(parts.values()), **parts, "usual step": usual}


# --- the table --------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="*", type=Path, default=[CHECKOUT])
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)  # of a process of its own
    given = parse_arguments(parser, {"only": "MLP", "rounds": 1})
    if given.start:
        print(json.dumps(one_start(*given.start)))
        return
    checkouts = [each.resolve() for each in given.checkouts]
    ways = [("dpdist", each) for each in checkouts] + [(w, CHECKOUT) for w in WAYS if w != "dpdist"]
    print("| model | way | all | import | construction | first step | usual step |")
    print("|---|---|---|---|---|---|---|")
    for name in (each for each in MODELS if given.only in each):
        found: dict[int, list[dict[str, float]]] = {}
        for _ in range(given.rounds):
            for place, (way, checkout) in enumerate(ways):
                environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    [sys.executable, __file__, "--start", name, way],
                    env=environment, capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode == 0:
                    found.setdefault(place, []).append(json.loads(done.stdout.splitlines()[-1]))
        for place, (way, checkout) in enumerate(ways):
            label = way if way != "dpdist" or len(checkouts) == 1 else f"{way} {checkout.name}"
            if place not in found:
                print(f"| {name} | {label} | fails |", flush=True)
                continue
            medians = [
                statistics.median(each[part] for each in found[place])
                for part in ("all", "import", "construction", "first step", "usual step")
            ]
            cells = " | ".join(f"{seconds:.3f}" for seconds in medians)
            print(f"| {name} | {label} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
