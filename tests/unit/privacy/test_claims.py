"""The papers' theorems at their own settings, and a counterexample for every one that fails."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from support.mechanisms import heterogeneous_std

from dpdist.papers import composition
from dpdist.papers.pate import claims as votes_of_pate
from dpdist.papers.published import published_claims
from dpdist.papers.residual import claims as residual_claims
from dpdist.papers.secure_sgd.claims import hgm_claim, redistribution, secure_sgd_claim
from dpdist.papers.stobatch.dpal import dpal_claim, dpal_encoder_budget, dpal_gammas
from dpdist.papers.transdenoiser.method import (
    mixed_gaussian_added_std,
)


@pytest.fixture(scope="module")
def table():
    return published_claims()


def test_dplis_rows_follow_from_their_steps(table):
    rows = [claim for claim in table if claim.system.startswith("DPlis")]
    assert len(rows) == 6
    for row in rows:
        assert row.claimed.epsilon == pytest.approx(row.printed, abs=0.012)
        assert row.proved.epsilon < row.claimed.epsilon
    assert rows[1].proved.epsilon == pytest.approx(8.49, abs=0.03)


def test_residual_theorem_one_by_grid_search():
    """The theorem's two conditions checked directly over lambda and epsilon."""
    pi, gamma, bound, passes, delta = 3.0, 6.0, 5.0, 20.0, 1e-5
    mix, epsilon = np.meshgrid(np.linspace(0.001, 0.999, 999), np.geomspace(10, 2000, 2000))
    order = math.log(1 / delta) / ((1 - mix) * epsilon) + 1
    need = bound * np.sqrt(2 * passes * order / (mix * epsilon))
    best = epsilon[need <= min(pi, gamma)].min()
    found = residual_claims.residual_claim(pi, gamma, bound, bound, passes)
    assert found.epsilon == pytest.approx(best, rel=5e-3)


def test_residual_budgets_do_not_follow(table):
    printed = {
        "Residual I, IDC": 1.1e3,
        "Residual I, CIFAR-10": 3e3,
        "DP-SGD beside Residual I, IDC": 15.79,
        "DP-SGD beside Residual I, CIFAR-10": 22.33,
    }
    for row in (claim for claim in table if claim.system in printed):
        assert row.printed == printed[row.system]
        assert not math.isclose(row.claimed.epsilon, row.printed, rel_tol=0.5)
    idc, cifar = (row for row in table if row.system.startswith("DP-SGD beside"))
    assert idc.claimed.epsilon == pytest.approx(7.2, abs=0.1)
    assert cifar.claimed.epsilon == pytest.approx(6.4, abs=0.1)
    # No batch size is printed: other ones, and twice the epochs, come near the printed budgets.
    for records, batch, near in ((9988, 250, 15.84), (12_500, 512, 22.03)):
        steps = 200 * records // batch
        found = secure_sgd_claim(records, batch, 1.1, steps).epsilon
        assert found == pytest.approx(near, abs=0.01)


def test_dpal_theorem_four():
    gamma, gamma_x = dpal_gammas(4950, 2499, 1.0)
    assert gamma_x == pytest.approx(1.98, abs=2e-3)
    assert dpal_gammas(9504, 1851, 1.0)[1] == pytest.approx(5.13, abs=5e-3)
    epsilon_1 = dpal_encoder_budget(0.2, 0.1, gamma, gamma_x)
    assert dpal_claim(epsilon_1, 0.1, gamma, gamma_x).epsilon == pytest.approx(0.2)
    with pytest.raises(ValueError):
        dpal_claim(0.1, 0.1, 0.0, 1.0)


def test_pate_is_charged_without_its_votes():
    everything = votes_of_pate.pate_guarantee(4000, 4000, 200.0, 40.0).epsilon
    capped = votes_of_pate.pate_guarantee(4000, 1323, 200.0, 40.0).epsilon
    assert capped == pytest.approx(6.08, abs=0.01)  # below the printed, data-dependent 7.44
    assert everything > 11


def test_hgm_inverts_its_scale():
    assert hgm_claim(4.8542, 1e-5).epsilon == pytest.approx(1.0, abs=1e-4)


def test_black_box_theorem_grows_with_blocks():
    few = residual_claims.residual_black_box_claim(1.0, 2.0, 1.0, 1.0, 0.1, 3).epsilon
    many = residual_claims.residual_black_box_claim(1.0, 2.0, 1.0, 1.0, 0.1, 6).epsilon
    assert many > 1.7 * few


# --- counterexamples --------------------------------------------------------------------------


