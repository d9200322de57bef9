"""Each certificate spends the error that it states, measured with oracles of this file's own."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats
from support import certificates
from support.certificates import Data
from support.networks import save_small_cnn

from dpdist.certification import cohen, job, score_bounds, table_reader, variants
from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Cohen
from dpdist.certification.noise import Gaussian
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import (
    BIN_EDGES,
    SCORE_UNIT,
    betting_lower_bound,
    bin_edge_weights,
    score_bounds_betting,
)
from dpdist.certification.sequential import Anytime, TargetRadius
from dpdist.certification.table_reader import achievable_label_radii, recertify
from dpdist.certification.variants import TwoClass
from dpdist.certification.worker import VoteSampler

SIGMA, ALPHA = 0.5, 0.05
PLACE = VoteSampler(Gaussian(SIGMA))
X = torch.zeros(1)


def test_a_confidence_sequence_ends_where_the_evidence_is_one_over_alpha() -> None:
    # The likelihood ratio against p, averaged over (p, 1) by quadrature.
    hits, draws = 880, 1000

    def evidence(p: float) -> float:
        def ratio(q: float) -> float:
            logs = hits * np.log(q / p) + (draws - hits) * np.log((1 - q) / (1 - p))
            return float(np.exp(logs) / (1 - p))

        return integrate.quad(ratio, p, 1, points=[hits / draws], limit=200)[0]

    settings = Anytime(sigma=SIGMA, n=draws, alpha=ALPHA)
    partial = {"selected": 0, "k": hits, "n": draws, "looks": 1}
    bound = settings.decide([partial], PLACE).p_lower
    expected = optimize.brentq(lambda p: np.log(evidence(p) * ALPHA), 0.7, 0.88)
    assert bound == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", [Cohen, TargetRadius])
def test_labels_are_predicted_at_the_certificates_own_error(kind: type[Certificate]) -> None:
    more = {"radii": (0.1,)} if kind is TargetRadius else {}
    settings: Any = kind(sigma=SIGMA, n=200, n0=1, alpha=ALPHA, **more)  # type: ignore[call-arg]
    for hits, label in ((115, 0), (114, -1)):  # p values 0.040 and 0.056
        counts = np.array([hits, 200 - hits])
        counter = SimpleNamespace(histogram=lambda *_, counts=counts: counts)
        assert settings.predict(counter, X, 0, 200, PLACE) == label


def capital(scores: np.ndarray, mean: float) -> float:
    """The mean over the stakes of what a bet on scores above the mean has grown to."""
    grown = []
    for place in np.linspace(-9, 7, 48):
        stake = 1 / (1 + np.exp(-place))
        grown.append(np.sum(np.log(1 - stake + stake * scores / mean)))
    return float(np.exp(special.logsumexp(grown)) / len(grown))


def test_one_sided_bets_are_at_the_whole_error_and_no_more() -> None:
    # Scores at ends of bins, so that nothing is moved: the capital against the bound is 1 / alpha.
    rng = np.random.default_rng(0)
    ends = score_bounds.BIN_EDGES[rng.integers(40, len(score_bounds.BIN_EDGES), 200)]
    scores = np.stack([ends, SCORE_UNIT - ends], axis=1)
    found = score_bounds.score_bounds_betting_one_sided(
        *score_bounds.bin_scores(scores), 0, 1 - ALPHA
    )
    assert capital(ends / SCORE_UNIT, found.p_a) == pytest.approx(1 / ALPHA, rel=1e-6)
    assert found.lower[1] == 0 and found.p_b == pytest.approx(1 - found.p_a)


def test_two_sided_bets_share_the_error_among_classes_and_sides() -> None:
    rng = np.random.default_rng(1)
    ends = score_bounds.BIN_EDGES[rng.integers(40, len(score_bounds.BIN_EDGES), 200)]
    scores = np.stack([ends, SCORE_UNIT - ends], axis=1)
    found = score_bounds.score_bounds_betting(*score_bounds.bin_scores(scores), 1 - ALPHA)
    share = ALPHA / 4  # two classes, two sides
    for k in range(2):
        own = scores[:, k] / SCORE_UNIT
        assert capital(own, found.lower[k]) == pytest.approx(1 / share, rel=1e-6)
        assert capital(1 - own, 1 - found.upper[k]) == pytest.approx(1 / share, rel=1e-6)


def test_betting_errs_no_more_often_than_allowed() -> None:
    """Exact: scores 0, 1/2 and 1, every outcome of 14 draws, at many means."""
    n, scores, alpha = 14, np.array([0.0, 0.5, 1.0]), 0.1
    counts = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
    bounds = np.array([betting_lower_bound(np.array(c), scores, alpha) for c in counts])
    worst = 0.0
    for shares in ((0.5, 0.0, 0.5), (0.1, 0.0, 0.9), (0.02, 0.0, 0.98), (0.1, 0.8, 0.1),
                   (0.0, 0.5, 0.5), (0.3, 0.3, 0.4), (0.9, 0.08, 0.02)):  # fmt: skip
        mean = float(np.array(shares) @ scores)
        chance = stats.multinomial.pmf(counts, n, shares)
        worst = max(worst, float(chance[bounds > mean].sum()))
    assert alpha / 20 < worst <= alpha


def test_bins_state_no_more_than_the_scores_themselves() -> None:
    rng = np.random.default_rng(3)
    scores = (special.softmax(rng.normal(0, 3, (300, 4)), 1) * SCORE_UNIT).astype(np.int64)
    scores[0], scores[1] = (0, SCORE_UNIT, 1, SCORE_UNIT - 1), BIN_EDGES[[5, 20, 40, 50]]
    counts, excess = score_bounds.bin_scores(scores)
    assert (
        counts.shape == excess.shape == (4, score_bounds.NUM_BINS) and (counts.sum(1) == 300).all()
    )
    weights = bin_edge_weights(counts, excess)
    assert (weights >= 0).all() and weights.sum(1) == pytest.approx(np.full(4, 300.0))
    assert weights @ BIN_EDGES == pytest.approx(scores.sum(0), rel=1e-12)
    found = score_bounds_betting(counts, excess, 0.95)
    for k in range(4):
        values, often = np.unique(scores[:, k] / SCORE_UNIT, return_counts=True)
        for bound, exact in (
            (found.lower[k], betting_lower_bound(often, values, 0.05 / 8)),
            (1 - found.upper[k], betting_lower_bound(often, 1 - values, 0.05 / 8)),
        ):
            assert exact * 0.98 < bound <= exact + 1e-12


NOISE = Gaussian(0.5)


def against_runner_up(counts: list[int], alpha: float = 0.001) -> cohen.Verdict:
    return variants.certify_against_runner_up(0, np.array(counts), alpha, NOISE)


@pytest.mark.parametrize(
    "shares",
    [(0.5, 0.25, 0.25), (0.7, 0.3, 0.0), (0.34, 0.33, 0.33), (0.95, 0.03, 0.02)],
)
def test_the_radius_is_too_large_at_most_alpha_often(shares: tuple[float, ...]) -> None:
    """Exact, over all counts of 30 draws: no class pays for another."""
    n, alpha, wrong = 30, 0.1, 0.0
    truth = 0.25 * (stats.norm.ppf(shares[0]) - stats.norm.ppf(max(shares[1:])))
    for a, b in itertools.product(range(n + 1), repeat=2):
        if a + b > n:
            continue
        if against_runner_up([a, b, n - a - b], alpha).radius > max(truth, 0.0):
            wrong += stats.multinomial.pmf([a, b, n - a - b], n, shares)
    assert wrong <= alpha


def test_the_radius_is_the_one_at_which_the_runner_up_catches_up() -> None:
    # Half-spaces on both sides of a slab of other classes: the worst classifier there is.
    p_a, p_b = 0.45, 0.1
    r = 0.25 * (stats.norm.ppf(p_a) - stats.norm.ppf(p_b))
    moved = [
        stats.norm.cdf(stats.norm.ppf(p_a) - r / 0.5),
        stats.norm.cdf(stats.norm.ppf(p_b) + r / 0.5),
    ]
    assert moved[0] == pytest.approx(moved[1])
    many = 10**8  # of so many draws the bounds are the shares
    found = against_runner_up([int(p_a * many), *[int(p_b * many)] * 5, int(0.05 * many)])
    assert found.radius == pytest.approx(r, rel=1e-3) and found.radius < r
    assert found.prediction == 0  # without a majority
    with_majority = cohen.certify(0, np.array([45, 10, 45]), 0.001, NOISE)
    assert with_majority.prediction == -1


def test_draws_without_a_class_may_be_the_runner_up_s() -> None:
    counts, draws = np.array([[600, 100, 100, 100]]), np.array([1000])
    (lower,), (upper,) = variants.runner_up_bounds(counts, np.array([0]), 0.01, draws)
    assert lower == pytest.approx(stats.beta.ppf(0.009, 600, 401), rel=1e-9)
    assert upper == pytest.approx(stats.beta.ppf(1 - 0.001, 201, 800), rel=1e-9)


def test_one_tenth_of_the_error_is_the_runner_up_s() -> None:
    counts = [900, 50, 50]
    spread, alone = against_runner_up(counts), cohen.certify(0, np.array(counts), 0.001, NOISE)
    p_a = stats.beta.ppf(0.0009, 900, 101)
    p_b = stats.beta.ppf(1 - 0.0001, 51, 950)
    radius = 0.25 * (stats.norm.ppf(p_a) - stats.norm.ppf(p_b))
    assert spread.radius == pytest.approx(radius, rel=1e-9) and radius > 1.05 * alone.radius
    assert (spread.p_lower, spread.p_upper) == (pytest.approx(p_a), pytest.approx(p_b))
    assert (
        against_runner_up([500, 500, 0]).prediction == -1
        and against_runner_up([10, 980, 10]).radius == 0
    )
    assert against_runner_up([1000]).radius > 0  # of one class


def test_a_table_of_both_bounds(here: None, tmp_path: Path) -> None:
    save_small_cnn(tmp_path / "model")
    section = {"sigma": 0.5, "n": 1130, "n0": 50, "batch": 100, "seed": "5", "backend": "eager"}
    settings = settings_of({**section, "mode": "two-class"})
    assert type(settings) is TwoClass and settings.folder_name == "sigma-0.5-two-class-n-1130"
    table = certificates.certify(tmp_path / "model", Data(), settings, tmp_path / "t", actors=2)
    for row in table.to_pylist():
        made = variants.certify_against_runner_up(
            row["selected"], np.array(row["histogram"]), 0.001, NOISE
        )
        for name in ("p_lower", "p_upper", "radius", "prediction"):
            assert row[name] == getattr(made, name), name
    found = table_reader.read(tmp_path / "t" / job.TABLE)
    looser = recertify(found.table, 0.05)
    assert (looser["radius"].to_numpy() >= table["radius"].to_numpy()).all()
    assert recertify(looser, 0.001).to_pylist() == table.to_pylist()
    # What no number of draws could certify allows for a rest that is spread evenly.
    reach = achievable_label_radii(found.table)
    assert reach is not None and (reach >= found.size_if_correct() - 1e-9).all()
    other, _ = found.certificate_class.recreate(found, "l2", 100)
    assert type(other) is TwoClass
