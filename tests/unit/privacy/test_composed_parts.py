"""Searches and choices composed several times, and parts without privacy inside a composition."""

from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpdist.privacy.accounting import QUICK_ORDERS, compose_rdp, compute_epsilon
from dpdist.privacy.pld import WorstOfDpEvent, compose_pld, compute_privacy_loss

GRID = 1e-3
GAUSS = dpa.GaussianDpEvent(8.0)
SEARCHES = {
    "geometric": RepeatAndSelectDpEvent(GAUSS, 5, 1.0),
    "logarithmic": RepeatAndSelectDpEvent(GAUSS, 5, 0.0),
    "negative": RepeatAndSelectDpEvent(GAUSS, 5, -0.5),
    "poisson": RepeatAndSelectDpEvent(GAUSS, 5, math.inf),
    "binomial": RepeatAndSelectDpEvent(GAUSS, 4.5, -6.0),
}
WORST = {
    "worst": WorstOfDpEvent(
        [dpa.GaussianDpEvent(6.0), dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(3.0))]
    ),
    "worst above a floor": WorstOfDpEvent([GAUSS], 1e-7),
    "a search of either": RepeatAndSelectDpEvent(
        WorstOfDpEvent(
            [dpa.GaussianDpEvent(8.0), dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(4.0))]
        ),
        3,
        1.0,
    ),
}
PARTS = SEARCHES | WORST
WITH_CURVES = [name for name in PARTS if name not in ("binomial", "worst above a floor")]


def pld(event: dpa.DpEvent):
    found = compose_pld(event, "add-or-remove-one", GRID)
    assert found is not None
    return found


def repetitions(event: dpa.DpEvent, times: int) -> list[dpa.DpEvent]:
    """The same mechanism so many times, said in every way."""
    return [
        dpa.SelfComposedDpEvent(event, times),
        dpa.ComposedDpEvent([event] * times),
        dpa.ComposedDpEvent([event, GAUSS, *[event] * (times - 1)]),
        dpa.SelfComposedDpEvent(dpa.ComposedDpEvent([event]), times),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_by_loss_n_times_is_composed_n_times(name):
    """Against the library's composition of what one costs."""
    one, three = pld(PARTS[name]), pld(PARTS[name])
    for _ in range(2):
        three = three.compose(one)
    for event in repetitions(PARTS[name], 3):
        for delta in (1e-3, 1e-5):
            wanted = three.get_epsilon_for_delta(delta)
            assert pld(event).get_epsilon_for_delta(delta) >= wanted - 1e-6
    assert three.get_epsilon_for_delta(1e-5) > 1.3 * one.get_epsilon_for_delta(1e-5)


@pytest.mark.parametrize("name", WITH_CURVES)
def test_by_renyi_n_times_is_n_times_the_curve(name):
    def curve(event: dpa.DpEvent) -> np.ndarray:
        return compose_rdp(event, "add-or-remove-one", QUICK_ORDERS).rdp

    for event in repetitions(PARTS[name], 3):
        assert (curve(event) >= 3 * curve(PARTS[name]) * (1 - 1e-12)).all()


def test_a_loss_composed_n_times_is_charged_n_times_its_rounding():
    for event in PARTS.values():
        one, many = (
            compute_privacy_loss(each, "add-or-remove-one", GRID).rounding
            for each in (event, dpa.SelfComposedDpEvent(event, 50))
        )
        assert many == pytest.approx(50 * one)


# --- parts without privacy

BARE = {
    "no theorem": dpa.NonPrivateDpEvent(),
    "no noise": dpa.GaussianDpEvent(0.0),
    "no noise in a sample": dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(0.0)),
    "no noise in a capped sample": dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 0.0),
    "the truth of a response": dpa.RandomizedResponseDpEvent(0.0, 2),
    "the best of what is told": RepeatAndSelectDpEvent(dpa.NonPrivateDpEvent(), 3, 1.0),
}


@pytest.mark.parametrize("name", BARE)
def test_one_part_without_privacy_is_all_of_it(name):
    bare = BARE[name]
    mixed = [
        dpa.ComposedDpEvent([GAUSS, bare]),
        dpa.ComposedDpEvent([bare, GAUSS]),
        dpa.ComposedDpEvent([GAUSS, dpa.SelfComposedDpEvent(bare, 3), GAUSS]),
        WorstOfDpEvent([GAUSS, bare]),
        WorstOfDpEvent([bare, GAUSS], 1e-7),
        dpa.SelfComposedDpEvent(WorstOfDpEvent([dpa.ComposedDpEvent([GAUSS, bare]), GAUSS]), 2),
        RepeatAndSelectDpEvent(dpa.ComposedDpEvent([GAUSS, bare]), 3, 1.0),
    ]
    for event in mixed:
        loss = compute_privacy_loss(event, "replace-one", GRID)
        assert math.isinf(loss.epsilon(1e-5)) and loss.delta(10.0) == 1.0
        assert math.isinf(compute_epsilon([event], 1e-5, "replace-one")[0])
        assert math.isinf(compute_epsilon([GAUSS, event], 1e-5, "replace-one")[0])
