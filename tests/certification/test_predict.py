from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpdist import models
from dpdist.attacks.job import counting_assignment, require_attackable
from dpdist.certification import cohen, predict
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import ExpectedScores
from dpdist.certification.predict import Predictor, to_model_input
from dpdist.core import binomial
from dpdist.core.errors import UserError
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import NoNoise


class Threshold(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = x.flatten(1)[:, :1] - 0.5
        return torch.cat([-score, score], 1)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known sequence in place of the operating system's secret one."""
    seeds = itertools.count()
    monkeypatch.setattr(predict.secrets, "token_hex", lambda width: f"{next(seeds)} of {width}")


def predictor(n: int = 2000) -> Predictor:
    return Predictor(Threshold(), Cohen(sigma=0.25, n=n), 2, (1, 2, 2))


def test_certificates_never_exceed_the_true_distance() -> None:
    # The distance to the boundary is known. 40 certificates at alpha 0.001: false failure 0.04
    # if the bound were exact at every one; the radius is 0.25, and more than one is 8e-4.
    it = predictor()
    x = torch.full((1, 2, 2), 0.75)
    verdicts = [it.certify(x) for _ in range(40)]
    assert sum(v.radius > 0.25 for v in verdicts) <= 1
    assert all(v.prediction == 1 and v.radius > 0.15 for v in verdicts)
    # Fresh secret noise each time and in each predictor: equal counts would be reuse.
    assert len({v.k for v in verdicts}) > 3
    assert len({predictor().certify(x).k for _ in range(4)}) > 1


class BatchMean(Threshold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 1e-3 * x.detach().mean(0, keepdim=True))


def test_a_model_that_looks_at_its_batch_is_not_certified() -> None:
    with pytest.raises(ValueError, match=r"looks at its batch"):
        Predictor(BatchMean(), Cohen(sigma=0.25, n=2000), 2, (1, 2, 2))
    # Also behind the noise that a model has of its own.
    behind = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), behind, nn.Linear(4, 2)).eval()
    models.attach_noise(model, torch.ones(4))
    with pytest.raises(ValueError, match="its batch"):
        Predictor(model, ExpectedScores(n=200, alpha=0.05), 2, (1, 2, 2))
    with pytest.raises(UserError, match="its batch"):
        inputs = np.random.default_rng(0).random((8, 1, 2, 2), dtype=np.float32)
        source = StreamKeys("attack", "1", "", "", "", 0.0)
        require_attackable(counting_assignment(BatchMean(), NoNoise(), 2, inputs, source, n=1))


class OwnRows(Threshold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(len(x), -1).view(-1, 1, 2, 2))


@pytest.mark.parametrize("n0", [1, 100, 250, 1000])
def test_a_form_is_chosen_for_all_rows_that_are_executed(n0: int) -> None:
    # A trace holds the number of rows that it was made at.
    it = Predictor(OwnRows(), Cohen(sigma=0.25, n=2000, n0=n0, backend="frozen"), 2, (1, 2, 2))
    assert it.certify(torch.full((1, 2, 2), 0.75)).prediction == 1


def test_labels_and_abstention() -> None:
    it = predictor()
    assert it.predict(torch.full((1, 2, 2), 0.75)) == 1
    assert it.predict(torch.full((1, 2, 2), 0.25)) == 0
    boundary = torch.full((1, 2, 2), 0.5)
    # On the boundary a label comes out with probability 0.001 each time: twice in ten is 5e-5.
    assert sum(it.predict(boundary) != -1 for _ in range(10)) <= 1


@pytest.mark.parametrize(("hits", "draws"), [(0, 0), (5, 10), (9, 10), (1, 10), (560, 1000)])
def test_two_sided_test_is_the_binomial_one(hits: int, draws: int) -> None:
    expected = stats.binomtest(hits, draws, 0.5).pvalue if draws else 1.0
    assert binomial.two_sided_p_value(hits, draws) == pytest.approx(expected, rel=1e-9)


def test_inputs_are_checked() -> None:
    assert to_model_input(np.full((1, 2, 2), 255, np.uint8), (1, 2, 2)).max() == 1.0
    for pixels, shape, named in (
        (np.zeros((2, 2), np.float32), (1, 2, 2), "shape"),
        (np.full((1, 2, 2), 7.0), (1, 2, 2), "0, 1"),
        (np.array([np.nan]), (1,), "finite"),
        (np.array([1e300]), (1,), "finite"),
    ):
        with pytest.raises(ValueError, match=named), warnings.catch_warnings():
            warnings.simplefilter("error")
            to_model_input(pixels, shape)


def test_a_label_is_wrong_with_the_stated_probability_and_no_larger() -> None:
    """Exact, of two classes with half of the answers each: every label may be the other one's."""
    alpha, errors = 0.05, []
    for draws in range(5, 60):
        decided = [
            k for k in range(draws + 1) if cohen.predict(np.array([k, draws - k]), alpha) != -1
        ]
        errors.append(float(stats.binom.pmf(decided, draws, 0.5).sum()))
    assert 0.8 * alpha < max(errors) <= alpha * (1 + 1e-9)
    # The same where the second outcome is no class: only the first one may be returned.
    for draws in range(5, 60):
        decided = [k for k in range(draws + 1) if cohen.predict(np.array([k]), alpha, draws) != -1]
        assert stats.binom.pmf(decided, draws, 0.5).sum() <= alpha / 2 * (1 + 1e-9)


def test_single_inputs_have_noise_of_their_own() -> None:
    """No generator that is no cipher."""
    given = Cohen(sigma=0.25, n=2000, generator="philox", seed="old")
    assert given.with_seed("new") == Cohen(sigma=0.25, n=2000, seed="new")
    scores = ExpectedScores(n=200, generator="philox")
    assert scores.with_seed("new") == ExpectedScores(n=200, seed="new")
