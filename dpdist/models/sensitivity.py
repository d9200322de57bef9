"""How much the first layer stretches inputs, and keeping that bounded while it trains.

Noise of a fixed scale hides nothing from a layer that grows. PixelDP therefore keeps the layer's
norm at most 1 after every update (Lecuyer et al., IEEE S&P 2019, Section III-B). Here the layer is
scaled back by a valid bound of its norm. That reads released parameters and public constants only:
post-processing, free of privacy cost.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from dpdist.models import SplitModel

# Machines may differ in the last bits of a spectral norm; their weights must not. A factor on this
# grid is the same on all of them, but for a rounding at a grid point.
_GRID = 2.0**20


def layer_bound(split: SplitModel) -> float:
    """An upper bound of the L2 operator norm of the first layer, in input units.

    Dense: the spectral norm. Convolution: that of the kernel as a (filters, patch) matrix, times
    the square root of how many patches one pixel can lie in (at most ceil(kernel / stride) a side).
    The certificate uses the exact norm of the whole map, which is smaller.
    """
    layer = split.layer
    weight = layer.weight.detach().double().flatten(1)
    bound = float(torch.linalg.matrix_norm(weight, 2))
    if isinstance(layer, nn.Conv2d):
        sides = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        patches = [k if dilated > 1 else math.ceil(k / stride) for k, stride, dilated in sides]
        bound *= math.sqrt(math.prod(patches))
        # Groups are a block-diagonal map: their joint norm is at most that of the stacked kernel.
    if split.std is not None:
        bound /= float(split.std.min())
    return bound


def keep_within(split: SplitModel, limit: float) -> None:
    """Scale the first layer's weight back, in place, so that its bound is at most `limit`."""
    bound = layer_bound(split)
    if bound > limit:
        with torch.no_grad():
            split.layer.weight.mul_(math.floor(limit / bound * _GRID) / _GRID)
