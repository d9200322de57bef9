"""The price of the best of K runs: published cases, exact orderings, what would be too small."""

from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from hypothesis import Phase, given
from hypothesis import strategies as st
from scipy.stats import norm
from support.hypothesis_settings import hypothesis_settings

from dpdist.privacy import mechanisms, pld
from dpdist.privacy.calibration import search_guarantee
from dpdist.privacy.phases import GaussianSteps, NonPrivate, RepeatAndSelect
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.pld import compose_pld, selection_pld
from dpdist.privacy.profiles import (
    loss_directions,
    pld_from_profiles,
    pointwise_maximum,
    profile_exceeds,
)
from dpdist.privacy.selection import TrialDistribution

GEOMETRIC, LOGARITHMIC, POISSON, HALF = 1.0, 0.0, math.inf, -0.5


def generating(distribution: TrialDistribution):
    """E s^K, by its closed form."""
    if math.isinf(distribution.shape):
        return lambda s: np.exp(distribution.mean * (s - 1))
    if distribution.shape <= -1:
        return lambda s: (
            (1 + distribution.mean / -distribution.shape * (s - 1)) ** -distribution.shape
        )
    if distribution.mean == 1:
        return lambda s: s
    gamma = distribution.gamma
    if distribution.shape == 0:
        return lambda s: np.log1p(-(1 - gamma) * s) / math.log(gamma)
    return lambda s: (
        ((1 - (1 - gamma) * s) ** -distribution.shape - 1) / (gamma**-distribution.shape - 1)
    )


def exact_delta(order, q, other, distribution, epsilon):
    """The hockey stick of a search over finitely many outcomes; order: best first.

    P(best is y) = phi(1 - Q(better)) - phi(1 - Q(better or y)), exactly; K = 0 is an outcome too.
    """
    phi = generating(distribution)

    def best(p):
        reached = np.minimum(np.concatenate([[0.0], np.cumsum(p[order])]), 1.0)
        return np.append(-np.diff(phi(1 - reached)), phi(0.0))

    return float(np.maximum(best(q) - math.exp(epsilon) * best(other), 0).sum())


def loss_of(q, other, grid=1e-3, reach=12.0):
    """A pessimistic loss distribution of a pair on finitely many outcomes."""
    steps = np.arange(0, round(reach / grid) + 1)
    x = np.exp(steps * grid)[:, None]
    sides = [np.maximum(q - x * other, 0).sum(1), np.maximum(other - x * q, 0).sum(1)]
    return pld_from_profiles(grid, steps, sides)


def sampled(noise, rate, steps):
    one = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise))
    return compose_pld(dpa.SelfComposedDpEvent(one, steps), "add-or-remove-one")


# --- published cases and independent prototypes


def test_the_example_of_the_docs():
    loss = selection_pld(sampled(1.152, 512 / 10800, 150), TrialDistribution(5, 0.0))
    assert loss.get_epsilon_for_delta(1e-5) == pytest.approx(3.80, rel=0.01)
    loss = selection_pld(sampled(1.325, 512 / 10800, 150), TrialDistribution(5, 0.0))
    assert loss.get_epsilon_for_delta(1e-5) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize(("epsilon", "mean"), [(1.0, 10), (2.0, 200)])
def test_pure_privacy_under_the_geometric_law(epsilon, mean):
    """epsilon + 2 ln((g + e^epsilon) / (1 + g e^epsilon)), g = 1/mean; 3 epsilon in the limit.

    Randomized response attains the worst pair, with a randomized ordering.
    """
    p = 1 / (1 + math.exp(-epsilon))
    pair = np.array([p, 1 - p])
    g, e = 1 / mean, math.exp(epsilon)
    expected = epsilon + 2 * math.log((g + e) / (1 + g * e))
    loss = loss_of(pair, pair[::-1], grid=1e-4, reach=1.2 * epsilon)
    found = selection_pld(loss, TrialDistribution(mean, GEOMETRIC))
    assert found.get_epsilon_for_delta(1e-9) == pytest.approx(expected, rel=2e-3)
    assert expected < 3 * epsilon


# --- tight and sound against exact orderings of a Gaussian pair


