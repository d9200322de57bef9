"""Norm balls around inputs: projection, steepest ascent, random points. Never a hair outside.

All arithmetic is float64; the model takes float32. That rounding goes towards the centre in every
coordinate, so the distance computed in float64 never exceeds the size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpdist.adversary.names import NORMS, Norm
from dpdist.base.errors import UserError

PIXELS = (0.0, 1.0)

# A sum of squares depends on its order in the last bits; this margin covers any order.
_MARGIN = 1e-12


@dataclass(frozen=True)
class Ball:
    """All points within ``size`` of ``centre`` in ``norm`` and inside ``box``.

    centre: float32 (B, ...). size: float64 (B,), in input units. box: least and largest value of
    each coordinate (the centre lies inside), or None.
    """

    centre: Tensor
    size: Tensor
    norm: Norm
    box: tuple[float, float] | None = PIXELS

    def project(self, point: Tensor) -> Tensor:
        """The point moved into the ball, then clipped to the box: float64 (B, ...).

        Each is the Euclidean projection; one after the other they stay in both sets, because the
        centre lies in the box.
        """
        moved = self.centre.double() + self._shift(point)
        return moved if self.box is None else moved.clamp(*self.box)

    def round(self, point: Tensor) -> Tensor:
        """`project`, rounded towards the centre: float32 (B, ...), exactly inside."""
        limit = self._shift(point).abs()
        rounded = self.project(point).float()
        too_far = (rounded.double() - self.centre.double()).abs() > limit
        return torch.where(too_far, torch.nextafter(rounded, self.centre), rounded)

    def _shift(self, point: Tensor) -> Tensor:
        shift = point.double() - self.centre.double()
        size = per_row(self.size, shift)
        if self.norm == "linf":
            return shift.clamp(-size, size)
        # (a / b) * b may exceed a by rounding; the margin is larger than that too.
        length = per_row(shift.flatten(1).norm(dim=1), shift)
        inside = size * (1 - _MARGIN)
        return torch.where(length > inside, shift * (inside / length.clamp_min(1e-300)), shift)

    def ascent(self, gradient: Tensor) -> Tensor:
        """The direction of length 1 in ``norm`` that climbs most: sign, or unit vector."""
        if self.norm == "linf":
            return gradient.double().sign()
        flat = gradient.double().flatten(1)
        length = flat.norm(dim=1, keepdim=True)
        return torch.where(length > 0, flat / length.clamp_min(1e-300), flat).view_as(gradient)

    def random_point(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """A uniformly distributed point of the ball, clipped to the box: float64 (B, ...).

        uniform: (B, n) in (0, 1), normal: (B, n), n the numbers of one input.
        """
        if self.norm == "linf":
            direction = 2 * uniform.double() - 1
        else:
            unit = self.ascent(normal)
            # The radius of a uniform point has distribution r^n.
            direction = unit * uniform[:, :1].double().pow(1 / normal.shape[1])
        shift = direction.view_as(self.centre) * per_row(self.size, self.centre)
        return self.project(self.centre.double() + shift)


def box_of(inputs: Tensor) -> tuple[float, float] | None:
    """Images (B, C, H, W) stay in [0, 1]; other features have no bounds."""
    return PIXELS if inputs.dim() == 4 else None


def distance(points: np.ndarray, centres: np.ndarray, norm: str) -> np.ndarray:
    """Distances in float64 of float32 points (B, ...) from their centres: (B,).

    Raises UserError for another norm than "linf" and "l2".
    """
    shift = np.asarray(points, dtype=np.float64) - np.asarray(centres, dtype=np.float64)
    flat = shift.reshape(len(shift), -1)
    if norm == "linf":
        return np.abs(flat).max(1, initial=0.0)
    if norm == "l2":
        return np.sqrt(np.square(flat).sum(1))
    raise UserError(f"norm: must be one of {', '.join(NORMS)}, got {norm!r}")


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """(B,) as something that multiplies ``like``, (B, ...)."""
    return values.view(-1, *[1] * (like.dim() - 1))
