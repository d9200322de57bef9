"""Features before a linear head: the penultimate layer, filters of patches, and scattering.

Public features are a fixed function of one record. They do not depend on data and have no privacy
cost: public cosines, and scattering of the first order (Bruna and Mallat, "Invariant Scattering
Convolution Networks", 2013), low frequencies of the moduli of wavelet coefficients. Filters may
also be computed from moments of private patches. The positive and negative parts of responses are
averaged over large squares, so that a change of single pixels has little effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError

# --- the last linear layer and its input ------------------------------------------------------


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the last linear layer among the modules. Raises UserError without one, or its bias.

    `PenultimateFeatures` checks that the model ends with it.
    """
    found = [module for module in model.modules() if type(module) is nn.Linear]
    if not found or found[-1].bias is None:
        raise UserError("the model must end in a linear layer with a bias: its head")
    return found[-1]


class PenultimateFeatures:
    """The input of a model's last linear layer for a batch, (B, ...) to (B, D), in eval mode.

    The model belongs to this object afterwards. Raises UserError if it does not end in that layer.

    inputs: (B, ...) for a test.
    """

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        self._model, self._head = model.eval().requires_grad_(False), last_linear(model)
        self._captured: list[Tensor] = []
        seen = self._captured  # the hook refers to the list, not to this object: no cycle
        self._head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        with torch.no_grad():
            answers = self._model(inputs)
            first = self._captured[0] if self._captured else inputs
            if len(self._captured) != 1 or first.dim() != 2 or not self._head(first).equal(answers):
                raise UserError("the model must end in its last linear layer, used once: its head")

    def __call__(self, inputs: Tensor, track_gradients: bool = False) -> Tensor:
        """Return the features. track_gradients: for gradients with respect to the inputs."""
        self._captured.clear()
        with torch.set_grad_enabled(track_gradients):
            self._model(inputs)
        return self._captured[0]


# --- filters of patches -----------------------------------------------------------------------


_TINY = 1e-8  # added under square roots, which are then smooth at 0


class PatchFeatures(nn.Module):
    """Images (B, C, H, W) to features (B, D) of norm 1.

    They are each filter's positive and negative part, averaged over squares of `pool` pixels. The
    filters are orthonormal and have mean 0 in each channel; initially they are public cosines of
    the lowest frequencies.
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
        output: Tensor = features / features.norm(dim=1, keepdim=True).clamp(min=_TINY)
        return output

    def moments(self, inputs: Tensor) -> Tensor:
        """Return each record's mean of p p' over its patches p: float64 (B, P, P).

        Channel means are subtracted from p, and its norm is clipped to 1; Frobenius norms of the
        result are at most 1.
        """
        layer, channels = self.encoder, inputs.shape[1]
        p = nn.functional.unfold(inputs.double(), layer.kernel_size).transpose(1, 2)
        p = p.unflatten(2, (channels, -1))
        p = (p - p.mean(3, keepdim=True)).flatten(2)
        p = p / p.norm(dim=2, keepdim=True).clamp(min=1.0)
        p = torch.where(p.isfinite().all(2, keepdim=True), p, 0.0)
        return p.transpose(1, 2) @ p / p.shape[1]

    def fit_filters(self, moments: Tensor) -> None:
        """Set the filters to the leading eigenvectors of a noisy sum of moments, (P, P)."""
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


def patch_features_of(model: nn.Module) -> PatchFeatures:
    """Return the module of a model's features of patches. Raises UserError for other models."""
    found = [module for module in model.modules() if isinstance(module, PatchFeatures)]
    if len(found) != 1:
        raise UserError("model.name: must be patches for a private encoder")
    return found[0]


def _cosines(channels: int, side: int) -> Tensor:
    """Return the products of cosines over a patch without constant ones, by frequency.

    They are orthonormal, float32 (channels (side^2 - 1), channels, side, side).
    """
    depth, line = _dct_rows(channels, channels), _dct_rows(side, side)
    order = [(c, u, v) for c in range(channels) for u in range(side) for v in range(side) if u or v]
    order.sort(key=lambda each: (2 * each[0] + each[1] + each[2], each))
    products = [depth[c][:, None, None] * line[u][:, None] * line[v] for c, u, v in order]
    return torch.stack(products).float()


