from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy import special, stats
from support import certificates, vote_score_disagreement
from support.certificates import Data
from support.networks import save_small_cnn
from support.separable_points import Points

from dpdist import models
from dpdist.attacks.job import MeanScores
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import TABLE, read_attack
from dpdist.certification import inference, score_bounds
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.core.errors import UserError

FakeData = partial(Data, count=12)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_cnn(tmp_path_factory.mktemp("model"))


SETTINGS = AttackSettings(
    norm="l2", sizes=(0.2, 1.0), attacks=("fgsm", "pgd"), steps=3, batch=5, seed="5", n=200,
    samples=4, restarts=2,
)  # fmt: skip
KINDS = {"deterministic": SETTINGS, "smoothed": SETTINGS.model_copy(update={"sigma": 0.25})}


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
def references(
    here: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    outputs = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, output in outputs.items():
        certificates.attack_model(model_folder, FakeData(), KINDS[kind], output, actors=1)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_size_and_input_is_there(references, kind: str, model_folder: Path) -> None:
    settings, output = KINDS[kind], references[kind]
    found = rows(output)
    assert len(found) == 12 * (1 + 2 * 2)
    assert {(row["attack"], row["size"]) for row in found} == set(settings.attack_sizes)
    for row in found:
        assert row["distance"] <= row["size"]
        assert row["label"] == row["index"] % 3
        assert 1 <= row["hits"] <= row["n"] == (1 if settings.sigma is None else 200)
        if row["attack"] == "pgd":
            assert row["distance"] > 0.7 * row["size"]  # the box takes some of it
    with torch.no_grad():
        answers = models.load(model_folder)(FakeData().batch(slice(None))).argmax(1)
    clean = {row["index"]: row["prediction"] for row in found if row["attack"] == "none"}
    if settings.sigma is None:
        assert [clean[i] for i in range(12)] == answers.tolist()
    else:
        # A two-sided test at 0.001 abstains or answers; at small noise mostly as the network.
        assert sum(clean[i] == int(answers[i]) for i in range(12)) >= 8
    right: dict[tuple[str, float], list[bool]] = {}
    for row in found:
        right.setdefault((row["attack"], row["size"]), []).append(row["prediction"] == row["label"])
    accuracy = {pair: np.mean(values) for pair, values in right.items()}
    assert accuracy["pgd", 1.0] <= accuracy["pgd", 0.2] <= accuracy["none", 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_actors_change_no_byte(references, kind: str, model_folder: Path, tmp_path: Path) -> None:
    settings, output = KINDS[kind], references[kind]
    certificates.attack_model(model_folder, FakeData(), settings, tmp_path, actors=3)
    assert raw(tmp_path) == raw(output)


@pytest.mark.slow
def test_sizes_and_attacks_can_be_added_and_change_nothing(
    references, model_folder: Path, tmp_path: Path
) -> None:
    settings, output = KINDS["deterministic"], references["deterministic"]
    one = settings.model_copy(update={"sizes": (1.0,), "attacks": ("pgd",)})
    certificates.attack_model(model_folder, FakeData(), one, tmp_path, actors=1)
    alone = rows(tmp_path)
    assert len(alone) == 24
    assert [row for row in rows(output) if row in alone] == alone
    certificates.attack_model(model_folder, FakeData(), settings, tmp_path, actors=1)
    assert raw(tmp_path) == raw(output)
    # What was computed once stays, whatever is asked for later.
    certificates.attack_model(model_folder, FakeData(), one, tmp_path, actors=1)
    assert raw(tmp_path) == raw(output)


def test_other_models_and_data_are_refused(references, model_folder: Path, tmp_path: Path) -> None:
    settings, output = KINDS["deterministic"], references["deterministic"]
    with pytest.raises(UserError, match="data"):
        certificates.attack_model(model_folder, FakeData(fingerprint="other"), settings, output)
    save_small_cnn(tmp_path, 4)
    with pytest.raises(UserError, match="model"):
        certificates.attack_model(tmp_path, FakeData(), settings, output)


POINTS = Points(4, count=16)


@pytest.mark.slow
def test_hidden_noise_answers_by_mean_scores(here: None, tmp_path: Path) -> None:
    """As its certificates do: most draws say another class."""
    vote_score_disagreement.save(tmp_path / "model", POINTS.size)
    settings = SETTINGS.model_copy(update={"n": 1000, "labels": "predicted"})
    certificates.attack_model(tmp_path / "model", POINTS, settings, tmp_path / "out", actors=1)
    assert {row["prediction"] for row in rows(tmp_path / "out")} == {vote_score_disagreement.SCORE}
    found = read_attack(tmp_path / "out" / TABLE)
    assert not found.predicts_by_vote and "mean scores" in found.description
    # With noise on the input besides it is smoothed, and certified by votes.
    smoothed = settings.model_copy(update={"sigma": 0.25, "attacks": ("fgsm",)})
    certificates.attack_model(tmp_path / "model", POINTS, smoothed, tmp_path / "votes", actors=1)
    assert {row["prediction"] for row in rows(tmp_path / "votes")} == {vote_score_disagreement.VOTE}
    assert read_attack(tmp_path / "votes" / TABLE).predicts_by_vote
    # Results of the other answers are not continued.
    about = tmp_path / "out" / "settings.json"
    about.write_text(about.read_text().replace('"answers": "mean scores",', ""))
    with pytest.raises(UserError, match="answers"):
        certificates.attack_model(tmp_path / "model", POINTS, settings, tmp_path / "out", actors=1)


def mean_scores(first: np.ndarray) -> MeanScores:
    """Of draws that score the first of two classes so, in [0, 1]."""
    scores = np.round(np.stack([first, 1 - first], axis=1) * SCORE_UNIT).astype(np.int64)
    votes = np.bincount(scores.argmax(1), minlength=2)
    return MeanScores(*score_bounds.bin_scores(scores), votes)


def capital(scores: np.ndarray, mean: float) -> float:
    """ln of the mean over all stakes of what bets on scores above the mean grow to."""
    stakes = special.expit(np.linspace(-9, 7, 48))[:, None]
    return float(special.logsumexp(np.log1p(stakes * (scores / mean - 1)).sum(1)) - np.log(48))


@pytest.mark.parametrize("alpha", [0.001, 0.1])
def test_mean_scores_are_apart_where_one_mean_is_refuted_for_both(alpha: float) -> None:
    # Two classes, so three statements: at alpha / 3 each a mean is refuted as one above the first
    # class's and below the second's, by symmetry 1/2. Scores at ends of bins are not moved.
    ends = score_bounds.BIN_EDGES / SCORE_UNIT
    high, low = ends[40], ends[len(ends) - 41]
    seen = {0: 0, 1: 0, -1: 0}
    for hits in range(101):
        first = np.repeat([high, low], [hits, 100 - hits])
        found = mean_scores(first)
        assert found.top_class == (0 if hits >= 50 else 1)
        ahead = first if found.top_class == 0 else 1 - first
        clear = capital(ahead, 0.5) > np.log(3 / alpha)
        assert found.predict(alpha) == (found.top_class if clear else -1), hits
        seen[found.predict(alpha)] += 1
    assert min(seen.values()) >= 2


def test_mean_scores_name_another_class_no_more_often_than_allowed() -> None:
    # Exact: scores 0 and 1 with equal means, where any class at all may be the wrong one.
    chance = {k: float(stats.binom.pmf(k, 60, 0.5)) for k in range(61)}
    named = sum(
        p for k, p in chance.items()
        if mean_scores(np.repeat([1.0, 0.0], [k, 60 - k])).predict(0.2) >= 0
    )  # fmt: skip
    assert 0 < named <= 0.2


def test_votes_are_tested_at_the_error_that_is_stated(here: None, tmp_path: Path) -> None:
    """Of two classes the hits say whether PREDICT may answer."""
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
