"""Results of one model never end in the table of another, whichever files are removed between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import certificates
from support.certificates import Data
from support.local_execution import run_without_ray
from support.networks import save_small_cnn

from dpdist import models
from dpdist.attacks import table as attack_tables
from dpdist.attacks.settings import AttackSettings
from dpdist.certification import job, table_reader
from dpdist.certification.cohen import Cohen
from dpdist.core.errors import UserError

THESE = Data(count=4, fingerprint="these")


class Interrupted(Exception):
    pass


def stop_at(wanted: int) -> Callable[[int, int, float], None]:
    def progress(done: int, total: int, rate: float) -> None:
        if done >= wanted:
            raise Interrupted

    return progress


def certify(model: Path, output: Path, data: Data = THESE, **options: Any) -> str:
    settings = Cohen(sigma=0.5, n0=20, n=200, batch=100, backend="eager")
    certificates.certify(model, data, settings, output, chunk_seconds=1e-9, **options)
    return table_reader.read(output / job.TABLE).job_record["model"]


def attack(model: Path, output: Path, data: Data = THESE, **options: Any) -> str:
    settings = AttackSettings(norm="l2", sizes=(1.0,), attacks=("fgsm",), batch=1)
    certificates.attack_model(model, data, settings, output, **options)
    return attack_tables.read_attack(output / attack_tables.TABLE).model


@pytest.fixture(params=[certify, attack], ids=["certify", "attack"])
def work(request, monkeypatch) -> Callable[..., str]:
    run_without_ray(monkeypatch)
    return request.param


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two models, a and b."""
    return [save_small_cnn(tmp_path / name, seed) for seed, name in enumerate("ab")]


def test_half_done_work_of_changed_settings_is_refused(work, folders, tmp_path) -> None:
    a, b = folders
    output = tmp_path / "out"
    with pytest.raises(Interrupted):
        work(a, output, progress=stop_at(2))
    path = output / "settings.json"
    path.write_text(path.read_text().replace(models.model_hash(a), models.model_hash(b)))
    with pytest.raises(UserError):
        work(b, output)


def test_finished_work_is_of_its_model_and_data(work, folders, tmp_path) -> None:
    a, b = folders
    output = tmp_path / "out"
    assert work(a, output) == models.model_hash(a)
    with pytest.raises(UserError, match="model was"):
        work(b, output)
    with pytest.raises(UserError, match="data was"):
        work(a, output, replace(THESE, fingerprint="those"))
    (output / "settings.json").unlink()
    with pytest.raises(UserError):
        work(b, output)
