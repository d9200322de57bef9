"""A row of logits that is not finite has no class: nothing selects, certifies or scores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import certificates
from support.batch_dependent import CLASSES, SHAPE, Inputs, Overflows, save
from torch import Tensor, nn

from dpdist import models
from dpdist.certification import cohen, job, table_reader
from dpdist.certification.certificate import counts_to_json, merge_partials, total_counts
from dpdist.certification.predict import Predictor
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.table_reader import achievable_label_radii, recertify
from dpdist.certification.worker import HiddenNoiseCounter, count_classes, expected_log_scores
from dpdist.core.binomial import two_sided_p_value
from dpdist.models import NO_CLASS, predicted_classes, softmax_scores
from dpdist.randomness import keys
from dpdist.randomness.keys import StreamKeys

SOURCE = StreamKeys("test", "seed", "model", "data", "gaussian", 0.5)
SETTINGS: dict[str, Any] = {
    "sigma": 0.1, "n0": 20, "n": 200, "batch": 25, "seed": "1", "backend": "eager"
}  # fmt: skip
ROWS = [
    [torch.nan, 1.0, 2.0], [0.0, torch.nan, -1.0], [torch.inf, 0.0, 0.0], [-torch.inf, 0.0, 1.0],
    [torch.inf, torch.inf, 0.0], [torch.nan] * 3, [0.0, 3.0, 1.0], [2.0, 2.0, 1.0],
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_rows_of_numbers_have_a_class(dtype: torch.dtype) -> None:
    logits = torch.tensor(ROWS, dtype=dtype)
    assert predicted_classes(logits).tolist() == [NO_CLASS] * 6 + [1, 0]
    assert predicted_classes(logits.view(2, 4, 3)).tolist() == [[-1] * 4, [-1, -1, 1, 0]]
    assert count_classes(logits, 3).tolist() == [1, 1, 0]
    scores = softmax_scores(logits)
    assert (scores[:6] == 0).all() and torch.equal(scores[6:], torch.softmax(logits[6:], 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [{}, {"mode": "anytime", "radii": (0.01,)}], ids=["fixed", "anytime"]
)
def test_what_no_check_input_shows_is_certified_as_nothing(
    here: None, tmp_path: Path, mode: dict[str, Any]
) -> None:
    spec = save("Overflows", tmp_path / "model")
    rows = certificates.certify(
        tmp_path / "model", Inputs(72, marked=True), settings_of(SETTINGS | mode),
        tmp_path / "out", actors=2, chunk_seconds=1e-3, trusted_factory=spec.name,
    ).to_pylist()  # fmt: skip
    assert any(row["prediction"] >= 0 for row in rows[:64])
    for row in rows[64:]:
        assert (row["prediction"], row["radius"], row["k"]) == (-1, 0.0, 0)
        assert not any(row["histogram"] or []) and row["n"] > 0
    found = table_reader.read(tmp_path / "out" / job.TABLE)
    assert found.certified_accuracy(0.0) == np.mean(
        [row["prediction"] == row["label"] for row in rows]
    )
    assert not found.correct[64:].any() and not found.size_if_correct()[64:].clip(0).any()
    if not mode:
        assert (achievable_label_radii(found.table)[64:] <= 0).all()  # type: ignore[index]
        looser = recertify(found.table, 0.2).to_pylist()
        assert {row["prediction"] for row in looser[64:]} == {-1}


class Sometimes(nn.Module):
    """Two classes by the first number, and none where the second is below `none`."""

    def __init__(self, none: float = 0.0) -> None:
        super().__init__()
        self.none = none

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1)[:, :1]
        score = torch.where(x.flatten(1)[:, 1:2] < self.none, torch.nan, score)
        return torch.cat([score, -score, score - 100], 1)


def test_nor_does_it_make_an_early_test_certain(here: None, tmp_path: Path) -> None:
    """Three in ten draws have no class: with the others alone for all, the share would be 1."""
    spec = save("Flickers", tmp_path / "model")
    mode = {"n": 2000, "batch": 100, "mode": "anytime", "radii": (0.2,)}
    rows = certificates.certify(
        tmp_path / "model", Inputs(66, marked=True), settings_of(SETTINGS | mode),
        tmp_path / "out", actors=1, chunk_seconds=1e-3, trusted_factory=spec.name,
    ).to_pylist()  # fmt: skip
    for row in rows[64:]:
        assert abs(row["k"] / row["n"] - 0.7) < 5 * np.sqrt(0.21 / row["n"])
        assert row["p_lower"] < 0.75 and row["n"] < 2000


def test_the_label_is_an_outcome_against_no_class() -> None:
    counts = np.array([10, 60, 5])
    assert cohen.predict(counts, 0.001) == cohen.predict(counts, 0.001, 75) == 1
    assert cohen.predict(counts, 0.001, 75 + 40) == -1  # 60 against 40
    assert cohen.predict(counts, 0.001, 75 + 61) == -1
    assert cohen.predict(counts, 1.0, 75 + 60) == 1 and cohen.predict(counts, 1.0, 75 + 61) == -1
    assert cohen.predict(np.array([0, 0]), 1.0, 50) == -1
    assert two_sided_p_value(60, 100) > 0.001 >= two_sided_p_value(60, 75)


def test_counts_of_another_number_of_draws_are_refused() -> None:
    some = counts_to_json(np.array([3, 4]), 7)
    assert some == {"histogram": [3, 4]}  # as ever where all draws have a class
    others = counts_to_json(np.array([1, 0]), 5)
    assert others == {"histogram": [1, 0], "undefined": [4]}
    for parts in ([some, others], [merge_partials(others, some)]):
        assert total_counts(parts, "histogram", 12).tolist() == [4, 4]
        for wrong in (8, 11, 13):
            with pytest.raises(ValueError, match=str(wrong)):
                total_counts(parts, "histogram", wrong)


def test_scores_of_what_is_no_number_are_zero() -> None:
    """They were the smallest int64 there is."""
    sampler = HiddenNoiseCounter(nn.Identity(), Sometimes(), 1.0, SOURCE)
    x = torch.tensor([5.0, 0.0, 0.0])
    noisy = sampler.noisy_hidden(x, 0, keys.ESTIMATE, 0, 400)
    none = int((noisy[:, 1] < 0).sum())
    found = sampler.sample_block(x, 0, 0, 400, 400, binned=True)
    assert 0 < none < 400 and found.draws == 400
    assert found.histogram.sum() == 400 - none
    assert (found.sums >= 0).all() and found.sums.sum() <= SCORE_UNIT * (400 - none)
    scores = torch.softmax(Sometimes()(noisy[noisy[:, 1] >= 0]).double(), 1)
    assert found.sums.tolist() == (scores * SCORE_UNIT).long().sum(0).tolist()
    assert found.bins is not None and (found.bins.sum(1) == 400).all()
    lead = sampler.sample_block(x, 0, 0, 400, 400, binned=True, leader=0)
    assert lead.bins is not None and (lead.bins.sum(1) == 400).all()


def noisy() -> nn.Module:
    """Three numbers, noise 0.3 on each; none where the second is below -2 with its noise."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 3, bias=False), Sometimes(none=-2.0)).eval()
    torch.nn.init.eye_(model[1].weight)  # type: ignore[arg-type]
    models.attach_noise(model, torch.full((3,), 0.3))
    return model


