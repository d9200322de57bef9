"""ROC numbers against independent oracles: pair counts, closed forms of normal scores."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from dpdist.audits.membership_statistics import (
    Ceiling,
    Estimate,
    Roc,
    claimed_ceiling,
    plan_curve,
    proved_ceiling,
)
from dpdist.privacy.audit_bounds import approximate_dp_tradeoff, gaussian_tradeoff
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.plan import PrivacyPlan


def normal(mu: float, members: int, others: int, seed: int = 0) -> Roc:
    rng = np.random.default_rng(seed)
    scores = np.concatenate([rng.normal(mu, 1, members), rng.normal(0, 1, others)])
    return Roc.from_scores(scores, np.arange(members + others) < members)


def test_auc_counts_pairs_and_ties_by_half() -> None:
    roc = normal(0.7, 60, 90)
    roc = Roc(roc.members.round(1), roc.others.round(1))
    difference = roc.members[:, None] - roc.others[None]
    pairs = ((difference > 0) + (difference == 0) / 2).mean()
    assert roc.auc.value == pytest.approx(pairs, abs=1e-12)
    false, true = roc.curve
    assert np.trapezoid(true, false) == pytest.approx(pairs, abs=1e-12)
    rates = np.linspace(0, 1, 20_001)
    assert np.trapezoid(roc.interpolate(rates), rates) == pytest.approx(pairs, abs=1e-3)
    kernel = (difference > 0) + (difference == 0) / 2
    variance = kernel.mean(1).var(ddof=1) / 60 + kernel.mean(0).var(ddof=1) / 90
    assert roc.auc.high - roc.auc.low == pytest.approx(2 * 1.959964 * math.sqrt(variance))


def test_rates_are_those_of_normal_scores() -> None:
    roc = normal(1.0, 4000, 4000)
    for rate in (0.01, 0.001):
        true, false = roc.rates_at(rate)
        assert false.value <= rate and false.low <= rate
        truth = norm.sf(norm.isf(false.value) - 1)
        assert true.low - 0.01 <= truth <= true.high + 0.01
    assert roc.advantage == pytest.approx(2 * norm.cdf(0.5) - 1, abs=0.03)
    precision, recall = roc.precision_recall(0.5)
    hits = binomtest(round(recall.value * 4000), 4000).proportion_ci(0.95, "exact")
    assert (recall.low, recall.high) == pytest.approx((hits.low, hits.high))
    assert precision.value == pytest.approx(norm.cdf(0.5), abs=0.02)  # .69 / (.69 + .31)
    assert roc.precision_recall(math.inf)[0] == pytest.approx(Estimate(math.nan, 0, 1), nan_ok=True)


def test_mean_over_models_is_students() -> None:
    found = Estimate.from_values([0.5, 0.6, 0.7])
    assert (found.value, found.high) == pytest.approx((0.6, 0.6 + 4.302653 * 0.1 / math.sqrt(3)))
    assert Estimate.from_values([0.5]).high == math.inf


# --- ceilings


@pytest.mark.parametrize(
    ("epsilon", "by_gaussian", "pure"), [(0.2, 0.517, 0.550), (3, 0.694, 0.953)]
)
def test_auc_ceilings(epsilon: float, by_gaussian: float, pure: float) -> None:
    low, high = 0.0, 10.0  # mu of this epsilon at delta 1e-5
    for _ in range(50):
        mu = (low + high) / 2
        low, high = (mu, high) if gaussian_epsilon(1e-5, 1.0, mu) < epsilon else (low, mu)
    ceiling = Ceiling("", gaussian_tradeoff(mu))
    assert ceiling.auc == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=2e-4)
    assert ceiling.auc >= norm.cdf(mu / math.sqrt(2))
    assert ceiling.auc == pytest.approx(by_gaussian, abs=6e-4)
    assert Ceiling("", approximate_dp_tradeoff(epsilon)).auc == pytest.approx(
        (1 + math.tanh(epsilon / 2)) / 2, abs=1e-3
    )
    assert (1 + math.tanh(epsilon / 2)) / 2 == pytest.approx(pure, abs=6e-4)


def plan(noise: float = 2.0, **more: float) -> PrivacyPlan:
    one = {"records": 100, "batch_size": 100, "steps": 1, "delta": 1e-5}
    return PrivacyPlan.dp_sgd(noise_multiplier=noise, **(one | more))  # type: ignore[arg-type]


def test_the_ceiling_of_a_plan_is_its_best_test() -> None:
    rates = np.array([1e-4, 0.01, 0.3, 0.9])
    ceiling = proved_ceiling(plan(), "add-or-remove-one", "")
    assert ceiling is not None
    best = norm.cdf(norm.ppf(rates) + 0.5)
    assert np.all(ceiling.max_true_positive_rates(rates) >= best - 1e-12)
    assert ceiling.max_true_positive_rates(rates) == pytest.approx(best, abs=1e-3)
    # Replacing a record moves the sum twice as far.
    twice = proved_ceiling(plan(), "replace-one", "")
    assert twice is not None
    assert twice.max_true_positive_rates(rates) == pytest.approx(
        norm.cdf(norm.ppf(rates) + 1), abs=1e-3
    )
    sampled = plan(1.0, batch_size=10, steps=5)
    direct = plan_curve(sampled, "replace-one")
    assert direct is not None and float(direct(np.asarray(0.9))) < 0.9


def test_a_roc_above_the_ceiling_is_told_and_one_below_is_not() -> None:
    ceiling = Ceiling("", gaussian_tradeoff(0.5))
    assert ceiling.exceeded_rates(normal(1.0, 3000, 3000)) != []
    assert not any(ceiling.exceeded_rates(normal(0.5, 1000, 1000, seed)) for seed in range(20))


def test_what_bounds_nothing_has_no_ceiling() -> None:
    assert proved_ceiling(plan(0.0), "add-or-remove-one", "") is None
    assert claimed_ceiling(None, "replace-one") is None


def test_a_claim_is_a_ceiling_under_its_own_relation() -> None:
    guarantee = Guarantee(1.0, 1e-5, "replace-one", "claimed", "a paper")
    infinite = Guarantee(math.inf, 1e-5, "replace-one", "proved", "nothing")
    claim = Claim("x", "as run", None, guarantee, infinite, "not sound", "labels")
    ceiling = claimed_ceiling(claim, "replace-one")
    assert ceiling is not None and "not sound" in ceiling.description
    assert ceiling.max_true_positive_rates(0.1) == pytest.approx(0.1 * math.e + 1e-5)
    assert claimed_ceiling(claim, "add-or-remove-one") is None
    one = replace(claim, claimed=replace(guarantee, adjacency="add-or-remove-one"))
    both = claimed_ceiling(one, "replace-one")
    assert both is not None
    assert both.max_true_positive_rates(0.05) == pytest.approx(
        0.05 * math.e**2 + 1e-5 * (1 + math.e)
    )
