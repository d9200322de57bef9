"""Count a column's numbers in the cells of a fixed grid, and estimate quantiles from noisy counts.

A grid has 4,096 cells that do not depend on private data: equal cells of a declared range, or those
of a universal grid. Numbers are counted at three levels, in 16, 256 and 4,096 cells, each with an
extra cell for missing numbers. A record is in one cell of each level, so it adds 1 to each of three
histograms, whatever the other records are; a user of k records adds 1/k for each of them. Estimates
from the noisy counts are post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from dpdist.core.preprocessing import COUNTED_LEVELS, LARGEST_COUNTED
from dpdist.data.protocol import Users

BRANCHES, LEVELS = 16, COUNTED_LEVELS
CELLS = BRANCHES**LEVELS
_SIZES = [BRANCHES**level + 1 for level in range(1, LEVELS + 1)]  # the last cell: missing
COUNTS = sum(_SIZES)  # of a column
# In standard deviations of the noise on a count: about that of all cells between the end of the
# numbers and the end of the grid, so that fewer records there cannot be detected.
_UNSEEN = 4.0
_INNERMOST = 0.25  # largest fraction of the numbers left out at an end
_PARTS_OF_ONE = 2**24  # a user's records get integer multiples of 1 / 2^24: sums are exact


def linear_edges(low: float, high: float) -> np.ndarray:
    """Return the ends of the cells of a declared range, ascending float64 (CELLS + 1,)."""
    return np.linspace(low, high, CELLS + 1)


@cache
def universal_edges(signed: bool = True) -> np.ndarray:
    """Return the ends of the cells of all numbers, ascending float64 (CELLS + 1,).

    On each side of 0 there are 32 cells for each power of two, from 2^-35 to 2^29: a cell's ends
    differ by 2.2 %. Numbers beyond are in the outermost cells.

    signed: False for numbers >= 0, with twice as many cells; negative ones are in the first.
    """
    half = CELLS // 2 if signed else CELLS
    positive = LARGEST_COUNTED * 2.0 ** (np.arange(1, half + 1) * (64 / half) - 64)
    return np.concatenate([-positive[::-1] if signed else [], [0.0], positive])


def count_cells(values: np.ndarray, edges: np.ndarray, users: Users | None = None) -> np.ndarray:
    """Return the counts of a column, float64 (COUNTS,), level by level.

    Guarantee: a record adds exactly 1 to one count of each level. With users, a user adds at most 1
    in total to the counts of each level. What it adds depends on no other record (user).

    Args:
        values: (N,) numbers; NaN if missing. Those beyond the grid are in its outer cells.
        edges: ends of the cells.
        users: the users of the records; a user adds the mean of its records.
    """
    cells = np.searchsorted(edges[1:-1], values, side="right")
    missing = np.isnan(values)
    found = []
    for level, size in enumerate(_SIZES, start=1):
        places = np.where(missing, size - 1, cells // BRANCHES ** (LEVELS - level))
        if users is None:
            found.append(np.bincount(places, minlength=size).astype(np.float64))
            continue
        pairs, times = np.unique(users.codes * size + places, return_counts=True)
        own, place = np.divmod(pairs, size)
        parts = times * _PARTS_OF_ONE // np.bincount(users.codes)[own]  # rounded down
        found.append(np.bincount(place, weights=parts, minlength=size) / _PARTS_OF_ONE)
    return np.concatenate(found)


@dataclass(frozen=True)
class ColumnEstimate:
    """Estimates of a column from its noisy counts.

    low, median, high: two quantiles and the median, in the column's units, low < high. missing:
    fraction of missing numbers, 0 to 1.
    """

    low: float
    median: float
    high: float
    missing: float


def estimate(
    counts: np.ndarray, edges: np.ndarray, quantiles: tuple[float, float], deviation: float
) -> ColumnEstimate:
    """Return the estimates of a column from its noisy counts (COUNTS,).

    The levels are made consistent by least squares (Hay et al. 2010), and the cumulative sums
    monotone by isotonic regression. If the noise hides a quantile, the end is where the fraction is
    four standard deviations of a count: an end in pure noise could be anywhere on the grid. If the
    noise leaves no records, the range is that of the grid.

    Args:
        counts: the noisy counts.
        edges: ends of the grid's cells.
        quantiles: fractions of the numbers below the low and the high end.
        deviation: standard deviation of the noise on each count.
    """
    *levels, _ = np.split(counts, np.cumsum(_SIZES))
    absent = max(0.0, float(np.mean([level[-1] for level in levels])))
    sums = np.cumsum(_consistent([level[:-1] for level in levels]))
    total = max(0.0, float(sums[-1]))
    missing = absent / (absent + total) if absent else 0.0
    if not total:
        middle = float(edges[CELLS // 2])
        return ColumnEstimate(float(edges[0]), middle, float(edges[-1]), missing)
    from scipy.optimize import isotonic_regression

    ascending = isotonic_regression(sums).x
    hidden = min(_INNERMOST, _UNSEEN * deviation / total)
    shares = (max(quantiles[0], hidden), 0.5, min(quantiles[1], 1 - hidden))
    found = np.searchsorted(ascending, [share * total for share in shares])
    low, median, high = np.minimum(found, CELLS - 1)
    middle = float(edges[median] + edges[median + 1]) / 2
    return ColumnEstimate(float(edges[low]), middle, float(edges[high + 1]), missing)


def _consistent(levels: list[np.ndarray]) -> np.ndarray:
    """Return the finest of equally noisy levels of counts, by least squares over all levels."""
    best, variances = [levels[-1]], [1.0]  # of a level with all finer ones, the coarsest last
    for level in reversed(levels[:-1]):
        below, variance = best[-1].reshape(-1, BRANCHES).sum(1), BRANCHES * variances[-1]
        best.append((variance * level + below) / (variance + 1))
        variances.append(variance / (variance + 1))
    found = best.pop()
    for level in reversed(best):
        groups = level.reshape(-1, BRANCHES)
        found = (groups + (found - groups.sum(1))[:, None] / BRANCHES).ravel()
    return found
