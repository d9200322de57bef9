"""White-box evasion attacks, untargeted and vectorised, in any ball of ``balls``.

Each is a pure function of a gradient, a ball and its settings; ``attack`` runs them on a classifier
with keyed randomness. Sources: FGSM, Goodfellow et al., ICLR 2015; I-FGSM (BIM), Kurakin et al.,
2016; MIM, Dong et al., CVPR 2018; PGD, Madry et al., ICLR 2018. In L2 the sign is replaced by the
unit vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dpdist.attacks.balls import Ball
from dpdist.attacks.names import ATTACKS, AttackName
from dpdist.attacks.randomised import RandomisedClassifier, loss_gradient, success_score
from dpdist.certification.sampling import Randomness

# (points float32 (B, ...), step) -> gradient of the loss (B, ...), up to a factor per input
Gradient = Callable[[Tensor, int], Tensor]


def fgsm(gradient: Gradient, ball: Ball, steps: int = 1) -> Tensor:
    """One step of the full size along the steepest ascent, whatever `steps` says."""
    return i_fgsm(gradient, ball, 1)


def i_fgsm(gradient: Gradient, ball: Ball, steps: int) -> Tensor:
    """``steps`` steps of size / steps from the centre, each projected."""
    return _ascend(gradient, ball, ball.centre, steps, ball.size / steps)


def mim(gradient: Gradient, ball: Ball, steps: int, decay: float = 1.0) -> Tensor:
    """I-FGSM along v <- decay v + g / ||g||_1 (Dong et al., Algorithm 1)."""
    velocity = torch.zeros_like(ball.centre, dtype=torch.float64)

    def momentum(point: Tensor, step: int) -> Tensor:
        g = gradient(point, step).double()
        length = g.flatten(1).abs().sum(1).clamp_min(1e-300)
        velocity.mul_(decay).add_(g / length.view(-1, *[1] * (g.dim() - 1)))
        return velocity

    return _ascend(momentum, ball, ball.centre, steps, ball.size / steps)


def pgd(gradient: Gradient, ball: Ball, start: Tensor, steps: int, step_size: Tensor) -> Tensor:
    """Projected gradient ascent from ``start``, a point of the ball; step_size: (B,)."""
    return _ascend(gradient, ball, start, steps, step_size)


# Attacks that begin at the input; pgd begins at random points.
FROM_THE_CENTRE: dict[str, Callable[[Gradient, Ball, int], Tensor]] = {
    "fgsm": fgsm,
    "i-fgsm": i_fgsm,
    "mim": mim,
}


def _ascend(gradient: Gradient, ball: Ball, start: Tensor, steps: int, step_size: Tensor) -> Tensor:
    point = start.double()
    length = step_size.view(-1, *[1] * (start.dim() - 1))
    for step in range(steps):
        climb = ball.ascent(gradient(ball.round(point), step))
        point = ball.project(point + length * climb)
    return ball.round(point)


def attack(
    name: AttackName,
    classifier: RandomisedClassifier,
    ball: Ball,
    targets: Tensor,
    indices: Sequence[int],
    randomness: Randomness,
    *,
    steps: int = 10,
    draws: int = 16,
    restarts: int = 1,
    step_scale: float = 2.5,
) -> Tensor:
    """Points of the ball at which the classifier should not answer ``targets``: float32 (B, ...).

    indices: names of the inputs in the keys of all random numbers. draws: of the noise, fresh at
    each step, for the expectation of the gradient; ignored without noise. restarts: PGD runs, from
    independent uniform points of the ball; the best of each input is kept (``success_score``, on
    draws used for nothing else). step_scale: PGD's step is step_scale * size / steps; 1 is what
    some papers use, Madry et al. advise more than the ball's radius in all.
    """
    shape = classifier.noise_shape(ball.centre.shape[1:])

    def normals(stage: str, block: int) -> Tensor | None:
        if shape is None:
            return None
        return randomness.normals(indices, f"{name}/{stage}", block, draws, shape)

    def gradient_of(run: int) -> Gradient:
        def gradient(point: Tensor, step: int) -> Tensor:
            return loss_gradient(classifier, point, targets, normals(f"eot/{run}", step))

        return gradient

    if name not in ATTACKS:
        raise ValueError(f"attack must be one of {', '.join(ATTACKS)}, got {name!r}")
    if name in FROM_THE_CENTRE:
        return FROM_THE_CENTRE[name](gradient_of(0), ball, steps)
    starts, step = _starts(ball, indices, randomness, restarts), step_scale * ball.size / steps
    found = (pgd(gradient_of(i), ball, start, steps, step) for i, start in enumerate(starts))
    if restarts == 1:
        return next(found)
    return _best(classifier, targets, normals("choose", 0), found)


def _starts(
    ball: Ball, indices: Sequence[int], randomness: Randomness, count: int
) -> Iterator[Tensor]:
    """Independent uniform points of the ball."""
    numbers = ball.centre[0].numel()
    for run in range(count):
        yield ball.random_point(
            randomness.uniforms(indices, "pgd/start/uniform", run, numbers),
            randomness.normals(indices, "pgd/start/normal", run, 1, (numbers,)),
        )


def _best(
    classifier: RandomisedClassifier,
    targets: Tensor,
    judge: Tensor | None,
    found: Iterator[Tensor],
) -> Tensor:
    """Of several points for each input, the one that fools the classifier best."""
    best = next(found)
    best_score = success_score(classifier, best, targets, judge)
    for points in found:
        score = success_score(classifier, points, targets, judge)
        better = (score > best_score).view(-1, *[1] * (points.dim() - 1))
        best, best_score = torch.where(better, points, best), torch.maximum(score, best_score)
    return best
