"""Every mechanism against known values, arbitrary precision, integration and sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats
from support.mechanisms import heterogeneous_std, weighted_sensitivity

from dpdist.papers.pate.claims import confident_gnmax_epsilon
from dpdist.papers.secure_sgd import claims as hgm
from dpdist.papers.stobatch import dpal as dpal_claims
from dpdist.papers.transdenoiser.method import mixed_gaussian_added_std
from dpdist.privacy import mechanisms as m


# Delta 1, delta 1e-5: epsilon, analytic, extended, classical formula
def test_classical_formula_breaks_and_is_refused_above_one():
    assert m.gaussian_delta(8.0, m.classical_gaussian_formula(8.0, 1e-5)) == pytest.approx(
        8.0e-6, rel=0.01
    )
    broken = m.gaussian_delta(10.0, m.classical_gaussian_formula(10.0, 1e-5))
    assert broken == pytest.approx(2.3e-5, rel=0.02)
    with pytest.raises(ValueError):
        m.classical_gaussian_scale([0.5, 1.01], 1e-5)
    assert m.classical_gaussian_scale(1.0, 1e-5) == pytest.approx(4.84481, abs=1e-5)


def high_precision_delta(epsilon: float, sigma: float) -> float:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        e, s = mpmath.mpf(epsilon), mpmath.mpf(sigma)
        first = mpmath.ncdf(1 / (2 * s) - e * s)
        return float(first - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * s) - e * s))


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.4])
def test_exact_scale_in_high_precision(epsilon, delta):
    sigma = float(m.analytic_gaussian_scale(epsilon, delta))
    exact = high_precision_delta(epsilon, sigma)
    assert exact <= delta * (1 + 1e-7)
    assert exact == pytest.approx(delta, rel=1e-6)
    assert high_precision_delta(epsilon, sigma * 0.999) > delta  # less noise would not do
    assert m.gaussian_epsilon(delta, sigma) == pytest.approx(epsilon, rel=1e-7)


def test_profile_by_integrating_densities():
    for epsilon, sigma in [(0.5, 1.0), (1.0, 3.0), (4.0, 0.4), (0.0, 2.0)]:
        low, high = stats.norm(0, sigma), stats.norm(1, sigma)
        value, _ = integrate.quad(
            lambda x, e=epsilon, a=low, b=high: max(0.0, b.pdf(x) - math.exp(e) * a.pdf(x)),
            -30,
            30,
            points=[0.5 + epsilon * sigma**2],
            limit=500,
        )
        assert m.gaussian_delta(epsilon, sigma) == pytest.approx(value, rel=1e-6)


def extended_with(constant: float, epsilon: np.ndarray, delta: np.ndarray | float) -> np.ndarray:
    """Theorem 2's scale, written out: the proof has sqrt(2 / pi), the statement sqrt(2) / pi."""
    s = np.log(constant / delta)
    return np.sqrt(2) / (2 * epsilon) * (np.sqrt(s) + np.sqrt(s + epsilon))


@pytest.mark.parametrize(
    ("constant", "crossing", "at_one", "worst"),
    [(math.sqrt(2 / math.pi), 0.907, 4.854, 0.264), (math.sqrt(2) / math.pi, 2.089, 4.735, 0.857)],
    ids=["proof", "printed"],
)
def test_extended_with_either_constant_is_sound_and_below_classical_up_to(
    constant, crossing, at_one, worst
):
    """At delta 1e-5 it crosses the classical formula once; worst: true over claimed delta."""
    at = crossing + np.array([-1e-3, 1e-3])
    below = extended_with(constant, at, 1e-5) < m.classical_gaussian_formula(at, 1e-5)
    assert below.tolist() == [True, False]
    lower = np.geomspace(1e-3, at[0], 500)
    assert np.all(extended_with(constant, lower, 1e-5) < m.classical_gaussian_formula(lower, 1e-5))
    assert extended_with(constant, np.array(1.0), 1e-5) == pytest.approx(at_one, abs=5e-4)
    epsilon = np.geomspace(1e-3, 50, 300)[:, None]
    delta = np.geomspace(1e-8, 0.44, 300)[None, :]
    ratio = m.gaussian_delta(epsilon, extended_with(constant, epsilon, delta)) / delta
    assert ratio.max() == pytest.approx(worst, abs=1e-3)


