"""The mixed Jacobian and its smallest singular value against brute force, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpdist.gradients.engine import squared_error
from dpdist.papers.transdenoiser.split import (
    MixedJacobian,
    lanczos_smallest,
    rescaling_directions,
    smallest_eigenvalue,
    zero_by_symmetry,
)


def denoiser(activation: type[nn.Module] = nn.Tanh, channels: int = 2) -> nn.Module:
    """One convolution and one transposed one on 1x4x4 images: 53 parameters."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        activation(),
        nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1),
    ).double()


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(count, 1, 4, 4, generator=generator, dtype=torch.float64)


def brute_force(model: nn.Module, inputs: Tensor) -> Tensor:
    """A (w, n v), row by row from the definition: d/dx of the gradient of |g(x) - target|^2."""
    parameters = list(model.parameters())
    blocks = []
    for clean in inputs:
        x = clean[None].clone().requires_grad_()
        loss = (model(x) - clean[None]).square().sum()
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        flat = torch.cat([piece.reshape(-1) for piece in gradient])
        each = torch.eye(len(flat), dtype=flat.dtype)
        rows = torch.autograd.grad(flat, x, each, is_grads_batched=True)[0]
        blocks.append(rows.reshape(len(flat), -1))
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_products_are_those_of_the_matrix(activation):
    model, inputs = denoiser(activation), images(3)
    a = brute_force(model, inputs)
    jacobian = MixedJacobian(model, squared_error, inputs, inputs)
    assert (jacobian.num_parameters, jacobian.num_records * jacobian.num_features) == a.shape
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(3, 16, generator=generator, dtype=torch.float64)
    u = torch.randn(len(a), generator=generator, dtype=torch.float64)
    assert torch.allclose(jacobian.matvec(y), a @ y.reshape(-1), rtol=1e-9)
    assert torch.allclose(jacobian.rmatvec(u).reshape(-1), a.T @ u, rtol=1e-9)
    assert torch.allclose(jacobian.gram_matvec(u), a @ (a.T @ u), rtol=1e-9)


def test_smallest_eigenvalue_of_small_networks_is_exact():
    model, inputs = denoiser(), images(8)
    a = brute_force(model, inputs)
    expected = float(torch.linalg.eigvalsh(a @ a.T)[0])
    found = smallest_eigenvalue(MixedJacobian(model, squared_error, inputs, inputs))
    assert found.exact and "eigenvalues" in found.reason
    assert expected > 0  # tanh has no continuous symmetry: the value is small, not nothing
    assert found.value == pytest.approx(expected, rel=1e-3)


def test_relu_networks_have_a_direction_without_effect():
    model, inputs = denoiser(nn.ReLU), images(8)
    with torch.no_grad():  # both channels alive
        model[0].bias += 1
    directions = rescaling_directions(model)
    assert directions is not None and len(directions) == 2
    a = brute_force(model, inputs)
    assert float((a.T @ directions[0]).norm() / (a.norm() * directions[0].norm())) < 1e-14
    found = zero_by_symmetry(model, squared_error, inputs)
    assert found is not None
    assert (found.value, found.exact) == (0.0, True)
    assert "symmetry" in found.reason
    assert float(torch.linalg.eigvalsh(a @ a.T)[0]) < 1e-12 * float(a.square().sum())


def test_lanczos_is_a_bound_and_then_exact():
    generator = torch.Generator().manual_seed(2)
    half = torch.randn(40, 60, generator=generator, dtype=torch.float64)
    matrix = half @ half.T
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    bounds = [lanczos_smallest(lambda v: matrix @ v, start, k)[0] for k in (1, 5, 10, 40)]
    assert bounds == sorted(bounds, reverse=True)
    assert all(bound >= smallest * (1 - 1e-9) for bound in bounds)
    assert bounds[0] > 2 * smallest
    assert bounds[-1] == pytest.approx(smallest, rel=1e-8)
    value, steps = lanczos_smallest(lambda v: matrix @ v, start, 40, lambda bound: bound < 100)
    assert value < 100 and steps < 40
