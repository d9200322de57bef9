"""Counting answers of a randomised classifier, with noise that no attack has seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.attacks.randomised import (
    InferenceNoise,
    InputNoise,
    RandomisedClassifier,
    Randomness,
)
from dpdist.certification.classifier import (
    ClassifierSpec,
    ExecutedClassifier,
    check_digest,
    choose,
)
from dpdist.certification.noises import Gaussian
from dpdist.certification.sampling import Counter, Sampler
from dpdist.certification.units import CHECK, UnitSource
from dpdist.errors import UserError
from dpdist.models import HiddenNoise

_ROWS = 500


@dataclass(frozen=True)
class Counted:
    """The classifier whose answers are counted. spec: executed form, needed with input noise.

    inputs: float32 (N, ...), some inputs on which every worker must answer alike.
    """

    model: nn.Module
    noise: InferenceNoise
    classes: int
    inputs: np.ndarray
    spec: ClassifierSpec | None = None


def fix_form(counted: Counted, source: UnitSource, like: ClassifierSpec | None) -> ClassifierSpec:
    """The executed classifier, chosen by a short probe, or of the form and batch of ``like``."""
    batch = _check_batch(counted, source, like.batch if like else _ROWS)
    spec, _ = choose(counted.model, batch, (like.form,) if like else ())
    return replace(spec, form=like.form) if like else spec


def require_logits(counted: Counted) -> None:
    """Raise UserError unless the model gives finite logits for each class."""
    batch = torch.from_numpy(counted.inputs)
    with torch.inference_mode():
        logits = counted.model.eval()(batch)
    expected = (len(batch), counted.classes)
    if tuple(logits.shape) != expected:
        raise UserError(
            f"the model cannot be attacked: it returns {tuple(logits.shape)} for a batch, not "
            f"{expected}"
        )
    if not bool(torch.isfinite(logits).all()):
        # The argmax of NaN is a constant, which no attack would change.
        raise UserError(
            "the model cannot be attacked: its outputs are not finite numbers (did the training "
            "diverge?)"
        )


def counter(counted: Counted, source: UnitSource, blocks: tuple[int, ...]) -> Counter:
    """Counts classes under keyed noise; ``blocks`` are the block sizes that will be asked for.

    Raises UserError when this machine answers otherwise than the one that fixed the form,
    ValueError without noise.
    """
    shape = tuple(counted.inputs.shape[1:])
    if isinstance(counted.noise, HiddenNoise):
        return HiddenCounter(RandomisedClassifier(counted.model, counted.noise), source, counted)
    if counted.noise is None or counted.spec is None:
        raise ValueError("nothing is random, or the executed form is not fixed")
    spec = counted.spec
    classify = ExecutedClassifier(
        counted.model, spec.form, [(rows, *shape) for rows in dict.fromkeys((spec.batch, *blocks))]
    )
    if check_digest(classify(_check_batch(counted, source, spec.batch))) != spec.check:
        raise UserError(
            "this worker computes other classes on the check batch than the model did when the "
            f"attack began ({spec.machine}, torch {spec.torch_version}): use workers of one kind"
        )
    return Sampler(classify, Gaussian(counted.noise.sigma), source, counted.classes, shape)


class HiddenCounter:
    """As ``certification.sampling.Sampler``, with the noise after one module of the network."""

    def __init__(
        self, classifier: RandomisedClassifier, source: UnitSource, counted: Counted
    ) -> None:
        self._classifier = classifier
        self._classes = counted.classes
        shape = classifier.noise_shape(counted.inputs.shape[1:])
        assert shape is not None
        self._shape = shape
        self._randomness = Randomness(source)

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """int64 (classes,): classes of the first ``draws`` of the block's ``rows`` answers."""
        normals = self._randomness.normals((index,), stage, block, rows, self._shape)
        with torch.inference_mode():
            logits = self._classifier.logits(x.expand(rows, *x.shape), normals)
        return torch.bincount(logits.argmax(1)[:draws], minlength=self._classes).numpy()


def count(counts: Counter, x: Tensor, index: int, stage: str, draws: int, batch: int) -> np.ndarray:
    """Classes of ``draws`` fresh answers at one input (float32, no batch dimension)."""
    return np.sum(
        [
            counts.histogram(x, index, stage, block, batch, min(batch, draws - block * batch))
            for block in range(-(-draws // batch))
        ],
        axis=0,
    )


def _check_batch(counted: Counted, source: UnitSource, rows: int) -> Tensor:
    """Noisy copies of some inputs, under a random unit used for nothing else."""
    inputs = torch.from_numpy(counted.inputs)
    inputs = inputs[torch.arange(rows) % len(inputs)]
    if not isinstance(counted.noise, InputNoise):
        return inputs
    normals = Randomness(source).normals((0,), CHECK, 0, rows, tuple(inputs.shape[1:]))
    return inputs + counted.noise.sigma * normals
