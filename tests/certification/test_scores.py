"""Certificates of expected scores: against known truths, in bulk, re-bounded, and refusing."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from support import certificates, vote_score_disagreement
from support.certificates import Data
from support.separable_points import Points
from torch import nn

from dpdist import models
from dpdist.certification import expected_scores, job, table
from dpdist.certification.certificate import merge_partials, total_counts
from dpdist.certification.expected_scores import ExpectedScores, certify_scores
from dpdist.certification.predict import Predictor
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.table_reader import recertify
from dpdist.certification.worker import (
    HiddenNoiseCounter,
    expected_log_scores,
    first_layer_sensitivity,
)
from dpdist.core.errors import UserError
from dpdist.models import ModelSpec
from dpdist.randomness import keys
from dpdist.randomness.noise_location import HiddenNoise, find_noise_location

SPEC = ModelSpec(
    "hgm-cnn",
    (1, 6, 6),
    3,
    {"filters": [4], "kernels": [3], "strides": [2], "dense": 8},
    hidden_noise=True,
)
SETTINGS = ExpectedScores(n=1130, n0=50, alpha=0.05, batch=100, seed="5", radii=(0.01, 0.1))
SIZES = [name for name in expected_scores.SIZE_COLUMNS if name != expected_scores.AS_PRINTED]


FakeData = partial(Data, count=9)


def noisy_model() -> nn.Module:
    model = models.initialize(replace(SPEC, hidden_noise=False), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # so that the scores say something
    torch.manual_seed(0)
    models.attach_noise(model, 0.2 * (0.2 + torch.rand(4, 3, 3)))
    return model.eval()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("noisy")
    models.save(noisy_model(), SPEC, folder)
    return folder


@pytest.fixture(scope="module")
def reference(here: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference")
    certificates.certify(model_folder, FakeData(), SETTINGS, output, actors=1)
    return output


class Vote(nn.Module):
    """Class 1 where the first hidden number is positive: its probability is known exactly."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        score = 1e4 * h.flatten(1)[:, :1]
        return torch.cat([-score, score], 1)


def threshold_model(weight: float, std: float) -> nn.Module:
    """Robust exactly up to |w . x| / ||w||, whatever the noise."""
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[weight, 2 * weight]]))
        layer.bias.zero_()
    model = nn.Sequential(layer, Vote()).eval()
    models.attach_noise(model, torch.tensor([std]))
    return model


@pytest.mark.parametrize(("weight", "std"), [(0.1, 0.05), (20.0, 9.0)])
def test_no_sound_size_exceeds_the_distance_to_the_boundary(weight: float, std: float) -> None:
    # At alpha 1e-6 each of the 3 x 2 seeded cases fails by chance with probability below 1e-5.
    model, x = threshold_model(weight, std), torch.tensor([0.3, 0.1])
    truth = {"l2": 0.5 / np.sqrt(5), "linf": 0.5 / 3}  # |w . x| / dual norm of w
    split, noise = models.require_split(model), find_noise_location(model).as_first_layer_noise()
    assert noise is not None
    norms = first_layer_sensitivity(split, noise, (2,))
    assert norms.l2 == pytest.approx(weight * np.sqrt(5), rel=1e-6)
    assert norms.linf == pytest.approx(3 * weight, rel=1e-6)
    source = keys.StreamKeys("test", "s", "m", "d", "hidden", 1.0)
    sampler = HiddenNoiseCounter(split.first, split.rest, noise.std, source)
    got = sampler.sample_block(x, 0, 0, 20_000, 20_000)
    # 20,000 draws agree with the exact probability: false failure 1e-4.
    p = stats.norm.cdf(0.5 * weight / std)
    assert stats.binomtest(int(got.histogram[1]), 20_000, p).pvalue > 1e-4
    settings = ExpectedScores(n=20_000, alpha=1e-6, bound="counts")
    verdict = certify_scores(
        got.sums, got.squares, got.histogram, 1, settings, noise.rms_std, norms
    )
    assert verdict.prediction == 1
    for norm, most in truth.items():
        sizes = [verdict.sizes[f"{name}_{norm}"] for name in expected_scores.CERTIFICATE_TITLES]
        assert all(0 < size <= most for size in sizes)
        classical, extended, analytic, exact, cohen = sizes
        assert classical < analytic <= exact and extended < analytic
        assert cohen == pytest.approx(exact, rel=0.02)
        assert cohen > 0.6 * most  # not vacuous


def test_the_sums_of_an_input_are_the_softmax_of_its_draws() -> None:
    model = noisy_model()
    split, noise = models.require_split(model), find_noise_location(model).as_first_layer_noise()
    assert noise is not None
    source = keys.StreamKeys("test", "s", "m", "d", "hidden", 1.0)
    sampler = HiddenNoiseCounter(split.first, split.rest, noise.std, source)
    x = torch.rand(1, 6, 6)
    hidden = sampler.noisy_hidden(x, 4, keys.ESTIMATE, 2, 50).clone()
    p = torch.softmax(split.rest(hidden)[:40].double(), 1).detach().numpy()
    got = sampler.sample_block(x, 4, 2, 50, 40)
    assert np.abs(got.sums / SCORE_UNIT - p.sum(0)).max() < 40 / SCORE_UNIT
    assert (got.sums <= p.sum(0) * SCORE_UNIT).all()
    assert np.abs(got.squares / SCORE_UNIT**2 - (p**2).sum(0)).max() < 80 / SCORE_UNIT
    assert (got.histogram == np.bincount(p.argmax(1), minlength=3)).all()
    # The evaluation's mean scores are the same expectation: 3,000 draws, 5 standard errors.
    mean = expected_log_scores(model, x[None], 3000, seed="x").exp()[0].numpy()
    many = sampler.sample_block(x, 4, 0, 3000, 3000)
    assert np.abs(mean - many.sums / SCORE_UNIT / 3000).max() < 5 * 0.5 * np.sqrt(2 / 3000)


