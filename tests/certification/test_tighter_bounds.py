"""Betting: errors by exact sums, bounds against exact oracles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats
from support import certificates
from support.certificates import Data
from support.networks import save_small_cnn

from dpdist.certification import job, table_reader
from dpdist.certification import score_bounds as betting
from dpdist.certification.expected_scores import BettingScores
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import (
    BIN_EDGES,
    SCORE_UNIT,
    betting_lower_bound,
    bin_edge_weights,
    score_bounds_betting,
    score_bounds_betting_one_sided,
)
from dpdist.certification.table_reader import recertify


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
    counts, excess = betting.bin_scores(scores)
    assert counts.shape == excess.shape == (4, betting.NUM_BINS) and (counts.sum(1) == 300).all()
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


@pytest.mark.slow
def test_a_table_of_bets(here: None, tmp_path: Path) -> None:
    model = save_small_cnn(tmp_path / "model", noise=0.3)
    section = {"n": 1130, "n0": 50, "alpha": 0.05, "batch": 100, "seed": "5", "backend": "eager"}
    for one_sided in (False, True):
        settings = settings_of({**section, "bound": "betting", "one_sided": one_sided})
        assert type(settings) is BettingScores
        home = tmp_path / settings.folder_name
        table = certificates.certify(model, Data(3), settings, home, actors=2, chunk_seconds=1e-3)
        for row in table.to_pylist():
            bins = [np.reshape(row[name], (3, -1)) for name in ("bins", "excess")]
            assert (bins[0] @ BIN_EDGES[:-1] + bins[1].sum(1)).tolist() == row["sums"]
            made = score_bounds_betting(*bins, 0.95)
            if one_sided:
                made = score_bounds_betting_one_sided(*bins, row["selected"], 0.95)
            assert (row["p_lower"], row["p_upper"]) == (made.p_a, made.p_b)
        found = table_reader.read(home / job.TABLE)
        assert found.comparison_key["one_sided"] is one_sided
        looser = recertify(found.table, 0.2)
        assert (looser["p_lower"].to_numpy() > table["p_lower"].to_numpy()).all()
        again_by, _ = found.certificate_class.recreate(found, "linf", 100)
        assert (again_by.one_sided, again_by.norm) == (one_sided, "linf")
