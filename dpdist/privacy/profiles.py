"""Read, maximize and rebuild hockey-stick profiles of privacy loss distributions.

A privacy loss distribution stands for a pair (Q, Q'): the probabilities under Q of the losses ln
q/q' on a grid, and the mass at an infinite loss. Its profile epsilon -> sup_S Q(S) - e^epsilon
Q'(S) is convex in e^epsilon, and every such profile is that of some pair (Zhu, Dong and Wang 2022,
"Optimal accounting of differential privacy via characteristic function", Proposition 8): a profile
that lies above a mechanism's in both directions dominates the mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # half a second to load; who reads an audit's options needs none of it
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_LARGEST = (
    700.0  # epsilon up to which e^epsilon is a float64; profiles made here are constant beyond
)
_FEW = 5_000  # losses that are listed; more are an array


@dataclass(frozen=True)
class LossPmf:
    """One direction of a privacy loss distribution.

    lower_loss: the least loss, in steps of `grid`. probabilities (n,): of the losses first * grid,
    (first + 1) * grid, ... under Q. infinity_mass: the mass at an infinite loss.
    """

    grid: float
    lower_loss: int
    probabilities: np.ndarray
    infinity_mass: float

    @property
    def steps(self) -> np.ndarray:
        """Return the losses in steps of the grid: int64 (n,)."""
        return np.arange(self.lower_loss, self.lower_loss + len(self.probabilities))

    @cached_property
    def reverse_probabilities(self) -> np.ndarray:
        """Return the probabilities of the same losses under Q': float64 (n,).

        They may add up to less than 1: the deficit lies where Q has nothing.
        """
        return self.probabilities * np.exp(-np.clip(self.steps * self.grid, -700, 700))

    def coarsen(self, factor: int) -> LossPmf:
        """Return the losses on a grid `factor` times as wide, of a pair that dominates this one.

        Each probability goes to the two nearest losses so that Q and Q' keep their mass: the
        profile stays where it is there, and between them becomes the chord in e^epsilon.
        """
        before = self.lower_loss % factor
        after = -(before + len(self.probabilities)) % factor
        # One more cell, empty, for what the last one sends upwards.
        cells = np.pad(self.probabilities, (before, after + factor)).reshape(-1, factor)
        up = np.expm1(-self.grid * np.arange(factor)) / math.expm1(-self.grid * factor)
        kept = cells @ (1 - up) + np.append(0.0, (cells @ up)[:-1])
        return LossPmf(self.grid * factor, self.lower_loss // factor, kept, self.infinity_mass)

    def profile(self) -> np.ndarray:
        """Return the profile at every one of the losses: float64 (n,)."""
        # From the top: D_j = (1 - e^-g) P(L > l_j) + e^-g D_{j+1}, sums of positive terms only.
        above = np.append(np.cumsum(self.probabilities[::-1])[::-1][1:], 0.0)
        from scipy.signal import lfilter

        shrink = math.exp(-self.grid)
        terms = -math.expm1(-self.grid) * above
        values = self.infinity_mass + lfilter([1.0], [1.0, -shrink], terms[::-1])[::-1]
        profile: np.ndarray = np.minimum(values, 1.0)
        return profile

    def profile_at(self, steps: np.ndarray) -> np.ndarray:
        """Return the profile at losses steps * grid, also outside its own range: float64 (m,)."""
        index = steps - self.lower_loss
        inside = np.clip(index, 0, len(self.probabilities) - 1)
        values = np.where(
            index >= len(self.probabilities), self.infinity_mass, self.profile()[inside]
        )
        # Below the least loss every outcome counts: Q - e^epsilon Q' of everything.
        below = (
            1.0
            - np.exp(np.minimum(steps, self.lower_loss) * self.grid)
            * self.reverse_probabilities.sum()
        )
        return np.where(index < 0, np.clip(below, 0.0, 1.0), values)


def loss_directions(loss: PrivacyLossDistribution) -> list[LossPmf]:
    """Return the loss of a removal and, when it differs, that of an addition."""
    found = [loss._pmf_remove]
    if loss._pmf_add is not loss._pmf_remove:
        found.append(loss._pmf_add)
    return [_losses(_dense(pmf)) for pmf in found]


def _dense(pmf: pld_pmf.PLDPmf) -> pld_pmf.DensePLDPmf:
    """Return the distribution with all losses between its least and its largest.

    The library has none for a loss that is always infinite.
    """
    from dp_accounting.pld import pld_pmf

    if isinstance(pmf, pld_pmf.SparsePLDPmf) and not pmf._loss_probs:
        return pld_pmf.DensePLDPmf(pmf._discretization, 0, np.zeros(1), pmf._infinity_mass, True)
    return pmf.to_dense_pmf()


def _losses(pmf: pld_pmf.DensePLDPmf) -> LossPmf:
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
    return LossPmf(pmf._discretization, pmf._lower_loss, kept, infinite)


def pld_from_profiles(
    grid: float, steps: np.ndarray, sides: Sequence[np.ndarray]
) -> PrivacyLossDistribution:
    """Return the distribution with these profiles, one for each direction, made convex from below.

    steps (m,): from 0, ascending. Each side (m,): an upper bound of a true profile at epsilon =
    steps * grid. Below zero the other direction says the rest: H_x(Q, Q') = 1 - x + x H_{1/x}(Q',
    Q) with x = e^epsilon. A true profile is convex in x and lies below these values, so it lies
    below the greatest convex function below them (1 at x = 0, constant beyond the last).
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    mirrored = np.concatenate([-steps[:0:-1], steps])
    x = np.exp(mirrored * grid)
    made = []
    for own, other in zip(sides, sides[::-1], strict=True):
        below = 1 - x[: len(steps) - 1] * (1 - np.minimum(other, 1.0)[:0:-1])
        falling = np.minimum.accumulate(np.minimum(np.concatenate([below, own]), 1.0))
        kept = upper_hull(np.append(0.0, x), np.append(-1.0, -falling))[1:] - 1
        made.append(_pmf_from_profile(grid, mirrored[kept], falling[kept]))
    return PrivacyLossDistribution(*made)


