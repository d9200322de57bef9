"""Noise that belongs to a model: saved and loaded with its weights.

The module's own forward pass stays without noise (nothing here draws); whoever trains, evaluates,
certifies or attacks the model adds fresh noise where `dpdist.randomness.places.place_of` says.
Behind the first hidden layer: PixelDP (Lecuyer et al., IEEE S&P 2019), HGM-PixelDP and Secure-SGD
(Phan et al., IJCAI 2019). On the input and in several modules: residual perturbation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.models.place import device_of
from dpdist.models.spec import BlockNoise
from dpdist.models.split import require_split

HIDDEN, INPUT, BLOCKS = "hidden_std", "input_std", "block_std"  # the saved tensors
BLOCK_NOISE = "block_noise"  # the attribute of a model that says where BLOCKS go


def attach_noise(model: nn.Module, std: Tensor) -> None:
    """Give the model noise behind its first layer; std has the shape of that layer's output.

    Raises UserError when the model has no such layer.
    """
    require_split(model)
    model.register_buffer(HIDDEN, std.detach().float().clone().to(device_of(model)))


def attach_silence(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Room for the noise of a model about to be loaded."""
    attach_noise(model, torch.zeros(require_split(model).hidden_shape(input_shape)))


def attach_block_noise(
    model: nn.Module, noise: BlockNoise, stds: Sequence[float], input_std: float
) -> None:
    """Give the model noise on the outputs of its modules and on its input.

    stds: one for each module of ``noise``. Raises UserError when the model has no such module.
    """
    known = {name for name, _ in model.named_modules()}
    missing = [name for name in noise.modules if name not in known]
    if missing:
        raise UserError(f"noise in modules: the model has no module named {missing[0]!r}")
    setattr(model, BLOCK_NOISE, noise)
    model.register_buffer(BLOCKS, torch.tensor(list(stds), dtype=torch.float64))
    model.register_buffer(INPUT, torch.tensor(input_std, dtype=torch.float64))


def drop_noise(tensors: dict[str, Tensor], model: nn.Module) -> None:
    """A model with noise may give its weights to one without: leave out the noise of others."""
    for name in (HIDDEN, BLOCKS, INPUT):
        if not hasattr(model, name):
            tensors.pop(name, None)
