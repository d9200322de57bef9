"""Composition against the exact Gaussian profile, brute force, and other accountants."""

from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import privacy_loss_distribution as library
from support.mechanisms import smallest_delta

from dpdist.privacy import accounting
from dpdist.privacy.accounting import compose_rdp, compute_epsilon
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.pld import (
    CountsDpEvent,
    UnsupportedMechanismError,
    WorstOfDpEvent,
    compose_pld,
    library_relation,
    sampled_gaussian_pld,
    truncated_gaussian_pld,
)

BOTH = ["add-or-remove-one", "replace-one"]
GAUSS = dpa.GaussianDpEvent(1.1)
SAMPLED = dpa.PoissonSampledDpEvent(0.02, dpa.GaussianDpEvent(0.9))
TRUNCATED = dpa.TruncatedSubsampledGaussianDpEvent(1000, 0.02, 26, 0.9)
RESPONSE = dpa.RandomizedResponseDpEvent(0.5, 2)


@pytest.mark.parametrize(("adjacency", "sensitivity"), [(BOTH[0], 1.0), (BOTH[1], 2.0)])
@pytest.mark.parametrize("noise", [0.7, 1.1, 4.0])
def test_one_gaussian_matches_the_exact_profile_in_both_relations(adjacency, sensitivity, noise):
    event = dpa.GaussianDpEvent(noise)
    exact = float(gaussian_epsilon(1e-5, noise, sensitivity))
    value, name = compute_epsilon([event], 1e-5, adjacency)
    assert name.startswith("PLD")
    assert exact <= value * (1 + 1e-9) and value == pytest.approx(exact, rel=1e-3)
    by_rdp = compose_rdp(event, adjacency).get_epsilon(1e-5)
    assert exact <= by_rdp <= 1.15 * exact
    assert smallest_delta(event, adjacency, exact) == pytest.approx(1e-5, rel=1e-2)


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (SAMPLED, BOTH[0]),
        (dpa.ComposedDpEvent([SAMPLED, GAUSS]), BOTH[1]),
        (TRUNCATED, BOTH[1]),
        (RESPONSE, BOTH[1]),  # under replace-one only
    ],
)
def test_composing_n_times_is_composing_one_by_one(event, adjacency):
    many = compose_pld(dpa.SelfComposedDpEvent(event, 6), adjacency, 1e-3)
    single = library.identity(value_discretization_interval=1e-3)
    for _ in range(6):
        single = single.compose(compose_pld(event, adjacency, 1e-3))
    for delta in (1e-2, 1e-6):
        assert many.get_epsilon_for_delta(delta) == pytest.approx(
            single.get_epsilon_for_delta(delta), abs=0.02
        )


@pytest.mark.parametrize("adjacency", BOTH)
@pytest.mark.parametrize(("noise", "rate"), [(1.1, 0.004), (0.4, 0.3)])
def test_arrays_give_the_library_s_own_losses(adjacency, noise, rate):
    ours = sampled_gaussian_pld(noise, rate, adjacency, 1e-3)
    theirs = library.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=1e-3,
        neighboring_relation=library_relation(adjacency),
    )
    grid = np.array([-1.0, -0.01, 0.0, 0.01, 0.5, 2.0, 8.0])
    assert ours.get_delta_for_epsilon(grid) == pytest.approx(
        theirs.get_delta_for_epsilon(grid), abs=1e-13
    )


@pytest.mark.parametrize("adjacency", BOTH)
def test_truncated_sampling_gives_the_library_s_own_losses(adjacency):
    ours = truncated_gaussian_pld(1000, 0.9, 0.02, 26, adjacency, 1e-3)
    theirs = library.from_truncated_subsampled_gaussian_mechanism(
        1000, 0.02, 26, 0.9, 1e-3, neighboring_relation=library_relation(adjacency)
    )
    grid = np.array([-1.0, 0.0, 0.01, 0.5, 2.0, 8.0])
    assert ours.get_delta_for_epsilon(grid) == pytest.approx(
        theirs.get_delta_for_epsilon(grid), abs=1e-13
    )


