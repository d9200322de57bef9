"""Counts of columns on fixed grids: what one record or user can change, and what they tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dpdist.data.histograms import (
    CELLS,
    count_cells,
    linear_edges,
    universal_edges,
)
from dpdist.data.protocol import Users
from dpdist.privacy.phases import GaussianCounts
from dpdist.privacy.plan import PrivacyPlan

AGES = linear_edges(0, 150)
CELL_VALUES = (math.nan, -5.0, 0.0, 42.0, 42.01, 1e12)
Row = tuple[float, ...]
Counter = Callable[[Sequence[Row]], np.ndarray]


def counts_of(rows: Sequence[Row]) -> np.ndarray:
    """Return the counts of all columns of a tiny table, the second on the universal grid."""
    table = np.array(rows, dtype=np.float64).reshape(len(rows), -1)
    grids = [AGES, universal_edges()]
    return np.concatenate([count_cells(table[:, k], grids[k]) for k in range(table.shape[1])])


def tables(columns: int) -> Iterator[tuple[Row, ...]]:
    """Yield all tables of two rows over a few values."""
    rows = list(itertools.product(CELL_VALUES, repeat=columns))
    yield from itertools.product(rows[:: 1 if columns == 1 else 5], repeat=2)


def furthest(count: Counter, columns: int, adjacency: str) -> float:
    """Return the largest distance, in L2 norm, of the counts of two neighboring tables."""
    distances = []
    for table in tables(columns):
        others = [table[:1], table[1:]]  # removed: a blanked-out record adds nothing either
        if adjacency == "replace-one":
            rows = itertools.product(CELL_VALUES, repeat=columns)
            others = [(table[0], row) for row in rows]
        if count is counts_of and adjacency != "replace-one":
            others.append((*table, table[0]))
        distances += [float(np.linalg.norm(count(table) - count(other))) for other in others]
    return max(distances)


def exact_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of two Gaussians `mu` deviations apart (Balle and Wang 2018, Theorem 8)."""

    def profile(epsilon: float) -> float:
        first, second = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
        return float(first - math.exp(epsilon) * second) - delta

    return float(brentq(profile, 0, 100))


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("columns", [1, 2])
def test_no_pair_of_neighbors_is_further_apart_than_what_is_paid_for(columns, adjacency):
    noise, delta = 3.0, 1e-5
    phase = GaussianCounts.of_columns(noise, columns)
    distance = furthest(counts_of, columns, adjacency)
    stated = PrivacyPlan(2, (phase,), delta, adjacency=adjacency).guarantee().epsilon
    exact = exact_epsilon(distance / phase.deviation, delta)
    assert exact <= stated <= 1.005 * exact  # the worst pair is among them


@pytest.mark.parametrize("records", [1, 3, 1000])
def test_a_user_adds_no_more_than_one_however_many_records_it_has(records):
    rng = np.random.default_rng(records)
    others = rng.choice(CELL_VALUES, 40), rng.integers(0, 9, 40)
    for values in (rng.choice(CELL_VALUES, records), np.full(records, 42.0)):
        with_user = count_cells(
            np.concatenate([others[0], values]), AGES,
            Users.from_values([*others[1].tolist(), *["new"] * records], 4),
        )  # fmt: skip
        without = count_cells(others[0], AGES, Users.from_values(others[1], 4))
        moved = with_user - without
        levels = np.split(moved, [17, 17 + 257])
        assert all(0 <= level.sum() <= 1 and (level >= 0).all() for level in levels)
        assert np.linalg.norm(moved) <= math.sqrt(3)
    # one column, all records in a cell: nothing of the bound is given away
    assert np.linalg.norm(moved) == pytest.approx(math.sqrt(3), rel=1e-6)
    alone = count_cells(np.full(records, 42.0), AGES)
    assert np.linalg.norm(alone) == pytest.approx(records * math.sqrt(3))


def test_counts_are_whole_and_in_no_order():
    rng = np.random.default_rng(0)
    values = rng.normal(40, 30, 500)
    values[::7] = math.nan
    owners = rng.integers(0, 60, 500)
    order = rng.permutation(500)
    for users, mixed in ((None, None), (owners, owners[order])):
        made = [
            count_cells(v, AGES, None if u is None else Users.from_values(u, 4))
            for v, u in ((values, users), (values[order], mixed))
        ]
        assert np.array_equal(*made)
        assert np.array_equal(made[0] * 2**24, np.round(made[0] * 2**24))


def test_the_universal_grid_holds_every_number():
    edges = universal_edges()
    assert len(edges) == CELLS + 1
    assert (np.diff(edges) > 0).all()
    for value in (-1e300, -1e-300, 0.0, 1e-300, 5.0, 1e300, math.inf, -math.inf):
        assert count_cells(np.array([value]), edges).sum() == 3
    for grid, cells in ((edges, 32), (universal_edges(signed=False), 64)):
        inner = grid[grid > 2**-34]
        assert np.allclose(inner[1:] / inner[:-1], 2 ** (1 / cells))
