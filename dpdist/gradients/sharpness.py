"""How flat the minimum is that a training run ended in: two evaluations of a loss surface.

Both look at a given model on given data. They are for public or test data: on training records they
are a private quantity, and showing it costs privacy that nobody has accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.gradients.perturbations import standard_normal_shared
from dpdist.randomness.keys import KEY_BYTES

# theta + alpha * direction for alpha in [-0.8, 0.8], as the DPlis paper plots it.
_ALPHAS = tuple(np.linspace(-0.8, 0.8, 33).tolist())

Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sharpness:
    """value: 100 * (largest loss in the box - loss) / (1 + loss).

    loss, worst_loss: mean loss at the parameters and the largest one found. iterations,
    evaluations: what the search spent; `value` is a lower bound on the sharpness, the more so the
    fewer they are.
    """

    value: float
    loss: float
    worst_loss: float
    iterations: int
    evaluations: int


class _Surface:
    """Mean loss as a function of the flat vector of trainable parameters."""

    def __init__(
        self, model: nn.Module, objective: Objective, inputs: Tensor, targets: Tensor, batch: int
    ) -> None:
        if len(inputs) == 0 or len(inputs) != len(targets):
            raise UserError(f"need as many targets as inputs, got {len(targets)}, {len(inputs)}")
        self.model, self.objective = model, objective
        self.inputs, self.targets, self.batch = inputs, targets, batch
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.named:
            raise UserError("the model has no trainable parameters")
        self.origin = torch.cat([p.detach().flatten() for p in self.named.values()])

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([p.numel() for p in self.named.values()])
        return {
            name: piece.view(p.shape)
            for (name, p), piece in zip(self.named.items(), pieces, strict=True)
        }

    def chunks(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs.split(self.batch), self.targets.split(self.batch), strict=True))

    def loss_and_accuracy(self, flat: Tensor) -> tuple[float, float]:
        loss, right = 0.0, 0.0
        with torch.no_grad():
            for inputs, targets in self.chunks():
                outputs = torch.func.functional_call(self.model, self.values(flat), (inputs,))
                loss += float(self.objective(outputs, targets).double().sum())
                if outputs.dim() == targets.dim() + 1:  # else nothing is told apart
                    hits = (outputs.argmax(-1) == targets).double().view(len(targets), -1)
                    asked = (targets >= 0).view(len(targets), -1)
                    right += float((hits.sum(1) / asked.sum(1).clamp(min=1)).sum())
        return loss / len(self.inputs), right / len(self.inputs)

    def loss_and_gradient(self, flat: Tensor) -> tuple[float, Tensor]:
        flat = flat.detach().clone().requires_grad_()
        total, gradient = 0.0, torch.zeros_like(flat)
        for inputs, targets in self.chunks():
            with torch.enable_grad():
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
    epsilon: float = 0.0045,
    iterations: int = 10,
    batch_size: int = 1024,
) -> Sharpness:
    """(C_epsilon, A)-sharpness with A = I (Keskar et al. 2017, Metric 2.1; DPlis Table 9).

    The box is |y_i| <= epsilon * (|theta_i| + 1) around the trainable parameters theta; the largest
    mean loss in it is searched with L-BFGS-B (scipy, ten correction pairs) for at most `iterations`
    iterations, as Keskar et al. do (10). The DPlis paper states epsilon = 0.0045 and A = I, but
    neither solver nor iterations. objective: per-example losses (B,). The model is not changed.
    """
    if not 0 < epsilon < float("inf") or iterations < 1:
        raise UserError(f"need epsilon > 0 and iterations >= 1, got {epsilon}, {iterations}")
    surface = _Surface(model, objective, inputs, targets, batch_size)
    origin = surface.origin
    half_width = (epsilon * (origin.abs() + 1)).double().cpu().numpy()

    def negative(offset: np.ndarray) -> tuple[float, np.ndarray]:
        moved = origin + torch.from_numpy(offset).to(origin)
        loss, gradient = surface.loss_and_gradient(moved)
        return -loss, -gradient.double().cpu().numpy()

    loss = surface.loss_and_accuracy(origin)[0]
    found = minimize(
        negative,
        np.zeros(len(origin)),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack([-half_width, half_width], axis=1),
        options={"maxiter": iterations, "maxcor": 10},
    )
    worst = max(loss, -float(found.fun))
    value = 100 * (worst - loss) / (1 + loss)
    return Sharpness(value, loss, worst, int(found.nit), int(found.nfev))


@dataclass(frozen=True)
class LossPicture:
    """Mean loss and accuracy at theta + alpha * direction, one entry per alpha."""

    alphas: tuple[float, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]


def loss_picture(
    model: nn.Module,
    objective: Objective,
    inputs: Tensor,
    targets: Tensor,
    *,
    key: bytes,
    alphas: Sequence[float] = _ALPHAS,
    batch_size: int = 1024,
) -> LossPicture:
    """The filter-normalised one-dimensional loss picture (Li et al. 2018; DPlis).

    A random Gaussian direction, each of whose filters (a row of every weight of two or more
    dimensions) is rescaled to the norm of the same filter of theta; vectors (biases,
    normalisation) are left where they are, as Li et al. do. key: 32 bytes that choose the
    direction; compare models under the same key. The model is not changed.
    """
    if len(key) != KEY_BYTES:
        raise UserError(f"the key of a direction has {KEY_BYTES} bytes, got {len(key)}")
    surface = _Surface(model, objective, inputs, targets, batch_size)
    random = standard_normal_shared(key, "loss-picture", 0, len(surface.origin)).to(surface.origin)
    direction = torch.cat(
        [
            _filter_normalised(piece, surface.named[name].detach()).flatten()
            for name, piece in surface.values(random).items()
        ]
    )
    points = [surface.loss_and_accuracy(surface.origin + alpha * direction) for alpha in alphas]
    return LossPicture(
        tuple(alphas), tuple(loss for loss, _ in points), tuple(right for _, right in points)
    )


def _filter_normalised(direction: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() < 2:
        return torch.zeros_like(direction)
    shape = (len(weight), *[1] * (weight.dim() - 1))
    wanted = weight.flatten(1).norm(dim=1)
    have = direction.flatten(1).norm(dim=1).clamp(min=torch.finfo(weight.dtype).tiny)
    return direction * (wanted / have).view(shape)
