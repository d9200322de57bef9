"""Denoisers: networks from noisy images to images of the same shape, for a place before a
classifier.

No BatchNorm anywhere: its statistics would mix examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from dpdist.models.activations import activation_layer


class Residual(nn.Module):
    """x - network(x): the network predicts the noise (Zhang et al. 2017, "DnCNN")."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return x - self.network(x)


def conv_autoencoder(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (16, 32),
    activation: str = "relu",
    residual: bool = False,
) -> nn.Module:
    """Convolutions of stride 2, then as many transposed ones back to the image (TransDenoiser).

    channels: filters of the convolutions, outermost first; the paper's widths are not known. The
    sides of the image must be divisible by 2^len(channels). residual: x - network(x) instead, with
    a last layer that begins at 0, so that training begins at the identity. classes is not used.
    """
    _check_halved(input_shape, channels)
    widths = [input_shape[0], *channels]
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [
            nn.Conv2d(width_in, width_out, 3, stride=2, padding=1),
            activation_layer(activation),
        ]
    for width_in, width_out in itertools.pairwise(reversed(widths)):
        layers += [
            nn.ConvTranspose2d(width_in, width_out, 4, stride=2, padding=1),
            activation_layer(activation),
        ]
    return _finished(layers[:-1], residual)


class _Level(nn.Module):
    """Inputs to `width` maps of half the size, what the level below sees added, and back."""

    def __init__(self, width_in: int, width: int, kernel: int, inner: nn.Module | None) -> None:
        super().__init__()
        padding = kernel // 2 - 1
        self.down = nn.Conv2d(width_in, width, kernel, stride=2, padding=padding)
        self.inner = inner
        self.same = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width_in, kernel, stride=2, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.down(x).relu()
        if self.inner is not None:
            seen = (seen + self.inner(seen)).relu()
        return self.up((seen + self.same(seen)).relu())


def unet(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (16, 32),
    kernel: int = 6,
) -> nn.Module:
    """A U-Net (Ronneberger et al. 2015) without full size: each level halves the image, and adds
    what the level below makes of it.

    channels: of the levels, outermost first; the sides of the image must be divisible by
    2^len(channels). kernel: even, of the outermost level; the others have 4. classes is not used.
    """
    _check_halved(input_shape, channels)
    if kernel < 2 or kernel % 2:
        raise ValueError(f"kernel must be an even number >= 2, got {kernel}")
    widths = [input_shape[0], *channels]
    inner: _Level | None = None
    for depth in reversed(range(len(channels))):
        inner = _Level(widths[depth], widths[depth + 1], 4 if depth else kernel, inner)
    assert inner is not None
    return inner


def dncnn(
    input_shape: Sequence[int],
    classes: int,
    depth: int = 17,
    width: int = 64,
    groups: int = 8,
) -> nn.Module:
    """DnCNN, the denoiser of denoised smoothing (Salman et al. 2020), with GroupNorm.

    3x3 convolutions at full size that predict the noise; groups: of the GroupNorm between them, 0
    for none. classes is not used.
    """
    _check_image(input_shape, [width])
    if depth < 2:
        raise ValueError(f"depth must be at least 2, got {depth}")
    layers: list[nn.Module] = [nn.Conv2d(input_shape[0], width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 2):
        layers.append(nn.Conv2d(width, width, 3, padding=1, bias=not groups))
        if groups:
            layers.append(nn.GroupNorm(groups, width))
        layers.append(nn.ReLU())
    layers.append(nn.Conv2d(width, input_shape[0], 3, padding=1))
    return _finished(layers, residual=True)


def _check_image(input_shape: Sequence[int], channels: Sequence[int]) -> None:
    if len(input_shape) != 3:
        raise ValueError(f"a denoiser works on images (C, H, W), got {tuple(input_shape)}")
    if not channels or min(channels) < 1:
        raise ValueError(f"channels must be numbers >= 1, got {list(channels)}")


def _check_halved(input_shape: Sequence[int], channels: Sequence[int]) -> None:
    """And its sides can be halved once for each of the channels."""
    _check_image(input_shape, channels)
    reduction = 2 ** len(channels)
    if any(side % reduction for side in input_shape[1:]):
        raise ValueError(
            f"{len(channels)} convolutions of stride 2 need sides divisible by {reduction}, got "
            f"{tuple(input_shape[1:])}"
        )


def _finished(layers: list[nn.Module], residual: bool) -> nn.Module:
    network = nn.Sequential(*layers)
    if not residual:
        return network
    last = layers[-1]
    assert isinstance(last, nn.Conv2d | nn.ConvTranspose2d) and last.bias is not None
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return Residual(network)
