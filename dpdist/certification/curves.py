"""Two runs compared over whole curves: every size at once, between those that were listed too.

At size r the later run less the first is D(r) = P[R2 >= r] - P[R1 >= r], with R1 and R2 the
certified sizes of one input by both, below 0 where it is not answered rightly. Sizes from 0 on are
cut into cells that do not depend on the results. Both shares fall with r, so for every r in a cell
(a, b], of which the first has 0 too,

    P[R2 >= b] - P[R1 > a]  <=  D(r)  <=  P[R2 > a] - P[R1 >= b],

and each side is a difference of two successes on the same inputs, which has an exact bound. All
bounds of all cells hold together (union bound). A cell costs a hair of every other's error, but its
width is lost whole, so there are many of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpdist.base.binomial import clopper_pearson_interval, clopper_pearson_lower
from dpdist.certification.paired import ERROR, SHARE_OF_DISCORDANT

CELLS = 64


@dataclass(frozen=True, eq=False)
class CurveDifference:
    """For every size in (knots[j], knots[j + 1]], the first with 0 itself, the population's
    difference is at least low[j] and at most high[j], all of them together. knots: (J + 1,)
    ascending; low, high: (J,)."""

    knots: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def ahead(self) -> list[tuple[float, float]]:
        """Stretches of sizes, (above, up to), at which the later run is better."""
        return self._stretches(self.low > 0)

    @property
    def behind(self) -> list[tuple[float, float]]:
        return self._stretches(self.high < 0)

    def _stretches(self, cells: np.ndarray) -> list[tuple[float, float]]:
        steps = np.diff(np.concatenate([[0], cells.astype(np.int8), [0]]))
        begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        return list(zip(self.knots[begins].tolist(), self.knots[ends].tolist(), strict=True))


def curve_difference(
    first: np.ndarray, second: np.ndarray, largest: float, error: float = ERROR, cells: int = CELLS
) -> CurveDifference:
    """Certified sizes of the same inputs by two runs, float64 (N,) each, compared up to `largest`.

    Wrong at any size with probability at most `error`, over the choice of inputs; `largest` must
    not be chosen by the results. Certificates are taken as made.
    """
    knots = np.linspace(0.0, largest, cells + 1)
    beyond = np.concatenate([[-1e-300], knots[1:-1]])  # 0 is a certified size
    above, reached = beyond[:, None], knots[1:, None]
    level = error / (2 * cells)
    low = _at_least(first > above, second >= reached, level)
    high = -_at_least(second > above, first >= reached, level)
    return CurveDifference(knots, low, high)


def _at_least(first: np.ndarray, second: np.ndarray, error: float) -> np.ndarray:
    """Lower bounds of the second's share less the first's, each wrong with probability <= error.

    bool (J, N) each, float64 (J,). As `paired.difference_interval`, on one side.
    """
    only_second = (second & ~first).sum(1)
    discordant = (first ^ second).sum(1)
    spent = SHARE_OF_DISCORDANT * error
    fewest, most = clopper_pearson_interval(discordant, first.shape[1], spent)
    split = clopper_pearson_lower(only_second, np.maximum(discordant, 1), error - spent)
    worst = 2 * split - 1
    return np.asarray(worst * np.where(worst < 0, most, fewest))
