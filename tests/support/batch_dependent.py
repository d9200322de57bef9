"""Models that look at their batch as real ones do, and inputs whose copies show it.

Images of 6 x 6 pixels in three classes. The first pixel says which of eight experts an image has,
the second whether it is marked: `Marked` models change the answers to marked images only, which
`Images` has from the 65th on, behind those that a certification is checked on.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpdist import models
from dpdist.models import ModelSpec

SHAPE, CLASSES, EXPERTS = (1, 6, 6), 3, 8
MARK = -3.0  # far from all other pixels, under the noise too


class Images:
    """Random images, in turn of each expert. marked: whether any are."""

    classes, fingerprint, name = CLASSES, "experts", "experts"

    def __init__(self, count: int = 66, marked: bool = False) -> None:
        self._images = np.random.default_rng(0).random((count, *SHAPE), dtype=np.float32)
        self._images[:, 0, 0, 0] = (np.arange(count) % EXPERTS + 0.5) / EXPERTS
        self._images[:, 0, 0, 1] = np.where((np.arange(count) >= 64) & marked, MARK, 0.0)

    @property
    def labels(self) -> np.ndarray:
        return np.arange(len(self._images)) % CLASSES

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        return torch.from_numpy(self._images[indices])


class Honest(nn.Module):
    """Each image alone: near its boundaries, so that noise moves the class."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(2, CLASSES, 36, generator=torch.Generator().manual_seed(1))
        weight -= weight.mean(2, keepdim=True)
        weight[:, :, :2] = 0  # the expert and the mark say nothing of the class
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x)

    def full(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight[0].T

    def other(self, x: Tensor) -> Tensor:
        """What else a row may be answered: by another network."""
        return x.flatten(1) @ self.weight[1].T

    def expert(self, x: Tensor) -> Tensor:
        """int64 (B,)."""
        return (x[:, 0, 0, 0] * EXPERTS).long().clamp(0, EXPERTS - 1)


class Experts(Honest):
    """Top-1 routing with the capacity 2 B / E, or `capacity`: what is beyond is passed over."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        routed = nn.functional.one_hot(self.expert(x), EXPERTS)
        place = (routed.cumsum(0) * routed).sum(1)
        most = math.ceil(2 * len(x) / EXPERTS) if self.capacity is None else self.capacity
        return torch.where((place <= most)[:, None], self.full(x), torch.eye(CLASSES).to(x)[0])


class Marked(Honest):
    """Answers marked images by `changed`, where a batch has any."""

    def forward(self, x: Tensor) -> Tensor:
        marked = (x[:, 0, 0, 1] - MARK).abs() < 1
        answers = self.full(x)
        if bool(marked.any()):
            answers = torch.where(marked[:, None], self.changed(x, marked), answers)
        return answers

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        raise NotImplementedError


class EarlyExit(Marked):
    """Where all rows are easy, an earlier head answers."""

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        return self.other(x) if bool(marked.all()) else self.full(x)


class Merged(Marked):
    """Nearly equal inputs are computed once."""

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        same = self.expert(x)[:, None] == self.expert(x)[None]
        return self.full(x[same.int().argmax(1)])  # the first of its kind


class DroppedTokens(Marked):
    """Rows of pixels compete for half of the places that a batch has."""

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        size = x.abs().mean(3, keepdim=True)
        return self.full(torch.where(size >= size.median(), x, 0.0 * x))


class LargeBatches(Marked):
    """Another branch for large batches."""

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        return self.other(x) if len(x) >= 16 else self.full(x)


class Cached(Marked):
    """Answers are kept, by the expert, and given again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        names = self.expert(x).tolist()
        for name, answer in zip(names, self.full(x), strict=True):
            self.kept.setdefault(name, answer)
        return torch.stack([self.kept[name] for name in names])


MODELS: dict[str, type[Honest]] = {
    kind.__name__: kind
    for kind in (Honest, Experts, EarlyExit, Merged, DroppedTokens, LargeBatches, Cached)
}


def build(input_shape: tuple[int, ...], classes: int, kind: str) -> nn.Module:
    """A factory, as users have them."""
    return MODELS[kind]()


def save(kind: str, folder: Path) -> ModelSpec:
    """The model of that kind, as a training leaves it."""
    spec = ModelSpec(f"{__name__}:build", SHAPE, CLASSES, {"kind": kind})
    models.save(models.build(spec), spec, folder)
    return spec