def test_table_is_reproducible_from_its_sums_and_holds_what_was_executed(
    reference: Path, model_folder: Path
) -> None:
    got = table.read(reference / job.TABLE)
    about = table.read_job_record(got)
    model = models.load(model_folder)
    noise = find_noise_location(model).as_first_layer_noise()
    assert noise is not None
    norms = first_layer_sensitivity(models.require_split(model), noise, (1, 6, 6))
    assert about["sensitivity"] == asdict(norms)
    assert about["settings"]["mode"] == "scores"
    for row in got.to_pylist():
        assert sum(row["histogram"]) == row["n"] == 1130
        assert abs(sum(row["sums"]) - 1130 * SCORE_UNIT) <= 3 * 1130
        assert row["sigma"] == noise.rms_std and row["norm"] == "l2"
        assert row["radius"] == row["exact_l2"]
        # Hoeffding by hand.
        half = np.sqrt(np.log(2 * 3 / 0.05) / (2 * 1130))
        means = np.asarray(row["sums"]) / SCORE_UNIT / 1130
        label = int(np.argmax(means))
        assert row["p_lower"] == pytest.approx(max(means[label] - half, 0), abs=1e-9)
        p_b = min(np.delete(means, label).max() + half, 1)
        assert row["p_upper"] == pytest.approx(p_b, abs=1e-9)
        exact = (
            noise.rms_std
            / norms.l2
            / 2
            * (stats.norm.ppf(row["p_lower"]) - stats.norm.ppf(row["p_upper"]))
        )
        assert row["exact_l2"] == pytest.approx(max(exact, 0), rel=1e-6, abs=1e-12)
        assert row["prediction"] == (label if exact > 0 else -1)
        assert row["exact_linf"] * norms.linf == pytest.approx(row["exact_l2"] * norms.l2)
    assert (np.asarray(got["radius"]) > 0).any()


def test_a_model_without_noise_has_no_such_certificate(tmp_path: Path) -> None:
    spec = replace(SPEC, hidden_noise=False)
    models.save(models.initialize(spec, 0), spec, tmp_path)
    with pytest.raises(UserError, match="sigma"):
        certificates.certify(tmp_path, FakeData(), SETTINGS, tmp_path / "out")


def test_rebound_is_what_a_certification_would_have_given(reference: Path) -> None:
    got = table.read(reference / job.TABLE)
    again = recertify(got, 0.05)
    assert again.drop_columns([]).to_pylist() == got.to_pylist()
    stricter = recertify(got, 0.001)
    for name in SIZES:
        old, new = np.asarray(got[name]), np.asarray(stricter[name])
        assert (new <= old).all()


def test_the_vote_s_sizes_answer_with_the_class_of_the_vote(here: None, tmp_path: Path) -> None:
    """Where most draws say one class and the mean scores another."""
    points = Points(8, count=4)
    vote_score_disagreement.save(tmp_path / "model", points.size)
    settings = ExpectedScores(n=2000, n0=500, alpha=0.01, batch=500, seed="1")
    made = certificates.certify(tmp_path / "model", points, settings, tmp_path / "out", actors=1)
    sizes = {(found.name, found.norm): found for found in ExpectedScores.read_sizes(made)}
    for norm in ("l2", "linf"):
        vote, scores = sizes["cohen", norm], sizes["exact", norm]
        assert set(vote.prediction) == {vote_score_disagreement.VOTE} and vote.predicts_by_vote
        assert set(scores.prediction) == {vote_score_disagreement.SCORE}
        assert (vote.size > 0).all() and not scores.predicts_by_vote


def test_prediction_of_single_inputs_certifies_with_fresh_noise() -> None:
    model = noisy_model()
    predictor = Predictor(model, ExpectedScores(n=500, alpha=0.05), 3, (1, 6, 6))
    x = FakeData().batch(slice(0, 1))[0]
    first, second = predictor.certify(x), predictor.certify(x)
    assert first.sums != second.sums  # type: ignore[union-attr]
    assert first.prediction == second.prediction == predictor.predict(x)
    with pytest.raises(UserError):
        Predictor(nn.Linear(4, 3), ExpectedScores(), 3, (4,))


def test_a_component_without_noise_certifies_nothing() -> None:
    split = models.require_split(noisy_model())
    std = torch.ones(4, 3, 3)
    std[0, 0, 0] = 0
    with pytest.raises(UserError):
        first_layer_sensitivity(split, HiddenNoise("0", std), (1, 6, 6))


def test_sums_of_squares_are_no_larger_than_their_columns() -> None:
    most = 2**23 - 1
    # All scores are 1, in two parts: what is added up and stored is int64.
    halves = [
        {name: [draws * SCORE_UNIT**power] for name, power in (("sums", 1), ("squares", 2))}
        for draws in (most // 2, most - most // 2)
    ]
    total = total_counts([merge_partials(*halves)], "squares")
    assert total.tolist() == [most * SCORE_UNIT**2] and total.dtype == np.int64
    for more in ({}, {"bound": "betting"}, {"mode": "target-scores"}):
        section = {"radii": (0.1,), **more}
        assert settings_of({**section, "n": most}).n == most
        with pytest.raises(UserError, match=r"certify\.n:"):
            settings_of({**section, "n": most + 1})
