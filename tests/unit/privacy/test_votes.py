"""Noisy votes: what they cost, beside what is printed, and that all of it is paid once."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dpdist.methods.pate import PATE, pate_claim
from dpdist.papers.pate.claims import confident_gnmax_epsilon
from dpdist.privacy.phases import GaussianSteps, NoisyVotes
from dpdist.privacy.plan import PrivacyPlan

METHOD = {
    "name": "pate", "teachers": 5, "public": {"data": "digits"}, "queries": 20, "answers": 12,
    "threshold": 1.0, "screening": 0.2,
}  # fmt: skip


def method(**more: Any) -> PATE:
    return PATE(**(METHOD | more))


def plan_of(noise: float, one: PATE | None = None, **more: Any) -> PrivacyPlan:
    phases = (one or method()).cost(GaussianSteps(4, noise, 0.1))
    return PrivacyPlan(1100, phases, 1e-5, math.inf, nominal=True, **more)


# DPlis, Table 12 (delta 1e-5; thresholds 200): votes' noise, queries, answers, printed, exact.
CELLS = [(40, 4000, 1323, 7.44, 6.08), (100, 16000, 5521, 6.68, 5.55)]


@pytest.mark.parametrize(("std", "queries", "answers", "printed", "exact"), CELLS)
def test_published_settings_cost_less_than_printed(
    std: float, queries: int, answers: int, printed: float, exact: float
) -> None:
    """With the realized number of answers as a cap fixed beforehand."""
    first, second = queries / 200**2, 2 * answers / std**2
    one = method(queries=queries, answers=answers, screening=first / (first + second))
    plan = plan_of(1 / math.sqrt(first + second), one)
    phase: Any = plan.phases[0]
    assert phase.screen_noise == pytest.approx(200) and phase.vote_noise == pytest.approx(std)
    found = plan.guarantee()
    assert found.epsilon == pytest.approx(exact, abs=0.006)
    assert found.epsilon == pytest.approx(
        confident_gnmax_epsilon(1e-5, queries, answers, 200, std), rel=1e-3
    )
    claim = one.claim(plan, found)
    assert claim is not None and claim.claimed is not None
    # Printed costs are a little above what Renyi bounds say without a look at the votes.
    claimed = claim.claimed.epsilon
    assert claimed == pytest.approx(pate_claim(queries, answers, 200, std).epsilon)
    assert max(exact, 0.96 * printed) < claimed < printed


def test_the_whole_is_paid_from_the_beginning_and_once() -> None:
    plan = plan_of(1.3)
    assert plan.steps == 4 and plan.num_queries == 1
    assert plan.guarantee(0).epsilon == plan.guarantee().epsilon
    assert plan.executed_phases([400]) == plan.phases
    assert PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    other_split = method(queries=900, answers=40, screening=0.7)  # of the same mu
    assert plan_of(1.3, other_split).guarantee() == plan.guarantee()
    # A record in place of another changes two teachers.
    replaced = plan_of(1.3, adjacency="replace-one").guarantee().epsilon
    assert replaced == pytest.approx(plan_of(0.65).guarantee().epsilon, rel=1e-3)
    unscreened = method(threshold=0.0, screening=0.0, answers=20)
    phase: Any = plan_of(1.3, unscreened).phases[0]
    assert math.isinf(phase.screen_noise) and phase.vote_noise == pytest.approx(1.3 * math.sqrt(40))
    assert unscreened.claim(plan_of(0.0, unscreened), plan.guarantee()) is None
    for wrong in ({"queries": 0}, {"screening": 1.0}, {"noise_multiplier": -1.0}):
        with pytest.raises(ValueError):
            NoisyVotes(**(vars(phase) | wrong))
