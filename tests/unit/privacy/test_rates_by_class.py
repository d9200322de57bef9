"""Sampling rates by class cost what the largest costs: by integration and in small cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpdist.privacy.class_rates import ClassRates
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan, UserUnit, parse_plan

RARE = ClassRates.for_batch([1.0, 4.0], [900, 100], 0.13)  # 0.1 and 0.4


def plan_of(
    rates: ClassRates, noise: float, steps: int = 1, adjacency: str = "add-or-remove-one"
) -> PrivacyPlan:
    phase = GaussianSteps(steps, noise, rates.largest, None, rates)
    return PrivacyPlan(1000, (phase,), 1e-4, adjacency=adjacency)


# --- the rates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "counts", "mean", "rates"),
    [
        ([1.0, 4.0], [900, 100], 0.13, (0.1, 0.4)),
        ([1.0, 2.0, 100.0], [100, 100, 100], 0.7, (1.1 / 3, 2.2 / 3, 1.0)),  # one is capped
        ([1.0, 2.0], [10, 10], 1.0, (1.0, 1.0)),
    ],
)
def test_rates_are_in_proportion_and_make_the_expected_batch(weights, counts, mean, rates):
    found = ClassRates.for_batch(weights, counts, mean)
    assert found.rates == pytest.approx(rates, rel=1e-12)
    assert found.mean == pytest.approx(mean, rel=1e-12)
    assert found.largest == max(found.rates)


def test_importance_weights_undo_the_rates_and_have_mean_one_over_a_step():
    weights = RARE.importance_weights
    products = [rate * weight for rate, weight in zip(RARE.rates, weights, strict=True)]
    assert products == pytest.approx([RARE.mean] * 2)  # what each record counts for, in the mean


def test_rates_that_no_batch_can_have_are_refused():
    with pytest.raises(ValueError):  # the rare class alone is the batch
        ClassRates.for_batch([1e-9, 1e9, 1e9], [1, 5, 5], 10 / 11)
    for rates, counts in (((0.1,), (1, 2)), ((0.0,), (1,)), ((1.1,), (1,)), ((0.1,), (0,))):
        with pytest.raises(ValueError):
            ClassRates(rates, counts)


def test_steps_must_be_priced_at_the_largest_rate():
    for rate, cap in ((RARE.mean, None), (0.5, None), (RARE.largest, 500)):
        with pytest.raises(ValueError):
            GaussianSteps(1, 1.0, rate, cap, RARE)
    phase = GaussianSteps(1, 1.0, RARE.largest, None, RARE)
    with pytest.raises(ValueError):
        PrivacyPlan(1000, (phase,), 1e-4, user=UserUnit("patient", 2))


def test_the_plan_divides_by_the_public_expected_batch_and_is_read_back():
    plan = plan_of(RARE, 1.0, 7)
    step = plan.step(3)
    assert (step.sample_rate, step.expected_batch) == (RARE.largest, 130.0)
    assert step.rates_by_class == RARE.rates and step.most_sampled_class == 1
    assert step.mean_rate == RARE.mean
    read = parse_plan(plan.to_dict(), "test")
    assert read == plan and read.fingerprint() == plan.fingerprint()
    other = plan_of(ClassRates(RARE.rates, (100, 900)), 1.0, 7)
    assert other.fingerprint() != plan.fingerprint()
    assert any("class counts that are public" in line for line in plan.assumptions)


def test_a_plan_without_rates_keeps_its_form_and_costs_what_equal_rates_cost():
    plain = PrivacyPlan.dp_sgd(
        records=1000, batch_size=200, noise_multiplier=1.0, steps=5, delta=1e-4
    )
    assert "class_rates" not in plain.phases[0].to_dict()
    assert repr(plain.step(0)).endswith("batch_cap=None)")  # keys of an audit are made of it
    equal = plan_of(ClassRates.for_batch([1.0, 1.0], [500, 500], 0.2), 1.0, 5)
    assert equal.guarantee().epsilon == plain.guarantee().epsilon


def test_the_price_is_that_of_the_largest_rate():
    rare, steps = plan_of(RARE, 1.0, 50), {"noise_multiplier": 1.0, "steps": 50, "delta": 1e-4}
    priced = {
        size: PrivacyPlan.dp_sgd(records=1000, batch_size=size, **steps).guarantee().epsilon
        for size in (130, 400)
    }
    assert rare.guarantee().epsilon == pytest.approx(priced[400], rel=1e-9)
    assert rare.guarantee().epsilon > 2 * priced[130]


# --- one step, by integration -------------------------------------------------------------------

X = np.linspace(-12, 12, 4_801)
DELTAS = (0.3, 0.1, 0.03, 0.01, 1e-3)


def density(rate: float, shift: float, noise: float) -> np.ndarray:
    """Return the density of the noisy part of one record along a line: (1 - q) N(0) + q N(u)."""
    return (1 - rate) * norm.pdf(X, 0, noise) + rate * norm.pdf(X, shift, noise)


def hockey_stick(first: np.ndarray, second: np.ndarray, epsilon: float, cell: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum() * cell)


def prices(plan: PrivacyPlan) -> list[tuple[float, float]]:
    return [(plan.guarantee(delta=delta).epsilon, delta) for delta in DELTAS]


def test_one_step_of_a_record_of_any_rate_is_within_the_price():
    noise = 0.6
    plan, cell = plan_of(RARE, noise), X[1] - X[0]
    for rate, shift in itertools.product((0.05, *RARE.rates, 0.25), (-1.0, -0.4, 0.7, 1.0)):
        with_it, without = density(rate, shift, noise), density(0, 0, noise)
        for epsilon, delta in prices(plan):
            for pair in ((with_it, without), (without, with_it)):
                assert hockey_stick(*pair, epsilon, cell) <= delta * (1 + 1e-3)
    # The largest rate is what is paid for: at the price of the mean rate its record is not covered.
    mean = PrivacyPlan.dp_sgd(
        records=1000, batch_size=130, noise_multiplier=noise, steps=1, delta=1e-4
    )
    epsilon = mean.guarantee(delta=0.01).epsilon
    with_it, without = density(RARE.largest, 1.0, noise), density(0, 0, noise)
    assert hockey_stick(with_it, without, epsilon, cell) > 0.02


def test_one_step_of_two_records_of_different_rates_is_within_the_price_of_replacing():
    noise = 0.6
    plan, cell = plan_of(RARE, noise, adjacency="replace-one"), X[1] - X[0]
    priced, worst = prices(plan), 0.0
    rates, shifts = (0.05, *RARE.rates, 0.25), (-1.0, -0.5, 0.0, 0.5, 1.0)
    for q, other, u, v in itertools.product(rates, rates, shifts, shifts):
        pair = density(q, u, noise), density(other, v, noise)
        for epsilon, delta in priced:
            found = hockey_stick(*pair, epsilon, cell)
            worst = max(worst, found / delta)
            assert found <= delta * (1 + 1e-3)
    assert worst > 0.99  # attained where both have the largest rate: the price is no larger
    lower = plan_of(ClassRates((0.1, 0.1), (1, 1)), noise, adjacency="replace-one")
    epsilon = lower.guarantee(delta=0.01).epsilon
    pair = density(RARE.largest, -1.0, noise), density(0.1, 1.0, noise)
    assert hockey_stick(*pair, epsilon, cell) > 0.02


def test_replacing_in_two_dimensions_is_no_worse_than_along_a_line():
    """The two gradients need not be opposite: any two of the clip's norm, at two rates."""
    noise, axis = 0.7, np.linspace(-5.5, 5.5, 221)
    x, y = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2
    plan = plan_of(RARE, noise, adjacency="replace-one")

    def plane(rate: float, angle: float) -> np.ndarray:
        center = math.cos(angle), math.sin(angle)
        at = norm.pdf(x, center[0], noise) * norm.pdf(y, center[1], noise)
        return (1 - rate) * norm.pdf(x, 0, noise) * norm.pdf(y, 0, noise) + rate * at

    for (q, other), angle in itertools.product(
        [(0.4, 0.4), (0.4, 0.1), (0.1, 0.4)], np.linspace(0, math.pi, 5)
    ):
        pair = plane(q, 0.0), plane(other, angle)
        for epsilon, delta in prices(plan):
            assert hockey_stick(*pair, epsilon, cell) <= delta * (1 + 5e-3)


