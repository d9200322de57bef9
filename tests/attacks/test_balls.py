from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hypothesis_settings import hypothesis_settings
from torch import Tensor

from dpdist.attacks.gradient_attacks import Ball, distance
from dpdist.core.fields import NORMS


def sizes(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@hypothesis_settings(150, derandomize=False)
@given(
    seed=st.integers(0, 2**31),
    size=st.one_of(st.just(0.0), st.floats(1e-9, 3.0)),
    norm=st.sampled_from(NORMS),
    numbers=st.sampled_from([1, 3, 784, 3072]),
    boxed=st.booleans(),
)
def test_no_point_is_a_hair_outside(seed, size, norm, numbers, boxed) -> None:
    generator = torch.Generator().manual_seed(seed)
    center = torch.rand(4, numbers, generator=generator)
    center[0] = center[0].round()  # corners of the box
    ball = Ball(center, sizes(size, size / 3, size, 0), norm, (0.0, 1.0) if boxed else None)
    far = center + torch.randn(4, numbers, generator=generator) * 2
    for point in (far.double(), center.double() + size * torch.sign(far - center)):
        moved = ball.project_to_float32(point)
        assert moved.dtype == torch.float32
        # Exactly: no tolerance.
        assert (distance(moved.numpy(), center.numpy(), norm) <= ball.size.numpy()).all()
        if boxed:
            assert moved.min() >= 0 and moved.max() <= 1
    assert torch.equal(ball.project_to_float32(far)[3], center[3])


def test_a_center_outside_the_box_has_none() -> None:
    """A standardized picture beside pixels: neither leaves its ball for the other's sake."""
    center = torch.stack([torch.full((3, 4, 4), 0.95), torch.full((3, 4, 4), 1.7)])
    ball = Ball(center, sizes(0.1, 0.1), "linf")
    moved = ball.project_to_float32(center.double() + 1)
    assert (moved[0] == 1).all() and (moved[1] > 1.79).all()
    assert (distance(moved.numpy(), center.numpy(), "linf") <= 0.1).all()


@pytest.mark.parametrize("norm", NORMS)
def test_projection_reaches_the_surface_and_keeps_what_is_inside(norm) -> None:
    generator = torch.Generator().manual_seed(1)
    center = torch.rand(50, 784, generator=generator)
    ball = Ball(center, sizes(*[0.3] * 50), norm, None)
    moved = ball.project_to_float32(center + torch.randn(50, 784, generator=generator) * 5)
    reached = distance(moved.numpy(), center.numpy(), norm)
    assert reached == pytest.approx(0.3, rel=2e-6)
    inside = (center + 0.001 * torch.randn(50, 784, generator=generator).clamp(-1, 1)).float()
    assert torch.equal(ball.project_to_float32(inside), inside)


def test_ascent_is_sign_or_unit_vector_even_when_tiny() -> None:
    gradient = torch.tensor([[3.0, -4.0], [3e-40, -4e-40], [0.0, 0.0]])
    center = torch.zeros(3, 2)
    linf = Ball(center, sizes(1, 1, 1), "linf", None).steepest_direction(gradient)
    assert linf.tolist() == [[1, -1], [1, -1], [0, 0]]
    l2 = Ball(center, sizes(1, 1, 1), "l2", None).steepest_direction(gradient)
    assert l2.numpy() == pytest.approx(np.array([[0.6, -0.8], [0.6, -0.8], [0, 0]]), abs=1e-5)


def test_random_points_are_uniform_in_the_ball() -> None:
    # n = 20,000 points: each share within 5 standard errors, false failure below 1e-6 each.
    generator = torch.Generator().manual_seed(2)
    count, numbers = 20_000, 3
    center = torch.full((count, numbers), 0.5)
    uniform = torch.rand(count, numbers, generator=generator, dtype=torch.float64)
    normal = torch.randn(count, numbers, generator=generator)
    error = 5 * 0.5 / count**0.5
    for norm, inner in (("linf", 0.5**3), ("l2", 0.5**3)):
        ball = Ball(center, torch.full((count,), 0.2, dtype=torch.float64), norm, None)
        points = ball.project_to_float32(ball.random_point(uniform, normal))
        lengths = distance(points.numpy(), center.numpy(), norm)
        assert lengths.max() <= 0.2
        assert np.mean(lengths < 0.1) == pytest.approx(inner, abs=error)
        assert (points > 0.5).double().mean(0).numpy() == pytest.approx(0.5, abs=error)
