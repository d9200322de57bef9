"""Early stopping of certified scores: errors by dynamic programming, sizes against the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats
from support import certificates
from support.certificates import Data
from support.networks import save_small_cnn
from torch import nn

from dpdist import models
from dpdist.certification import job, score_bounds, table_reader
from dpdist.certification.expected_scores import BettingScores
from dpdist.certification.predict import Predictor
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.sequential import LeadTest, TargetScores
from dpdist.certification.table_reader import recertify
from dpdist.certification.worker import HiddenNoiseCounter, ScoreSampler, first_layer_sensitivity
from dpdist.core.errors import UserError
from dpdist.randomness import keys
from dpdist.randomness.noise_location import find_noise_location

ALPHA = 0.05


def leads_of(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the arguments of `LeadTest.update` for leads (n, K) in [0, 1]."""
    return score_bounds.bin_scores(np.round(scores * SCORE_UNIT).astype(np.int64))


def test_a_lead_beyond_phi_of_t_keeps_the_order() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(3, 0.4), 20_000)
    p_a, p_b = p[:, 0], p[:, 1]
    with np.errstate(divide="ignore"):
        t = special.ndtri((1 + p_a - p_b) / 2)
        apart = (special.ndtri(p_a) - special.ndtri(p_b)) / 2
    ahead = p_a > p_b
    assert (apart[ahead] >= t[ahead] * (1 - 1e-9)).all()
    # Never less than what the class's own probability shows, and the same where two share all.
    assert (t >= special.ndtri(p_a) - 1e-9).all()
    assert special.ndtri((1 + 0.8 - 0.2) / 2) == pytest.approx(special.ndtri(0.8))


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
            votes = rng.multinomial(10, shares, 15)
            test = LeadTest((p0,), ALPHA, futility_alpha=0.2)
            for a, b, c in votes:
                leads = np.repeat([[1.0, 1.0], [0.0, 0.5], [0.5, 0.0]], (a, b, c), axis=0)
                if test.update(*leads_of(leads)):
                    break
            wrong += test.passed
        assert wrong <= 34


def test_leads_show_at_least_what_the_class_alone_does() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (400, 5)) + np.array([4.0, 2.0, 0, 0, 0])
    scores = (special.softmax(logits, 1) * SCORE_UNIT).astype(np.int64)
    leads = score_bounds.lead_scores(scores, 0)
    assert leads.shape == (400, 4)
    assert (leads >= scores[:, [0]] - 1).all() and (leads <= SCORE_UNIT).all()
    exact = (1 + (scores[:, [0]] - scores[:, 1:]) / SCORE_UNIT) / 2
    assert (leads / SCORE_UNIT <= exact).all() and leads / SCORE_UNIT == pytest.approx(
        exact, abs=1 / SCORE_UNIT
    )


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


SECTION = {"n": 1130, "n0": 50, "alpha": 0.05, "batch": 100, "seed": "5", "backend": "eager"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_cnn(tmp_path_factory.mktemp("noisy"), noise=0.3, times=2)


def test_a_table_of_targets(here: None, model_folder: Path, tmp_path: Path) -> None:
    settings = settings_of({**SECTION, "mode": "target-scores", "radii": (0.001, 0.03, 0.4)})
    assert type(settings) is TargetScores
    assert settings_of(settings.model_dump(mode="json")) == settings
    table = certificates.certify(model_folder, Data(), settings, tmp_path / "t", actors=1)
    again = certificates.certify(model_folder, Data(), settings, tmp_path / "t2", actors=3,
                        chunk_seconds=1e-3)  # fmt: skip
    assert table.equals(again, check_metadata=True)
    rows = table.to_pylist()
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
    by_norm = [
        settings_of({"mode": "target-scores", "radii": (0.01,), "norm": norm}).hypotheses(place)  # type: ignore[attr-defined]
        for norm in ("l2", "linf")
    ]
    for (mean,), norm in zip(by_norm, (place.sensitivity.l2, place.sensitivity.linf), strict=True):
        assert mean == pytest.approx(stats.norm.cdf(0.01 * norm / place.sigma))
        assert mean > stats.norm.cdf(0.01 * norm / place.sigma)


class Vote(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        score = 1e4 * h.flatten(1)[:, :1]
        return torch.cat([-score, score, score * 0 - 1e5], 1)


def test_no_target_beyond_the_distance_to_the_boundary_passes() -> None:
    """A half-space, robust up to 0.5 / sqrt(5); alpha 1e-6."""
    layer, truth = nn.Linear(2, 1), 0.5 / np.sqrt(5)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.bias.zero_()
    model = nn.Sequential(layer, Vote()).eval()
    models.attach_noise(model, torch.tensor([0.5]))
    split, noise, x = (
        models.require_split(model),
        find_noise_location(model).as_first_layer_noise(),
        torch.tensor([0.3, 0.1]),
    )
    place = ScoreSampler(noise.rms_std, first_layer_sensitivity(split, noise, (2,)))
    source = keys.StreamKeys("test", "s", "m", "d", "hidden", 1.0)
    sampler = HiddenNoiseCounter(split.first, split.rest, noise.std, source)
    radii = (0.5 * truth, 0.8 * truth, 1.01 * truth, 1.2 * truth)
    settings = settings_of({"mode": "target-scores", "radii": radii, "alpha": 1e-6, "n": 20_000})
    verdict = settings.decide([settings.sample(sampler, x, 0, 0, 1, 500, place)], place)
    assert verdict.radius == radii[1] and verdict.prediction == verdict.selected == 1
    assert verdict.n == 20_000  # open to the end: at 1.01 nothing is hopeless yet
    easy = settings_of({**settings.model_dump(), "radii": radii[:1]})
    assert easy.decide([easy.sample(sampler, x, 0, 0, 1, 500, place)], place).n <= 1000


def test_it_answers_single_inputs_and_refuses_mistakes(model_folder: Path) -> None:
    model = models.load(model_folder)
    settings = settings_of({**SECTION, "seed": None, "mode": "target-scores", "radii": (1e-4,)})
    x = Data().batch(slice(0, 1))[0]
    predictor = Predictor(model, settings, 3, (1, 6, 6))
    assert predictor.predict(x) in (-1, predictor.certify(x).selected)
    with pytest.raises(UserError, match=r"certify\.radii"):
        settings_of({"mode": "target-scores", "radii": (0.2, 0.1)})
    far = settings_of({"mode": "target-scores", "radii": (1e6,)})
    with pytest.raises(UserError, match=r"certify\.radii"):
        far.build_sampler(model, (1, 6, 6))