@pytest.mark.parametrize(
    "section",
    [{"bound": "counts"}, {"bound": "betting"}, {"mode": "target-scores", "radii": (0.001,)}],
    ids=lambda section: str(next(iter(section.values()))),
)
def test_expected_scores_have_no_class_there_either(section: dict[str, Any]) -> None:
    model = noisy()
    settings = settings_of({"n": 1000, "n0": 50, "alpha": 0.05, "batch": 250, **section})
    predictor = Predictor(model, settings, 3, (3,))
    right = predictor.certify(torch.tensor([4.0, 9.0, 0.0]))
    assert right.prediction == 0 and right.radius > 0
    nothing = predictor.certify(torch.tensor([4.0, -9.0, 0.0]))
    assert nothing.prediction == -1 and nothing.radius == 0 and nothing.k == 0
    # Half of the draws: score 0 in every class. The first class is ahead still, at half its score.
    half = predictor.certify(torch.tensor([4.0, -2.0, 0.0]))
    assert half.k < 0.7 * half.n  # 1000 draws, or 250: six standard deviations
    if "mode" not in section:
        assert half.p_lower < 0.6 < right.p_lower and half.radius < right.radius


def test_mean_scores_leave_out_what_is_no_number() -> None:
    model = noisy()
    x = torch.tensor([[4.0, 9.0, 0.0], [4.0, -9.0, 0.0], [4.0, -2.0, 0.0], [-900.0, 9.0, 0.0]])
    found = expected_log_scores(model, x, 50, "seed")
    assert predicted_classes(found).tolist() == [0, -1, 0, 1]
    assert found[1].isnan().all() and found[[0, 2, 3]].isfinite().all()
    assert 0.2 < float(found[2].exp().sum()) < 0.8  # four standard deviations; seeded


def test_predictions_abstain() -> None:
    marked = Inputs(65, marked=True).batch(slice(64, 65))[0]
    settings = settings_of({"sigma": 0.1, "n": 500})
    predictor = Predictor(Overflows().eval(), settings, CLASSES, SHAPE)
    assert predictor.predict(marked) == -1
    found = predictor.certify(marked)
    assert (found.prediction, found.radius, found.k) == (-1, 0.0, 0)
