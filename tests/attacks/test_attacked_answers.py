"""Attacks where a model has no answer, and where its answer depends on its batch."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support import certificates
from support.batch_dependent import Inputs, save
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import (
    RandomizedClassifier,
    _best,
    success_score,
)
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import TABLE, read_attack
from dpdist.certification import job as certifying
from dpdist.certification import reexecution
from dpdist.certification.registry import settings_of
from dpdist.core.errors import InvalidResultsError, UserError

SETTINGS = AttackSettings(
    norm="l2",
    sizes=(0.2,),
    attacks=("pgd",),
    steps=2,
    batch=4,
    seed="5",
    n=50,
    samples=2,
    restarts=2,
)
SMOOTHED = SETTINGS.model_copy(update={"sigma": 0.1})
DATA = Inputs(72, marked=True)


def attack(kind: str, settings: AttackSettings, tmp_path: Path, name: str = "out") -> Path:
    spec = save(kind, tmp_path / "model")
    certificates.attack_model(tmp_path / "model", DATA, settings, tmp_path / name, actors=2,
                     trusted_factory=spec.name)  # fmt: skip
    return tmp_path / name / TABLE


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, SMOOTHED], ids=["deterministic", "smoothed"])
def test_an_input_without_a_class_is_neither_right_nor_wrong(
    here: None, tmp_path: Path, settings: AttackSettings
) -> None:
    """It was class 0, and right under any attack where that is the label."""
    found = attack("Overflows", settings, tmp_path)
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
    # Nor does it keep a later restart from being one.
    best = _best(classifier, targets[:1], None, iter([x[:1], x[1:2]]))
    assert best.tolist() == x[1:2].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [("EarlyExit", SETTINGS), ("Cached", SMOOTHED)])
def test_answers_that_depend_on_the_batch_stop_an_attack(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: AttackSettings
) -> None:
    monkeypatch.setattr(reexecution, "EXPECTED_ROWS", 10**6)
    for _ in range(2):  # nor does a second call continue it
        with pytest.raises(InvalidResultsError):
            attack(kind, settings, tmp_path)
        assert not (tmp_path / "out" / TABLE).exists()


@pytest.mark.parametrize("settings", [SETTINGS, SMOOTHED], ids=["deterministic", "smoothed"])
def test_experts_are_not_attacked(here: None, tmp_path: Path, settings: AttackSettings) -> None:
    with pytest.raises(UserError, match="its batch"):
        attack("Experts", settings, tmp_path)
    assert not (tmp_path / "out" / TABLE).exists()


def test_a_check_of_certificates_looks_too(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = save("Honest", tmp_path / "model")
    settings = settings_of({"sigma": 0.1, "n0": 20, "n": 200, "batch": 100, "seed": "1"})
    trusted = {"actors": 1, "trusted_factory": spec.name}
    certificates.certify(tmp_path / "model", DATA, settings, tmp_path / "table", **trusted)
    asked = set()
    monkeypatch.setattr(
        reexecution.Reexecution, "__call__", lambda self, index, *_: asked.add(index)
    )
    table, _ = certificates.check_certificates(
        tmp_path / "model", DATA, tmp_path / "table" / certifying.TABLE, SETTINGS,
        tmp_path / "check", **trusted,
    )  # fmt: skip
    assert asked == set(table["index"].to_pylist())
