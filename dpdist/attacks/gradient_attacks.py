"""White-box evasion attacks: norm balls, gradient ascents, and the attacked classifier.

FGSM (Goodfellow et al., ICLR 2015), I-FGSM or BIM (Kurakin et al., 2016), MIM (Dong et al., CVPR
2018) and PGD (Madry et al., ICLR 2018) are pure functions of a gradient, a ball and their
settings. In L2 the sign is replaced by the unit vector. Row b of the result depends only on row b
of the ball and of the gradients. `attack` runs them on a classifier, untargeted and vectorized,
with keyed randomness.

A ball has projection, steepest ascent and random points. All arithmetic is float64; the model
takes float32. That rounding goes toward the center in every coordinate, so the distance computed
in float64 never exceeds the size.

A randomized classifier answers the class of most of its noise samples, or that of the largest mean
score. Attacks differentiate it by expectation over the noise (EOT, Athalye et al., ICML 2018): the
gradient is the mean of the gradients under independent samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification.worker import KeyedGenerator
from dpdist.core.errors import UserError
from dpdist.core.fields import ATTACKS, NORMS, AttackName, Norm
from dpdist.models import NO_CLASS, predicted_classes, softmax_scores
from dpdist.randomness.noise_location import NoiseLocation, NoNoise

# --- norm balls -------------------------------------------------------------------------------


PIXELS = (0.0, 1.0)

# The last bits of a sum of squares depend on its order; this margin covers any order.
_MARGIN = 1e-12


@dataclass(frozen=True)
class Ball:
    """All points within ``size`` of ``center`` in ``norm`` and inside ``box``.

    center: float32 (B, ...). size: float64 (B,), in input units. box: least and largest value of
    each coordinate, or None. It does not apply to rows whose center is outside of it.
    """

    center: Tensor
    size: Tensor
    norm: Norm
    box: tuple[float, float] | None = PIXELS

    def project(self, point: Tensor) -> Tensor:
        """Return the point moved into the ball, then clipped to the box: float64 (B, ...).

        Both are Euclidean projections. The result is in both sets, because the center is in the
        box.
        """
        moved = self.center.double() + self._projected_shift(point)
        if self.box is None:
            return moved
        boxed = (self.center == self.center.clamp(*self.box)).flatten(1).all(1)
        return torch.where(per_row(boxed, moved), moved.clamp(*self.box), moved)

    def project_to_float32(self, point: Tensor) -> Tensor:
        """Return `project`, rounded toward the center: float32 (B, ...), exactly inside."""
        limit = self._projected_shift(point).abs()
        rounded = self.project(point).float()
        too_far = (rounded.double() - self.center.double()).abs() > limit
        return torch.where(too_far, torch.nextafter(rounded, self.center), rounded)

    def _projected_shift(self, point: Tensor) -> Tensor:
        shift = point.double() - self.center.double()
        size = per_row(self.size, shift)
        if self.norm == "linf":
            return shift.clamp(-size, size)
        # (a / b) * b may exceed a by rounding; the margin is larger than that too.
        length = per_row(shift.flatten(1).norm(dim=1), shift)
        inside = size * (1 - _MARGIN)
        return torch.where(length > inside, shift * (inside / length.clamp_min(1e-300)), shift)

    def steepest_direction(self, gradient: Tensor) -> Tensor:
        """Return the direction of steepest ascent with length 1 in ``norm``: float64 (B, ...)."""
        if self.norm == "linf":
            return gradient.double().sign()
        flat = gradient.double().flatten(1)
        length = flat.norm(dim=1, keepdim=True)
        return torch.where(length > 0, flat / length.clamp_min(1e-300), flat).view_as(gradient)

    def random_point(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return a uniformly distributed point of the ball, clipped to the box: float64 (B, ...).

        uniform: (B, n) in (0, 1), normal: (B, n), for inputs of n numbers.
        """
        if self.norm == "linf":
            direction = 2 * uniform.double() - 1
        else:
            unit = self.steepest_direction(normal)
            # The radius of a uniform point has distribution r^n.
            direction = unit * uniform[:, :1].double().pow(1 / normal.shape[1])
        shift = direction.view_as(self.center) * per_row(self.size, self.center)
        return self.project(self.center.double() + shift)


def input_range(inputs: Tensor) -> tuple[float, float] | None:
    """Return the bounds of images (B, C, H, W), or None for other inputs."""
    return PIXELS if inputs.dim() == 4 else None


