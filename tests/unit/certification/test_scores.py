"""Certificates of expected scores: against known truths, in bulk, and stopped early."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats
from support import certificates, vote_score_disagreement
from support.certificates import Data
from support.networks import save_small_cnn
from support.separable_points import Points
from torch import nn

from dpdist import models
from dpdist.certification import expected_scores, job, score_bounds, table, table_reader
from dpdist.certification.certificate import merge_partials, total_counts
from dpdist.certification.expected_scores import BettingScores, ExpectedScores, certify_scores
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.sequential import LeadTest, TargetScores
from dpdist.certification.table_reader import recertify
from dpdist.certification.worker import (
    HiddenNoiseCounter,
    ScoreSampler,
    expected_log_scores,
    first_layer_sensitivity,
)
from dpdist.core.errors import UserError
from dpdist.randomness import keys
from dpdist.randomness.noise_location import HiddenNoise, find_noise_location

ALPHA = 0.05
SECTION = {"n": 1130, "n0": 50, "alpha": ALPHA, "batch": 100, "seed": "5", "backend": "eager"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_cnn(tmp_path_factory.mktemp("noisy"), noise=0.3, times=2)


@pytest.fixture(scope="module")
def reference(here: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference")
    settings = settings_of({**SECTION, "radii": (0.01, 0.1)})
    certificates.certify(model_folder, Data(), settings, output, actors=1)
    return output


class Vote(nn.Module):
    """Class 1 where the first hidden number is positive: its probability is known exactly."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        score = 1e4 * h.flatten(1)[:, :1]
        return torch.cat([-score, score, score * 0 - 1e5], 1)


def counting(model: nn.Module, shape: tuple[int, ...]) -> tuple[HiddenNoiseCounter, ScoreSampler]:
    """A counter of this model's scores, and what its noise certifies."""
    split, noise = models.require_split(model), find_noise_location(model).as_first_layer_noise()
    assert noise is not None
    source = keys.StreamKeys("test", "s", "m", "d", "hidden", 1.0)
    counter = HiddenNoiseCounter(split.first, split.rest, noise.std, source)
    return counter, ScoreSampler(noise.rms_std, first_layer_sensitivity(split, noise, shape))


def half_space(weight: float, std: float) -> nn.Module:
    """Robust exactly up to |w . x| / ||w||, whatever the noise."""
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[weight, 2 * weight]]))
        layer.bias.zero_()
    model = nn.Sequential(layer, Vote()).eval()
    models.attach_noise(model, torch.tensor([std]))
    return model


X = torch.tensor([0.3, 0.1])
TRUTH = {"l2": 0.5 / np.sqrt(5), "linf": 0.5 / 3}  # |w . X| / dual norm of w


@pytest.mark.parametrize(("weight", "std"), [(0.1, 0.05), (20.0, 9.0)])
def test_no_sound_size_exceeds_the_distance_to_the_boundary(weight: float, std: float) -> None:
    # At alpha 1e-6 each of the 2 x 2 seeded cases fails by chance with probability below 1e-5.
    sampler, place = counting(half_space(weight, std), (2,))
    assert place.sensitivity.l2 == pytest.approx(weight * np.sqrt(5), rel=1e-6)
    assert place.sensitivity.linf == pytest.approx(3 * weight, rel=1e-6)
    got = sampler.sample_block(X, 0, 0, 20_000, 20_000)
    # 20,000 draws agree with the exact probability: false failure 1e-4.
    p = stats.norm.cdf(0.5 * weight / std)
    assert stats.binomtest(int(got.histogram[1]), 20_000, p).pvalue > 1e-4
    settings = ExpectedScores(n=20_000, alpha=1e-6, bound="counts")
    verdict = certify_scores(
        got.sums, got.squares, got.histogram, 1, settings, place.sigma, place.sensitivity
    )
    assert verdict.prediction == 1
    for norm, most in TRUTH.items():
        sizes = [verdict.sizes[f"{name}_{norm}"] for name in expected_scores.CERTIFICATE_TITLES]
        assert all(0 < size <= most for size in sizes)
        classical, extended, analytic, exact, cohen = sizes
        assert classical < analytic <= exact and extended < analytic
        assert cohen == pytest.approx(exact, rel=0.02)
        assert cohen > 0.6 * most  # not vacuous