def _pmf_from_profile(grid: float, steps: np.ndarray, values: np.ndarray) -> pld_pmf.PLDPmf:
    """Return the distribution whose profile these values at steps * grid are.

    Between them it follows their chords in e^epsilon. Source: Doroshenko et al. 2022, Algorithm
    1.
    """
    from dp_accounting.pld import pld_pmf

    falls, gaps = -np.diff(values), np.diff(steps) * grid
    arrived = np.append(1 - values[0], falls / -np.expm1(-gaps))
    p = np.maximum(arrived - np.append(falls / np.expm1(gaps), 0.0), 0.0)
    last = float(values[-1])
    if len(steps) <= _FEW:
        known = dict(zip(steps.tolist(), p.tolist(), strict=True))
        return pld_pmf.SparsePLDPmf(known, grid, last, True)
    dense = np.zeros(steps[-1] - steps[0] + 1)
    dense[steps - steps[0]] = p
    return pld_pmf.DensePLDPmf(grid, int(steps[0]), dense, last, True)


def upper_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the indices of the vertices of the least concave function above the points.

    x is strictly ascending.

    What lies on or below a chord of two others is no vertex: all that are found so are left out at
    once, then what lies around them is tried again, by chords of several lengths.
    """
    kept, longest = np.arange(len(x)), 1
    tried = np.arange(1, len(x) - 1)
    while len(tried):
        below = np.zeros(len(tried), dtype=bool)
        for reach in 2 ** np.arange(longest.bit_length()):
            found = np.flatnonzero((tried >= reach) & (tried < len(kept) - reach))
            left, middle, right = (kept[tried[found] + k] for k in (-reach, 0, reach))
            rise, run = y[middle] - y[left], x[middle] - x[left]
            below[found] |= rise * (x[right] - x[middle]) <= (y[right] - y[middle]) * run
        gone = tried[below]
        kept = np.delete(kept, gone)
        follows = gone - np.arange(len(gone))  # where what followed each is now
        tried = np.unique(follows[:, None] + np.arange(-longest, longest))
        tried = tried[(tried > 0) & (tried < len(kept) - 1)]
        longest = min(2 * longest, 16)
    return kept


def pointwise_maximum(
    losses: Sequence[PrivacyLossDistribution], floor: float = 0.0
) -> PrivacyLossDistribution:
    """Return the loss whose profiles are the pointwise maxima of these and of `floor`.

    It dominates a mechanism that runs any one of them, chosen without the data (the profile of the
    mixture lies below the mixture of the profiles), and any that does not exceed it
    (`profile_exceeds`). All on one grid.
    """
    sides = [_both_directions(loss) for loss in losses]
    grid = sides[0][0].grid
    steps = _common_steps(sides)[: math.ceil(_LARGEST / grid) + 1]
    highest = [
        np.maximum(np.max([side[way].profile_at(steps) for side in sides], axis=0), floor)
        for way in (0, 1)
    ]
    return pld_from_profiles(grid, steps, highest)


def profile_exceeds(
    loss: PrivacyLossDistribution, limit: PrivacyLossDistribution, margin: float = 0.0
) -> bool:
    """Return whether a profile rises above that of `limit`, less a margin, anywhere in a direction.

    False proves that `limit` dominates whatever has this loss: both profiles are linear in
    e^epsilon between the points of their one grid, so they are compared at these points; below
    zero each direction follows from the other one.
    """
    sides = [_both_directions(loss), _both_directions(limit)]
    steps = _common_steps(sides)
    own, bound = sides
    return any(
        (own[way].profile_at(steps) + margin > bound[way].profile_at(steps)).any() for way in (0, 1)
    )


def _both_directions(loss: PrivacyLossDistribution) -> tuple[LossPmf, LossPmf]:
    found = loss_directions(loss)
    return found[0], found[-1]


def _common_steps(sides: Sequence[tuple[LossPmf, LossPmf]]) -> np.ndarray:
    ends = [one.lower_loss + len(one.probabilities) for side in sides for one in side]
    return np.arange(0, max([2, *ends]))
