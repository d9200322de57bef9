"""Noise that belongs to a model: in its first hidden layer, saved and loaded with the weights.

The module's own forward pass stays without noise (nothing here draws); whoever trains, certifies
or attacks the model adds fresh N(0, std^2) to the named module's output. PixelDP (Lecuyer et al.,
IEEE S&P 2019), HGM-PixelDP and Secure-SGD (Phan et al., IJCAI 2019) predict that way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpdist.models.split import require_split

_BUFFER = "hidden_std"


@dataclass(frozen=True)
class HiddenNoise:
    """N(0, std^2) on every component of one module's output.

    module: its name in ``model.named_modules()``. std: float32, the shape of one example's output.
    """

    module: str
    std: Tensor

    @property
    def scale(self) -> float:
        """Root mean square of the deviations: sigma_r, of which std is sigma_r sqrt(K r)."""
        return float(self.std.double().square().mean().sqrt())

    @property
    def shares(self) -> Tensor:
        """K r, float64, mean 1: every component's variance relative to the mean."""
        squares = self.std.double().square()
        return squares / squares.mean()


def attach_noise(model: nn.Module, std: Tensor) -> None:
    """Give the model noise behind its first layer; std has the shape of that layer's output.

    Raises UserError when the model has no such layer.
    """
    require_split(model)
    model.register_buffer(_BUFFER, std.detach().float().clone())


def attach_silence(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Room for the noise of a model about to be loaded."""
    attach_noise(model, torch.zeros(require_split(model).hidden_shape(input_shape)))


def hidden_noise(model: nn.Module) -> HiddenNoise | None:
    """The noise that belongs to a model, or None."""
    std = getattr(model, _BUFFER, None)
    if not isinstance(std, Tensor):
        return None
    return HiddenNoise(require_split(model).name, std)