def test_no_target_beyond_the_distance_to_the_boundary_passes() -> None:
    sampler, place = counting(half_space(1.0, 0.5), (2,))
    radii = tuple(share * TRUTH["l2"] for share in (0.5, 0.8, 1.01, 1.2))
    settings = settings_of({"mode": "target-scores", "radii": radii, "alpha": 1e-6, "n": 20_000})
    verdict = settings.decide([settings.sample(sampler, X, 0, 0, 1, 500, place)], place)
    assert verdict.radius == radii[1] and verdict.prediction == verdict.selected == 1
    assert verdict.n == 20_000  # open to the end: at 1.01 nothing is hopeless yet
    easy = settings_of({**settings.model_dump(), "radii": radii[:1]})
    assert easy.decide([easy.sample(sampler, X, 0, 0, 1, 500, place)], place).n <= 1000


def test_the_sums_of_an_input_are_the_softmax_of_its_draws(model_folder: Path) -> None:
    model = models.load(model_folder)
    sampler, _ = counting(model, (1, 6, 6))
    x = torch.rand(1, 6, 6)
    hidden = sampler.noisy_hidden(x, 4, keys.ESTIMATE, 2, 50).clone()
    p = torch.softmax(models.require_split(model).rest(hidden)[:40].double(), 1).detach().numpy()
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
    _, place = counting(models.load(model_folder), (1, 6, 6))
    norms = place.sensitivity
    assert table.read_job_record(got)["sensitivity"] == asdict(norms)
    for row in got.to_pylist():
        assert sum(row["histogram"]) == row["n"] == 1130
        assert row["sigma"] == place.sigma and row["norm"] == "l2"
        assert row["radius"] == row["exact_l2"]
        # Hoeffding by hand.
        half = np.sqrt(np.log(2 * 3 / ALPHA) / (2 * 1130))
        means = np.asarray(row["sums"]) / SCORE_UNIT / 1130
        label = int(np.argmax(means))
        assert row["p_lower"] == pytest.approx(max(means[label] - half, 0), abs=1e-9)
        p_b = min(np.delete(means, label).max() + half, 1)
        assert row["p_upper"] == pytest.approx(p_b, abs=1e-9)
        apart = stats.norm.ppf(row["p_lower"]) - stats.norm.ppf(row["p_upper"])
        exact = place.sigma / norms.l2 / 2 * apart
        assert row["exact_l2"] == pytest.approx(max(exact, 0), rel=1e-6, abs=1e-12)
        assert row["prediction"] == (label if exact > 0 else -1)
        assert row["exact_linf"] * norms.linf == pytest.approx(row["exact_l2"] * norms.l2)
    assert (np.asarray(got["radius"]) > 0).any()
    assert recertify(got, ALPHA).to_pylist() == got.to_pylist()
    stricter = recertify(got, 0.001)
    for name in set(expected_scores.SIZE_COLUMNS) - {expected_scores.AS_PRINTED}:
        assert (np.asarray(stricter[name]) <= np.asarray(got[name])).all()


def test_a_model_without_noise_on_every_component_has_no_such_certificate(
    model_folder: Path, tmp_path: Path
) -> None:
    save_small_cnn(tmp_path / "plain")
    with pytest.raises(UserError, match="sigma"):
        certificates.certify(tmp_path / "plain", Data(), ExpectedScores(n=100), tmp_path / "out")
    split = models.require_split(models.load(model_folder))
    std = torch.ones(split.hidden_shape((1, 6, 6)))
    std[0, 0, 0] = 0
    with pytest.raises(UserError):
        first_layer_sensitivity(split, HiddenNoise(split.name, std), (1, 6, 6))


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


