"""Upper bounds of a layer's operator norm: the actual linear map, stride and padding included.

The norms take the input in L1, L2 or L-infinity to the output in L2 (Gaussian noise) or L1
(Laplace noise). ``weights`` is the vector of variances K r of heterogeneous noise, shaped like the
output: the output is divided by its square root, jointly over all positions and feature maps.
Biases play no role.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# For more inputs the exact spectral norm takes minutes; a weaker bound is used.
_LARGEST_GRAM = 4096
_ROUNDING = 1 + 1e-9
_BASIS_ROWS = 32


def l2_to_l2(
    layer: nn.Linear | nn.Conv2d,
    input_shape: tuple[int, ...],
    noise_variances: Tensor | None = None,
) -> float:
    """Return the spectral norm of the layer's matrix, from the eigenvalues of W^T W in float64.

    For more than 4,096 inputs it is the Schur test sqrt(max row sum * max column sum) of |W|, which
    is larger. A power iteration would give a lower bound, which certifies nothing.
    """
    if math.prod(input_shape) > _LARGEST_GRAM:
        return _schur(layer, input_shape, noise_variances)
    gram, outputs = _gram(layer, input_shape, noise_variances)
    largest = float(torch.linalg.eigvalsh(gram)[-1])
    # Rounding of the product and of the eigenvalue, generously: n u ||W||_F^2.
    slack = outputs * 2.3e-16 * float(gram.trace())
    return math.sqrt(max(largest, 0.0) + slack) * _ROUNDING


def linf_to_l2(
    layer: nn.Linear | nn.Conv2d,
    input_shape: tuple[int, ...],
    noise_variances: Tensor | None = None,
    *,
    l2: float | None = None,
) -> float:
    """Return the smaller of sqrt(sum_k ||w_k||_1^2 / (K r_k)) and sqrt(inputs) * l2_to_l2.

    l2: that norm, if it is known already.
    """
    rows = _row_sums(layer, input_shape) / _noise_std(noise_variances)
    by_rows = float(torch.linalg.vector_norm(rows)) * _ROUNDING
    l2 = l2_to_l2(layer, input_shape, noise_variances) if l2 is None else l2
    return min(by_rows, math.sqrt(math.prod(input_shape)) * l2)


def hgm_linf_to_l2_as_printed(
    layer: nn.Linear | nn.Conv2d,
    input_shape: tuple[int, ...],
    noise_variances: Tensor,
    *,
    feature_map: int | None = None,
) -> float:
    """Return HGM's printed bound (IJCAI 2019, Eq. 6): sqrt(K) max_k ||w_k||_1 / (K r_k).

    It divides by K r although the noise has standard deviation sqrt(K r). Over all units jointly it
    is still an upper bound, because the r_k sum to one, but a looser one than ``linf_to_l2``. With
    ``feature_map`` it is the sensitivity of that map only, as in the paper for convolutions, and
    not an upper bound, since all maps read the same pixels. For comparison only.
    """
    rows = _row_sums(layer, input_shape) / noise_variances.detach().double()
    if feature_map is not None:
        rows = rows[feature_map]
    return math.sqrt(rows.numel()) * float(rows.max())


def _schur(
    layer: nn.Linear | nn.Conv2d, input_shape: tuple[int, ...], weights: Tensor | None
) -> float:
    root = _noise_std(weights)
    rows = (_row_sums(layer, input_shape) / root).max()
    shape = _apply(layer, torch.zeros(1, *input_shape, dtype=torch.float64), None).shape[1:]
    absolute = layer.weight.detach().double().abs()
    columns = _transposed(layer, input_shape, absolute, (1 / root).expand(shape)).max()
    return math.sqrt(float(rows * columns)) * _ROUNDING


def _row_sums(layer: nn.Linear | nn.Conv2d, input_shape: tuple[int, ...]) -> Tensor:
    """Return ||w_k||_1 for every output k, shaped like the output."""
    ones = torch.ones(1, *input_shape, dtype=torch.float64)
    return _apply(layer, ones, layer.weight.detach().double().abs())[0]


def _gram(
    layer: nn.Linear | nn.Conv2d, input_shape: tuple[int, ...], weights: Tensor | None
) -> tuple[Tensor, int]:
    """Return W^T diag(1 / weights) W in float64, and the number of outputs.

    Layer and transposed layer are applied to a few basis vectors at a time, since the matrix of all
    outputs of a wide convolution would fill the memory.
    """
    size = math.prod(input_shape)
    squares = _noise_std(weights).square()
    rows = []
    outputs = 0
    for start in range(0, size, _BASIS_ROWS):
        count = min(_BASIS_ROWS, size - start)
        basis = torch.zeros(count, size, dtype=torch.float64)
        basis[torch.arange(count), start + torch.arange(count)] = 1
        x = basis.view(count, *input_shape).requires_grad_()
        y = _apply(layer, x, None)
        outputs = y[0].numel()
        (gradient,) = torch.autograd.grad(y, x, y.detach() / squares)
        rows.append(gradient.view(count, size))
    return torch.cat(rows), outputs


def _apply(layer: nn.Linear | nn.Conv2d, x: Tensor, weight: Tensor | None) -> Tensor:
    kernel = layer.weight.detach().double() if weight is None else weight
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x.flatten(1), kernel)
    if layer.padding_mode != "zeros":
        raise ValueError(f"padding_mode {layer.padding_mode!r} is not supported, only zeros")
    return nn.functional.conv2d(
        x, kernel, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )


def _transposed(
    layer: nn.Linear | nn.Conv2d, input_shape: tuple[int, ...], weight: Tensor, y: Tensor
) -> Tensor:
    """Return the transposed map, with ``weight`` as the layer's, of one output ``y``."""
    x = torch.zeros(1, *input_shape, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(_apply(layer, x, weight), x, y.reshape(1, *y.shape))
    return gradient


def _noise_std(weights: Tensor | None) -> Tensor:
    if weights is None:
        return torch.ones((), dtype=torch.float64)
    if not bool((weights > 0).all()):
        raise ValueError("every component needs noise: K r must be positive")
    return weights.detach().double().sqrt()
