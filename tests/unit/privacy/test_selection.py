"""The number of runs and what a search costs, against an independent minimization."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from support.mechanisms import log_pmf

from dpdist.privacy.accounting import compose_rdp, selection_rdp
from dpdist.privacy.calibration import search_guarantee
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, RepeatAndSelect, WorstOf
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.selection import TrialDistribution, truncated_nb_mean

STEPS = (GaussianSteps(4680, 1.23, 512 / 60_000),)
SHAPES = [math.inf, 3.0, 0.0, -0.1, -300.0]


def _nearly_all(distribution: TrialDistribution) -> int:
    """K is smaller but for a chance too small to be seen."""
    if distribution.max_runs is not None:
        return distribution.max_runs + 1
    if math.isinf(distribution.shape):
        return math.ceil(distribution.mean + 10 * math.sqrt(distribution.mean) + 50)
    return min(60_000, math.ceil(50 / distribution.gamma) + 10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 200.0])
def test_law_sums_to_one_and_has_its_mean(shape, mean):
    distribution = TrialDistribution(mean, shape)
    ks = np.arange(0, _nearly_all(distribution))
    pmf = np.exp([log_pmf(distribution, int(k)) for k in ks])
    assert pmf.sum() == pytest.approx(1, abs=1e-9)
    assert (ks * pmf).sum() == pytest.approx(mean, rel=1e-6)
    for k in (0, 1, 2, 7, 300):
        assert distribution.tail_probability(k) == pytest.approx(pmf[k:].sum(), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("shape", [math.inf, 50.0, 0.0, -0.9])
@pytest.mark.parametrize("excess", [2.3e-16, 1e-6, 0.05])
def test_means_a_little_above_one(shape, excess):
    """K is then hardly ever more than 1; P(K = 1) follows from the mean to first order."""
    distribution = TrialDistribution(1 + excess, shape)
    one, two = (math.exp(log_pmf(distribution, k)) for k in (1, 2))
    if math.isfinite(shape):
        assert -excess - 1e-13 < one - 1 < 1e-13 and two <= excess + 1e-13
        assert distribution.tail_probability(2) == pytest.approx(1 - one, rel=1e-6, abs=1e-13)
        assert truncated_nb_mean(shape, distribution.log_gamma) == pytest.approx(
            distribution.mean, rel=1e-14
        )
    releases = (GaussianReleases(4.0),)
    cost = search_guarantee(releases, distribution, records=1000, delta=1e-5).epsilon
    nearly = search_guarantee(releases, TrialDistribution(1.06, shape), records=1000, delta=1e-5)
    assert PrivacyPlan(1000, releases, 1e-5).guarantee().epsilon < cost <= nearly.epsilon


@pytest.mark.parametrize("shape", SHAPES)
def test_quantiles_invert_the_tail(shape):
    distribution = TrialDistribution(10.0, shape)
    for probability in (0.0, 0.01, 0.3, 0.5, 0.9, 0.999):
        k = distribution.quantile(probability)
        assert 1 - distribution.tail_probability(k + 1) >= probability
        lowest = 0 if distribution.zero_probability else 1
        assert k == lowest or 1 - distribution.tail_probability(k) < probability


def test_mean_one_is_a_single_run():
    distribution = TrialDistribution(1.0, 0.5)
    assert distribution.quantile(0.999) == 1
    assert distribution.tail_probability(2) == 0


def independent_epsilon(distribution: TrialDistribution, delta: float) -> float:
    """Theorems 2 and 6 minimized over a dense set of orders (conversion: Canonne et al.)."""
    orders = np.array([*np.arange(1.1, 12, 0.1), *range(12, 128)])
    accountant = RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(512 / 60_000, GaussianDpEvent(1.23)), 4680)
    rdp = accountant.rdp
    best = math.inf
    for order, cost in zip(orders, rdp, strict=True):
        if math.isinf(distribution.shape):
            hat = math.log1p(1 / (order - 1))
            # delta of the base at epsilon hat, from RDP, by the bound of Canonne et al.
            logs = (
                (orders - 1) * (rdp - hat) + (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
            )
            delta_hat = min(1.0, float(np.exp(np.min(logs))))
            out = cost + distribution.mean * delta_hat + math.log(distribution.mean) / (order - 1)
        else:
            extra = min(
                (1 + distribution.shape)
                * ((1 - 1 / other) * other_cost - math.log(distribution.gamma) / other)
                for other, other_cost in zip(orders, rdp, strict=True)
            )
            out = cost + extra + math.log(distribution.mean) / (order - 1)
        epsilon = out + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        best = min(best, epsilon)
    return best


@pytest.mark.parametrize(
    ("mean", "shape", "published"),
    [(10, -0.5, 3.79), (50, 0.0, 4.86), (10, 1.0, 5.01), (50, math.inf, 15.8)],
)
def test_cost_of_a_search(mean, shape, published):
    """By Renyi DP; the loss distribution proves less, and the smaller one is stated."""
    distribution = TrialDistribution(mean, shape)
    plan = PrivacyPlan(60_000, (RepeatAndSelect(STEPS, mean, shape),), 1e-5)
    by_curves = compose_rdp(plan.event(), plan.adjacency).get_epsilon(1e-5)
    assert by_curves == pytest.approx(published, rel=5e-3)
    assert by_curves == pytest.approx(independent_epsilon(distribution, 1e-5), rel=0.02)
    if mean == 10:
        cost = search_guarantee(STEPS, distribution, records=60_000, delta=1e-5)
        assert cost.epsilon < 0.85 * by_curves


def test_a_search_costs_the_smaller_of_two_bounds():
    """Where a delta is below what a loss distribution resolves, Renyi's bound is the price."""
    distribution, delta = TrialDistribution(5, 1.0), 1e-12
    cost = search_guarantee(STEPS, distribution, records=60_000, delta=delta)
    plan = PrivacyPlan(60_000, (RepeatAndSelect(STEPS, 5, 1.0),), delta)
    assert cost.source.startswith("RDP") and math.isfinite(cost.epsilon)
    assert cost.epsilon == compose_rdp(plan.event(), plan.adjacency).get_epsilon(delta)