def test_transdenoiser_gives_back_the_input_exactly():
    """A linear denoiser with bias, input noise only (nothing added: the non-negative branch).

    The gradient of ||W z + c - x||^2 names its residual (bias) and z (weights), hence the clean x.
    """
    rng = np.random.default_rng(1)
    size, sigma, steps = 12, 0.25, 1000
    weights, bias = rng.normal(size=(size, size)), rng.normal(size=size)
    x = rng.random(size)
    z = x + sigma * rng.normal(size=size)

    jacobian = 2 * np.concatenate([np.kron(weights, z[:, None]), weights])  # of the gradient, in z
    thin = float(np.linalg.svd(jacobian, compute_uv=False)[-1]) ** 2
    assert mixed_gaussian_added_std(1.0, 2.0, thin, sigma, steps) == 0.0  # nothing is added

    residual = weights @ z + bias - x
    gradient_weights, gradient_bias = 2 * np.outer(residual, z), 2 * residual

    found_z = gradient_bias @ gradient_weights / (gradient_bias @ gradient_bias)
    found_x = weights @ found_z + bias - gradient_bias / 2
    assert np.abs(found_z - z).max() < 1e-12
    assert np.abs(found_x - x).max() < 1e-12


def test_dpal_s_shared_noise_cancels():
    rng = np.random.default_rng(5)
    images = rng.uniform(-1, 1, size=(2, 784))
    noise = rng.laplace(scale=4950 / 0.03, size=784) / 2499
    seen = images + noise
    assert np.abs((seen[0] - seen[1]) - (images[0] - images[1])).max() < 1e-9
    # knowing one record gives the other away
    assert np.abs(seen[1] - (seen[0] - images[0]) - images[1]).max() < 1e-9


def test_dpal_s_sensitivity_is_a_ratio_and_not_the_largest_change():
    """Lemma 3 puts 1 for what an image in [-1, 1]^d can change by, which is 2 d. Even if every
    record had noise of its own, at the printed scale, the release of noisy inputs would cost 45
    where the lemma charges 0.03."""
    size, batch, total, epsilon_2 = 784, 2499, 0.2, 0.1
    gamma, gamma_x = dpal_gammas(4950, batch, 1.0)
    epsilon_1 = dpal_encoder_budget(total, epsilon_2, gamma, gamma_x)
    scale = 4950 / (batch * epsilon_1)
    white, black = np.ones(size), -np.ones(size)
    noise = stats.laplace(scale=scale)
    seen = white + np.abs(np.random.default_rng(8).laplace(scale=scale, size=size))
    ratio = (noise.logpdf(seen - white) - noise.logpdf(seen - black)).sum()
    assert ratio == pytest.approx(2 * size / scale) and ratio > 40
    assert epsilon_1 / gamma_x < 0.03 < 0.2 < ratio


def test_dpal_s_fixed_noise_is_gone_between_two_steps():
    """Theorem 4 pays once for the labels of all steps. Each step releases the coefficients
    sum h y + chi_3 at another h, which everybody knows once the network is; their difference has
    no noise, and names one unknown label however small epsilon_2 is."""
    rng = np.random.default_rng(9)
    first, second = rng.uniform(-1, 1, size=(2, 50, 256))  # h_pi of a batch at two steps
    labels = rng.integers(0, 10, 50)
    chi_3 = rng.laplace(scale=512 / 1e-6, size=(10, 256))
    hot = np.eye(10)[labels]
    changed = (hot.T @ second + chi_3) - (hot.T @ first + chi_3)
    left = changed - hot[1:].T @ (second[1:] - first[1:])  # the adversary knows all but one
    assert int(np.abs(left).sum(1).argmax()) == labels[0]
    assert np.sort(np.abs(left).sum(1))[-2] < 1e-2 * np.abs(left).sum(1).max()


def test_dpal_s_predictions_have_less_noise_than_their_certificate_counts():
    """Noise of scale b / psi around a fixed center, counted as b: where the certificate allows a
    score to change by e^(L / b), it changes by e^(psi L / b)."""
    scale, psi, moved, bar = 1.0, 2.0, 0.5, 3.0
    drawn = stats.laplace(scale=scale / psi)  # a score: the probability to pass the bar
    before, after = drawn.sf(bar), drawn.sf(bar - moved)
    assert math.log(after / before) == pytest.approx(psi * moved / scale)
    assert after / before > math.exp(moved / scale)
    still = stats.laplace(scale=1e-9)  # and the part that is drawn once certifies nothing
    assert still.sf(bar) == 0 and still.sf(bar - 7 * moved) == 1


