"""Noise and counting in one process: how often the model says each class around one input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification import betting
from dpdist.certification.certificate import Counter
from dpdist.certification.classifier import ExecutedClassifier
from dpdist.certification.expected_score_bounds import SCORE_UNIT
from dpdist.certification.noises import Gaussian, Laplace, Noise
from dpdist.certification.streams import Aes, Stream
from dpdist.models import predicted_classes, softmax_scores
from dpdist.randomness.places import NoiseCut
from dpdist.randomness.units import ESTIMATE, RandomWords, UnitSource


class Inspector(Protocol):
    """Looks at counted blocks (`dpdist.certification.reexecution`)."""

    def __call__(
        self, index: int, stage: str, block: int, rows: Tensor, logits: Tensor, draws: int,
        scores: bool = False,
    ) -> None:  # fmt: skip
        """Raise where what was counted of the first draws does not hold. rows: as executed;
        scores: whether scores were counted, not classes alone."""
        ...


def class_counts(logits: Tensor, classes: int) -> Tensor:
    """How many rows of logits (B, classes) have each class: int64 (classes,), where they are. Rows
    that are not finite have none."""
    return torch.bincount(predicted_classes(logits) + 1, minlength=classes + 1)[1:]


class Sampler:
    """Counts classes over canonical blocks of noisy copies of an input.

    A block has ``batch`` rows; a block counted in part (the last of n draws) is executed whole,
    because the executed batch is fixed. Which blocks are asked for, and in what order, changes
    nothing in their counts. stream: makes the noise, on the device of the classifier; of a block
    its counts alone come back from there. inspect: sees each block that was counted.
    """

    def __init__(
        self,
        classify: ExecutedClassifier,
        noise: Noise,
        units: UnitSource,
        classes: int,
        input_shape: tuple[int, ...],
        *,
        bank: bool = False,
        stream: Stream | None = None,
        inspect: Inspector | None = None,
    ) -> None:
        self._classify, self._inspect = classify, inspect
        self._noise, self._stream = noise, stream or Aes()
        self._units = units
        self._classes = classes
        self._shape = input_shape
        self._bank = bank
        self._buffers: dict[int, Tensor] = {}

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """int64 (classes,): classes of the first ``draws`` of the block's ``rows`` noisy copies.

        x: float32 of the input's shape, in [0, 1]. index names the input in the noise's key.
        """
        noisy = self._noisy(x, self._units.key(None if self._bank else index, stage, block), rows)
        logits = self._classify.logits(noisy)
        if self._inspect is not None:
            self._inspect(index, stage, block, noisy, logits, draws)
        return class_counts(logits[:draws], self._classes).cpu().numpy()

    def _noisy(self, x: Tensor, key: bytes, rows: int) -> Tensor:
        if rows not in self._buffers:
            self._buffers[rows] = torch.empty(rows, *self._shape, device=self._stream.device)
        return self._stream.fill(self._noise, key, self._buffers[rows]).add_(x)


@dataclass(frozen=True)
class Scores:
    """Softmax scores under noise, in units of 1 / SCORE_UNIT, rounded down. A draw whose logits are
    not finite has score 0 in every class.

    sums, squares: of the scores per class, int64 (K,); histogram: of the classes, as `Counter` has
    it; draws: how many.
    bins, excess: of the scores, int64 (K, BINS) each, where asked for (`betting.binned`).
    """

    sums: np.ndarray
    squares: np.ndarray
    histogram: np.ndarray
    draws: int
    bins: np.ndarray | None = None
    excess: np.ndarray | None = None


class HiddenNoiseSampler:
    """Scores with fresh noise after the first layers (certificates: ``scores``).

    first: the network before the noise. rest: what executes the network behind it. scale: standard
    deviation (Gaussian) or b (Laplace) of every component, a number or a tensor of the hidden shape
    (heterogeneous noise; 0 where there is none). Blocks are canonical, and stream and inspect are,
    as in ``Sampler``.
    """

    def __init__(
        self,
        first: nn.Module,
        rest: Callable[[Tensor], Tensor],
        scale: float | Tensor,
        units: UnitSource,
        *,
        laplace: bool = False,
        stream: Stream | None = None,
        inspect: Inspector | None = None,
    ) -> None:
        self._first, self._rest, self._stream = first.eval(), rest, stream or Aes()
        self._inspect = inspect
        self._scale = torch.as_tensor(scale, dtype=torch.float32).to(self._stream.device)
        if not bool((self._scale >= 0).all()) or not bool((self._scale > 0).any()):
            raise ValueError("scales must be >= 0, and one of them positive")
        self._noise: Noise = Laplace(math.sqrt(2)) if laplace else Gaussian(1.0)
        self._units = units
        self._hidden: tuple[Tensor, Tensor] | None = None
        self._buffers: dict[int, Tensor] = {}

    def noisy(self, x: Tensor, index: int | None, stage: str, block: int, rows: int) -> Tensor:
        """The hidden layer of one input under the noises of one block: (rows, *hidden)."""
        hidden = self._behind_first(x)
        if rows not in self._buffers:
            self._buffers[rows] = torch.empty(rows, *hidden.shape, device=hidden.device)
        key = self._units.key(index, stage, block)
        noise = self._stream.fill(self._noise, key, self._buffers[rows])
        return noise.mul_(self._scale).add_(hidden)

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """Classes of the first ``draws`` of a block's ``rows``, as ``Sampler`` counts them."""
        return self._scores(x, index, stage, block, rows, draws).histogram

    def block(
        self,
        x: Tensor,
        index: int,
        block: int,
        rows: int,
        draws: int,
        binned: bool = False,
        leader: int | None = None,
        stage: str = ESTIMATE,
    ) -> Scores:
        """Scores of the first ``draws`` of one canonical block's ``rows``.

        x: float32 of the network's input shape. index names the input in the noise's key. leader:
        what is binned are its leads over each class (`betting.leads`).
        """
        return self._scores(x, index, stage, block, rows, draws, binned, leader, counted=True)

    def _scores(
        self,
        x: Tensor,
        index: int,
        stage: str,
        block: int,
        rows: int,
        draws: int,
        binned: bool = False,
        leader: int | None = None,
        counted: bool = False,
    ) -> Scores:
        """counted: whether the scores count, not the classes alone."""
        with torch.inference_mode():
            noisy = self.noisy(x, index, stage, block, rows)
            logits = self._rest(noisy)
            if self._inspect is not None:
                self._inspect(index, stage, block, noisy, logits, draws, scores=counted)
            logits = logits[:draws].double()
            p = (softmax_scores(logits) * SCORE_UNIT).long()
            votes = class_counts(logits, p.shape[1])
            found = torch.stack([p.sum(0), p.square().sum(0), votes]).cpu().numpy()
            scores = p.cpu().numpy() if binned else None
            if scores is not None and leader is not None:
                scores = betting.leads(scores, leader)
            bins = () if scores is None else betting.binned(scores)
            return Scores(found[0], found[1], found[2], draws, *bins)

    def _behind_first(self, x: Tensor) -> Tensor:
        """The first layer's answer, kept for the blocks of one input."""
        if self._hidden is None or self._hidden[0] is not x:
            with torch.inference_mode():
                self._hidden = (x, self._first(x[None])[0])
        return self._hidden[1]


def counter(
    cut: NoiseCut,
    executed: ExecutedClassifier,
    units: UnitSource,
    classes: int,
    input_shape: tuple[int, ...],
    inspect: Inspector | None = None,
) -> Counter:
    """Of a place's answers under Gaussian noise. executed: the network behind the noise. inspect:
    as in `Sampler`."""
    if cut.first is None:
        noise = Gaussian(float(cut.std))
        return Sampler(executed, noise, units, classes, input_shape, inspect=inspect)
    return HiddenNoiseSampler(cut.first, executed.logits, cut.std, units, inspect=inspect)


class Randomness:
    """Random numbers that are a pure function of the source, the input and what they are for.

    So an input is attacked or evaluated alike whoever does it, in whatever order and company.
    """

    def __init__(self, source: UnitSource) -> None:
        self._source = source
        self._words = RandomWords()

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
        return self._words.fill(self._source.key(index, stage, block), size)
