from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from scipy import stats
from support.certificates import certify, check_certificates, save_plane, scale_sensitivity
from support.separable_points import Points

from dpdist import models
from dpdist.attacks.job import CertificateCheckJob
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import VERDICT, assess_plausibility, read_check
from dpdist.certification import job
from dpdist.certification import table as certificates
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import ExpectedScores
from dpdist.certification.subject import Subject
from dpdist.core.errors import UserError

CERTIFY = Cohen(sigma=0.25, n0=50, n=1000, batch=200, seed="1")
ATTACK = AttackSettings(attacks=("pgd",), steps=5, samples=4, seed="2", batch=20)


POINTS = Points(8, count=40, near=0.05, far=0.6)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plane(tmp_path_factory.mktemp("model"), 8)


@pytest.fixture(scope="module")
def certified(here: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("certificates")
    certify(model_folder, POINTS, CERTIFY, output, actors=1)
    return output / job.TABLE


@pytest.fixture(scope="module")
def noisy(here: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    """The same plane with noise behind its linear layer, certified with it."""
    folder = tmp_path_factory.mktemp("noisy")
    spec = models.ModelSpec("linear", (8,), 2, hidden_noise=True)
    model = models.initialize(spec, 0)
    layer = models.require_split(model).layer
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[1, 0], layer.weight[0, 0] = 2.0, -2.0
        layer.bias.zero_()  # type: ignore[union-attr]
    models.attach_noise(model, torch.full((2,), 0.5))
    models.save(model, spec, folder / "model")
    settings = ExpectedScores(n=1000, alpha=0.01, seed="1", batch=250)
    certify(folder / "model", POINTS, settings, folder / "certificates", actors=1)
    return folder / "model", certificates.read(folder / "certificates" / job.TABLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "factors", "holds"),
    [
        (None, {}, True),
        (None, {"l2": 0.1}, False),  # three times the radius may still be true, ten is not
        ("exact_linf", {"as_printed": 0.05}, True),
        ("as_printed_linf", {"as_printed": 0.05}, False),
    ],
)
def test_certificates_of_expected_scores_are_checked_too(
    noisy, tmp_path: Path, claim: str | None, factors: dict[str, float], holds: bool
) -> None:
    """The radius, or a claimed column in its place."""
    model, table = noisy
    path = tmp_path / "claimed" / "certificates.parquet"
    certificates.write(scale_sensitivity(table, **factors), path)
    found, verdict = check_certificates(
        model, POINTS, path, ATTACK, tmp_path / "check", actors=1, claim=claim
    )
    assert found.num_rows >= 15 and verdict.error == pytest.approx(0.02)
    assert verdict.plausible == (verdict.contradictions == 0) == holds


@pytest.mark.parametrize("kind", ["model", "data", "l1"])
def test_tables_of_something_else_are_refused(certified, model_folder, tmp_path, kind):
    model, data, path = model_folder, POINTS, certified
    if kind == "model":
        spec = models.ModelSpec("linear", (8,), 2)
        models.save(models.initialize(spec, 7), spec, model := tmp_path / "model")
    elif kind == "data":
        data = replace(POINTS, fingerprint="others")
    else:
        settings = CERTIFY.model_copy(update={"noise": "laplace", "n": 200, "max_inputs": 1})
        certify(model, data, settings, tmp_path, actors=1)
        path = tmp_path / job.TABLE
    with pytest.raises(UserError, match=path.name):
        CertificateCheckJob(Subject.load(model), data, path, ATTACK)


@pytest.mark.parametrize("claim", ["", "radius", "as_printed_linf"])
def test_a_claim_that_the_table_does_not_make_is_refused(certified, model_folder, claim):
    with pytest.raises(UserError, match="no column"):
        CertificateCheckJob(Subject.load(model_folder), POINTS, certified, ATTACK, claim)


def test_a_weaker_attack_does_not_take_back_what_another_found(
    here, certified, model_folder, tmp_path
):
    """The verdict is on all points that the folder has, with the error of all."""
    for attacks in (("pgd",), ("fgsm",)):
        attack = ATTACK.model_copy(update={"attacks": attacks})
        table, verdict = check_certificates(
            model_folder, POINTS, certified, attack, tmp_path / "check", actors=1
        )
    assert set(table["attack"].to_pylist()) == {"fgsm", "pgd"}
    assert verdict.error == pytest.approx(3 * 0.001)
    assert set(Counter(table["index"].to_pylist()).values()) == {2}
    assert all(row["distance"] <= row["radius"] for row in table.to_pylist())
    assert verdict.contradictions == 0 and read_check(tmp_path / "check" / VERDICT)["plausible"]


@pytest.mark.parametrize(
    ("inputs", "alpha", "points"), [(500, 0.001, 1), (2000, 0.01, 3), (7, 0.3, 2)]
)
def test_plausibility_is_the_binomial_tail(inputs: int, alpha: float, points: int) -> None:
    error = (1 + points) * alpha
    for count in {0, 1, 5, inputs // 50, 7}:
        found = assess_plausibility(min(count, inputs), inputs, alpha, points)
        expected = sum(stats.binom.pmf(range(min(count, inputs), inputs + 1), inputs, error))
        assert found.p_value == pytest.approx(expected, rel=1e-9)
    limit = found.allowed
    assert assess_plausibility(limit, inputs, alpha, points).plausible
    if limit < inputs:
        assert not assess_plausibility(limit + 1, inputs, alpha, points).plausible
