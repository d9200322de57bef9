from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from support.local_execution import call
from torch import nn

from dpdist import models
from dpdist.attacks.job import counting_assignment, require_attackable
from dpdist.certification import cohen, predict
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import ExpectedScores
from dpdist.certification.predict import Predictor, to_model_input
from dpdist.core.errors import UserError
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import NoNoise


class Threshold(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = x.flatten(1)[:, :1] - 0.5
        return torch.cat([-score, score], 1)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known sequence in place of the operating system's secret one."""
    seeds = itertools.count()
    monkeypatch.setattr(predict.secrets, "token_hex", lambda width: f"{next(seeds)} of {width}")


def predictor(n: int = 2000) -> Predictor:
    return Predictor(Threshold(), Cohen(sigma=0.25, n=n), 2, (1, 2, 2))


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


def test_labels_and_abstention_under_fresh_noise(seeded: None) -> None:
    it = predictor()
    # Equal counts would be noise that is used again, by one predictor or by several.
    x = torch.full((1, 2, 2), 0.75)
    assert len({it.certify(x).k for _ in range(4)}) > 1
    assert len({predictor().certify(x).k for _ in range(4)}) > 1
    assert it.predict(torch.full((1, 2, 2), 0.75)) == 1
    assert it.predict(torch.full((1, 2, 2), 0.25)) == 0
    boundary = torch.full((1, 2, 2), 0.5)
    # On the boundary a label comes out with probability 0.001 each time: twice in ten is 5e-5.
    assert sum(it.predict(boundary) != -1 for _ in range(10)) <= 1


def test_inputs_are_checked() -> None:
    assert to_model_input(np.full((1, 2, 2), 255, np.uint8), (1, 2, 2)).max() == 1.0
    for pixels, shape in (
        (np.zeros((2, 2), np.float32), (1, 2, 2)),
        (np.full((1, 2, 2), 7.0), (1, 2, 2)),
        (np.array([np.nan]), (1,)),
    ):
        with pytest.raises(ValueError):
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


@pytest.fixture
def runs(golden, tmp_path: Path) -> Path:
    """A trained run named x that is not certified yet."""
    folder = golden("digits", tmp_path)
    shutil.rmtree(folder.certificates)
    return tmp_path


def good(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_predict(runs: Path) -> None:
    import dpdist.data

    test = dpdist.data.load(dpdist.data.DataSource("digits", 10), "test")
    image = np.array(test.inputs[0])
    pixels = image[0] if image.dtype == np.uint8 else (image[0] * 255).astype(np.uint8)
    Image.fromarray(pixels).save(runs / "a.png")
    np.save(runs / "b.npy", test.batch(slice(0, 1))[0].numpy())
    images = (runs / "a.png", runs / "b.npy")
    lines = good(
        "predict", "x", *images, "--runs", runs, "--json", "--set", "certify.n=2000"
    ).splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["label"] for answer in answers] == [int(test.labels[0])] * 2
    assert all(0 < answer["radius"] < 1.2 and not answer["abstain"] for answer in answers)
    text = good("predict", "x", runs / "a.png", "--runs", runs, "--label-only")
    assert text.strip() == f"{runs / 'a.png'}: {int(test.labels[0])}"
