"""Numbers of records by class, released with noise: their price."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dpdist.privacy.budget import (
    BudgetExceeded,
    Charge,
    RenyiFilter,
    composed_guarantee,
    reserve,
)
from dpdist.privacy.phases import GaussianCounts, GaussianSteps, phase_from_dict

ONE, REPLACED = "add-or-remove-one", "replace-one"


def terms_of(adjacency: Any = ONE, epsilon: float = 4.0) -> RenyiFilter:
    return RenyiFilter.for_ceiling(epsilon, 1e-4, adjacency)


def charge_of(deviation: float = 5.0) -> Charge:
    return Charge("counts", "class counts", 1000, (GaussianCounts(deviation),), "reserved")


def delta_by_integration(epsilon: float, deviation: float, shifts: tuple[float, ...]) -> float:
    """Integrate the hockey stick of two histograms, over the counts in which they differ."""
    step, reach = deviation / 20, 7 * deviation
    grid = np.arange(-reach, reach, step)
    axes = np.meshgrid(*[grid] * len(shifts), indexing="ij")
    here: Any = math.prod(norm.pdf(axis, 0, deviation) for axis in axes)
    there: Any = math.prod(
        norm.pdf(axis, shift, deviation) for axis, shift in zip(axes, shifts, strict=True)
    )
    return float(np.maximum(here - math.exp(epsilon) * there, 0).sum() * step ** len(shifts))


@pytest.mark.parametrize(("adjacency", "shifts"), [(ONE, (1.0,)), (REPLACED, (1.0, -1.0))])
def test_the_price_is_that_of_the_histograms_themselves(adjacency, shifts):
    """A record more moves one count by 1; a replaced one moves two, and never one by 2."""
    deviation = 2.0
    charge = charge_of(deviation)
    found = composed_guarantee([charge], 1e-4, adjacency)
    exact = brentq(lambda at: delta_by_integration(at, deviation, shifts) - 1e-4, 0.01, 10)
    assert found.epsilon == pytest.approx(exact, rel=2e-3)  # the grid of the integral
    length = math.hypot(*shifts) / deviation  # a Gaussian's divergence of order a: a length^2 / 2
    ceiling = terms_of(adjacency)
    cost = ceiling.cost(charge.phases, 1000)
    assert cost == pytest.approx(ceiling.order * length**2 / 2, rel=1e-9)
    twice = composed_guarantee([charge, charge], 1e-4, adjacency).epsilon
    both = delta_by_integration(twice, deviation / math.sqrt(2), shifts)
    assert both == pytest.approx(1e-4, rel=0.02)


def test_counts_beside_steps_compose_and_keep_their_form():
    steps = GaussianSteps(1, 5.0, 1.0)
    mixed = Charge("a", "a", 1000, (steps, GaussianCounts(5.0)), "reserved")
    same = Charge("b", "b", 1000, (GaussianSteps(2, 5.0, 1.0),), "reserved")
    one, other = (composed_guarantee([each], 1e-5).epsilon for each in (mixed, same))
    assert one == pytest.approx(other, rel=1e-3)  # at one record more or less both move by 1
    one, other = (composed_guarantee([each], 1e-5, REPLACED).epsilon for each in (mixed, same))
    assert one < 0.95 * other  # a gradient may turn over, a record's class may not
    for phase in mixed.phases:
        assert phase_from_dict(json.loads(json.dumps(phase.to_dict()))) == phase
    for wrong in (0.0, math.nan):
        with pytest.raises(ValueError):
            GaussianCounts(wrong)


def test_a_divergence_that_is_no_number_fits_under_no_ceiling(tmp_path, monkeypatch):
    monkeypatch.setattr(RenyiFilter, "cost", lambda *given: math.nan)
    with pytest.raises(BudgetExceeded):
        reserve(tmp_path, np.arange(10), charge_of(), terms_of(), ONE)
