"""The lower bound for shuffled batches against its published value and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.mechanisms import smallest_delta

from dpdist.privacy.mechanisms import (
    shuffled_delta_lower_bound,
    shuffled_epsilon_lower_bound,
)
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan


def test_the_published_gap():
    """sigma 0.4, 10,000 batches, epsilon 4: 1.17e-5 by Poisson, at least 0.226 shuffled."""
    plan = PrivacyPlan(10_000, (GaussianSteps(10_000, 0.4, 1e-4),), 1e-5)
    poisson = smallest_delta(plan.event(), "add-or-remove-one", 4.0)
    assert poisson == pytest.approx(1.17e-5, rel=0.01)
    assert shuffled_delta_lower_bound(4.0, 0.4, 10_000) == pytest.approx(0.226, abs=1e-3)


def test_the_bound_is_reached_by_simulation():
    """P - e^eps Q of the best event, estimated; 5 standard errors: once in 1.7e6 correct runs."""
    rng = np.random.default_rng(1)
    sigma, steps, epsilon, runs = 0.7, 20, 1.0, 100_000
    noise = sigma * rng.normal(size=(runs, steps))
    with_record, blanked = noise.copy(), noise.copy()
    where = rng.integers(steps, size=runs)
    with_record[np.arange(runs), where] += 2
    blanked[np.arange(runs), where] += 1
    bound = shuffled_delta_lower_bound(epsilon, sigma, steps)
    gaps = []
    for threshold in np.linspace(1, 5, 81):
        p, q = with_record.max(1) > threshold, blanked.max(1) > threshold
        error = math.sqrt(p.var() / runs + math.exp(2 * epsilon) * q.var() / runs)
        gap = p.mean() - math.exp(epsilon) * q.mean()
        assert gap < bound + 5 * error + 1e-6
        gaps.append(gap)
    assert max(gaps) > 0.97 * bound


def test_epsilon_inverts_delta():
    found = shuffled_epsilon_lower_bound(1e-5, 0.5, 1000)
    assert shuffled_delta_lower_bound(found * 0.999, 0.5, 1000) > 1e-5
    assert shuffled_delta_lower_bound(found * 1.001, 0.5, 1000) <= 1e-5
    assert shuffled_epsilon_lower_bound(0.5, 50.0, 1) == 0.0
    more_noise = shuffled_epsilon_lower_bound(1e-5, 1.0, 1000)
    assert more_noise < found


@pytest.mark.parametrize("bad", [(1.0, 0.0, 10), (1.0, 1.0, 0), (-1.0, 1.0, 10)])
def test_bad_values(bad):
    with pytest.raises(ValueError):
        shuffled_delta_lower_bound(*bad)