@pytest.mark.parametrize(
    ("mean", "shape"), [(10, 0.0), (10, 1.0), (10, math.inf), (10, -0.5), (50, 1.0), (4.5, -6.0)]
)
def test_an_adversarial_ordering_reaches_the_bound(mean, shape):
    """Outcomes that speak for the neighbor are best, then the others from either end: within 3 %
    of the bound's epsilon, and never beyond it."""
    distribution, delta, shift, cells = TrialDistribution(mean, shape), 1e-5, 0.5, 3000
    x = np.linspace(-9, 9.5, cells + 1)
    q, other = np.diff(norm.cdf(x)), np.diff(norm.cdf(x - shift))
    bound = selection_pld(
        library.from_gaussian_mechanism(1 / shift), distribution
    ).get_epsilon_for_delta(delta)
    index = np.arange(cells)
    orders = [index, index[::-1]]
    for cut in np.linspace(-4, 5, 31):
        high, low = index[x[:-1] > cut], index[x[:-1] <= cut]
        orders += [np.concatenate([high, low]), np.concatenate([low, high[::-1]])]

    def worst(epsilon):
        pairs = ((q, other), (other, q))
        return max(exact_delta(order, *p, distribution, epsilon) for order in orders for p in pairs)

    assert worst(0.97 * bound) >= delta and worst(bound) <= delta * (1 + 1e-6)


pairs = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=7).flatmap(
    lambda q: st.tuples(
        st.just(q), st.lists(st.floats(0.0, 1.0), min_size=len(q), max_size=len(q))
    ).filter(lambda pair: sum(pair[1]) > 0.1)
)


@hypothesis_settings(60, phases=[Phase.explicit, Phase.generate])
@given(
    pairs,
    st.floats(1.0, 100.0),
    st.sampled_from([GEOMETRIC, LOGARITHMIC, POISSON, HALF, 2.5, -0.9, -100.0]),
    st.floats(-3.0, 6.0),
    st.randoms(use_true_random=False),
)
def test_no_ordering_of_any_pair_is_beyond_the_bound(pair, mean, shape, epsilon, random):
    """Also where the neighbor cannot give an outcome (infinite loss), and below epsilon 0."""
    q, other = (np.array(p) / sum(p) for p in pair)
    distribution = TrialDistribution(mean, shape)
    loss = selection_pld(loss_of(q, other, grid=5e-3), distribution)
    for _ in range(5):
        order = np.array(random.sample(range(len(q)), len(q)))
        ahead = exact_delta(order, q, other, distribution, epsilon)
        back = exact_delta(order, other, q, distribution, epsilon)
        assert loss._pmf_remove.get_delta_for_epsilon(epsilon) >= ahead - 1e-9
        assert loss._pmf_add.get_delta_for_epsilon(epsilon) >= back - 1e-9


# --- what must be charged


def infinite(mass):
    probabilities = {-1000: (1 - mass) / (1 + math.e), 1000: (1 - mass) * math.e / (1 + math.e)}
    return PrivacyLossDistribution(pld_pmf.SparsePLDPmf(probabilities, 1e-3, mass, True))


@pytest.mark.parametrize("shape", [GEOMETRIC, LOGARITHMIC, POISSON])
def test_an_infinite_loss_costs_the_mean_number_of_runs(shape):
    found = selection_pld(infinite(1e-6), TrialDistribution(20, shape))
    assert found.get_delta_for_epsilon(300.0) == pytest.approx(2e-5, rel=1e-3)
    assert math.isinf(found.get_epsilon_for_delta(1.9e-5))


def test_the_dearer_direction_counts():
    cheap, dear = (
        loss_directions(library.from_gaussian_mechanism(s, value_discretization_interval=1e-3))[0]
        for s in (4.0, 1.0)
    )
    steps = np.arange(0, 20_000)
    sides = [cheap.profile_at(steps), dear.profile_at(steps)]

    def price(of):
        loss = pld_from_profiles(1e-3, steps, of)
        return selection_pld(loss, TrialDistribution(10, GEOMETRIC)).get_epsilon_for_delta(1e-5)

    assert price(sides) == pytest.approx(price(sides[::-1]), rel=1e-9)
    assert price(sides) > 1.5 * price(sides[:1])


