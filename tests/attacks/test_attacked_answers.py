"""Attacks where a model has no answer, and where its answer depends on its batch."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support import certificates
from support.batch_dependent import Honest, Inputs, save
from support.certificates import certify, check_certificates
from torch import Tensor, nn

from dpdist.attacks import job
from dpdist.attacks.gradient_attacks import (
    RandomizedClassifier,
    _best,
    loss_gradient,
    success_score,
)
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import TABLE, attack_line, read_attack
from dpdist.certification import job as certifying
from dpdist.certification import reexecution, worker
from dpdist.certification.registry import settings_of
from dpdist.core.errors import InvalidResultsError, UserError
from dpdist.models import find_batch_dependence

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


# ---- no class


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, SMOOTHED], ids=["deterministic", "smoothed"])
@pytest.mark.parametrize("labels", ["true", "predicted"])
def test_an_input_without_a_class_is_neither_right_nor_wrong(
    here: None, tmp_path: Path, settings: AttackSettings, labels: str
) -> None:
    """It was class 0, and right under any attack where that is the label."""
    settings = settings.model_copy(update={"labels": labels})  # type: ignore[arg-type]
    path = attack("Overflows", settings, tmp_path)
    rows = pq.read_table(path).to_pylist()
    marked = [row for row in rows if row["index"] >= 64]
    assert len(marked) == 16 and {row["prediction"] for row in marked} == {-1}
    assert {row["hits"] for row in marked} == {0}
    unmarked = [row for row in rows if row["attack"] == "none" and row["index"] < 64]
    clean = [row["prediction"] for row in unmarked]
    own = Honest()(DATA.batch(slice(0, 64))).argmax(1).tolist()
    assert clean == own or (settings.sigma and set(clean) == {-1, 0, 1, 2})
    attack("Honest", settings, tmp_path, "honest")
    found = read_attack(path)
    shares = found.outcome_shares("none", 0.0)
    assert shares.abstained >= 8 / 72
    assert sum((shares.correct, shares.abstained, shares.wrong)) == pytest.approx(1)
    assert "% abstained" in attack_line(found)
    assert "abstained" not in attack_line(read_attack(tmp_path / "honest" / TABLE)) or (
        settings.sigma is not None
    )


class Half(nn.Module):
    """No number where the first one is above 1/2."""

    def forward(self, x: Tensor) -> Tensor:
        score = torch.where(x[:, :1] > 0.5, torch.nan, x[:, :1] - 0.2)
        return torch.cat([-score, score], 1)


def test_a_gradient_that_is_no_number_leads_nowhere() -> None:
    x, targets = torch.tensor([[0.6, 0.1], [0.3, 0.1]]), torch.tensor([1, 1])
    found = loss_gradient(RandomizedClassifier(Half()), x, targets, None)
    assert (found[0] == 0).all() and found[1, 0] != 0 and found.isfinite().all()


def test_a_point_without_an_answer_is_no_success() -> None:
    x, targets = torch.tensor([[0.6], [0.1], [0.3]]), torch.tensor([1, 1, 1])
    classifier = RandomizedClassifier(Half())
    scores = success_score(classifier, x, targets, None)
    assert scores[0] == 0 and scores[1] >= 1 and 0 < scores[2] < 1
    # Nor does it keep a later restart from being one.
    best = _best(classifier, targets[:1], None, iter([x[:1], x[1:2]]))
    assert best.tolist() == x[1:2].tolist()


# ---- batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("EarlyExit", SETTINGS), ("LargeBatches", SETTINGS.model_copy(update={"batch": 24})),
     ("EarlyExit", SMOOTHED), ("Merged", SMOOTHED), ("Cached", SMOOTHED)],
)  # fmt: skip
def test_answers_that_depend_on_the_batch_stop_an_attack(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: AttackSettings
) -> None:
    monkeypatch.setattr(reexecution, "EXPECTED_ROWS", 10**6)
    for expected in ("looks at its batch: a row of input", ": the model"):
        with pytest.raises(InvalidResultsError, match=expected):
            attack(kind, settings, tmp_path)
        assert not (tmp_path / "out" / TABLE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, SMOOTHED], ids=["deterministic", "smoothed"])
def test_no_byte_of_an_honest_attack_depends_on_it(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: AttackSettings
) -> None:
    with_it = attack("Honest", settings, tmp_path, "with").read_bytes()
    assert attack("Honest", settings, tmp_path, "again").read_bytes() == with_it
    asked: list[int] = []
    monkeypatch.setattr(reexecution.Reexecution, "__call__",
                        lambda self, index, *_: asked.append(index))  # fmt: skip
    assert attack("Honest", settings, tmp_path, "without").read_bytes() == with_it
    assert set(asked) == (set(range(72)) if settings.sigma else set(range(0, 72, 4)))


@pytest.mark.parametrize("settings", [SETTINGS, SMOOTHED], ids=["deterministic", "smoothed"])
def test_experts_are_not_attacked(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: AttackSettings
) -> None:
    seen = []

    def watched(*given, **more):
        seen.append(given)
        return find_batch_dependence(*given, **more)

    for module in (job, worker):
        monkeypatch.setattr(module, "find_batch_dependence", watched)
    with pytest.raises(UserError, match="cannot be attacked: it looks at its batch"):
        attack("Experts", settings, tmp_path)
    _, _, copies = seen[0]
    if settings.sigma is not None:  # noise of that sigma: 64 x 36 normals, 5 standard deviations
        noise = copies - DATA.batch(slice(0, 1))
        assert abs(float(noise.std()) - 0.1) < 5 * 0.1 / (2 * 64 * 36) ** 0.5
    assert not (tmp_path / "out" / TABLE).exists()


def test_a_check_of_certificates_looks_too(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = save("Honest", tmp_path / "model")
    settings = settings_of({"sigma": 0.1, "n0": 20, "n": 200, "batch": 100, "seed": "1"})
    certify(tmp_path / "model", DATA, settings, tmp_path / "table", actors=1,
                       trusted_factory=spec.name)  # fmt: skip
    asked = []
    monkeypatch.setattr(reexecution.Reexecution, "__call__",
                        lambda self, index, stage, *_: asked.append((index, stage)))  # fmt: skip
    table, _ = check_certificates(
        tmp_path / "model", DATA, tmp_path / "table" / certifying.TABLE, SETTINGS,
        tmp_path / "check", actors=1, trusted_factory=spec.name,
    )  # fmt: skip
    assert {index for index, _ in asked} == set(table["index"].to_pylist())
    assert {stage for _, stage in asked} >= {"select"}