def test_the_accountants_agree_where_both_have_a_bound():
    """Our Theorem 2 (needed for negative shapes) against the library's, on the same curve."""
    base = SelfComposedDpEvent(PoissonSampledDpEvent(0.05, GaussianDpEvent(2.0)), 100)
    one = RdpAccountant()
    one.compose(base)
    for shape in (0.0, 0.7, 1.0, 4.0):
        best = RdpAccountant()
        best.compose(RepeatAndSelectDpEvent(base, 12.0, shape))
        ours = selection_rdp(one.orders, one.rdp, 12.0, shape)
        np.testing.assert_allclose(ours, best.rdp, rtol=1e-9)


def test_worst_of_is_the_pointwise_maximum():
    """Two curves that cross: neither alone is the bound."""
    many, few = GaussianSteps(50, 0.7, 0.02), GaussianSteps(1, 1.4, 1.0)
    distribution = TrialDistribution(5.0, 1.0)

    def cost(*phases) -> float:
        return search_guarantee(phases, distribution, records=1000, delta=1e-5).epsilon

    both = cost(WorstOf(((many,), (few,))))
    assert both > max(cost(many), cost(few))
    curves = []
    for phase in (many, few):
        accountant = RdpAccountant()
        event = PoissonSampledDpEvent(phase.sample_rate, GaussianDpEvent(phase.noise_multiplier))
        accountant.compose(event, phase.steps)
        curves.append(accountant.rdp)
    assert (curves[0] > curves[1]).any() and (curves[1] > curves[0]).any()


def test_fixed_runs_by_composition():
    cost = search_guarantee(STEPS, None, 3, records=60_000, delta=1e-5)
    assert cost.epsilon == pytest.approx(4.34, abs=0.01)
    base = search_guarantee(STEPS, None, 1, records=60_000, delta=1e-5)
    assert base.epsilon < 2.579 < cost.epsilon


@pytest.mark.parametrize(
    ("mean", "shape"), [(0.5, 1.0), (10, -1.0), (math.inf, 1.0), (3, math.nan)]
)
def test_bad_laws_are_refused(mean, shape):
    with pytest.raises(ValueError):
        TrialDistribution(mean, shape)
