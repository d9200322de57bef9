"""The attacked classifier: a network, and where it is noisy at inference (input, hidden, nowhere).

A randomised classifier answers with the most likely class over its noise. Attacks differentiate
that classifier itself by expectation over the noise (EOT, Athalye et al., ICML 2018): the gradient
is the mean of the gradients under independent draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification.noises import Gaussian
from dpdist.models import HiddenNoise
from dpdist.randomness.units import RandomWords, UnitSource


@dataclass(frozen=True)
class InputNoise:
    """N(0, sigma^2) on every number of the input (randomised smoothing). sigma in input units."""

    sigma: float


# HiddenNoise: N(0, std^2) on the output of one module (PixelDP, HGM-PixelDP, Secure-SGD).
InferenceNoise = InputNoise | HiddenNoise | None


class RandomisedClassifier:
    """Logits of a network under given standard normal draws; without noise it is deterministic."""

    def __init__(self, model: nn.Module, noise: InferenceNoise = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.noise = noise
        if isinstance(noise, HiddenNoise):
            self._module = model.get_submodule(noise.module)

    def noise_shape(self, input_shape: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of the normals of one draw for one example; None when nothing is random."""
        if self.noise is None:
            return None
        if isinstance(self.noise, InputNoise):
            return tuple(input_shape)
        shapes: list[tuple[int, ...]] = []
        hook = self._module.register_forward_hook(
            lambda module, inputs, output: shapes.append(tuple(output.shape[1:]))
        )
        try:
            with torch.inference_mode():
                self.model(torch.zeros(1, *input_shape))
        finally:
            hook.remove()
        if len(shapes) != 1:
            raise ValueError(f"the module ran {len(shapes)} times in a forward pass, must be once")
        return shapes[0]

    def logits(self, x: Tensor, normals: Tensor | None) -> Tensor:
        """(B, classes) for float32 inputs (B, ...) and normals (B, *noise_shape), or none."""
        if self.noise is None or normals is None:
            return self.model(x)
        if isinstance(self.noise, InputNoise):
            return self.model(x + self.noise.sigma * normals)
        std = self.noise.std
        hook = self._module.register_forward_hook(
            lambda module, inputs, output: output + std * normals
        )
        try:
            return self.model(x)
        finally:
            hook.remove()


def loss_gradient(
    classifier: RandomisedClassifier, x: Tensor, targets: Tensor, normals: Tensor | None
) -> Tensor:
    """Gradient by x of the mean cross-entropy over the draws, up to a positive factor per input.

    x: float32 (B, ...). targets: int64 (B,). normals: (B * K, *noise_shape), the K draws of an
    input beside one another, or None. Returns float32 (B, ...).

    The factor keeps the gradient of a confident network from underflowing to zero, which would
    look like robustness. No attack here depends on it.
    """
    draws = 1 if normals is None else len(normals) // len(x)
    with torch.enable_grad():
        inputs = x.detach().clone().requires_grad_(True)
        logits = classifier.logits(inputs.repeat_interleave(draws, 0), normals)
        back = _logit_gradient(logits.detach(), targets.repeat_interleave(draws))
        largest = back.abs().view(len(x), -1).amax(1).clamp_min(1e-300).repeat_interleave(draws)
        (gradient,) = torch.autograd.grad(logits, inputs, (back / largest[:, None]).float())
    return gradient


def _logit_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """softmax - onehot in float64; the target's entry is minus the sum of the others, so that it
    does not round to zero when the target has nearly all the probability."""
    p = torch.log_softmax(logits.double(), 1).exp()
    p.scatter_(1, targets[:, None], 0.0)
    return p.scatter(1, targets[:, None], -p.sum(1, keepdim=True))


def success_score(
    classifier: RandomisedClassifier, x: Tensor, targets: Tensor, normals: Tensor | None
) -> Tensor:
    """How well x fools the classifier: draws not answered by the target, then the mean loss.

    float64 (B,): an integer count plus loss / (1 + loss), for choosing between restarts.
    """
    draws = 1 if normals is None else len(normals) // len(x)
    repeated = targets.repeat_interleave(draws)
    with torch.inference_mode():
        logits = classifier.logits(x.repeat_interleave(draws, 0), normals).double()
        loss = nn.functional.cross_entropy(logits, repeated, reduction="none")
        wrong = (logits.argmax(1) != repeated).double()
    loss = loss.view(len(x), draws).mean(1)
    return wrong.view(len(x), draws).sum(1) + loss / (1 + loss)


class Randomness:
    """Random numbers for attacks: a pure function of the source, the input and what they are for.

    So an input is attacked alike whoever attacks it, in whatever order, beside whatever sizes.
    """

    def __init__(self, source: UnitSource) -> None:
        self._source = source
        self._words: dict[int, RandomWords] = {}

    def normals(
        self, indices: Sequence[int], stage: str, block: int, draws: int, shape: tuple[int, ...]
    ) -> Tensor:
        """Standard normals, float32 (len(indices) * draws, *shape); row by row of one input."""
        out = np.empty((len(indices), draws * int(np.prod(shape))), dtype=np.float32)
        noise = Gaussian(1.0)
        for row, index in zip(out, indices, strict=True):
            noise.draw(self._fill(index, stage, block, row.size), row)
        return torch.from_numpy(out).view(-1, *shape)

    def uniforms(self, indices: Sequence[int], stage: str, block: int, count: int) -> Tensor:
        """Uniform on (0, 1), float64 (len(indices), count)."""
        rows = [self._fill(index, stage, block, count)[:count] + 0.5 for index in indices]
        return torch.from_numpy(np.stack(rows) * 2.0**-32 + 0.5)

    def _fill(self, index: int, stage: str, block: int, count: int) -> np.ndarray:
        size = count + count % 2  # Box-Muller takes words in pairs
        words = self._words.setdefault(size, RandomWords(size))
        return words.fill(self._source.key(index, stage, block))
