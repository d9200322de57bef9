"""Each certificate spends the error that it states, measured with oracles of this file's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

from dpdist.certification import score_bounds
from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import BettingScores, ExpectedScores
from dpdist.certification.noise import Gaussian
from dpdist.certification.score_bounds import SCORE_UNIT, Sensitivity
from dpdist.certification.sequential import Anytime, TargetRadius, TargetScores
from dpdist.certification.variants import TwoClass
from dpdist.certification.worker import BlockScores, ScoreSampler, VoteSampler

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


class SureLead:
    """A counter of expected scores that are always 1 for class 0."""

    def histogram(self, *_: Any) -> np.ndarray:
        return np.array([1, 0])

    def sample_block(
        self, x: Any, index: int, block: int, rows: int, draws: int, binned: bool, leader: int
    ) -> BlockScores:
        scores = np.array([[SCORE_UNIT, 0]] * draws)
        bins = score_bounds.bin_scores(score_bounds.lead_scores(scores, leader))
        return BlockScores(scores.sum(0), scores.sum(0), np.array([draws, 0]), draws, *bins)


def test_targets_of_scores_share_one_error() -> None:
    # Every lead is 1: with a draw a look the last radius passes at the first number of draws at
    # which its own capital is 1 / alpha.
    settings = TargetScores(n=1000, n0=1, alpha=ALPHA, radii=(0.1, 0.2, 0.3), mode="target-scores")
    place = ScoreSampler(1.0, Sensitivity(1.0, 1.0, 1.0))
    partial = settings.sample(SureLead(), X, 0, 0, 1, 1, place)  # type: ignore[arg-type]
    mean = float(stats.norm.cdf(0.3))
    needed = next(n for n in range(1, 1000) if capital(np.ones(n), mean) >= 1 / ALPHA)
    assert (partial["passed"], partial["n"]) == (3, needed)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fixed": (Cohen(sigma=SIGMA, n=100), {}),
    "two-class": (TwoClass(sigma=SIGMA, n=100), {}),
    "scores": (ExpectedScores(n=100), {"sums": [90 * SCORE_UNIT, 0], "squares": [0, 0]}),
    "betting": (
        BettingScores(n=100),
        {"sums": [0, 0], "squares": [0, 0], "bins": [0] * 2 * score_bounds.NUM_BINS,
         "excess": [0] * 2 * score_bounds.NUM_BINS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("counted", [99, 200])
@pytest.mark.parametrize("mode", CASES)
def test_counts_of_another_number_of_draws_certify_nothing(mode: str, counted: int) -> None:
    settings, more = CASES[mode]
    partials = [
        {"selected": 0, "histogram": [60, 0], **more},
        {"histogram": [counted - 60, 0], **{name: [0] * len(v) for name, v in more.items()}},
    ]
    with pytest.raises(ValueError, match=str(counted)):
        settings.decide(partials, PLACE)
