"""What a recipe charges to a budget: at which delta, for which records, and when it was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dp_accounting.pld  # noqa: F401 - here, or the first test would wait for it
import numpy as np
import pytest

from dpdist import pipeline
from dpdist.core.errors import UserError
from dpdist.privacy.budget import Charge, read_budgets
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.phases import GaussianReleases
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs import charging
from dpdist.runs.recipe import Recipe, parse_recipe

RECORDS: Any = SimpleNamespace(hashes=np.array([f"record {i:9}" for i in range(40)], "S16"))
NOISE = 4.0
PLAN = PrivacyPlan(40, (GaussianReleases(NOISE),), 1e-3)
CHARGE = Charge.for_plan("run", "a run", PLAN, PLAN.phases)


def recipe(**privacy: Any) -> Recipe:
    raw = {
        "name": "x",
        "data": {"name": "digits"},
        "model": "linear",
        "privacy": {"noise_multiplier": NOISE, "delta": 1e-3, **privacy},
        "training": {"batch_size": 10, "steps": 2, "learning_rate": 0.1},
    }
    return parse_recipe(raw, "r.yaml")


def exact(delta: float) -> float:
    return float(gaussian_epsilon(delta, NOISE))


@pytest.mark.parametrize(("given", "delta"), [({}, 1e-3), ({"budget_delta": 1e-6}, 1e-6)])
def test_a_ceiling_is_one_at_its_own_delta(tmp_path, given, delta):
    """As a filter, and as a composition: what fits at the run's delta may not fit at it."""
    limits = {"budget": str(tmp_path / "filter"), "budget_ceiling": 3.0, **given}
    ceiling = charging.budget_ceiling(recipe(**limits))
    assert ceiling is not None and (ceiling.epsilon, ceiling.delta) == (3.0, delta)
    composed = limits | {"budget": str(tmp_path / "sum"), "budget_composition": "non-adaptive"}
    low = recipe(**composed | {"budget_ceiling": 0.99 * exact(delta)})
    with pytest.raises(UserError, match="above their ceiling"):
        charging.reserve_charge(low, RECORDS, CHARGE, "r.yaml", enforce=True)
    assert charging.budget_ceiling(low) is None
    high = recipe(**composed | {"budget_ceiling": 1.01 * exact(delta)})
    charging.reserve_charge(high, RECORDS, CHARGE, "r.yaml", enforce=True)
    assert exact(1e-6) > 1.2 * exact(1e-3)  # else this test shows nothing


def test_a_run_that_its_budget_refuses_takes_no_name(tmp_path):
    """Or the recipe with a lower epsilon would be another one under a name that is in use."""
    above = recipe(delta=1e-4, budget=str(tmp_path / "budgets"), budget_ceiling=0.01)
    with pytest.raises(UserError, match=r"privacy\.budget"):
        pipeline.train_only(above, runs=tmp_path / "runs", executor="local")
    assert not (tmp_path / "runs" / "x").exists()


def test_every_record_is_on_the_budget(tmp_path):
    own = recipe(budget=str(tmp_path / "b"))
    charging.reserve_charge(own, RECORDS, CHARGE, "r.yaml", enforce=True)
    (budget,) = read_budgets(tmp_path / "b")
    assert len(budget.known) == len(RECORDS.hashes)
    last = SimpleNamespace(hashes=RECORDS.hashes[-1:])
    charging.reserve_charge(
        own, last, Charge.for_plan("two", "", PLAN, PLAN.phases), "r.yaml", enforce=True
    )
    (budget,) = read_budgets(tmp_path / "b")  # the same one: it knows the last record
    assert [charge.run for charge in budget.charges] == ["run", "two"]


@pytest.mark.parametrize("lost", [True, False])
def test_a_finished_run_is_settled_whether_or_not_it_was_reserved(tmp_path, lost):
    own = recipe(budget=str(tmp_path / "b"))
    if not lost:
        charging.reserve_charge(own, RECORDS, CHARGE, "r.yaml", enforce=True)
    released = Charge.for_plan("run", "a run", PLAN, (GaussianReleases(NOISE, 3),))
    charging.settle_charge(own, RECORDS, released, "r.yaml")
    (budget,) = read_budgets(tmp_path / "b")
    (charge,) = budget.charges
    assert (charge.phases, charge.status) == (released.phases, "settled")