def test_a_verdict_is_of_the_classifier_that_is_asked_for() -> None:
    """700 of 1,000 samples prefer class 1 slightly, and 300 prefer class 0 strongly."""
    scores = np.repeat([[0.45, 0.55, 0.0], [0.97, 0.02, 0.01]], [700, 300], axis=0)
    units = (scores * SCORE_UNIT).astype(np.int64)
    votes = np.bincount(scores.argmax(1), minlength=3)
    counts = {"sums": units.sum(0), "squares": (units**2).sum(0), "histogram": votes}
    sampler = ScoreSampler(0.5, score_bounds.Sensitivity(2.0, 5.0, 1.0))
    means, counted = (
        ExpectedScores(n=1000, alpha=0.01, bound=bound) for bound in ("hoeffding", "counts")
    )
    first, second = (
        each.certify_counts(counts, 1, sampler.sigma, sampler.sensitivity)
        for each in (means, counted)
    )
    assert (first.prediction, second.prediction) == (0, 1)
    assert means.verdict_for_classifier(False, first, sampler) is first
    assert counted.verdict_for_classifier(True, second, sampler) is second
    names = ("prediction", "p_lower", "p_upper", "radius")
    again = counted.verdict_for_classifier(False, second, sampler)
    assert [getattr(again, name) for name in names] == [getattr(first, name) for name in names]
    vote = means.verdict_for_classifier(True, first, sampler)
    assert (vote.prediction, vote.k, vote.n) == (1, 700, 1000)
    assert vote.p_lower == pytest.approx(stats.beta.ppf(0.01, 700, 301), rel=1e-9)
    assert vote.radius == pytest.approx(0.25 * stats.norm.ppf(vote.p_lower), rel=1e-9)


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


# ---- stopped early


