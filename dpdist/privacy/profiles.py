"""Hockey-stick profiles of privacy loss distributions: read, take the maximum of, and built anew.

A privacy loss distribution stands for a pair (Q, Q'): the probabilities under Q of the losses
ln q/q' on a grid, and the mass at an infinite loss. Its profile epsilon -> sup_S Q(S) - e^epsilon
Q'(S) is convex in e^epsilon, and every such profile is that of some pair (Zhu, Dong and Wang 2022,
"Optimal accounting of differential privacy via characteristic function", Proposition 8): a
profile that lies above a mechanism's in both directions dominates the mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_LARGEST = (
    700.0  # epsilon up to which e^epsilon is a float64; profiles made here are constant beyond
)


@dataclass(frozen=True)
class Losses:
    """One direction of a privacy loss distribution.

    first: the least loss, in steps of `grid`. probabilities (n,): of the losses first * grid,
    (first + 1) * grid, ... under Q. infinite: the mass at an infinite loss.
    """

    grid: float
    first: int
    probabilities: np.ndarray
    infinite: float

    @property
    def steps(self) -> np.ndarray:
        """The losses in steps of the grid: int64 (n,)."""
        return np.arange(self.first, self.first + len(self.probabilities))

    @cached_property
    def other(self) -> np.ndarray:
        """Probabilities of the same losses under Q': float64 (n,). They may add up to less than 1:
        the deficit lies where Q has nothing."""
        return self.probabilities * np.exp(-np.clip(self.steps * self.grid, -700, 700))

    def profile(self) -> np.ndarray:
        """The profile at every one of the losses: float64 (n,)."""
        # From the top: D_j = (1 - e^-g) P(L > l_j) + e^-g D_{j+1}, sums of positive terms only.
        above = np.append(np.cumsum(self.probabilities[::-1])[::-1][1:], 0.0)
        from scipy.signal import lfilter

        shrink = math.exp(-self.grid)
        terms = -math.expm1(-self.grid) * above
        values = self.infinite + lfilter([1.0], [1.0, -shrink], terms[::-1])[::-1]
        return np.minimum(values, 1.0)

    def at(self, steps: np.ndarray) -> np.ndarray:
        """The profile at losses steps * grid, also outside of its own: float64 (m,)."""
        index = steps - self.first
        inside = np.clip(index, 0, len(self.probabilities) - 1)
        values = np.where(index >= len(self.probabilities), self.infinite, self.profile()[inside])
        # Below the least loss every outcome counts: Q - e^epsilon Q' of everything.
        below = 1.0 - np.exp(np.minimum(steps, self.first) * self.grid) * self.other.sum()
        return np.where(index < 0, np.clip(below, 0.0, 1.0), values)


def directions(loss: PrivacyLossDistribution) -> list[Losses]:
    """The loss of a removal and, when it differs, that of an addition."""
    found = [loss._pmf_remove]
    if loss._pmf_add is not loss._pmf_remove:
        found.append(loss._pmf_add)
    return [_losses(pmf.to_dense_pmf()) for pmf in found]


def _losses(pmf: pld_pmf.DensePLDPmf) -> Losses:
    # Rounding in Fourier transforms leaves a mass a little above 1. What is too much is taken from
    # the lowest losses: the profile stays where it was above them and becomes the chord to (0, 1)
    # below, which no convex profile exceeds.
    kept, infinite = np.maximum(pmf._probs, 0.0), max(0.0, pmf._infinity_mass)
    excess = kept[::-1].sum() + infinite - 1.0
    if excess > 0:
        # Only the lowest change, the others stay to the last bit: differences of cumulative sums
        # would lose every probability below 1e-16, all of them in the tail that counts.
        mass = np.cumsum(kept)
        last = min(int(np.searchsorted(mass, excess)), len(kept) - 1)
        kept[:last] = 0.0
        kept[last] = max(mass[last] - excess, 0.0)
    return Losses(pmf._discretization, pmf._lower_loss, kept, infinite)


def from_profiles(
    grid: float, steps: np.ndarray, sides: Sequence[np.ndarray]
) -> PrivacyLossDistribution:
    """The distribution with these profiles, one for each direction, made convex from below.

    steps (m,): from 0, ascending. Each side (m,): an upper bound of a true profile at epsilon =
    steps * grid. Below zero the other direction says the rest: H_x(Q, Q') = 1 - x + x H_{1/x}(Q',
    Q) with x = e^epsilon. A true profile is convex in x and lies below these values, so it lies
    below the greatest convex function below them (1 at x = 0, constant beyond the last).
    """
    mirrored = np.concatenate([-steps[:0:-1], steps])
    x = np.exp(mirrored * grid)
    made = []
    for own, other in zip(sides, sides[::-1], strict=True):
        below = 1 - x[: len(steps) - 1] * (1 - np.minimum(other, 1.0)[:0:-1])
        falling = np.minimum.accumulate(np.minimum(np.concatenate([below, own]), 1.0))
        kept = _lower_hull(x, falling)
        pmf = pld_pmf.create_pmf_pessimistic_connect_dots(grid, mirrored[kept], falling[kept])
        made.append(pmf)
    return PrivacyLossDistribution(*made)


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the vertices of the greatest convex, non-increasing function below the points
    (0, 1), (x, y): x ascending, y not."""
    hull: list[int] = []
    xs, ys = [0.0], [1.0]
    for index, (right, low) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        while len(xs) > 1 and (
            (ys[-1] - ys[-2]) * (right - xs[-1]) >= (low - ys[-1]) * (xs[-1] - xs[-2])
        ):
            xs.pop()
            ys.pop()
            hull.pop()
        xs.append(right)
        ys.append(low)
        hull.append(index)
    return np.array(hull)


def maximum(
    losses: Sequence[PrivacyLossDistribution], floor: float = 0.0
) -> PrivacyLossDistribution:
    """The loss whose profile is the pointwise maximum of these and of `floor`, in each direction.

    It dominates a mechanism that runs any one of them, chosen without the data (the profile of the
    mixture lies below the mixture of the profiles), and any that does not exceed it (`exceeds`).
    All on one grid.
    """
    sides = [_both(loss) for loss in losses]
    grid = sides[0][0].grid
    steps = _common_steps(sides)[: math.ceil(_LARGEST / grid) + 1]
    highest = [
        np.maximum(np.max([side[way].at(steps) for side in sides], axis=0), floor) for way in (0, 1)
    ]
    return from_profiles(grid, steps, highest)


def exceeds(
    loss: PrivacyLossDistribution, limit: PrivacyLossDistribution, margin: float = 0.0
) -> bool:
    """Whether a profile rises above that of `limit`, less a margin, anywhere in a direction.

    False proves that `limit` dominates whatever has this loss: both profiles are linear in
    e^epsilon between the points of their one grid, so they are compared at these points; below
    zero each direction is told by the other one.
    """
    sides = [_both(loss), _both(limit)]
    steps = _common_steps(sides)
    own, bound = sides
    return any((own[way].at(steps) + margin > bound[way].at(steps)).any() for way in (0, 1))


def _both(loss: PrivacyLossDistribution) -> tuple[Losses, Losses]:
    found = directions(loss)
    return found[0], found[-1]


def _common_steps(sides: Sequence[tuple[Losses, Losses]]) -> np.ndarray:
    ends = [one.first + len(one.probabilities) for side in sides for one in side]
    return np.arange(0, max([2, *ends]))
