"""LiRA, RMIA and the shadow attack: against direct formulas, and on models that remember."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from dpdist.audits import membership_statistics
from dpdist.audits.membership_findings import ATTACKS, shadow_scores
from dpdist.audits.membership_statistics import (
    GAMES,
    BankScores,
    Ceiling,
    Coins,
    Estimate,
    Halves,
    Quarters,
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

KEY = bytes(range(32))


def test_log_odds_are_exact_where_probabilities_round_to_one() -> None:
    logits = np.array([[800.0, 0.0, 1.0], [0.0, 2.0, -1.0], [-900.0, 0.0, 0.0]])
    found = membership_statistics.log_odds(logits, [0, 1, 0])
    p = math.exp(2) / (1 + math.exp(2) + math.exp(-1))
    expected = [800 - math.log(1 + math.e), math.log(p / (1 - p)), -900 - math.log(2)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert membership_statistics.top_probabilities(logits[1:2])[0] == pytest.approx(
        sorted(np.exp(logits[1]) / np.exp(logits[1]).sum(), reverse=True)
    )
    assert membership_statistics.top_probabilities(np.zeros((1, 2)))[0].tolist() == [0.5, 0.5, 0.0]


@pytest.fixture
def bank() -> BankScores:
    """Log-odds that are 1 larger where the record is in: LiRA's own assumption."""
    rng = np.random.default_rng(1)
    member = rng.random((12, 300)) < 0.5
    phi = rng.normal(0, 1, (12, 300)) + rng.normal(0, 2, 300) + 1.5 * member
    return BankScores(member, phi, np.zeros((12, 300, 3)), rng.normal(0, 2, (12, 50)))


def test_lira_is_the_likelihood_ratio(bank: BankScores) -> None:
    found = membership_statistics.lira_online(bank.phi, bank.member, 3)
    offline = membership_statistics.lira_offline(bank.phi, bank.member, 3)
    others = np.arange(12) != 3
    sides = []
    for inside in (True, False):
        chosen = (bank.member == inside) & others[:, None]
        means = np.array([bank.phi[chosen[:, i], i].mean() for i in range(300)])
        residuals = [bank.phi[chosen[:, i], i] - means[i] for i in range(300)]
        freedom = sum(len(r) - 1 for r in residuals)
        sides.append((means, math.sqrt(sum((r**2).sum() for r in residuals) / freedom)))
    ratio = norm.logpdf(bank.phi[3], *sides[0]) - norm.logpdf(bank.phi[3], *sides[1])
    assert found == pytest.approx(ratio)
    assert offline == pytest.approx(norm.cdf(bank.phi[3], *sides[1]))
    # With known means the AUC would be Phi(1.5 / sqrt 2) = .856; they are estimated from 5 or 6.
    assert 0.75 < Roc.from_scores(found, bank.member[3]).auc.value < 0.856


def test_rmia_counts_the_population(bank: BankScores) -> None:
    found = membership_statistics.rmia(bank.phi, bank.member, 0, bank.population)
    p, z = 1 / (1 + np.exp(-bank.phi)), 1 / (1 + np.exp(-bank.population))
    ratio, ratio_z = p[0] / p[1:].mean(0), z[0] / z[1:].mean(0)
    assert found == pytest.approx((ratio[:, None] >= 2 * ratio_z).mean(1), abs=1e-12)
    offline = membership_statistics.rmia(bank.phi, bank.member, 0, bank.population, online=False)
    out = np.array([p[1:][~bank.member[1:, i], i].mean() for i in range(300)])
    ratio, ratio_z = p[0] / (0.65 * out + 0.35), z[0] / (0.65 * z[1:].mean(0) + 0.35)
    assert offline == pytest.approx((ratio[:, None] >= 2 * ratio_z).mean(1), abs=1e-12)


def test_no_attack_looks_at_the_targets_members(bank: BankScores) -> None:
    flipped = bank.member.copy()
    flipped[0] = ~flipped[0]
    for attack in ATTACKS.values():
        if not attack.needs_quarters_game:
            for one in (bank.member, flipped):
                copy = BankScores(one, bank.phi, bank.top, bank.population)
                scored = attack.score(copy, 0, np.ones(300, bool), 1)
                first = scored if one is bank.member else first  # noqa: F821
            assert np.array_equal(first, scored), attack.name


def test_the_shadow_network_learns_from_the_shadow_alone() -> None:
    rng = np.random.default_rng(2)
    game = Quarters()
    member = np.stack([game.members(KEY, m, 400) for m in range(2)])
    top = rng.dirichlet([4, 2, 1], (2, 400))
    top[member] = rng.dirichlet([30, 1, 1], int(member.sum()))
    bank = BankScores(member, np.zeros((2, 400)), -np.sort(-top, axis=2), np.zeros((2, 5)))
    judged = game.guessed_records(KEY, 0, 400)
    found = shadow_scores(bank, 0, game.guessed_records(KEY, 1, 400), 1)
    assert Roc.from_scores(found[judged], member[0][judged]).auc.value > 0.9
    assert np.array_equal(found, shadow_scores(bank, 0, game.guessed_records(KEY, 1, 400), 1))


# --- games


def test_games_are_what_they_say() -> None:
    coins = np.stack([Coins(8).members(KEY, m, 4000) for m in range(8)])
    assert abs(coins.mean() - 0.5) < 4 * 0.5 / math.sqrt(32000)
    assert np.abs(np.corrcoef(coins)[np.triu_indices(8, 1)]).max() < 4.5 / math.sqrt(4000)
    halves = [Halves(3).members(KEY, m, 101) for m in range(3)]
    assert [int(half.sum()) for half in halves] == [50] * 3
    assert not np.array_equal(halves[0], halves[1])
    quarters = Quarters()
    target, shadow = (quarters.members(KEY, m, 395) for m in range(2))
    assert target.sum() == shadow.sum() == quarters.expected_members(395) == 98
    d_target, d_shadow = (quarters.guessed_records(KEY, m, 395) for m in range(2))
    assert d_target.sum() == d_shadow.sum() == 196 and not (d_target & d_shadow).any()
    assert (target <= d_target).all() and (shadow <= d_shadow).all()
    assert quarters.is_plain(1) and not quarters.is_plain(0) and list(quarters.targets) == [0]
    for name, game in GAMES.items():
        assert name == game.name and game.relation in ("add-or-remove-one", "replace-one")


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
