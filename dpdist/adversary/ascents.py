"""White-box evasion attacks as pure functions of a gradient, a ball and their settings.

Sources: FGSM, Goodfellow et al., ICLR 2015; I-FGSM (BIM), Kurakin et al., 2016; MIM, Dong et al.,
CVPR 2018; PGD, Madry et al., ICLR 2018. In L2 the sign is replaced by the unit vector. Row b of
what they return depends on row b of the ball and of the gradients alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpdist.adversary.balls import Ball, per_row

# (points float32 (B, ...), step) -> gradient of the loss (B, ...), up to a factor per input
Gradient = Callable[[Tensor, int], Tensor]


def fgsm(gradient: Gradient, ball: Ball, steps: int = 1) -> Tensor:
    """One step of the full size along the steepest ascent, whatever `steps` says."""
    return i_fgsm(gradient, ball, 1)


def i_fgsm(gradient: Gradient, ball: Ball, steps: int) -> Tensor:
    """``steps`` steps of size / steps from the centre, each projected."""
    return ascend(gradient, ball, ball.centre, steps, ball.size / steps)


def mim(gradient: Gradient, ball: Ball, steps: int, decay: float = 1.0) -> Tensor:
    """I-FGSM along v <- decay v + g / ||g||_1 (Dong et al., Algorithm 1)."""
    return i_fgsm(with_momentum(gradient, ball, decay), ball, steps)


def pgd(gradient: Gradient, ball: Ball, start: Tensor, steps: int, step_size: Tensor) -> Tensor:
    """Projected gradient ascent from ``start``, a point of the ball; step_size: (B,)."""
    return ascend(gradient, ball, start, steps, step_size)


# Attacks that begin at the input; pgd begins at random points.
FROM_THE_CENTRE: dict[str, Callable[[Gradient, Ball, int], Tensor]] = {
    "fgsm": fgsm,
    "i-fgsm": i_fgsm,
    "mim": mim,
}


def with_momentum(gradient: Gradient, ball: Ball, decay: float | Tensor) -> Gradient:
    """The velocity v <- decay v + g / ||g||_1 in place of the gradient, for one ascent.

    decay: a number, or one for each row (B,); 0 leaves the gradient's direction as it is.
    """
    velocity = torch.zeros_like(ball.centre, dtype=torch.float64)
    kept = decay if isinstance(decay, float) else per_row(decay, velocity)

    def momentum(point: Tensor, step: int) -> Tensor:
        g = gradient(point, step).double()
        length = g.flatten(1).abs().sum(1).clamp_min(1e-300)
        velocity.mul_(kept).add_(g / per_row(length, g))
        return velocity

    return momentum


def ascend(gradient: Gradient, ball: Ball, start: Tensor, steps: int, step_size: Tensor) -> Tensor:
    """``steps`` steps of length step_size (B,) along the steepest ascent, each projected."""
    point = start.double()
    length = per_row(step_size, start)
    for step in range(steps):
        climb = ball.ascent(gradient(ball.round(point), step))
        point = ball.project(point + length * climb)
    return ball.round(point)
