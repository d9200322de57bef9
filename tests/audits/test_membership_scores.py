"""LiRA, RMIA and the shadow attack: against direct formulas, and on models that remember."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpdist.audits import membership_statistics
from dpdist.audits.membership_findings import ATTACKS, shadow_scores
from dpdist.audits.membership_statistics import GAMES, BankScores, Coins, Halves, Quarters, Roc

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
