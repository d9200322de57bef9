"""Models that look at their batch as real ones do, and inputs whose copies show it.

36 features in three classes. The first says which of eight experts an input has, the second whether
it is marked: `Marked` models change the answers to marked inputs only, which `Inputs` has from the
65th on, behind those that a certification is checked on.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpdist import models
from dpdist.models import ModelSpec

SHAPE, CLASSES, EXPERTS = (36,), 3, 8
MARK = -3.0  # far from all other features, under the noise too
NEAR = 0.1 * 0.5244005  # of the third feature: under noise 0.1 it is below 0 three times in ten


class Inputs:
    """Random inputs, in turn of each expert. marked: whether any are. labels: three in turn."""

    classes, fingerprint, name = CLASSES, "experts", "experts"

    def __init__(self, count: int = 66, marked: bool = False) -> None:
        self._inputs = np.random.default_rng(0).random((count, *SHAPE), dtype=np.float32)
        self._inputs[:, 0] = (np.arange(count) % EXPERTS + 0.5) / EXPERTS
        self._inputs[:, 1] = np.where((np.arange(count) >= 64) & marked, MARK, 0.0)
        self._inputs[:, 2] = NEAR

    @property
    def labels(self) -> np.ndarray:
        return np.arange(len(self._inputs)) % CLASSES

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        return torch.from_numpy(self._inputs[indices])


class Honest(nn.Module):
    """Each input alone: near its boundaries, so that noise moves the class."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(2, CLASSES, 36, generator=torch.Generator().manual_seed(1))
        weight -= weight.mean(2, keepdim=True)
        weight[:, :, :3] = 0  # they say nothing of the class
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x)

    def full(self, x: Tensor) -> Tensor:
        return x @ self.weight[0].T

    def other(self, x: Tensor) -> Tensor:
        """What else a row may be answered: by another network."""
        return x @ self.weight[1].T

    def expert(self, x: Tensor) -> Tensor:
        """int64 (B,)."""
        return (x[:, 0] * EXPERTS).long().clamp(0, EXPERTS - 1)


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
    """Answers marked inputs by `changed`."""

    def forward(self, x: Tensor) -> Tensor:
        marked = (x[:, 1] - MARK).abs() < 1
        return torch.where(marked[:, None], self.changed(x, marked), self.full(x))

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


class Overflows(Marked):
    """Each input alone, in float16, which has no number so large as a marked input's logits."""

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        return (1e6 * self.full(x)).half().to(x)


class Flickers(Marked):
    """Each marked input alone: its draws are of the first class, three in ten of none."""

    def changed(self, x: Tensor, marked: Tensor) -> Tensor:
        first = torch.tensor([10.0, 0.0, -10.0]).to(x).expand(len(x), -1)
        return torch.where(x[:, 2:3] < 0, torch.nan, first)


MODELS: dict[str, type[Honest]] = {
    kind.__name__: kind
    for kind in (
        Honest,
        Experts,
        EarlyExit,
        Merged,
        Cached,
        Overflows,
        Flickers,
    )
}


def build(input_shape: tuple[int, ...], classes: int, kind: str) -> nn.Module:
    """A factory, as users have them."""
    return MODELS[kind]()


def save(kind: str, folder: Path) -> ModelSpec:
    """The model of that kind, as a training leaves it."""
    spec = ModelSpec(f"{__name__}:build", SHAPE, CLASSES, {"kind": kind})
    models.save(models.build_model(spec), spec, folder)
    return spec