def patches(
    input_shape: Sequence[int], classes: int, filters: int = 20, side: int = 5, pool: int = 6
) -> nn.Module:
    """Return a linear classifier of features of patches: 640 for a 28 x 28 image."""
    features = PatchFeatures(input_shape, filters, side, pool)
    return nn.Sequential(features, nn.Linear(features.size, classes))


# --- scattering -------------------------------------------------------------------------------


_FREQUENCY_TIMES_WIDTH = 1.6 * math.pi * 0.75  # frequency times width of a Morlet wavelet


class Scattering(nn.Module):
    """Images (B, C, H, W) to features (B, D) of norm 1, for each channel separately.

    They are the lowest cosines x cosines frequencies of the image, and of the moduli of its Morlet
    coefficients at each width (pixels) and angle, on every `stride`-th pixel.
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
            self.register_buffer(f"{name}_rows", _dct_rows(rows, cosines).float(), False)
            self.register_buffer(f"{name}_columns", _dct_rows(columns, cosines).float().T, False)
        self.size = channels * (1 + angles * self.scales) * cosines**2

    def forward(self, x: Tensor) -> Tensor:
        channels = x.flatten(0, 1)[:, None]
        maps = [self._low(channels, "whole") / self.stride]  # the norm of coarse maps is smaller
        for scale in range(self.scales):
            wavelets = getattr(self, f"wavelets_{scale}")
            padding = wavelets.shape[-1] // 2
            parts = nn.functional.conv2d(channels, wavelets, stride=self.stride, padding=padding)
            moduli = (parts.unflatten(1, (-1, 2)).square().sum(2) + _TINY).sqrt()
            maps.append(self._low(moduli, "coarse"))
        features = torch.cat(maps, 1).unflatten(0, (-1, self.channels)).flatten(1)
        output: Tensor = features / features.norm(dim=1, keepdim=True).clamp(min=_TINY)
        return output

    def _low(self, maps: Tensor, size: str) -> Tensor:
        result: Tensor = getattr(self, f"{size}_rows") @ maps @ getattr(self, f"{size}_columns")
        return result


def _morlets(width: float, angles: int) -> Tensor:
    """Return alternating real and imaginary parts: float32 (2 angles, 1, side, side).

    Each real part has L1 norm 1 and mean 0. The envelope is twice as long as wide.
    """
    reach = math.ceil(2.5 * width)
    steps = torch.from_numpy(np.arange(-reach, reach + 1.0))
    rows, columns = torch.meshgrid(steps, steps, indexing="ij")
    found = []
    for angle in range(angles):
        turn = math.pi * angle / angles
        across = rows * math.cos(turn) + columns * math.sin(turn)
        along = columns * math.cos(turn) - rows * math.sin(turn)
        envelope = (-(across.square() + along.square() / 4) / (2 * width**2)).exp()
        phase = _FREQUENCY_TIMES_WIDTH / 2 / width * across
        real, imaginary = envelope * phase.cos(), envelope * phase.sin()
        real = real - envelope * real.sum() / envelope.sum()
        found += [real / real.abs().sum(), imaginary / real.abs().sum()]
    return torch.stack(found)[:, None].float()


def _dct_rows(side: int, count: int) -> Tensor:
    """Return the first rows of the orthonormal cosine transform: float64 (count, side)."""
    places = torch.from_numpy(np.arange(side) + 0.5)
    rows = torch.stack([(math.pi / side * places * row).cos() for row in range(count)])
    result: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return result


def scattering(
    input_shape: Sequence[int],
    classes: int,
    angles: int = 8,
    widths: Sequence[float] = (1.0, 2.0),
    cosines: int = 5,
    stride: int = 2,
) -> nn.Sequential:
    """Return a linear classifier of public features: 425 for a 28 x 28 image."""
    features = Scattering(input_shape, angles, widths, cosines, stride)
    return nn.Sequential(features, nn.Linear(features.size, classes))


def resize_images(inputs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return public images in the model's shape: channels averaged or repeated, sides interpolated.

    inputs: (N, C, H, W) float32 in [0, 1]. shape: (C', H', W'). Raises ValueError for other shapes.
    """
    if tuple(inputs.shape[1:]) == shape:
        return inputs
    if inputs.dim() != 4 or len(shape) != 3:
        raise ValueError(f"inputs of shape {tuple(inputs.shape[1:])} cannot be made to fit {shape}")
    if inputs.shape[1] != shape[0]:
        inputs = inputs.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    sides = (shape[1], shape[2])
    return nn.functional.interpolate(inputs, size=sides, mode="bilinear", align_corners=False)