def test_no_run_at_all_is_an_outcome_too():
    """With a distribution that seldom runs at all, the search's losses are mostly zero."""
    t = np.linspace(0, 1, 20_001)
    for mean, shape in ((1, POISSON), (1.5, -3.0), (3, LOGARITHMIC), (1.5, GEOMETRIC), (2, HALF)):
        tried = TrialDistribution(mean, shape)
        total = np.trapezoid(tried.pgf_derivative(t), t)
        assert total == pytest.approx(1 - tried.zero_probability, abs=1e-6)
    distribution = TrialDistribution(1, POISSON)
    found = selection_pld(library.from_gaussian_mechanism(1.0), distribution)
    for losses in loss_directions(found):
        for epsilon in (-0.5, -2.0, -4.0):
            value = float(losses.profile_at(np.array([round(epsilon / losses.grid)]))[0])
            assert value >= distribution.zero_probability * (1 - math.exp(epsilon))
        assert losses.probabilities.sum() + losses.infinity_mass == pytest.approx(1, abs=1e-9)


# --- profiles


def test_a_coarser_grid_says_more_between_its_points_only():
    for side in loss_directions(sampled(0.9, 0.02, 40)):
        coarse = side.coarsen(37)
        assert coarse.grid == 37 * side.grid and len(coarse.probabilities) < 10_000
        both = (side, coarse)
        masses = [
            (one.probabilities.sum(), one.reverse_probabilities.sum(), one.infinity_mass)
            for one in both
        ]
        np.testing.assert_allclose(*masses, rtol=1e-12)
        np.testing.assert_allclose(coarse.profile(), side.profile_at(37 * coarse.steps), rtol=1e-9)
        fine = np.arange(0, 20_000, 7)
        x = np.exp(fine * side.grid)
        own = np.interp(x, np.exp(coarse.steps * coarse.grid), coarse.profile())
        assert (own >= side.profile_at(fine) * (1 - 1e-12)).all()


def test_mass_above_one_is_taken_from_the_lowest_losses():
    """Composing by Fourier transforms leaves some: above them nothing changes."""
    loss = sampled(1.152, 512 / 10800, 150)
    mass = loss._pmf_add._probs.sum() + loss._pmf_add._infinity_mass
    assert mass > 1 + 1e-6  # else this test shows nothing
    side = loss_directions(loss)[1]
    assert side.probabilities.sum() + side.infinity_mass == pytest.approx(1, abs=1e-12)
    for epsilon in (0.0, 1.0, 3.0):
        at = side.profile_at(np.array([round(epsilon / side.grid)]))[0]
        assert at == pytest.approx(loss._pmf_add.get_delta_for_epsilon(epsilon), abs=1e-13)


def test_the_guarantee_is_the_loss_s_with_its_rounding():
    distribution = TrialDistribution(5, LOGARITHMIC)
    steps = (GaussianSteps(150, 1.152, 512 / 10800),)
    found = search_guarantee(steps, distribution, records=10800, delta=1e-5)
    loss = selection_pld(sampled(1.152, 512 / 10800, 150), distribution)
    assert found.epsilon == pytest.approx(loss.get_epsilon_for_delta(1e-5), rel=1e-6)
    # The rounding of one run's distribution counts E[K] times: here it is all of delta.
    plan = PrivacyPlan(
        10800, (RepeatAndSelect(steps, distribution.mean, distribution.shape),), 1e-5
    )
    priced = pld.compute_privacy_loss(plan.event(), plan.adjacency, 1e-4)
    assert math.isinf(priced.epsilon(150 * 5 * 1e-15))
    assert math.isfinite(priced.epsilon(151 * 5 * 1e-12))
    none = search_guarantee((NonPrivate("a test"),), distribution, records=10, delta=1e-5)
    assert math.isinf(none.epsilon)


def test_relations_and_caps_that_have_no_renyi_bound():
    def price(cap=None, **more):
        steps, tried = (GaussianSteps(20, 1.5, 0.05, cap),), TrialDistribution(3, POISSON)
        return search_guarantee(steps, tried, records=1000, delta=1e-5, **more).epsilon

    assert price() < price(80) < price(adjacency="replace-one") < 10


