"""Noise and counting in one process: how often the model says each class around one input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification.classifier import ExecutedClassifier
from dpdist.certification.noises import Gaussian, Laplace, Noise
from dpdist.certification.units import ESTIMATE, RandomWords, UnitSource


class Counter(Protocol):
    """Counts classes over one canonical block of noisy copies of an input."""

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray: ...


class Sampler:
    """Counts classes over canonical blocks of noisy copies of an input.

    A block has ``batch`` rows; a block counted in part (the last of n draws) is executed whole,
    because the executed batch is fixed. Which blocks are asked for, and in what order, changes
    nothing in their counts.
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
    ) -> None:
        self._classify = classify
        self._noise = noise
        self._units = units
        self._classes = classes
        self._shape = input_shape
        self._bank = bank
        self._buffers: dict[int, tuple[RandomWords, Tensor, Tensor]] = {}

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """int64 (classes,): classes of the first ``draws`` of the block's ``rows`` noisy copies.

        x: float32 of the input's shape, in [0, 1]. index names the input in the noise's key.
        """
        noisy = self._noisy(x, self._units.key(None if self._bank else index, stage, block), rows)
        return torch.bincount(self._classify(noisy)[:draws], minlength=self._classes).numpy()

    def _noisy(self, x: Tensor, key: bytes, rows: int) -> Tensor:
        if rows not in self._buffers:
            noise = torch.empty(rows, *self._shape)
            # Box-Muller takes words in pairs.
            words = RandomWords(noise.numel() + noise.numel() % 2)
            self._buffers[rows] = (words, noise, torch.empty_like(noise))
        words, noise, noisy = self._buffers[rows]
        self._noise.draw(words.fill(key), noise.numpy().reshape(-1))
        return torch.add(noise, x, out=noisy)


@dataclass(frozen=True)
class Scores:
    """Softmax scores under noise: sums and sums of squares per class (float64), argmax counts."""

    sums: np.ndarray
    squares: np.ndarray
    histogram: np.ndarray
    draws: int


class HiddenNoiseSampler:
    """Expected scores with fresh noise after the first layers (certificates: ``pixeldp``).

    first, rest: the network before and after the noise. scale: standard deviation (Gaussian) or b
    (Laplace) of every component, a number or a tensor of the hidden shape (heterogeneous noise).
    """

    def __init__(
        self,
        first: nn.Module,
        rest: nn.Module,
        scale: float | Tensor,
        units: UnitSource,
        *,
        laplace: bool = False,
        rows: int = 500,
    ) -> None:
        self._first, self._rest = first.eval(), rest.eval()
        self._scale = torch.as_tensor(scale, dtype=torch.float32)
        if not bool((self._scale > 0).all()):
            raise ValueError("every hidden component needs noise: scales must be positive")
        self._noise: Noise = Laplace(math.sqrt(2)) if laplace else Gaussian(1.0)
        self._units = units
        self._rows = rows

    def scores(self, x: Tensor, index: int, draws: int) -> Scores:
        """Scores of one input (float32, the network's input shape) over ``draws`` fresh noises."""
        with torch.inference_mode():
            hidden = self._first(x[None])[0]
            noise = torch.empty(self._rows, *hidden.shape)
            words = RandomWords(noise.numel() + noise.numel() % 2)
            total: list[np.ndarray] = []
            for block in range(-(-draws // self._rows)):
                key = self._units.key(index, ESTIMATE, block)
                self._noise.draw(words.fill(key), noise.numpy().reshape(-1))
                kept = min(self._rows, draws - block * self._rows)
                logits = self._rest(noise * self._scale + hidden)[:kept].double()
                p = torch.softmax(logits, 1)
                votes = torch.bincount(logits.argmax(1), minlength=p.shape[1])
                total.append(torch.stack([p.sum(0), p.square().sum(0), votes.double()]).numpy())
        sums, squares, histogram = np.sum(total, axis=0)
        return Scores(sums, squares, histogram.astype(np.int64), draws)
