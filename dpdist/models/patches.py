"""Features from filters of one size: of public cosines, or of what private patches have in common.

What they respond is rectified on either side and averaged over large squares, which a change of
single pixels moves little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError

_TINY = 1e-8  # under the root of a square: smooth at 0


class Patches(nn.Module):
    """Images (B, C, H, W) to features (B, D) of norm 1: each filter's positive and negative part,
    averaged over squares of `pool` pixels.

    The filters are orthonormal and have mean 0 in each channel; at first they are cosines of the
    lowest frequencies, which are public.
    """

    def __init__(self, input_shape: Sequence[int], filters: int, side: int, pool: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        most = channels * (side**2 - 1)
        if not (1 <= filters <= most and side + pool - 1 <= min(height, width)):
            raise ValueError(f"1 <= filters <= {most}, and side + pool - 1 within the image")
        self.pool = pool
        self.encoder = nn.Conv2d(channels, filters, side, bias=False)
        with torch.no_grad():
            self.encoder.weight.copy_(_cosines(channels, side)[:filters])
        squares = ((height - side + 1) // pool) * ((width - side + 1) // pool)
        self.size = 2 * filters * squares

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        moduli = (code.square() + _TINY).sqrt()
        parts = torch.cat([moduli + code, moduli - code], 1)
        features = nn.functional.avg_pool2d(parts, self.pool).flatten(1)
        return features / features.norm(dim=1, keepdim=True).clamp(min=_TINY)

    def moments(self, inputs: Tensor) -> Tensor:
        """Of each record, the mean over its patches p of p p', p without its channels' means and
        scaled back to norm 1: float64 (B, P, P), Frobenius norms at most 1."""
        layer, channels = self.encoder, inputs.shape[1]
        p = nn.functional.unfold(inputs.double(), layer.kernel_size).transpose(1, 2)
        p = p.unflatten(2, (channels, -1))
        p = (p - p.mean(3, keepdim=True)).flatten(2)
        p = p / p.norm(dim=2, keepdim=True).clamp(min=1.0)
        p = torch.where(p.isfinite().all(2, keepdim=True), p, 0.0)
        return p.transpose(1, 2) @ p / p.shape[1]

    def take(self, moments: Tensor) -> None:
        """Make the filters the leading eigenvectors of a noisy sum of moments, (P, P)."""
        weight = self.encoder.weight
        channels = weight.shape[1]
        ones = torch.eye(channels, dtype=torch.float64).repeat_interleave(
            len(moments) // channels, 1
        )
        flat = torch.eye(len(moments), dtype=torch.float64) - ones.T @ ones / ones[0].sum()
        flat = flat.to(moments)
        vectors = torch.linalg.eigh(flat @ moments @ flat)[1]
        with torch.no_grad():
            weight.copy_(vectors.flip(1)[:, : len(weight)].T.reshape(weight.shape))


def patches_of(model: nn.Module) -> Patches:
    """The part of a model that makes its features of patches. Raises UserError for another one."""
    found = [module for module in model.modules() if isinstance(module, Patches)]
    if len(found) != 1:
        raise UserError("a private encoder is of model patches")
    return found[0]


def _cosines(channels: int, side: int) -> Tensor:
    """All products of cosines over a patch but the constant ones, orthonormal, lowest frequencies
    first: float32 (channels (side^2 - 1), channels, side, side)."""

    def rows(count: int) -> Tensor:
        places = torch.from_numpy(np.arange(count) + 0.5)
        found = torch.stack([(math.pi / count * places * row).cos() for row in range(count)])
        return found / found.norm(dim=1, keepdim=True)

    depth, line = rows(channels), rows(side)
    order = [(c, u, v) for c in range(channels) for u in range(side) for v in range(side) if u or v]
    order.sort(key=lambda each: (2 * each[0] + each[1] + each[2], each))
    products = [depth[c][:, None, None] * line[u][:, None] * line[v] for c, u, v in order]
    return torch.stack(products).float()


def patches(
    input_shape: Sequence[int], classes: int, filters: int = 20, side: int = 5, pool: int = 6
) -> nn.Module:
    """A linear classifier of features of patches: 640 of a 28 x 28 image."""
    features = Patches(input_shape, filters, side, pool)
    return nn.Sequential(features, nn.Linear(features.size, classes))
