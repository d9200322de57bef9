from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from dpdist.privacy import audit_bounds
from dpdist.privacy.plan import PrivacyPlan, group_delta_by_lemma

GRID = np.linspace(0, 1, 2001)


def plan(noise: float, rate: float, steps: int = 1, adjacency="add-or-remove-one"):
    return PrivacyPlan.dp_sgd(
        records=1000,
        batch_size=round(1000 * rate),
        noise_multiplier=noise,
        steps=steps,
        delta=1e-5,
        adjacency=adjacency,
    )


@pytest.mark.parametrize(("adjacency", "mu"), [("add-or-remove-one", 1.25), ("replace-one", 2.5)])
def test_a_full_batch_plan_has_the_gaussian_curve(adjacency, mu):
    got = audit_bounds.plan_tradeoff(plan(0.8, 1.0, adjacency=adjacency))(GRID)
    exact = audit_bounds.gaussian_tradeoff(mu)(GRID)
    assert (got <= exact + 1e-12).all()
    np.testing.assert_allclose(got[:-1], exact[:-1], atol=2e-6)


def test_a_subsampled_curve_is_the_hull_of_what_thresholds_reach_in_both_directions():
    sigma, q = 0.7, 0.3
    curve = audit_bounds.plan_tradeoff(plan(sigma, q))
    cuts = np.linspace(-5, 6, 4001)
    without = norm.sf(cuts / sigma)
    with_ = (1 - q) * without + q * norm.sf((cuts - 1) / sigma)
    removal, addition = curve(with_) - without, curve(1 - without) - (1 - with_)
    assert removal.max() < 1e-12 and addition.max() < 1e-12  # no test does better
    assert (removal > -1e-6).any() and (addition > -1e-6).any()
    reached = np.concatenate([removal, addition])
    assert (reached > -1e-6).mean() > 0.4  # and a direction reaches the curve nearly everywhere


def test_a_group_is_the_lemma():
    size, epsilon, delta = 5, 0.4, 1e-3
    x = np.array([0.05, 0.2])  # the lower branch
    expected = np.exp(-size * epsilon) * (x - group_delta_by_lemma(epsilon, delta, size))
    grouped = audit_bounds.group_tradeoff(
        audit_bounds.approximate_dp_tradeoff(epsilon, delta), size
    )(x)
    np.testing.assert_allclose(grouped, np.maximum(expected, 0), atol=1e-12)
    gaussian = audit_bounds.group_tradeoff(audit_bounds.gaussian_tradeoff(0.5), size)(x)
    np.testing.assert_allclose(gaussian, audit_bounds.gaussian_tradeoff(0.5 * size)(x), rtol=1e-9)
    with pytest.raises(ValueError):
        audit_bounds.group_tradeoff(audit_bounds.gaussian_tradeoff(1), 0)


def test_the_ceiling_of_a_roc():
    rates = np.array([1e-3, 0.1, 0.5])
    np.testing.assert_allclose(
        audit_bounds.max_true_positive_rate(audit_bounds.gaussian_tradeoff(1.0), rates),
        norm.cdf(norm.ppf(rates) + 1),
        rtol=1e-9,
    )
    pure = audit_bounds.max_true_positive_rate(audit_bounds.approximate_dp_tradeoff(1.0), rates)
    np.testing.assert_allclose(pure[:2], np.e * rates[:2], rtol=1e-9)


def test_where_it_is_known_who_is_who_the_curve_says_more():
    sigma, q = 0.7, 0.3
    both, directed = (
        audit_bounds.plan_tradeoff(plan(sigma, q)),
        audit_bounds.plan_tradeoff(plan(sigma, q), True),
    )
    cuts = np.linspace(-3, 4, 501)
    without = norm.sf(cuts / sigma)
    with_ = (1 - q) * without + q * norm.sf((cuts - 1) / sigma)
    assert (directed(GRID) >= both(GRID) - 1e-9).all()
    np.testing.assert_allclose(directed(with_), without, atol=1e-5)  # with the record for P