def test_data_dependent_redistribution_tells_neighbors_apart():
    """A(D) = A(D'), only r differs. The claim is epsilon 1; the test proves more than 3.

    1,500 runs each, the threshold fixed by theory; at error 1e-6 per bound (Clopper-Pearson).
    """
    rng = np.random.default_rng(6)
    units, trials, claimed, delta = 4000, 1500, 1.0, 1e-5
    tilt = np.where(np.arange(units) % 2 == 0, 1.0, -1.0)
    scales = [
        heterogeneous_std(claimed, delta, 1.0, redistribution(1 + t * tilt)) for t in (0.1, -0.1)
    ]

    def accuses(scale: np.ndarray) -> int:
        released = scale * rng.normal(size=(trials, units))
        log_ratio = (released**2 * (1 / scales[1] ** 2 - 1 / scales[0] ** 2)).sum(axis=1) / 2
        return int(np.sum(log_ratio > np.log(scales[0] / scales[1]).sum()))

    hits, false = accuses(scales[0]), accuses(scales[1])
    rate = stats.beta.ppf(1e-6, hits, trials - hits + 1)
    false_rate = stats.beta.ppf(1 - 1e-6, false + 1, trials - false)
    assert math.log((rate - delta) / false_rate) > 3 * claimed

    scales[1] = scales[0]  # the same r: nothing to see
    assert accuses(scales[0]) == 0


# ---- composition


def test_advanced_composition_is_the_theorem():
    mpmath = pytest.importorskip("mpmath")
    for e, d, k, total in [(0.1, 0.0, 100, 1e-5), (0.5, 1e-8, 10, 1e-6), (0.01, 1e-10, 2000, 1e-6)]:
        with mpmath.workdps(40):
            slack = mpmath.mpf(total) - k * mpmath.mpf(d)
            spread = mpmath.sqrt(2 * k * mpmath.log(1 / slack)) * e
            exact = float(spread + k * e * (mpmath.exp(e) - 1))
        advanced = composition.advanced_composition_epsilon(e, d, k, total)
        assert advanced == pytest.approx(exact, rel=1e-9)


# ---- PATE by its votes


def argmax_law(votes, std):
    """Probabilities that noisy votes name each class, by integration over the winner's count."""
    votes = np.asarray(votes, float)
    grid = np.linspace(-12, 12, 4801)
    found = []
    for place, count in enumerate(votes):
        others = np.delete(votes, place)
        below = stats.norm.cdf((count - others)[:, None] / std + grid).prod(axis=0)
        found.append(np.trapezoid(stats.norm.pdf(grid) * below, grid))
    return np.array(found)


def renyi(p, q, order):
    return float(np.log(np.sum(p**order * q ** (1 - order))) / (order - 1))


@pytest.mark.parametrize("votes", [[20, 18, 0], [12, 12, 12]])
def test_the_cost_of_votes_is_above_every_neighbor_s_renyi_divergence(votes):
    """By the distributions themselves, against all votes that one teacher's change makes."""
    std, orders = 6.0, np.array([1.5, 2.0, 4.0, 8.0, 16.0])
    log_q = votes_of_pate.vote_flip_log_probability(np.array([votes]), std)
    own = argmax_law(votes, std)
    missed = 1 - own.max()
    assert missed <= math.exp(log_q[0]) * (1 + 1e-6)
    bound = votes_of_pate.data_dependent_rdp(log_q, std, orders)[0]
    assert np.all(bound <= orders / std**2)
    for giver in range(len(votes)):
        for taker in range(len(votes)):
            if giver == taker or votes[giver] == 0:
                continue
            changed = np.array(votes)
            changed[giver] -= 1
            changed[taker] += 1
            there = argmax_law(changed, std)
            for order, most in zip(orders, bound, strict=True):
                assert max(renyi(own, there, order), 0.0) <= most + 1e-7


def test_the_epsilon_of_given_votes_charges_every_test_and_every_answer():
    """By the closed form of Gaussian costs, since ties have no smaller cost by their votes.

    The other queries are unanimous and far above the threshold, and cost nearly nothing.
    """
    std, test_std, ties, delta = 20.0, 30.0, 1500, 1e-5
    votes = np.array([[12, 12, 12], [250, 0, 0]] * ties)  # a tie passes with probability 1/2
    found = votes_of_pate.data_dependent_pate_claims(votes, std, 12.0, test_std, delta)
    for name, answered in (("all pass", 1.0), ("expected", 0.5)):
        cost = ties * (answered / std**2 + 1 / (2 * test_std**2))
        epsilon = cost + 2 * math.sqrt(cost * math.log(1 / delta))
        assert found[name].epsilon == pytest.approx(epsilon, rel=1e-3)
        assert found[name].kind == "claimed"
    only_ties = votes_of_pate.data_dependent_pate_claims(votes[::2], std, 12.0, test_std, delta)
    blind = votes_of_pate.pate_guarantee(ties, ties, test_std, std, delta)
    assert only_ties["all pass"].epsilon == blind.epsilon