def test_the_maximum_covers_curves_that_cross():
    """Two full batches at noise 2.298 lie below 150 steps of rate 512/10,800 at noise 1.152 at
    every Renyi order to 16, and have the larger delta(0): Renyi curves do not order profiles."""
    steps, full = sampled(1.152, 512 / 10800, 150), sampled(2.298 / math.sqrt(2), 1.0, 1)
    assert full.get_delta_for_epsilon(0.0) > 1.04 * steps.get_delta_for_epsilon(0.0)
    assert profile_exceeds(full, steps) and profile_exceeds(steps, full)
    both = pointwise_maximum([steps, full])
    assert not profile_exceeds(full, full) and profile_exceeds(full, full, 1e-12)
    for epsilon in (0.0, 0.5, 1.0, 3.0):
        larger = max(steps.get_delta_for_epsilon(epsilon), full.get_delta_for_epsilon(epsilon))
        assert both.get_delta_for_epsilon(epsilon) == pytest.approx(larger, rel=1e-5)


def test_an_addition_counts_as_a_removal_does():
    """Larger batches at more noise: below for a removal, above for an addition."""
    base, larger = sampled(0.9945, 200 / 9000, 100), sampled(2.0, 400 / 9000, 100)
    at = np.arange(0.0, 1.6, 0.05)
    below = [
        np.maximum(side(base).get_delta_for_epsilon(at), 1e-9)
        - side(larger).get_delta_for_epsilon(at)
        for side in (lambda loss: loss._pmf_remove, lambda loss: loss._pmf_add)
    ]
    assert below[0].min() > 0 > below[1].min()
    assert profile_exceeds(larger, pointwise_maximum([base], 1e-9))


def test_a_floor_is_paid_and_covers_what_lies_below():
    steps = sampled(1.152, 512 / 10800, 150)
    floored = pointwise_maximum([steps], 1e-7)
    for epsilon in (0.0, 2.0, 8.0):
        wanted = max(steps.get_delta_for_epsilon(epsilon), 1e-7)
        assert floored.get_delta_for_epsilon(epsilon) == pytest.approx(wanted, rel=1e-5)
    # More steps at more noise: a little above in the tail alone, below the floor.
    other = sampled(1.22, 512 / 10800, 165)
    assert profile_exceeds(other, steps) and not profile_exceeds(other, floored)


def test_any_number_of_points_is_sound(monkeypatch):
    """Between two points the bound takes the worse end of each term: fewer points, a larger one."""
    loss, distribution = library.from_gaussian_mechanism(1.0), TrialDistribution(4.5, -6.0)
    fine = selection_pld(loss, distribution)
    monkeypatch.setattr("dpdist.privacy.pld._POINTS", 12)
    rough = selection_pld(loss, distribution)
    for epsilon in (0.5, 2.0, 4.0):
        assert rough.get_delta_for_epsilon(epsilon) > fine.get_delta_for_epsilon(epsilon)


def test_no_small_probability_is_lost():
    """Against the exact Gaussian profile, far out in its tail: one run, and a maximum of one."""
    sigma, delta = 0.5, 1e-12
    exact = float(mechanisms.gaussian_epsilon(delta, sigma))
    loss = sampled(sigma, 1.0, 1)
    for found in (selection_pld(loss, TrialDistribution(1, GEOMETRIC)), pointwise_maximum([loss])):
        assert exact <= found.get_epsilon_for_delta(delta) < 1.01 * exact


def test_a_loss_that_is_always_infinite_is_priced():
    """Two distributions that share no outcome: the library keeps no loss at all of them."""
    apart = library.from_two_probability_mass_functions({0: 0.0}, {1: 0.0})
    found = selection_pld(apart, TrialDistribution(3.0, POISSON))
    for epsilon in (0.0, 1.0, 50.0):
        assert found.get_delta_for_epsilon(epsilon) == 1.0


def test_a_search_that_costs_nearly_nothing_is_priced():
    """Its divergence rounds to zero, of which the library takes a logarithm for Poisson."""
    phases = (GaussianSteps(1, 1e5, 1e-6),)
    plan = PrivacyPlan(1000, (RepeatAndSelect(phases, 3.0, math.inf),), 1e-5)
    assert 0 <= plan.guarantee().epsilon < 1e-3