def test_the_extended_scale_has_the_constant_of_the_proof():
    epsilon = np.geomspace(0.01, 50, 40)
    built = m.extended_gaussian_scale(epsilon, 1e-5)
    assert built == pytest.approx(extended_with(math.sqrt(2 / math.pi), epsilon, 1e-5))
    # and meets the proof's other condition, whatever delta is
    for delta in (1e-10, 1e-3, 0.48, 0.6):
        other = (1 + np.sqrt(1 + 2 * epsilon)) / (2 * epsilon)
        assert np.all(m.extended_gaussian_scale(epsilon, delta) >= other * (1 - 1e-12))


def test_extended_inverse_and_large_delta():
    for epsilon, delta in [(0.3, 1e-6), (5.0, 0.3), (1.0, 0.6)]:
        scale = m.extended_gaussian_scale(epsilon, delta, 2.0)
        assert m.extended_gaussian_epsilon(delta, scale, 2.0) == pytest.approx(epsilon)
        assert m.gaussian_delta(epsilon, scale, 2.0) <= delta


def test_profile_handles_extremes():
    assert m.gaussian_delta(0.0, 1e-3) == pytest.approx(1.0)
    assert m.gaussian_delta(1e3, 1e6) == 0.0
    assert m.gaussian_epsilon(0.9, 1.0) == 0.0
    assert m.analytic_gaussian_scale(1.0, 1e-5, 3.0) == pytest.approx(3 * 3.7306, abs=2e-4)
    grid = m.gaussian_epsilon(np.array([1e-12, 1e-5])[:, None], np.geomspace(0.02, 1e4, 9))
    assert grid.shape == (2, 9)
    assert np.all(np.diff(grid, axis=1) < 0)


def test_heterogeneous_noise_is_the_exact_gaussian_after_whitening():
    r = hgm.redistribution([4.0, 1.0, 0.0, 3.0])
    assert r.sum() == pytest.approx(1) and r.min() > 0
    change = np.array([0.5, -0.2, 0.1, 1.0])
    weighted = weighted_sensitivity(np.abs(change), r)
    std = heterogeneous_std(1.0, 1e-5, weighted, r, m.analytic_gaussian_scale)
    distance = np.linalg.norm(change / std)  # what an observer of all outputs can tell apart
    assert m.gaussian_delta(1.0, 1.0, distance) == pytest.approx(1e-5, rel=1e-6)
    loose = heterogeneous_std(1.0, 1e-5, weighted, r)
    assert np.all(loose > std)
    assert m.gaussian_delta(1.0, 1.0, np.linalg.norm(change / (0.7 * loose))) > 1e-5


def test_the_smallest_singular_value_charges_heterogeneous_noise_no_less_than_its_own_theorem():
    """TransDenoiser's multivariate mechanism with M = diag(K r) has HGM's noise and a looser bound.

    It has sensitivity / sqrt(S_min) for the weighted sensitivity; equal shares make them equal.
    """
    rng = np.random.default_rng(0)
    for size in (2, 5, 40):
        for bounds in (np.ones(size), rng.random(size)):
            for r, loose in (
                (rng.dirichlet(np.ones(size)), True),
                (np.full(size, 1 / size), False),
            ):
                weighted = weighted_sensitivity(bounds, r)
                by_smallest = np.linalg.norm(bounds) / math.sqrt(size * r.min())
                assert by_smallest >= weighted * (1 - 1e-12)
                assert (by_smallest > weighted * (1 + 1e-6)) == loose


