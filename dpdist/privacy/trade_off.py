"""Trade-off curves: how well any test can tell two neighbouring data sets apart.

A curve is B(x) = the least Q(S) over sets S of outcomes with P(S) >= x, for every pair of
neighbours P, Q in either order: convex, non-decreasing, B(x) <= x. In the words of f-DP (Dong, Roth
and Su 2022) B(x) = f(1 - x): a test with true positive rate x has a false positive rate of at least
B(x). A lower curve says less, so wherever something is rounded it is rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from dpdist.privacy.profiles import Losses, directions

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    from dpdist.privacy.plan import PrivacyPlan

Array = NDArray[np.float64]
Curve = Callable[[Array], Array]

_LARGEST = 600.0  # losses beyond say nothing that a float64 could hold


def gaussian(mu: ArrayLike) -> Curve:
    """Of mu-Gaussian DP: Phi(Phi^-1(x) - mu). mu >= 0, broadcast with x."""
    shift = np.asarray(mu, float)
    return lambda x: ndtr(ndtri(np.clip(x, 0.0, 1.0)) - shift)


def approximate(epsilon: ArrayLike, delta: ArrayLike = 0.0) -> Curve:
    """Of (epsilon, delta)-DP: the larger of e^-epsilon (x - delta) and 1 - delta - e^epsilon
    (1 - x), and at least 0. Broadcast with x."""
    grown, lost = np.exp(np.minimum(epsilon, _LARGEST)), np.asarray(delta, float)

    def curve(x: Array) -> Array:
        x = np.clip(x, 0.0, 1.0)
        return np.maximum(0.0, np.maximum((x - lost) / grown, 1 - lost - grown * (1 - x)))

    return curve


def of_losses(
    alternatives: Sequence[PrivacyLossDistribution], slack: float = 0.0, directed: bool = False
) -> Curve:
    """Of a mechanism with one of these privacy losses, in both directions; directed: with the
    record for P and without for Q only, which says more where it is known who is who.

    P(S) <= e^l Q(S) + delta(l) for every loss l, so B(x) is the largest of e^-l (x - delta(l)).
    With the maximum of all profiles for delta it is the greatest convex function below the curves
    of all alternatives and directions (conjugates turn maxima into hulls of minima). slack:
    added to every delta, what rounding may have lost. Raises ValueError for several grids.
    """
    found = [one for loss in alternatives for one in directions(loss)[: 1 if directed else 2]]
    return _below(found, slack)


def by_direction(loss: PrivacyLossDistribution, slack: float = 0.0) -> tuple[Curve, Curve]:
    """Of a loss in one direction each: from data with the record (or group) to data without, and
    from data without it to data with it. slack: as in `of_losses`."""
    found = directions(loss)
    return _below(found[:1], slack), _below(found[-1:], slack)


def _below(found: Sequence[Losses], slack: float) -> Curve:
    """The greatest convex curve below those of all these. Raises ValueError for several grids."""
    grid = found[0].grid
    if any(one.grid != grid for one in found):
        raise ValueError("losses on one grid are needed")
    steps = _steps(found, grid)
    deltas = np.minimum(np.max([one.at(steps) for one in found], axis=0) + slack, 1.0)
    slopes = np.exp(-steps * grid)
    # Tangents with falling slopes: where x grows, those of smaller losses are the highest ones.
    falls = -np.diff(slopes)
    meets = np.minimum.accumulate(-np.diff(slopes * deltas) / falls)  # with the next larger loss

    def curve(x: Array) -> Array:
        x = np.clip(x, 0.0, 1.0)
        above = len(meets) - np.searchsorted(meets[::-1], x, side="right")
        return np.clip(slopes[above] * (x - deltas[above]), 0.0, x)

    return curve


def of_plan(plan: PrivacyPlan, directed: bool = False) -> Curve | None:
    """Of whatever the plan proves. None where there is no distribution of its loss (no noise, or
    Renyi DP alone): there is no curve that an audit could refute."""
    from dpdist.privacy import accounting
    from dpdist.privacy.losses import Unsupported, loss_of

    paths = plan.alternatives(plan.phases)
    try:
        # Ten times coarser than the price: still below the true curve, by 1e-3 of epsilon at most.
        grid = 10 * max(accounting.grid_for(path, plan.neighbours) for path in paths)
        found = [loss_of(path, plan.neighbours, grid) for path in paths]
    except Unsupported:
        return None
    known = [loss.pld for loss in found if loss.pld is not None]
    if len(known) < len(found):
        return None
    return of_losses(known, max(loss.rounding for loss in found), directed)


def _steps(found: Sequence[Losses], grid: float) -> NDArray[np.int64]:
    """All losses that occur, in steps of the grid, and their opposites."""
    ends = [abs(end) for one in found for end in (one.first, one.first + len(one.probabilities))]
    most = min(max(1, *ends), math.floor(_LARGEST / grid))
    return np.arange(-most, most + 1)


def of_group(curve: Curve, size: int) -> Curve:
    """Of data sets that differ in up to `size` records: the curve, `size` times over."""
    if size < 1:
        raise ValueError(f"a group has at least one record, got {size}")

    def grouped(x: Array) -> Array:
        for _ in range(size):
            x = curve(x)
        return x

    return grouped


def ceiling(curve: Curve, false_positives: ArrayLike) -> Array:
    """The largest true positive rate that any attack can have at these false positive rates."""
    return 1 - curve(1 - np.asarray(false_positives, float))