def leads_of(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the arguments of `LeadTest.update` for leads (n, K) in [0, 1]."""
    return score_bounds.bin_scores(np.round(scores * SCORE_UNIT).astype(np.int64))


def test_a_lead_beyond_phi_of_t_keeps_the_order() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(3, 0.4), 20_000)
    p_a, p_b = p[:, 0], p[:, 1]
    with np.errstate(divide="ignore"):
        t = special.ndtri((1 + p_a - p_b) / 2)
        apart = (special.ndtri(p_a) - special.ndtri(p_b)) / 2
    ahead = p_a > p_b
    assert (apart[ahead] >= t[ahead] * (1 - 1e-9)).all()
    # Never less than what the class's own probability shows.
    assert (t >= special.ndtri(p_a) - 1e-9).all()


@pytest.mark.parametrize(("p0", "middle"), [(0.7, 0.2), (0.9, 0.0), (0.9, 0.1)])
def test_the_error_over_all_looks_by_dynamic_programming(p0: float, middle: float) -> None:
    """Leads of 0, 1/2 and 1 whose mean is p0, watched after every draw: the exact probability that
    the radius is ever certified, over all outcomes of 60 draws."""
    draws, shares = 60, np.array([1 - p0 - middle / 2, middle, p0 - middle / 2])
    values = np.array([0.0, 0.5, 1.0])
    alive, wrong = np.zeros((draws + 1, draws + 1)), 0.0  # by how many were 1/2, and 1
    alive[0, 0] = 1.0
    half, one = np.meshgrid(np.arange(draws + 1), np.arange(draws + 1), indexing="ij")
    for number in range(1, draws + 1):
        after = alive * shares[0]
        after[1:] += alive[:-1] * shares[1]
        after[:, 1:] += alive[:, :-1] * shares[2]
        counts = np.stack([number - half - one, half, one]).reshape(3, -1)
        there = counts[0] >= 0
        shown = np.zeros(there.shape, bool)
        shown[there] = score_bounds.means_exceed(counts[:, there], values, p0, ALPHA)
        shown = shown.reshape(after.shape)
        wrong += float(after[shown].sum())
        alive = np.where(shown, 0.0, after)
    assert wrong <= ALPHA
    if middle < 1 - p0:  # not as small as could be
        assert wrong > ALPHA / 10


def test_no_class_pays_for_another() -> None:
    """Three classes, one of the others too close or both: 300 walks of 15 looks of 10 draws each;
    more than 34 wrong ones of an error of 5 % have probability below 1e-5."""
    p0, rng = 0.75, np.random.default_rng(1)
    for shares in ((0.6, 0.3, 0.1), (2 / 3, 1 / 6, 1 / 6)):
        assert (1 + shares[0] - shares[1]) / 2 <= p0 + 1e-9  # b is not far enough behind
        wrong = 0
        for _ in range(300):
            test = LeadTest((p0,), ALPHA, futility_alpha=0.2)
            for a, b, c in rng.multinomial(10, shares, 15):
                leads = np.repeat([[1.0, 1.0], [0.0, 0.5], [0.5, 0.0]], (a, b, c), axis=0)
                if test.update(*leads_of(leads)):
                    break
            wrong += test.passed
        assert wrong <= 34


def test_leads_are_rounded_down() -> None:
    logits = np.random.default_rng(2).normal(0, 1, (400, 5)) + np.array([4.0, 2.0, 0, 0, 0])
    scores = (special.softmax(logits, 1) * SCORE_UNIT).astype(np.int64)
    leads = score_bounds.lead_scores(scores, 0) / SCORE_UNIT
    exact = (1 + (scores[:, [0]] - scores[:, 1:]) / SCORE_UNIT) / 2
    assert (leads <= exact).all() and leads == pytest.approx(exact, abs=1 / SCORE_UNIT)


def test_radii_pass_in_their_order_and_hopeless_ones_end_it() -> None:
    sure, poor = np.full((300, 2), 0.9), np.array([[0.9, 0.5]] * 300)
    test = LeadTest((0.6, 0.8, 0.95), ALPHA)
    assert test.update(*leads_of(sure)) and test.passed == 2  # given up on the third
    test = LeadTest((0.6,), ALPHA)
    assert test.update(*leads_of(poor)) and test.passed == 0  # one class too close
    test = LeadTest((0.6,), ALPHA)
    assert (
        not test.update(*leads_of(sure[:2])) and test.update(*leads_of(sure)) and test.passed == 1
    )
    # Draw by draw it passes where the mean over all stakes of the capital is 1 / alpha.
    stakes, test, draws = special.expit(np.linspace(-9, 7, 48)), LeadTest((0.6,), ALPHA), 1
    while not test.update(*leads_of(np.array([[1.0]]))):
        draws += 1
    capital = [np.mean((1 + stakes * (1 / 0.6 - 1)) ** n) for n in range(draws + 1)]
    assert capital[draws - 1] < 1 / ALPHA <= capital[draws]


def test_a_table_of_targets(here: None, model_folder: Path, tmp_path: Path) -> None:
    settings = settings_of({**SECTION, "mode": "target-scores", "radii": (0.001, 0.03, 0.4)})
    assert type(settings) is TargetScores
    assert settings_of(settings.model_dump(mode="json")) == settings
    made = certificates.certify(model_folder, Data(), settings, tmp_path / "t", actors=1)
    again = certificates.certify(
        model_folder, Data(), settings, tmp_path / "t2", actors=3, chunk_seconds=1e-3
    )
    assert made.equals(again, check_metadata=True)
    rows = made.to_pylist()
    assert {row["radius"] for row in rows} <= {0.0, 0.001, 0.03}
    assert any(row["radius"] for row in rows) and any(row["n"] < 1130 for row in rows)
    assert all((row["prediction"] == row["selected"]) == (row["radius"] > 0) for row in rows)
    found = table_reader.read(tmp_path / "t" / job.TABLE)
    assert found.comparison_key["radii"] == (0.001, 0.03, 0.4)
    assert [sizes.name for sizes in found.sizes] == ["exact"]
    other, place = found.certificate_class.recreate(found, "linf", 100)
    assert type(other) is BettingScores and other.one_sided and place.sigma == found.sigma
    with pytest.raises(UserError, match="mode"):
        recertify(found.table, 0.01)


def test_other_norms_need_more(model_folder: Path) -> None:
    place = ScoreSampler.from_model(models.load(model_folder), (1, 6, 6))
    for norm in ("l2", "linf"):
        settings = settings_of({"mode": "target-scores", "radii": (0.01,), "norm": norm})
        (mean,) = settings.hypotheses(place)  # type: ignore[attr-defined]
        exact = stats.norm.cdf(0.01 * getattr(place.sensitivity, norm) / place.sigma)
        assert exact < mean == pytest.approx(exact)