# --- small data sets, all their samples and several steps ---------------------------------------

LINE = np.linspace(-9, 10, 381)


def step_density(records: list[tuple[int, float]], noise: float) -> np.ndarray:
    """Return the density of a noisy sum over every possible sample of records (class, gradient)."""
    found = np.zeros_like(LINE)
    for joined in itertools.product((False, True), repeat=len(records)):
        chance, total = 1.0, 0.0
        for (kind, value), there in zip(records, joined, strict=True):
            chance *= RARE.rates[kind] if there else 1 - RARE.rates[kind]
            total += value * there
        found += chance * norm.pdf(LINE, total, noise)
    return found


def neighbors_of(records: list[tuple[int, float]], relation: str) -> list[list[tuple[int, float]]]:
    """Return the data sets in which the last record is away, or any other record stands for it."""
    if relation == "add-or-remove-one":
        return [records[:-1]]
    every = [(kind, value) for kind in (0, 1) for value in (-1.0, 0.0, 1.0)]
    return [[*records[:-1], other] for other in every]


DATA_SETS = [
    [(0, 1.0), (0, -1.0), (1, 1.0)],
    [(1, 1.0), (0, 0.3), (0, 1.0)],
    [(1, -1.0), (1, 1.0), (1, -1.0)],
]


@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_every_sample_of_a_small_data_set_is_within_the_printed_epsilon(relation, adaptive):
    """Two steps. The adversary may turn all gradients round where the first sum is negative."""
    noise, cell = 1.0, (LINE[1] - LINE[0]) ** 2
    plan = plan_of(RARE, noise, 2, relation)

    def released(records: list[tuple[int, float]]) -> np.ndarray:
        first = step_density(records, noise)
        turned = step_density([(kind, -value) for kind, value in records], noise)
        return first[:, None] * np.where(adaptive & (LINE[:, None] < 0), turned, first)

    for records in DATA_SETS:
        own = released(records)
        for other in neighbors_of(records, relation):
            for epsilon, delta in prices(plan)[1:4]:
                for pair in ((own, released(other)), (released(other), own)):
                    assert hockey_stick(*pair, epsilon, cell) <= delta * (1 + 5e-3)


def test_rates_that_one_record_moves_are_not_covered():
    """Rates from private counts move the sampling of all others: the price would be too small."""
    noise, crowd = 1.0, 40
    fixed = plan_of(ClassRates((0.05, 0.5), (50, 5)), noise)

    def total(rate: float) -> np.ndarray:  # of the other records of the class, each of gradient 1
        joined = np.arange(crowd + 1)
        line, chance = np.linspace(-8, crowd + 8, 4001), binom.pmf(joined, crowd, rate)
        return sum(p * norm.pdf(line, k, noise) for k, p in zip(joined, chance, strict=True))

    cell = (crowd + 16) / 4000
    # One record of the rare class among 1 or 2: its class's rate halves, and the crowd's doubles.
    pair = total(0.25), total(0.5)
    epsilon = fixed.guarantee(delta=0.01).epsilon
    assert hockey_stick(*pair, epsilon, cell) > 0.5
