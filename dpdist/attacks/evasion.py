"""White-box evasion attacks, untargeted and vectorised, with keyed randomness.

The attacks themselves are pure functions (`dpdist.adversary.ascents`); ``attack`` runs them on a
classifier, in any ball.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dpdist.adversary.ascents import FROM_THE_CENTRE, Gradient, pgd
from dpdist.adversary.balls import Ball
from dpdist.adversary.names import ATTACKS, AttackName
from dpdist.adversary.randomised import RandomisedClassifier, loss_gradient, success_score
from dpdist.certification.sampling import Randomness


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
        found = randomness.normals(indices, f"{name}/{stage}", block, draws, shape)
        return found.to(ball.centre.device)

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
    numbers, device = ball.centre[0].numel(), ball.centre.device
    for run in range(count):
        yield ball.random_point(
            randomness.uniforms(indices, "pgd/start/uniform", run, numbers).to(device),
            randomness.normals(indices, "pgd/start/normal", run, 1, (numbers,)).to(device),
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
