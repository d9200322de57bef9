"""A small data set whose truth is known: points on both sides of a plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Points:
    """Features, so that no pixel box helps them. The plane is x_0 = 0; label 1 lies above it, each
    point between `near` and `far` away."""

    size: int
    count: int = 30
    near: float = 0.1
    far: float = 0.5
    classes: int = 2
    fingerprint: str = "points"
    name: str = "points/test"

    @property
    def labels(self) -> np.ndarray:
        return np.arange(self.count) % 2

    def batch(self, indices: np.ndarray | slice) -> torch.Tensor:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.count, self.size)).astype(np.float32)
        away = rng.uniform(self.near, self.far, self.count)
        x[:, 0] = np.where(self.labels == 1, 1, -1) * away
        return torch.from_numpy(x[indices])