def distance(points: np.ndarray, centers: np.ndarray, norm: str) -> np.ndarray:
    """Return the distances of float32 points (B, ...) from their centers: float64 (B,).

    Raises UserError for a norm other than "linf" and "l2".
    """
    shift = np.asarray(points, dtype=np.float64) - np.asarray(centers, dtype=np.float64)
    flat = shift.reshape(len(shift), -1)
    if norm == "linf":
        largest: np.ndarray = np.abs(flat).max(1, initial=0.0)
        return largest
    if norm == "l2":
        lengths: np.ndarray = np.sqrt(np.square(flat).sum(1))
        return lengths
    raise UserError(f"norm: must be one of {', '.join(NORMS)}, got {norm!r}")


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Return values (B,) in a shape that broadcasts with ``like``, (B, ...)."""
    return values.view(-1, *[1] * (like.dim() - 1))


# --- ascents ----------------------------------------------------------------------------------


# (points float32 (B, ...), step) -> gradient of the loss (B, ...), up to a positive factor per row
Gradient = Callable[[Tensor, int], Tensor]


def fgsm(gradient: Gradient, ball: Ball, steps: int = 1) -> Tensor:
    """Return the point after one step of the full size; `steps` is ignored."""
    return i_fgsm(gradient, ball, 1)


def i_fgsm(gradient: Gradient, ball: Ball, steps: int) -> Tensor:
    """Return the point after ``steps`` projected steps of size / steps from the center."""
    return ascend(gradient, ball, ball.center, steps, ball.size / steps)


def mim(gradient: Gradient, ball: Ball, steps: int, decay: float = 1.0) -> Tensor:
    """Return the point after I-FGSM along v <- decay v + g / ||g||_1 (Dong et al., Algorithm 1)."""
    return i_fgsm(with_momentum(gradient, ball, decay), ball, steps)


# Attacks that start at the input; pgd starts at random points.
ATTACKS_FROM_CENTER: dict[str, Callable[[Gradient, Ball, int], Tensor]] = {
    "fgsm": fgsm,
    "i-fgsm": i_fgsm,
    "mim": mim,
}


def with_momentum(gradient: Gradient, ball: Ball, decay: float | Tensor) -> Gradient:
    """Return the velocity v <- decay v + g / ||g||_1 as a gradient for one ascent.

    decay: a number, or one for each row (B,); 0 keeps the gradient's direction.
    """
    velocity = torch.zeros_like(ball.center, dtype=torch.float64)
    kept = decay if isinstance(decay, float) else per_row(decay, velocity)

    def momentum(point: Tensor, step: int) -> Tensor:
        g = gradient(point, step).double()
        length = g.flatten(1).abs().sum(1).clamp_min(1e-300)
        velocity.mul_(kept).add_(g / per_row(length, g))
        return velocity

    return momentum


def ascend(gradient: Gradient, ball: Ball, start: Tensor, steps: int, step_size: Tensor) -> Tensor:
    """Return the point after projected steps along the steepest ascent: float32 (B, ...).

    start: a point of the ball. step_size: (B,), the length of each of the ``steps`` steps.
    """
    point = start.double()
    length = per_row(step_size, start)
    for step in range(steps):
        climb = ball.steepest_direction(gradient(ball.project_to_float32(point), step))
        point = ball.project(point + length * climb)
    return ball.project_to_float32(point)


# --- the randomized classifier ----------------------------------------------------------------


class RandomizedClassifier:
    """A network under given standard normal noise; without noise it is deterministic.

    predicts_by_vote: whether it answers by votes of noise samples, not by their mean scores; None:
    as the location of its noise asks.
    """

    def __init__(
        self,
        model: nn.Module,
        location: NoiseLocation | None = None,
        predicts_by_vote: bool | None = None,
    ) -> None:
        self.model = model
        self.location = location or NoNoise()
        if predicts_by_vote is None:
            predicts_by_vote = self.location.predicts_by_vote
        self.predicts_by_vote = predicts_by_vote

    def noise_shape(self, input_shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the normals of one sample for one input; None without noise."""
        return self.location.normals_shape(self.model, tuple(input_shape))

    def logits(self, x: Tensor, normals: Tensor | None) -> Tensor:
        """Return logits (B, classes) of float32 inputs (B, ...) under normals (B, *noise_shape)."""
        return self.location.logits(self.model, x, normals)


def loss_gradient(
    classifier: RandomizedClassifier, x: Tensor, targets: Tensor, normals: Tensor | None
) -> Tensor:
    """Return the gradient of the mean cross-entropy over the noise, by x: float32 (B, ...).

    x: float32 (B, ...). targets: int64 (B,). normals: (B * K, *noise_shape), with the K samples of
    an input in sequence, or None.

    The gradient of each input is scaled by a positive factor, so that that of a confident network
    does not underflow to zero, which would look like robustness. No attack here depends on the
    factor. A gradient that is not finite is replaced by 0.
    """
    samples = 1 if normals is None else len(normals) // len(x)
    with torch.enable_grad():
        inputs = x.detach().clone().requires_grad_(True)
        logits = classifier.logits(inputs.repeat_interleave(samples, 0), normals)
        back = _logit_gradient(logits.detach(), targets.repeat_interleave(samples))
        largest = back.abs().view(len(x), -1).amax(1).clamp_min(1e-300).repeat_interleave(samples)
        (gradient,) = torch.autograd.grad(logits, inputs, (back / largest[:, None]).float())
    finite = gradient.isfinite().flatten(1).all(1)
    return gradient.masked_fill(~per_row(finite, gradient), 0.0)


