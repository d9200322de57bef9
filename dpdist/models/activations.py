"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class TemperedSigmoid(nn.Module):
    """scale * sigmoid(temperature * x) - offset (Papernot et al. 2021); the defaults are tanh."""

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset


ACTIVATIONS["tempered-sigmoid"] = TemperedSigmoid


def activation_layer(name: str) -> nn.Module:
    """The named activation. Raises ValueError for a name that is not known."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: unknown {name!r}; one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]()
