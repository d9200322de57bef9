"""Edited tables of certificates, and those of something else: what a check makes of them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.certificates import certify, check_certificates
from support.separable_points import Points

from dpdist import models
from dpdist.attacks.job import CertificateCheckJob
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import VERDICT, read_check
from dpdist.certification import job
from dpdist.certification import table as certificates
from dpdist.certification.cohen import Cohen
from dpdist.certification.subject import Subject
from dpdist.core.errors import UserError

CERTIFY = Cohen(sigma=0.25, n0=50, n=500, batch=250, seed="1")
ATTACK = AttackSettings(attacks=("fgsm",), samples=2, seed="2", batch=20)
POINTS = Points(8, count=12, near=0.05, far=0.6)


@pytest.fixture(scope="module")
def place(here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plane as model/, its certificates/, and the check/ of these."""
    folder = tmp_path_factory.mktemp("place")
    spec = models.ModelSpec("linear", (8,), 2)
    model = models.initialize(spec, 0)
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[1, 0], layer.weight[0, 0] = 5.0, -5.0
        layer.bias.zero_()
    models.save(model, spec, folder / "model")
    certify(folder / "model", POINTS, CERTIFY, folder / "certificates", actors=1)
    check_certificates(
        folder / "model", POINTS, folder / "certificates" / job.TABLE, ATTACK, folder / "check",
        actors=1,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("kind", ["model", "data", "half", "pieces"])
def test_tables_of_something_else_are_refused(place, tmp_path, kind):
    model, data, path = place / "model", POINTS, tmp_path / job.TABLE
    shutil.copy(place / "certificates" / job.TABLE, path)
    if kind == "model":
        spec = models.ModelSpec("linear", (8,), 2)
        models.save(models.initialize(spec, 7), spec, model := tmp_path / "model")
    elif kind == "data":
        data = replace(POINTS, fingerprint="others")
    elif kind == "half":
        certificates.write(certificates.read(path).slice(0, 6), path)
    else:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError):
        CertificateCheckJob(Subject.load(model), data, path, ATTACK)


@pytest.mark.parametrize("claim", ["", "_", "radius", "l2", "as_printed_linf", "x_l2", "a_b_c"])
def test_a_claim_that_the_table_does_not_make_is_refused(place, claim):
    path = place / "certificates" / job.TABLE
    with pytest.raises(UserError, match="no column"):
        CertificateCheckJob(Subject.load(place / "model"), POINTS, path, ATTACK, claim)


def test_a_weaker_attack_does_not_take_back_what_another_found(here, place, tmp_path):
    """The verdict is on all points that the folder has, with the error of all."""
    path = place / "certificates" / job.TABLE
    for attacks in (("pgd",), ("fgsm",)):
        attack = ATTACK.model_copy(update={"attacks": attacks})
        table, verdict = check_certificates(
            place / "model", POINTS, path, attack, tmp_path / "check", actors=1
        )
    assert set(table["attack"].to_pylist()) == {"fgsm", "pgd"}
    assert verdict.error == pytest.approx(3 * 0.001)
    assert np.unique(table["index"].to_numpy(), return_counts=True)[1].tolist() == [2] * (
        table.num_rows // 2
    )
    assert read_check(tmp_path / "check" / VERDICT)["plausible"]