def test_mixed_noise():
    assert mixed_gaussian_added_std(0.5, 2.0, 0.01, 1.0) == 2.0
    added = mixed_gaussian_added_std(0.5, 2.0, 1.0, 1.0)
    assert math.hypot(added, 1.0) == pytest.approx(2.0)
    assert mixed_gaussian_added_std(0.5, 2.0, 9.0, 1.0) == 0.0
    # The published factor T takes credit for noise that is not there.
    credited = mixed_gaussian_added_std(0.5, 2.0, 0.01, 1.0, steps=400)
    assert math.hypot(credited, math.sqrt(0.01)) < 0.2


def test_noise_with_a_covariance_is_the_gaussian_of_its_mahalanobis_sensitivity():
    """The loss of N(v, S) against N(0, S) has mean ||S^(-1/2) v||^2 / 2: the worst v is found."""
    rng = np.random.Generator(np.random.Philox(3))
    root = rng.normal(size=(4, 4))
    noise = root @ root.T + 0.1 * np.eye(4)
    reach = m.mahalanobis_sensitivity(noise, 2.0)
    differences = rng.normal(size=(20_000, 4))
    differences *= 2 / np.linalg.norm(differences, axis=1, keepdims=True)
    seen = np.sqrt(np.einsum("ni,ni->n", differences @ np.linalg.inv(noise), differences))
    assert 0.97 * reach < seen.max() <= reach
    bounds = np.array([1.0, 0.5, 2.0, 0.1])
    corners = bounds * (1 - 2 * ((np.arange(16)[:, None] >> np.arange(4)) & 1))
    worst = np.sqrt(np.einsum("ni,ni->n", corners @ np.linalg.inv(noise), corners)).max()
    assert worst <= m.mahalanobis_sensitivity(noise, bounds) * (1 + 1e-9)


def test_multivariate_noise_generalizes_hgm_and_transdenoiser_s_theorem_does_not():
    """HGM's noise is the diagonal case, exactly; by the least eigenvalue alone it costs 7 times."""
    r, bounds = np.array([0.99, 0.01]), np.array([1.0, 0.1])
    noise = np.diag(2 * r)
    own = m.mahalanobis_sensitivity(noise, bounds)
    assert own == pytest.approx(weighted_sensitivity(bounds, r), rel=1e-12)
    by_least = float(np.linalg.norm(bounds) / math.sqrt(2 * r.min()))  # Theorem 1's condition
    assert by_least > 7 * own
    sigma = m.extended_gaussian_scale(1.0, 1e-5, own)  # HGM's noise for epsilon 1
    assert m.classical_gaussian_formula(1.0, 1e-5, by_least) > 7 * sigma  # what Theorem 1 asks
    assert m.gaussian_delta(1.0, sigma, own) <= 1e-5


def test_a_direction_without_noise_costs_everything():
    thin = np.outer([1.0, 2.0, 2.0], [1.0, 2.0, 2.0])
    assert m.mahalanobis_sensitivity(thin, 1.0) == math.inf
    assert m.mahalanobis_sensitivity(thin + 4 * np.eye(3), 1.0) == pytest.approx(0.5, rel=1e-9)


def test_dpal_constants():
    assert dpal_claims.dpal_encoder_sensitivity(25, 14**2) == 4950
    assert 3 * dpal_claims.dpal_encoder_sensitivity(16, 14**2) == 9504
    assert dpal_claims.dpal_output_sensitivity(256) == 512


def test_confident_gnmax():
    exact = confident_gnmax_epsilon(1e-5, 4000, 1323, 200.0, 40.0)
    orders = np.arange(1.05, 60, 0.01)
    by_rdp = np.min(
        orders * (4000 / (2 * 200.0**2) + 1323 / 40.0**2)
        + np.log1p(-1 / orders)
        - np.log(1e-5 * orders) / (orders - 1)
    )
    assert exact <= by_rdp <= 1.1 * exact
    with pytest.raises(ValueError):
        confident_gnmax_epsilon(1e-5, 10, 11, 1.0, 1.0)


@pytest.mark.parametrize("bad", [(0.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_bad_parameters(bad):
    for scale in (m.analytic_gaussian_scale, m.extended_gaussian_scale, m.classical_gaussian_scale):
        with pytest.raises(ValueError):
            scale(*bad)
