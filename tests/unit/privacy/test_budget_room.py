"""Room on budgets: under the run's own relation, on every budget of its records, one at a time."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import dp_accounting.rdp as rdp
import numpy as np
import pytest

from dpdist.privacy import budget as budgets
from dpdist.privacy.budget import (
    BUDGET_SUFFIX,
    BudgetExceeded,
    Charge,
    RenyiFilter,
    read_budgets,
)
from dpdist.privacy.ledger import anchor_path
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.phases import GaussianReleases
from dpdist.privacy.plan import PrivacyPlan

DELTA = 1e-5
NOISE = 4.0
ONE = (GaussianReleases(NOISE),)
SENSITIVITY = {"add-or-remove-one": 1.0, "replace-one": 2.0}
RELATIONS = list(SENSITIVITY)
FILTER = RenyiFilter.for_ceiling(2.0, DELTA, "add-or-remove-one")
GROUPS = [np.random.default_rng(seed).random(50) for seed in range(3)]  # of records


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "budgets"


def reserve(
    folder, run, phases=ONE, records=GROUPS[0], *, terms=None, adjacency=RELATIONS[0], **setting
):
    plan = PrivacyPlan(1000, phases, DELTA, adjacency=adjacency)
    charge = Charge.for_plan(run, "same name", plan, phases)
    budgets.reserve(folder, records, charge, terms, adjacency, name="toy", **setting)


def exact(runs: int, adjacency: str) -> float:
    """Epsilon of so many Gaussian releases: they are one with sqrt(runs) times the shift."""
    return float(gaussian_epsilon(DELTA, NOISE / math.sqrt(runs), SENSITIVITY[adjacency]))


# --- the relation


@pytest.mark.parametrize("adjacency", RELATIONS)
def test_a_composed_ceiling_counts_under_the_relation_of_the_run(folder, adjacency):
    two = exact(2, adjacency)
    reserve(folder, "one", adjacency=adjacency, limit=(1.01 * two, DELTA))
    before = content(folder)
    with pytest.raises(BudgetExceeded):
        reserve(folder, "two", adjacency=adjacency, limit=(0.99 * two, DELTA))
    assert content(folder) == before
    reserve(folder, "two", adjacency=adjacency, limit=(1.01 * two, DELTA))
    (budget,) = read_budgets(folder)
    stated = budget.guarantee(DELTA, adjacency)
    assert two * (1 - 1e-9) <= stated.epsilon <= 1.01 * two and stated.adjacency == adjacency


@pytest.mark.parametrize("adjacency", RELATIONS)
def test_a_filter_counts_under_its_relation(adjacency):
    """A Gaussian release costs order * shift^2 / 2."""
    ceiling = RenyiFilter.for_ceiling(2.0, DELTA, adjacency)
    shift = SENSITIVITY[adjacency] / NOISE
    assert ceiling.cost(ONE, 1000) == pytest.approx(ceiling.order * shift**2 / 2)


# --- the share


@pytest.mark.parametrize("above", [0.0, 1e-6, 0.3])
def test_a_sum_above_the_share_is_stated_as_what_it_proves(above):
    spent = FILTER.share * (1 + above)
    stated = FILTER.guarantee(spent, True)
    proved, _ = rdp.compute_epsilon([FILTER.order], [spent], DELTA)
    assert stated.epsilon >= proved * (1 - 1e-12)
    assert (above > 0) == (stated.epsilon > 2.0)


def gaussian_costing(cost: float) -> tuple[GaussianReleases]:
    """One release with this divergence at the filter's order."""
    return (GaussianReleases(math.sqrt(FILTER.order / (2 * cost))),)


def test_no_run_is_let_in_above_the_share(folder):
    """Which is less than the ceiling's epsilon: the rest is what delta costs."""
    assert FILTER.share < 0.9 * FILTER.epsilon
    reserve(folder, "half", gaussian_costing(0.5 * FILTER.share), terms=FILTER)
    with pytest.raises(BudgetExceeded):
        reserve(folder, "more", gaussian_costing(0.501 * FILTER.share), terms=FILTER)
    reserve(folder, "rest", gaussian_costing(0.499 * FILTER.share), terms=FILTER)
    (budget,) = read_budgets(folder)
    assert budget.guarantee().epsilon == FILTER.epsilon
    extra = gaussian_costing(0.51 * FILTER.share)
    reserve(folder, "rest", extra, terms=FILTER, enforce=False)  # released again after a crash
    (budget,) = read_budgets(folder)
    assert FILTER.share < budget.spent < FILTER.epsilon
    assert budget.guarantee().epsilon > FILTER.epsilon