def test_one_sampled_step_by_integration():
    """The hockey-stick divergence of the mixture against its base, both ways round."""
    rate, noise, at = 0.1, 0.8, 0.3
    x = np.linspace(-20, 21, 2_000_001)
    base = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    moved = np.exp(-((x - 1) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    mixed = (1 - rate) * base + rate * moved
    width = x[1] - x[0]
    remove = np.maximum(0, mixed - math.exp(at) * base).sum() * width
    add = np.maximum(0, base - math.exp(at) * mixed).sum() * width
    event = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise))
    assert smallest_delta(event, BOTH[0], at) == pytest.approx(max(remove, add), rel=1e-3)


def test_composition_by_sampling_the_privacy_loss():
    """Ten sampled steps; 5 standard errors fail about once in 1.7e6 correct runs."""
    rng = np.random.default_rng(11)
    rate, noise, at, runs, steps = 0.05, 0.8, 0.5, 200_000, 10
    loss = np.zeros(runs)
    for _ in range(steps):
        joined = rng.random(runs) < rate
        x = rng.normal(0, noise, runs) + joined
        loss += np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
    gain = np.maximum(0.0, -np.expm1(at - loss))
    event = dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise)), steps
    )
    error = gain.std() / math.sqrt(runs)
    assert abs(gain.mean() - smallest_delta(event, BOTH[0], at)) < 5 * error
    wrong = dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise * 1.1)), steps
    )
    assert abs(gain.mean() - smallest_delta(wrong, BOTH[0], at)) > 5 * error


def test_what_no_theorem_covers_is_refused_with_a_reason():
    fixed = dpa.SampledWithoutReplacementDpEvent(1000, 10, GAUSS)
    for compose, event, adjacency in (
        (compose_rdp, RepeatAndSelectDpEvent(SAMPLED, 5, 1.0), BOTH[1]),
        (compose_rdp, RepeatAndSelectDpEvent(TRUNCATED, 5, 1.0), BOTH[0]),
        (compose_rdp, RepeatAndSelectDpEvent(GAUSS, 1.5, -6.0), BOTH[0]),  # binomial
        (compose_pld, fixed, BOTH[0]),
        (compose_pld, dpa.UnsupportedDpEvent(), BOTH[0]),
    ):
        with pytest.raises(UnsupportedMechanismError):
            compose(event, adjacency)
    with pytest.raises(ValueError):
        compute_epsilon([GAUSS], 1e-5, "zero-out")


def test_full_batches_can_be_searched_under_replace_one():
    halved, doubled = (
        compute_epsilon([RepeatAndSelectDpEvent(dpa.GaussianDpEvent(noise), 5, 1.0)], 1e-5, each)
        for noise, each in zip((2.0, 4.0), BOTH, strict=True)
    )
    assert halved[0] == pytest.approx(doubled[0])


@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_epsilon_is_no_negative_number_and_falls_as_noise_rises(rate):
    """From epsilon in the thousands to none; with full batches it is the exact one throughout."""
    found = []
    for noise in (0.05, 0.3, 1.0, 4.0, 20.0, 300.0, 1e4):
        step = dpa.GaussianDpEvent(noise)
        one = step if rate == 1.0 else dpa.PoissonSampledDpEvent(rate, step)
        value, _ = compute_epsilon([dpa.SelfComposedDpEvent(one, 4)], 1e-5, BOTH[0])
        exact = float(gaussian_epsilon(1e-5, noise / 2)) if rate == 1.0 else 0.0
        assert max(0.0, exact) <= value * (1 + 1e-9) and math.isfinite(value), (noise, value)
        assert rate < 1.0 or value == pytest.approx(exact, rel=1e-3, abs=1e-3)
        found.append(value)
    assert found == sorted(found, reverse=True) and found[0] > 1 and found[-1] < 1e-3


def test_deltas_below_the_grid_s_resolution_use_renyi():
    event = dpa.SelfComposedDpEvent(SAMPLED, 100)
    value, name = compute_epsilon([event], 1e-30, BOTH[0])
    assert name.startswith("RDP") and math.isfinite(value)
    assert value > compute_epsilon([event], 1e-12, BOTH[0])[0]


def test_coarse_bounds_are_bounds():
    event = dpa.SelfComposedDpEvent(SAMPLED, 500)
    fine, _ = compute_epsilon([event], 1e-5, BOTH[0])
    coarse = accounting.coarse_epsilon([event], 1e-5, BOTH[0])
    assert fine <= coarse <= 1.05 * fine


