"""Normalisation by public constants, as part of the model."""

from __future__ import annotations

from torch import Tensor, nn


class Normalised(nn.Module):
    """(x - mean) / std, then the network; part of the model, so that radii are in input units."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network((x - self.mean) / self.std)
