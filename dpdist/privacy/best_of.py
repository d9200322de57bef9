"""What releasing the best of K secret runs costs, from the privacy loss distribution of one run.

Guarantee. A run has distribution Q on a data set and Q' on a neighbour; K is drawn from a law with
generating function phi, the runs are independent, and only the best one is released (ties broken
by labels drawn in advance). On the first data set the released outcome has density q(y) phi'(1 -
t(y)), t(y) = Q(better than y). With L = ln q/q' and G(t) = max {Q'(T): Q(T) = t},

    delta(epsilon) <= E_Q [ max over t of (phi'(1 - t) - e^(epsilon - L) phi'(1 - G(t)))_+ ],

because t'(y) = Q'(better than y) <= G(t(y)) (Neyman and Pearson) and phi' increases. For a loss L
the maximum is a convex function of q'/q, so the right side is an f-divergence, and a pair that
dominates (Q, Q') may stand for it. K = 0 has the same chance on both sides and adds nothing at
epsilon >= 0; below, the other direction's bound says the rest. The proof step by step:
docs/explanation/privacy.md. Other bounds of the same price, by other ways: Koskela, Redberg and
Wang (ICML 2024, arXiv 2402.06701), Xiang et al. (arXiv 2402.13087).
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpdist.privacy.profiles import Losses, directions, from_profiles, upper_hull
from dpdist.privacy.selection import SelectionLaw

_POINTS = 10_000  # at which the maximum over t is bounded, for each term; any number is sound
_LOSSES = 10_000  # of one run that are told apart, about; any number is sound
_SUPPORT = 1_024  # losses of the result on each side of zero
_SLACK = 1e-13  # relative, for what rounding may take from the highest lines
_NEGLIGIBLE = 1e-15  # deltas below the accuracy of a composed distribution


def best_of(loss: PrivacyLossDistribution, law: SelectionLaw) -> PrivacyLossDistribution:
    """The loss of releasing the best of K runs, each with this loss; an upper bound."""
    sides = directions(loss)
    times = math.ceil(max(len(side.probabilities) for side in sides) / _LOSSES)
    prices = [_Price(side.coarser(times), law) for side in sides]
    top = max(price.top() for price in prices)
    apart = max(1, -(-top // _SUPPORT))
    steps = apart * np.arange(0, top // apart + 2)
    deltas = [price.deltas(steps) for price in prices]
    return from_profiles(sides[0].grid, times * steps, deltas)


class _Price:
    """The bound for one direction: sum_i p_i H(e^(epsilon - l_i)) + E[K] P(L infinite)."""

    def __init__(self, losses: Losses, law: SelectionLaw) -> None:
        self.grid, self.law, self.losses = losses.grid, law, losses
        self._heights, self._slopes = _envelope(losses, law)
        with np.errstate(divide="ignore"):
            self._turns = np.diff(self._heights) / np.diff(self._slopes)

    def deltas(self, steps: np.ndarray) -> np.ndarray:
        """The bound at epsilon = steps * grid >= 0, not cut at 1: float64, the shape of steps."""
        p, first = self.losses.probabilities, self.losses.first
        low = int(steps[0]) - first - len(p) + 1
        # H at every difference epsilon - loss that occurs.
        gaps = np.arange(low, int(steps[-1]) - first + 1)
        c = np.exp(np.minimum(gaps * self.grid, 700.0))
        line = np.searchsorted(-self._turns, -c)
        worst = np.maximum(self._heights[line] - c * self._slopes[line], 0.0)[::-1]
        begin = len(worst) - (steps - first - low) - 1
        found = np.array([p @ worst[b : b + len(p)] for b in begin])
        return found + self.losses.infinite * self.law.mean

    def top(self) -> int:
        """Steps of an epsilon beyond which delta hardly falls."""
        floor = self.losses.infinite * self.law.mean * (1 + 1e-9) + _NEGLIGIBLE
        last = self.losses.first + len(self.losses.probabilities)
        with np.errstate(divide="ignore"):
            spread = np.log((self._heights / self._slopes).max())  # beyond it H is zero
        end = max(self.grid, last * self.grid + spread)
        steps = np.unique(np.geomspace(1, min(end, 300.0) / self.grid, 160).astype(int))
        low = self.deltas(steps) <= floor
        return int(steps[np.argmax(low)] if low.any() else steps[-1])


def _envelope(losses: Losses, law: SelectionLaw) -> tuple[np.ndarray, np.ndarray]:
    """Lines a - c b whose maximum bounds phi'(1 - t) - c phi'(1 - G(t)) for all t and c >= 0.

    Between two points t < u the first term is at most phi'(1 - t), the second at least
    c phi'(1 - G(u)): the values at the points alone would be too small. Only lines that are the
    highest somewhere are kept; heights a and slopes b both ascend.
    """
    deficit = max(0.0, 1.0 - losses.other.sum())
    # Neyman-Pearson: the least losses first, where Q' has most. Linear in between: randomised.
    size = np.minimum(np.concatenate([[0.0], np.cumsum(losses.probabilities), [1.0]]), 1.0)
    power = np.concatenate([[deficit], deficit + np.cumsum(losses.other), [1.0]])
    power = np.minimum(power, 1.0)
    fine = _evenly_tilted(law)
    t = np.unique(np.concatenate([fine, np.interp(fine, power, size)]))
    g = np.interp(t, size, power)
    # In ascending order, also where rounding says otherwise (heights too large, slopes too small).
    heights = np.maximum.accumulate(law.tilt(t[:-1])[::-1])
    slopes = np.minimum.accumulate(law.tilt(g[1:]))[::-1]
    last = np.append(np.diff(slopes) > 0, True)  # of equal slopes the highest
    heights, slopes = heights[last], slopes[last]
    kept = upper_hull(slopes, heights)
    return heights[kept] * (1 + _SLACK), slopes[kept]


def _evenly_tilted(law: SelectionLaw) -> np.ndarray:
    """Points from 0 to 1 between which phi'(1 - t) falls by about the same ratio."""
    rough = np.concatenate([[0.0], np.logspace(-15, 0, 2_000)])
    fallen = -np.log(np.maximum(law.tilt(rough), 1e-9))
    points = np.interp(np.linspace(fallen[0], fallen[-1], _POINTS), fallen, rough)
    return np.concatenate([points, [0.0, 1.0]])