# --- several budgets


def three(folder: Path, terms: list[RenyiFilter | None]) -> None:
    """Budgets of three groups of records, whose files lie in this order."""
    for number, (records, own) in enumerate(zip(GROUPS, terms, strict=True)):
        before = set(folder.glob(f"*{BUDGET_SUFFIX}"))
        reserve(folder, f"first {number}", records=records, terms=own)
        (path,) = set(folder.glob(f"*{BUDGET_SUFFIX}")) - before
        target = path.with_name(f"{number:016x}{BUDGET_SUFFIX}")
        os.rename(anchor_path(path), anchor_path(target))
        os.rename(path, target)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir()}


ALL = np.concatenate([records[:5] for records in GROUPS])


@pytest.mark.parametrize("full", range(3))
@pytest.mark.parametrize("filtered", [True, False])
def test_every_budget_of_the_records_must_have_room(folder, full, filtered):
    terms = FILTER if filtered else None
    limit = None if filtered else (1.01 * exact(2, RELATIONS[0]), DELTA)
    more = gaussian_costing(FILTER.share) if filtered else (GaussianReleases(1.0),)
    three(folder, [terms] * 3)
    reserve(folder, "more", more, GROUPS[full], terms=terms, enforce=False)
    before = content(folder)
    with pytest.raises(BudgetExceeded):
        reserve(folder, "joint", records=ALL, terms=terms, limit=limit)
    assert content(folder) == before
    others = np.concatenate([r[:5] for number, r in enumerate(GROUPS) if number != full])
    reserve(folder, "joint", records=others, terms=terms, limit=limit)
    charged = [any(c.run == "joint" for c in budget.charges) for budget in read_budgets(folder)]
    assert charged == [number != full for number in range(3)]


@pytest.mark.parametrize("odd", range(3))
def test_every_budget_of_the_records_must_promise_the_same(folder, odd):
    three(folder, [FILTER if number == odd else None for number in range(3)])
    before = content(folder)
    with pytest.raises(BudgetExceeded):
        reserve(folder, "joint", records=ALL, terms=None)
    assert content(folder) == before


def test_a_run_is_charged_and_settled_on_every_budget_of_its_records(folder):
    three(folder, [None] * 3)
    reserve(folder, "joint", records=ALL)
    assert all(len(budget.known) >= len(ALL) for budget in read_budgets(folder))
    released = (GaussianReleases(NOISE, 3),)
    assert budgets.settle(folder, "joint", released)
    for budget in read_budgets(folder):
        (joint,) = [charge for charge in budget.charges if charge.run == "joint"]
        assert (joint.phases, joint.status) == (released, "settled")


# --- one at a time


def test_two_runs_that_reserve_at_once_are_on_one_budget(folder, monkeypatch):
    """The first one waits for the disk, with nothing on record, while the second one begins. There
    is room for one of them."""
    cost = gaussian_costing(0.6 * FILTER.share)
    waiting, goes_on = threading.Event(), threading.Event()
    real, outcomes = os.fsync, {}

    def fsync(descriptor):
        if threading.current_thread().name == "first" and not goes_on.is_set():
            waiting.set()
            assert goes_on.wait(30)
        real(descriptor)

    def run():
        name = threading.current_thread().name
        try:
            reserve(folder, name, cost, terms=FILTER)
            outcomes[name] = "charged"
        except BudgetExceeded:
            outcomes[name] = "refused"

    folder.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    first, second = (threading.Thread(target=run, name=name) for name in ("first", "second"))
    first.start()
    assert waiting.wait(30)
    second.start()
    second.join(0.3)  # time for one that does not wait for the first
    goes_on.set()
    first.join(30)
    second.join(30)
    assert sorted(outcomes.values()) == ["charged", "refused"]
    (budget,) = read_budgets(folder)
    assert [outcomes[charge.run] for charge in budget.charges] == ["charged"]
