from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats
from support import certificates, vote_score_disagreement
from support.batch_dependent import Inputs, save
from support.certificates import Data
from support.networks import save_small_cnn
from support.separable_points import Points
from torch import Tensor, nn

from dpdist import models
from dpdist.attacks.gradient_attacks import (
    RandomizedClassifier,
    _best,
    success_score,
)
from dpdist.attacks.job import AttackJob, MeanScores
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import TABLE, read_attack
from dpdist.certification import inference, reexecution, score_bounds
from dpdist.certification import job as certifying
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.subject import Subject
from dpdist.core.errors import InvalidResultsError, UserError

FakeData = partial(Data, count=12)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_cnn(tmp_path_factory.mktemp("model"))


SETTINGS = AttackSettings(
    norm="l2", sizes=(0.2, 1.0), attacks=("fgsm", "pgd"), steps=3, batch=5, seed="5", n=200,
    samples=4, restarts=2,
)  # fmt: skip
SMOOTHED = SETTINGS.model_copy(update={"sigma": 0.25})


def raw(output: Path) -> bytes:
    return (output / TABLE).read_bytes()


def rows(output: Path) -> list[dict]:
    return pq.read_table(output / TABLE).to_pylist()


@pytest.fixture(scope="module", autouse=True)
def _one_form() -> Iterator[None]:
    """The executed form is the fastest of a short probe: under load not always the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            inference, "_time_forms", lambda forms, batch, rounds=1: dict.fromkeys(forms, 1.0)
        )
        yield


@pytest.fixture(scope="module")
def reference(here: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference")
    certificates.attack_model(model_folder, FakeData(), SETTINGS, output, actors=1)
    return output


@pytest.mark.slow
def test_every_attack_size_and_input_is_there(
    here: None, model_folder: Path, tmp_path: Path
) -> None:
    for actors in (1, 3):
        certificates.attack_model(
            model_folder, FakeData(), SMOOTHED, tmp_path / f"{actors}", actors=actors
        )
    found = rows(tmp_path / "1")
    assert raw(tmp_path / "1") == raw(tmp_path / "3") and len(found) == 12 * (1 + 2 * 2)
    assert {(row["attack"], row["size"]) for row in found} == set(SMOOTHED.attack_sizes)
    for row in found:
        assert row["distance"] <= row["size"] and row["label"] == row["index"] % 3
        assert 1 <= row["hits"] <= row["n"] == 200
        if row["attack"] == "pgd":
            assert row["distance"] > 0.7 * row["size"]  # the box takes some of it
    right: dict[tuple[str, float], list[bool]] = {}
    for row in found:
        right.setdefault((row["attack"], row["size"]), []).append(row["prediction"] == row["label"])
    accuracy = {pair: np.mean(values) for pair, values in right.items()}
    assert accuracy["pgd", 1.0] <= accuracy["pgd", 0.2] <= accuracy["none", 0.0]


def test_sizes_and_attacks_can_be_added_and_change_nothing(
    reference: Path, model_folder: Path, tmp_path: Path
) -> None:
    with torch.no_grad():
        answers = models.load(model_folder)(FakeData().batch(slice(None))).argmax(1)
    clean = {row["index"]: row["prediction"] for row in rows(reference) if row["attack"] == "none"}
    assert [clean[i] for i in range(12)] == answers.tolist()
    one = SETTINGS.model_copy(update={"sizes": (1.0,), "attacks": ("pgd",)})
    certificates.attack_model(model_folder, FakeData(), one, tmp_path, actors=1)
    alone = rows(tmp_path)
    assert len(alone) == 24
    assert [row for row in rows(reference) if row in alone] == alone
    # What was computed once stays, whatever is asked for later.
    for settings in (SETTINGS, one):
        certificates.attack_model(model_folder, FakeData(), settings, tmp_path, actors=1)
        assert raw(tmp_path) == raw(reference)


def test_an_input_is_attacked_alike_whichever_others_are_chosen(
    reference: Path, model_folder: Path, tmp_path: Path
) -> None:
    some = SETTINGS.model_copy(update={"start": 1, "every": 2})
    certificates.attack_model(model_folder, FakeData(), some, tmp_path, actors=1)
    names = ("attack", "size", "index")
    whole = {tuple(row[name] for name in names): row for row in rows(reference)}
    found = rows(tmp_path)
    assert len(found) == 6 * 5 and {row["index"] for row in found} == set(range(1, 12, 2))
    for row in found:
        same = whole[tuple(row[name] for name in names)]
        assert row == same | {"distance": pytest.approx(same["distance"], rel=1e-5)}


def test_other_models_and_data_are_refused(
    reference: Path, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="data"):
        certificates.attack_model(model_folder, FakeData(fingerprint="other"), SETTINGS, reference)
    save_small_cnn(tmp_path, 4)
    with pytest.raises(UserError, match="model"):
        certificates.attack_model(tmp_path, FakeData(), SETTINGS, reference)


def test_results_of_other_settings_are_not_mixed(model_folder: Path) -> None:
    others: tuple[dict[str, Any], ...] = (
        {}, {"norm": "linf"}, {"steps": 4}, {"restarts": 3}, {"step_scale": 2.0}, {"sigma": 0.25},
        {"samples": 5}, {"n": 300}, {"alpha": 0.002}, {"labels": "predicted"}, {"batch": 6},
        {"start": 1}, {"every": 2}, {"max_inputs": 3},
    )  # fmt: skip
    subject, data = Subject.load(model_folder), FakeData()
    asked = [SETTINGS.model_copy(update=other) for other in others]
    jobs = [AttackJob(subject, data, settings).identity() for settings in asked]
    assert len({json.dumps(job, sort_keys=True) for job in jobs}) == len(others)


POINTS = Points(4, count=16)


@pytest.mark.slow
def test_hidden_noise_answers_by_mean_scores(here: None, tmp_path: Path) -> None:
    """As its certificates do: most draws say another class."""
    vote_score_disagreement.save(tmp_path / "model", POINTS.size)
    settings = SETTINGS.model_copy(update={"n": 1000, "labels": "predicted"})
    # With noise on the input besides it is smoothed, and certified by votes.
    smoothed = settings.model_copy(update={"sigma": 0.25, "attacks": ("fgsm",)})
    for asked, answer, by_vote in (
        (settings, vote_score_disagreement.SCORE, False),
        (smoothed, vote_score_disagreement.VOTE, True),
    ):
        output = tmp_path / f"{by_vote}"
        certificates.attack_model(tmp_path / "model", POINTS, asked, output, actors=1)
        assert {row["prediction"] for row in rows(output)} == {answer}
        assert read_attack(output / TABLE).predicts_by_vote == by_vote
    # Results of the other answers are not continued.
    about = tmp_path / "False" / "settings.json"
    about.write_text(about.read_text().replace('"answers": "mean scores",', ""))
    with pytest.raises(UserError, match="answers"):
        certificates.attack_model(
            tmp_path / "model", POINTS, settings, tmp_path / "False", actors=1
        )


def mean_scores(first: np.ndarray) -> MeanScores:
    """Return the mean scores of samples that give the first of two classes these scores."""
    scores = np.round(np.stack([first, 1 - first], axis=1) * SCORE_UNIT).astype(np.int64)
    votes = np.bincount(scores.argmax(1), minlength=2)
    return MeanScores(*score_bounds.bin_scores(scores), votes)


def test_mean_scores_name_another_class_no_more_often_than_allowed() -> None:
    # Exact: scores 0 and 1 with equal means, where any class at all may be the wrong one.
    chance = {k: float(stats.binom.pmf(k, 60, 0.5)) for k in range(61)}
    named = sum(
        p for k, p in chance.items()
        if mean_scores(np.repeat([1.0, 0.0], [k, 60 - k])).predict(0.2) >= 0
    )  # fmt: skip
    assert 0 < named <= 0.2


def test_mean_scores_of_all_classes_share_the_error() -> None:
    # Classes that no draw names are behind at any error, and still have their parts of it.
    two = mean_scores(np.repeat([0.9, 0.2], [70, 30]))
    none = mean_scores(np.ones(100)).bins[1:], np.zeros((1, two.excess.shape[1]), np.int64)
    bins, excess = (
        np.concatenate([of, *[zeros] * 7])
        for of, zeros in zip((two.bins, two.excess), none, strict=True)
    )
    nine = MeanScores(bins, excess, np.append(two.histogram, [0] * 7))

    def least_error(scores: MeanScores) -> float:
        low, high = -40.0, 0.0  # its logarithm
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if scores.predict(np.exp(middle)) >= 0 else (middle, high)
        return float(np.exp(high))

    assert 1e-15 < least_error(two) < 0.1
    assert least_error(nine) == pytest.approx(least_error(two) * 10 / 3, rel=1e-6)


def test_votes_are_tested_at_the_error_that_is_stated(here: None, tmp_path: Path) -> None:
    """With two classes, PREDICT answers if enough samples agree, at the error alpha."""
    spec = models.ModelSpec("linear", (4,), 2)
    model = models.initialize(spec, 0)
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[1, 0], layer.bias[:] = 5.0, 0.0
    models.save(model, spec, tmp_path / "model")
    data = Points(4, count=60, near=0.0, far=0.08)
    settings = AttackSettings(
        norm="l2", sizes=(0.05,), attacks=("fgsm",), sigma=0.25, n=200, alpha=0.05, seed="1"
    )
    certificates.attack_model(tmp_path / "model", data, settings, tmp_path / "out", actors=1)
    seen = {True: 0, False: 0}
    for row in rows(tmp_path / "out"):
        decided = stats.binomtest(row["hits"], 200).pvalue <= settings.alpha
        assert (row["prediction"] >= 0) == decided
        seen[bool(decided)] += 1
    assert min(seen.values()) >= 20
    assert any(112 <= row["hits"] < 115 for row in rows(tmp_path / "out"))  # between 0.1 and 0.05


def test_predicted_labels_are_those_of_the_clean_input(
    here: None, model_folder: Path, tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(
        update={"labels": "predicted", "attacks": ("pgd",), "sizes": (1.0,)}
    )
    certificates.attack_model(model_folder, FakeData(), settings, tmp_path, actors=1)
    found = rows(tmp_path)
    clean = {r["index"]: r["prediction"] for r in found if r["attack"] == "none"}
    attacked = {r["index"]: r["prediction"] for r in found if r["attack"] == "pgd"}
    assert np.mean([attacked[i] != clean[i] for i in clean]) > 0.7


FEW = SETTINGS.model_copy(
    update={"sizes": (0.2,), "attacks": ("pgd",), "steps": 2, "batch": 4, "n": 50, "samples": 2}
)
FEW_SMOOTHED = FEW.model_copy(update={"sigma": 0.1})
INPUTS = Inputs(72, marked=True)


def attack_inputs(kind: str, settings: AttackSettings, tmp_path: Path, name: str = "out") -> Path:
    spec = save(kind, tmp_path / "model")
    certificates.attack_model(
        tmp_path / "model", INPUTS, settings, tmp_path / name, actors=2, trusted_factory=spec.name
    )
    return tmp_path / name / TABLE


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FEW, FEW_SMOOTHED], ids=["deterministic", "smoothed"])
def test_an_input_without_a_class_is_neither_right_nor_wrong(
    here: None, tmp_path: Path, settings: AttackSettings
) -> None:
    """It was class 0, and right under any attack where that is the label."""
    found = attack_inputs("Overflows", settings, tmp_path)
    marked = [row for row in pq.read_table(found).to_pylist() if row["index"] >= 64]
    assert len(marked) == 16
    assert {(row["prediction"], row["hits"]) for row in marked} == {(-1, 0)}
    shares = read_attack(found).outcome_shares("none", 0.0)
    assert shares.abstained >= 8 / 72
    assert sum((shares.correct, shares.abstained, shares.wrong)) == pytest.approx(1)


class Half(nn.Module):
    """No number where the first one is above 1/2."""

    def forward(self, x: Tensor) -> Tensor:
        score = torch.where(x[:, :1] > 0.5, torch.nan, x[:, :1] - 0.2)
        return torch.cat([-score, score], 1)


def test_a_point_without_an_answer_is_no_success() -> None:
    x, targets = torch.tensor([[0.6], [0.1], [0.3]]), torch.tensor([1, 1, 1])
    classifier = RandomizedClassifier(Half())
    scores = success_score(classifier, x, targets, None)
    assert scores[0] == 0 and scores[1] >= 1 and 0 < scores[2] < 1
    # Of restarts in any order, the best one is kept.
    for order in itertools.permutations(range(3)):
        best = _best(classifier, targets[:1], None, iter(x[list(order)].split(1)))
        assert best.tolist() == x[1:2].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [("EarlyExit", FEW), ("Cached", FEW_SMOOTHED)])
def test_answers_that_depend_on_the_batch_stop_an_attack(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: AttackSettings
) -> None:
    monkeypatch.setattr(reexecution, "EXPECTED_ROWS", 10**6)
    for _ in range(2):  # nor does a second call continue it
        with pytest.raises(InvalidResultsError):
            attack_inputs(kind, settings, tmp_path)
        assert not (tmp_path / "out" / TABLE).exists()


@pytest.mark.parametrize("settings", [FEW, FEW_SMOOTHED], ids=["deterministic", "smoothed"])
def test_experts_are_not_attacked(here: None, tmp_path: Path, settings: AttackSettings) -> None:
    with pytest.raises(UserError, match="its batch"):
        attack_inputs("Experts", settings, tmp_path)
    assert not (tmp_path / "out" / TABLE).exists()


def test_a_check_of_certificates_looks_too(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = save("Honest", tmp_path / "model")
    settings = settings_of({"sigma": 0.1, "n0": 20, "n": 200, "batch": 100, "seed": "1"})
    trusted = {"actors": 1, "trusted_factory": spec.name}
    certificates.certify(tmp_path / "model", INPUTS, settings, tmp_path / "table", **trusted)
    asked = set()
    monkeypatch.setattr(
        reexecution.Reexecution, "__call__", lambda self, index, *_: asked.add(index)
    )
    table, _ = certificates.check_certificates(
        tmp_path / "model", INPUTS, tmp_path / "table" / certifying.TABLE, FEW,
        tmp_path / "check", **trusted,
    )  # fmt: skip
    assert asked == set(table["index"].to_pylist())