def _logit_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Return softmax - onehot in float64, (B, classes).

    The target's entry is minus the sum of the others, so that it does not round to zero if the
    target has nearly all the probability.
    """
    p = torch.log_softmax(logits.double(), 1).exp()
    p.scatter_(1, targets[:, None], 0.0)
    return p.scatter(1, targets[:, None], -p.sum(1, keepdim=True))


def success_score(
    classifier: RandomizedClassifier, x: Tensor, targets: Tensor, normals: Tensor | None
) -> Tensor:
    """Return how well x fools the classifier, to choose between restarts: float64 (B,).

    By votes: the number of samples with an answer other than the target, plus loss / (1 + loss) of
    the mean loss. By mean scores: by how much the target's is below the largest other one. A sample
    whose logits are not finite is not an answer, and adds nothing.
    """
    samples = 1 if normals is None else len(normals) // len(x)
    repeated = targets.repeat_interleave(samples)
    with torch.inference_mode():
        logits = classifier.logits(x.repeat_interleave(samples, 0), normals).double()
        found = predicted_classes(logits)
        if not classifier.predicts_by_vote:
            scores = softmax_scores(logits).view(len(x), samples, -1).mean(1)
            own = scores.gather(1, targets[:, None])[:, 0]
            return scores.scatter(1, targets[:, None], -1.0).amax(1) - own
        loss = nn.functional.cross_entropy(logits, repeated, reduction="none")
        loss = loss.masked_fill(found == NO_CLASS, 0.0)
        wrong = ((found != repeated) & (found != NO_CLASS)).double()
    loss = loss.view(len(x), samples).mean(1)
    return wrong.view(len(x), samples).sum(1) + loss / (1 + loss)


# --- an attack on a classifier ----------------------------------------------------------------


def attack(
    name: AttackName,
    classifier: RandomizedClassifier,
    ball: Ball,
    targets: Tensor,
    indices: Sequence[int],
    randomness: KeyedGenerator,
    *,
    steps: int = 10,
    samples: int = 16,
    restarts: int = 1,
    step_scale: float = 2.5,
) -> Tensor:
    """Return points of the ball at which the classifier avoids ``targets``: float32 (B, ...).

    indices: names of the inputs in the keys of all random numbers. samples: of the noise, fresh at
    each step, for the expectation of the gradient; ignored without noise. restarts: PGD runs, from
    independent uniform points of the ball; the best of each input is kept (``success_score``, on
    separate noise samples). step_scale: PGD's step is step_scale * size / steps; some papers use 1,
    Madry et al. advise more.
    """
    shape = classifier.noise_shape(ball.center.shape[1:])

    def normals(stage: str, block: int) -> Tensor | None:
        if shape is None:
            return None
        found = randomness.normals(indices, f"{name}/{stage}", block, samples, shape)
        return found.to(ball.center.device)

    def gradient_of(run: int) -> Gradient:
        def gradient(point: Tensor, step: int) -> Tensor:
            return loss_gradient(classifier, point, targets, normals(f"eot/{run}", step))

        return gradient

    if name not in ATTACKS:
        raise ValueError(f"attack must be one of {', '.join(ATTACKS)}, got {name!r}")
    if name in ATTACKS_FROM_CENTER:
        return ATTACKS_FROM_CENTER[name](gradient_of(0), ball, steps)
    step_size = step_scale * ball.size / steps
    found = (
        ascend(gradient_of(run), ball, start, steps, step_size)
        for run, start in enumerate(_starts(ball, indices, randomness, restarts))
    )
    if restarts == 1:
        return next(found)
    return _best(classifier, targets, normals("choose", 0), found)


def _starts(
    ball: Ball, indices: Sequence[int], randomness: KeyedGenerator, count: int
) -> Iterator[Tensor]:
    """Yield independent uniform points of the ball."""
    numbers, device = ball.center[0].numel(), ball.center.device
    for run in range(count):
        yield ball.random_point(
            randomness.uniforms(indices, "pgd/start/uniform", run, numbers).to(device),
            randomness.normals(indices, "pgd/start/normal", run, 1, (numbers,)).to(device),
        )


def _best(
    classifier: RandomizedClassifier,
    targets: Tensor,
    normals: Tensor | None,
    candidates: Iterator[Tensor],
) -> Tensor:
    """Return the candidate that fools the classifier best, for each input: float32 (B, ...)."""
    best = next(candidates)
    best_score = success_score(classifier, best, targets, normals)
    for points in candidates:
        score = success_score(classifier, points, targets, normals)
        better = per_row(score > best_score, points)
        best, best_score = torch.where(better, points, best), torch.maximum(score, best_score)
    return best