def test_each_plan_has_its_own_coarse_bound():
    """Prices are kept by the plan that they are of."""
    few, many = (dpa.SelfComposedDpEvent(SAMPLED, steps) for steps in (50, 500))
    first = accounting.coarse_epsilon([few], 1e-5, BOTH[0])
    assert accounting.coarse_epsilon([many], 1e-5, BOTH[0]) > first
    assert accounting.coarse_epsilon([few], 1e-6, BOTH[0]) > first
    assert accounting.coarse_epsilon([few], 1e-5, BOTH[0]) == first


def test_a_search_that_costs_nearly_nothing_has_a_bound_by_rdp():
    """The library takes the logarithm of a divergence that rounds to zero."""

    def bound(event):
        return compose_rdp(event, BOTH[0], accounting.QUICK_ORDERS).get_epsilon(1e-5)

    tiny = dpa.PoissonSampledDpEvent(1e-6, dpa.GaussianDpEvent(1e4))
    search, twice = (RepeatAndSelectDpEvent(tiny, mean, math.inf) for mean in (3.0, 6.0))
    assert 0 < bound(search) < bound(dpa.SelfComposedDpEvent(search, 2)) < 0.02
    assert bound(search) < bound(twice) < 0.02
    assert bound(GAUSS) < bound(dpa.ComposedDpEvent([GAUSS, search])) < bound(GAUSS) + 0.3
    assert bound(WorstOfDpEvent([search, GAUSS])) == bound(GAUSS)


@pytest.mark.parametrize("adjacency", BOTH)
def test_a_floor_under_profiles_has_no_bound_by_rdp(adjacency):
    """A Renyi curve knows nothing of the floor: its bound would be too low."""
    floored = WorstOfDpEvent([GAUSS], 1e-7)
    compose_rdp(WorstOfDpEvent([GAUSS]), adjacency, accounting.QUICK_ORDERS)
    for event in (floored, dpa.SelfComposedDpEvent(floored, 2), dpa.ComposedDpEvent([floored])):
        with pytest.raises(UnsupportedMechanismError):
            compose_rdp(event, adjacency, accounting.QUICK_ORDERS)


def test_a_replaced_record_moves_counts_by_the_root_of_two():
    for adjacency, scale in ((BOTH[0], 1.0), (BOTH[1], math.sqrt(2))):
        counts = compose_rdp(CountsDpEvent(3.0), adjacency, accounting.QUICK_ORDERS)
        gauss = compose_rdp(dpa.GaussianDpEvent(3.0 / scale), BOTH[0], accounting.QUICK_ORDERS)
        assert counts.get_epsilon(1e-5) == pytest.approx(gauss.get_epsilon(1e-5), rel=1e-9)


# --- the floating-point floor of PLD ------------------------------------------------------------

TINY = [1e-5, 1e-10, 1e-12, 1e-13, 1e-15]


@pytest.mark.parametrize(("noise", "count"), [(1.0, 10_000), (2.0, 100_000)])
def test_epsilon_is_never_below_the_exact_one_however_small_delta_is(noise, count):
    """Rounding in the transforms: delta 1.46e-13 where 1e-13 was stated, 2e-12 for 100,000 steps.

    Sampling at a rate of almost 1 is composed step by step, and its profile is the full batch's.
    """
    step = dpa.PoissonSampledDpEvent(1 - 2.0**-50, dpa.GaussianDpEvent(noise * math.sqrt(count)))
    event = dpa.SelfComposedDpEvent(step, count)
    for delta in TINY:
        value, name = compute_epsilon([event], delta, BOTH[0])
        exact = float(gaussian_epsilon(delta, noise))
        assert exact * (1 - 1e-12) <= value <= 1.15 * exact, (delta, name)
    assert name.startswith("RDP")
    with pytest.raises(UnsupportedMechanismError):
        accounting.coarse_epsilon([event], 1e-15, BOTH[0])


def test_where_neither_accountant_resolves_delta_nothing_is_stated():
    event = dpa.SelfComposedDpEvent(TRUNCATED, 10)
    value, _ = compute_epsilon([event], 1e-14, BOTH[0])
    assert math.isinf(value)
    assert math.isfinite(compute_epsilon([event], 1e-11, BOTH[0])[0])
