"""How flat the minimum is in which a run ended, on TEST inputs (on training records it would be a
private quantity): DPlis' Table 9 and Figure 6.

    python papers/dplis/landscape.py RUN [--runs runs] [--data-root DATA] [--picture FILE]
    python papers/dplis/landscape.py --quick     # a training of three steps on digits

Sharpness is (C_epsilon, A)-sharpness with A = I (Keskar et al. 2017, Metric 2.1) in the paper's
box, 0.0045. The paper says neither by which solver the box is searched nor for how long; here it is
L-BFGS-B, ten iterations, as Keskar et al. do: a lower bound. The picture is the mean loss along a
random direction, filter by filter of the parameters' norm (Li et al. 2018).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from dpdist.core import console
from dpdist.core.errors import UserError
from dpdist.evaluation import load_model
from dpdist.gradients.engine import cross_entropy
from dpdist.gradients.perturbations import standard_normal_shared
from dpdist.runs.folder import RunFolder, open_run
from dpdist.runs.recipe import Recipe, parse_recipe, resolve_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.records import data_source, load_test_records

BOX = 0.0045  # DPlis, PoPETs 2021
# theta + alpha * direction for alpha in [-0.8, 0.8], as the paper plots it.
ALPHAS = tuple(np.linspace(-0.8, 0.8, 33).tolist())
QUICK = {
    "name": "quick",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "options": {"hidden": [8]}},
    "privacy": {"noise_multiplier": 1.1, "clip_norm": 1.0, "delta": 1e-5},
    "training": {"batch_size": 64, "learning_rate": 0.15, "steps": 3},
}

Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sharpness:
    """value: 100 * (largest loss in the box - loss) / (1 + loss).

    loss, worst_loss: mean loss at the parameters and the largest one found; value is a lower bound
    on the sharpness.
    """

    value: float
    loss: float
    worst_loss: float


class Surface:
    """Mean loss as a function of the flat vector of trainable parameters."""

    def __init__(
        self, model: nn.Module, objective: Objective, inputs: Tensor, targets: Tensor, batch: int
    ) -> None:
        self.model, self.objective = model, objective
        self.inputs, self.targets, self.batch = inputs, targets, batch
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.origin = torch.cat([p.detach().flatten() for p in self.named.values()])

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([p.numel() for p in self.named.values()])
        return {
            name: piece.view(p.shape)
            for (name, p), piece in zip(self.named.items(), pieces, strict=True)
        }

    def chunks(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs.split(self.batch), self.targets.split(self.batch), strict=True))

    def loss(self, flat: Tensor) -> float:
        total = 0.0
        with torch.no_grad():
            for inputs, targets in self.chunks():
                outputs = torch.func.functional_call(self.model, self.values(flat), (inputs,))
                total += float(self.objective(outputs, targets).double().sum())
        return total / len(self.inputs)

    def loss_and_gradient(self, flat: Tensor) -> tuple[float, Tensor]:
        flat = flat.detach().clone().requires_grad_()
        total, gradient = 0.0, torch.zeros_like(flat)
        for inputs, targets in self.chunks():
            outputs = torch.func.functional_call(self.model, self.values(flat), (inputs,))
            loss = self.objective(outputs, targets).sum() / len(self.inputs)
            gradient += torch.autograd.grad(loss, [flat])[0]
            total += float(loss.detach())
        return total, gradient


def sharpness(
    model: nn.Module,
    objective: Objective,
    inputs: Tensor,
    targets: Tensor,
    *,
    box: float = BOX,
    iterations: int = 10,
    batch_size: int = 1024,
) -> Sharpness:
    """Search |y_i| <= box * (|theta_i| + 1) around the trainable parameters theta for the largest
    mean loss, by L-BFGS-B with ten correction pairs. objective: losses of the examples (B,).
    """
    surface = Surface(model, objective, inputs, targets, batch_size)
    origin = surface.origin
    half_width = (box * (origin.abs() + 1)).double().cpu().numpy()

    def negative(offset: np.ndarray) -> tuple[float, np.ndarray]:
        moved = origin + torch.from_numpy(offset).to(origin)
        loss, gradient = surface.loss_and_gradient(moved)
        return -loss, -gradient.double().cpu().numpy()

    loss = surface.loss(origin)
    found = minimize(
        negative,
        np.zeros(len(origin)),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack([-half_width, half_width], axis=1),
        options={"maxiter": iterations, "maxcor": 10},
    )
    worst = max(loss, -float(found.fun))
    return Sharpness(100 * (worst - loss) / (1 + loss), loss, worst)


def losses_along(
    model: nn.Module,
    objective: Objective,
    inputs: Tensor,
    targets: Tensor,
    *,
    key: bytes,
    alphas: Sequence[float] = ALPHAS,
    batch_size: int = 1024,
) -> list[float]:
    """Compute the mean loss at theta + alpha * direction for each alpha.

    The direction is Gaussian; each of its filters (a row of a weight of two or more dimensions) is
    rescaled to the norm of theta's, vectors (biases, normalization) are zero. key: 32 bytes that
    choose it; compare models under the same key.
    """
    surface = Surface(model, objective, inputs, targets, batch_size)
    random = standard_normal_shared(key, "loss-picture", 0, len(surface.origin)).to(surface.origin)
    direction = torch.cat(
        [
            filter_normalized(piece, surface.named[name].detach()).flatten()
            for name, piece in surface.values(random).items()
        ]
    )
    return [surface.loss(surface.origin + alpha * direction) for alpha in alphas]


def filter_normalized(direction: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() < 2:
        return torch.zeros_like(direction)
    shape = (len(weight), *[1] * (weight.dim() - 1))
    wanted = weight.flatten(1).norm(dim=1)
    have = direction.flatten(1).norm(dim=1).clamp(min=torch.finfo(weight.dtype).tiny)
    return direction * (wanted / have).view(shape)


def draw(losses: Sequence[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot(ALPHAS, losses)
    axes.set_xlabel("alpha: distance along a filter-normalized random direction")
    axes.set_ylabel("mean loss on test data")
    figure.savefig(path)


def measured(
    recipe: Recipe, folder: RunFolder, inputs: int, iterations: int, picture: Path | None
) -> str:
    """Return the table of a run's minimum on its first test inputs, and write its picture."""
    model = load_model(recipe, folder)
    dataset = load_test_records(recipe, data_source(recipe)).first(inputs)
    batch, targets = dataset.batch(slice(None)), dataset.targets(slice(None))
    sharp = sharpness(model, cross_entropy, batch, targets, iterations=iterations)
    rows = [
        ("sharpness", f"{sharp.value:.4g} (box {BOX:g}, at least)"),
        ("loss", f"{sharp.loss:.4g}, worst found in the box {sharp.worst_loss:.4g}"),
        ("data", f"first {len(dataset):,} of {dataset.name}"),
    ]
    if picture is not None:
        draw(losses_along(model, cross_entropy, batch, targets, key=bytes(32)), picture)
        rows.append(("picture", str(picture)))
    return console.format_table(rows, title=f"landscape of {recipe.name}")


def quick(picture: Path | None) -> str:
    with tempfile.TemporaryDirectory(prefix="dpdist-landscape-") as place:
        recipe, folder = parse_recipe(QUICK, "quick"), RunFolder(Path(place) / "run")
        worker.run_training(prepare(recipe, folder, "quick"), Reducer(0, 1, torch.device("cpu")))
        return measured(recipe, folder, 20, 2, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", nargs="?", help="a run folder, or its name under --runs")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--inputs", type=int, default=1000, help="the first so many test inputs")
    parser.add_argument("--iterations", type=int, default=10, help="of the search in the box")
    parser.add_argument("--picture", type=Path, help="the loss along one direction: a PNG file")
    parser.add_argument("--quick", action="store_true", help="digits, three steps: a smoke test")
    given = parser.parse_args()
    if min(given.inputs, given.iterations) < 1:
        parser.error("--inputs and --iterations must be at least 1")
    try:
        if given.quick or given.run is None:
            print(quick(given.picture))
            return
        folder = open_run(given.run, given.runs)
        recipe = resolve_recipe(folder.read_recipe(), data_root=given.data_root)
        print(measured(recipe, folder, given.inputs, given.iterations, given.picture))
    except UserError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
