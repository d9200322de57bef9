from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from dpdist.certification import operator_norms as norms

CASES = [
    (nn.Conv2d(1, 3, 3, stride=2, padding=1), (1, 4, 4)),
    (nn.Conv2d(2, 4, 2, stride=1, padding=0), (2, 2, 3)),
    (nn.Conv2d(2, 4, 3, stride=1, padding=2, dilation=2, groups=2), (2, 3, 2)),
    (nn.Linear(10, 6), (10,)),
]


def dense(layer: nn.Module, shape: tuple[int, ...], weights: torch.Tensor | None) -> torch.Tensor:
    """The matrix by probing the layer itself, one input at a time, bias taken out."""
    layer = layer.double()
    zero = layer(torch.zeros(1, *shape, dtype=torch.float64)).flatten()
    size = int(torch.tensor(shape).prod())
    columns = []
    for i in range(size):
        x = torch.zeros(size, dtype=torch.float64)
        x[i] = 1
        columns.append(layer(x.reshape(1, *shape)).flatten() - zero)
    matrix = torch.stack(columns, 1).detach()
    return matrix if weights is None else matrix / weights.flatten().sqrt()[:, None]


@pytest.mark.parametrize(("layer", "shape"), CASES)
@pytest.mark.parametrize("weighted", [False, True])
def test_bounds_against_the_dense_matrix(
    layer: nn.Conv2d | nn.Linear, shape: tuple[int, ...], weighted: bool
) -> None:
    torch.manual_seed(0)
    layer = layer.double()
    output = layer(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:]
    weights = torch.rand(output, dtype=torch.float64) + 0.1 if weighted else None
    matrix = dense(layer, shape, weights)
    spectral = float(torch.linalg.matrix_norm(matrix, 2))
    got = norms.l2_to_l2(layer, shape, weights)
    assert spectral <= got == pytest.approx(spectral, rel=1e-6)
    assert norms._schur(layer, shape, weights) >= spectral
    # Every sign vector, for small inputs: the largest is the exact L-infinity norm.
    if matrix.shape[1] <= 12:
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=matrix.shape[1])))
        images = signs.double() @ matrix.T
        worst = float(images.norm(dim=1).max())
        assert worst <= norms.linf_to_l2(layer, shape, weights) < 4 * worst


def test_one_feature_map_is_not_enough() -> None:
    layer = nn.Conv2d(1, 16, 3, padding=1)
    whole = norms.linf_to_l2(layer, (1, 6, 6))
    single = nn.Conv2d(1, 1, 3, padding=1)
    single.weight.data = layer.weight.data[:1]
    assert whole > 1.5 * norms.linf_to_l2(single, (1, 6, 6))


def test_weights_divide_by_the_standard_deviation() -> None:
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.eye(2, 4)
    weights = torch.tensor([1.5, 0.5], dtype=torch.float64)  # K r
    got = norms.linf_to_l2(layer, (4,), weights)
    assert got == pytest.approx((1 / 1.5 + 1 / 0.5) ** 0.5, rel=1e-6)
    printed = norms.hgm_linf_to_l2_as_printed(layer, (4,), weights)
    assert printed == pytest.approx(2**0.5 / 0.5, rel=1e-6)
    with pytest.raises(ValueError):
        norms.l2_to_l2(layer, (4,), torch.tensor([1.0, 0.0]))
    padded = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    with pytest.raises(ValueError):
        norms.linf_to_l2(padded, (1, 4, 4))
