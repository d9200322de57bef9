"""PixelDP: certified robustness from noise behind the first layer (Lecuyer et al., IEEE S&P 2019).

The noise is what a Gaussian mechanism needs for (epsilon_r, delta_r) when the input moves by the
construction size L and the layer has norm Delta: sigma_r = scale(epsilon_r, delta_r) Delta L. It
protects nothing about training records: epsilon_r is a parameter of robustness. What the trained
network certifies is computed from its real first layer (`dpdist.certification.scores`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpdist.methods.options import HiddenNoiseMethod
from dpdist.privacy import mechanisms

_SCALES: dict[str, Callable[..., object]] = {
    "classical": mechanisms.classical_gaussian_scale,
    "analytic": mechanisms.analytic_gaussian_scale,
    "extended": mechanisms.extended_gaussian_scale,
}


def noise_scale(method: HiddenNoiseMethod, inputs: int) -> float:
    """sigma_r: standard deviation of the noise on every hidden component, before redistribution.

    inputs: numbers in one input; an L-infinity size moves the first layer's output by at most
    sqrt(inputs) times as much as an L2 size.
    """
    if method.sigma is not None:
        return method.sigma
    reach = method.sensitivity * (math.sqrt(inputs) if method.norm == "linf" else 1.0)
    unit = float(_SCALES[method.mechanism](method.epsilon_r, method.delta_r))  # type: ignore[arg-type]
    return unit * reach * method.attack_size


def equal_noise(scale: float, shape: tuple[int, ...]) -> Tensor:
    """The same deviation for every component: float32 of the hidden shape."""
    return torch.full(shape, scale)
