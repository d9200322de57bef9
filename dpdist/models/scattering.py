"""Public features before a linear head: such a model learns its head alone.

Features are a fixed function of one record, the same for everybody. They read no data, and cost
nothing. Scattering of the first order (Bruna and Mallat, "Invariant Scattering Convolution
Networks", 2013): moduli of wavelet coefficients, of which low frequencies are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

_FINEST = 1.6 * math.pi * 0.75  # frequency times width of a Morlet wavelet
_TINY = 1e-8  # under the root of a squared modulus, which is smooth at 0 then


class Scattering(nn.Module):
    """Images (B, C, H, W) to features (B, D) of norm 1, of each channel by itself: the image, and
    the moduli of its Morlet coefficients at each width (pixels) and angle, on every `stride`-th
    pixel; of each of these maps the lowest cosines x cosines frequencies.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        angles: int,
        widths: Sequence[float],
        cosines: int,
        stride: int,
    ) -> None:
        super().__init__()
        channels, *sides = input_shape
        coarse = [math.ceil(side / stride) for side in sides]
        if not 1 <= cosines <= min(coarse) or min(widths) <= 0 or angles < 1:
            raise ValueError(
                f"angles >= 1, widths > 0 and 1 <= cosines <= {min(coarse)} are needed"
            )
        self.channels, self.scales, self.stride = channels, len(widths), stride
        for scale, width in enumerate(widths):
            self.register_buffer(f"wavelets_{scale}", _morlets(width, angles), False)
        for name, (rows, columns) in (("whole", sides), ("coarse", coarse)):
            self.register_buffer(f"{name}_rows", _lowest(rows, cosines), False)
            self.register_buffer(f"{name}_columns", _lowest(columns, cosines).T, False)
        self.size = channels * (1 + angles * self.scales) * cosines**2

    def forward(self, x: Tensor) -> Tensor:
        channels = x.flatten(0, 1)[:, None]
        maps = [self._low(channels, "whole") / self.stride]  # coarse maps have as much less norm
        for scale in range(self.scales):
            wavelets = getattr(self, f"wavelets_{scale}")
            padding = wavelets.shape[-1] // 2
            parts = nn.functional.conv2d(channels, wavelets, stride=self.stride, padding=padding)
            moduli = (parts.unflatten(1, (-1, 2)).square().sum(2) + _TINY).sqrt()
            maps.append(self._low(moduli, "coarse"))
        features = torch.cat(maps, 1).unflatten(0, (-1, self.channels)).flatten(1)
        return features / features.norm(dim=1, keepdim=True).clamp(min=_TINY)

    def _low(self, maps: Tensor, size: str) -> Tensor:
        return getattr(self, f"{size}_rows") @ maps @ getattr(self, f"{size}_columns")


def _morlets(width: float, angles: int) -> Tensor:
    """Real and imaginary parts by turns: float32 (2 angles, 1, side, side), each real part of L1
    norm 1 and mean 0. The envelope is twice as long as wide."""
    reach = math.ceil(2.5 * width)
    steps = torch.from_numpy(np.arange(-reach, reach + 1.0))
    rows, columns = torch.meshgrid(steps, steps, indexing="ij")
    found = []
    for angle in range(angles):
        turn = math.pi * angle / angles
        across = rows * math.cos(turn) + columns * math.sin(turn)
        along = columns * math.cos(turn) - rows * math.sin(turn)
        envelope = (-(across.square() + along.square() / 4) / (2 * width**2)).exp()
        phase = _FINEST / 2 / width * across
        real, imaginary = envelope * phase.cos(), envelope * phase.sin()
        real = real - envelope * real.sum() / envelope.sum()
        found += [real / real.abs().sum(), imaginary / real.abs().sum()]
    return torch.stack(found)[:, None].float()


def _lowest(side: int, count: int) -> Tensor:
    """The first rows of the orthonormal cosine transform: float32 (count, side)."""
    places = torch.from_numpy(np.arange(side) + 0.5)
    rows = torch.stack([(math.pi / side * places * row).cos() for row in range(count)])
    return (rows / rows.norm(dim=1, keepdim=True)).float()


def scattering(
    input_shape: Sequence[int],
    classes: int,
    angles: int = 8,
    widths: Sequence[float] = (1.0, 2.0),
    cosines: int = 5,
    stride: int = 2,
) -> nn.Sequential:
    """A linear classifier of public features: 425 of a 28 x 28 image."""
    features = Scattering(input_shape, angles, widths, cosines, stride)
    return nn.Sequential(features, nn.Linear(features.size, classes))
