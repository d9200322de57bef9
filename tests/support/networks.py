"""Networks that many tests are of, small enough to be counted in seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.models import ModelSpec

SMALL_CNN = ModelSpec("small-cnn", (1, 6, 6), 3, {"width": 4})


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each example, (B,): as an engine wants it."""
    return F.cross_entropy(outputs, targets, reduction="none")


def save_small_cnn(
    folder: Path, seed: int = 3, *, noise: float | None = None, times: float = 1.0
) -> Path:
    """Save an untrained `SMALL_CNN` into a folder; return that.

    noise: standard deviation of noise in its first hidden layer. times: what its weights are
    multiplied by, so that its scores say something.
    """
    model = models.initialize(SMALL_CNN, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(times)
    if noise is not None:
        shape = models.require_split(model).hidden_shape(SMALL_CNN.input_shape)
        models.attach_noise(model, torch.full(shape, noise))
    models.save(model, replace(SMALL_CNN, hidden_noise=noise is not None), folder)
    return folder


def saved_parameters(folder: Path) -> Tensor:
    """Return all parameters of a saved model as one vector, in the order of their names."""
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def small_layers(norm: Callable[[], nn.Module] = lambda: nn.GroupNorm(2, 4)) -> nn.Sequential:
    """Return a convolution, a norm (by default in two groups) and two dense layers for images of
    1 x 8 x 8 and three classes; its weights are always the same."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 36, 16), nn.Tanh(), nn.Linear(16, 3),
    )  # fmt: skip


def mixing_refused() -> AbstractContextManager[object]:
    """Expect the refusal of a model whose examples have an effect on each other's gradients."""
    return pytest.raises(UserError, match="mixes examples")


class Of(nn.Module):
    """A network by a function of itself, with its parts as attributes, and an input."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)
