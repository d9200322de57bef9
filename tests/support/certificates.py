"""Settings of certificates, as a recipe would say them, and a few inputs to certify."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dpdist import models
from dpdist.attacks.job import AttackJob, CertificateCheckJob
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import Plausibility
from dpdist.certification import job
from dpdist.certification import table as tables
from dpdist.certification.certificate import Certificate
from dpdist.certification.registry import settings_of
from dpdist.certification.subject import Subject
from dpdist.certification.table_reader import recertify
from dpdist.cluster.resumable_job import run_job


def with_changes(settings: Certificate, **changes: Any) -> Certificate:
    """The same settings but for these; another mode is another certificate."""
    return settings_of({**settings.model_dump(), **changes})


def save_plane(folder: Path, size: int) -> Path:
    """Save a linear model of two classes: an input's true radius is its distance to the plane."""
    spec = models.ModelSpec("linear", (size,), 2)
    model = models.initialize(spec, 0)
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[1, 0], layer.weight[0, 0] = 5.0, -5.0
        layer.bias.zero_()
    models.save(model, spec, folder)
    return folder


def certify(
    folder: Path,
    dataset: Any,
    settings: Certificate,
    output: Path,
    trusted_factory: str | None = None,
    **options: Any,
) -> pa.Table:
    """Certify the model in a folder, as every door to a certification does in the end."""
    subject = Subject.load(folder, trusted_factory)
    return job.certify(subject, dataset, settings, output, **options).table


def attack_model(
    folder: Path,
    dataset: Any,
    settings: AttackSettings,
    output: Path,
    trusted_factory: str | None = None,
    **options: Any,
) -> pa.Table:
    """Attack the model in a folder, as `dpdist attack` does."""
    subject = Subject.load(folder, trusted_factory)
    return run_job(AttackJob(subject, dataset, settings), output, **options)


def check_certificates(
    model: Path,
    dataset: Any,
    path: Path,
    settings: AttackSettings,
    output: Path,
    actors: int | None = None,
    claim: str | None = None,
    trusted_factory: str | None = None,
) -> tuple[pa.Table, Plausibility]:
    """Attack every certificate of the table at `path` within its radius, as `dpdist attack
    --check-certificates` does: what was found, and the verdict."""
    subject = Subject.load(model, trusted_factory)
    work = CertificateCheckJob(subject, dataset, path, settings, claim)
    return run_job(work, output, actors=actors), work.verdict


def shift_classes(table: pa.Table) -> pa.Table:
    """A table whose counts, and with them every certificate, are of the class after its own."""
    rows = table.to_pylist()
    for row in rows:
        votes = row["histogram"]
        row["histogram"] = votes[-1:] + votes[:-1]
        row["selected"] = (row["selected"] + 1) % len(votes)
        if row["prediction"] >= 0:
            row["prediction"] = row["selected"]
    return tables.build(rows, tables.read_job_record(table), table.schema.remove_metadata())


def scale_sensitivity(table: pa.Table, **factors: float) -> pa.Table:
    """A table of expected scores whose first layer is said to have norms so many times as large."""
    about = tables.read_job_record(table)
    norms = {name: norm * factors.get(name, 1.0) for name, norm in about["sensitivity"].items()}
    schema = table.schema.remove_metadata()
    other = tables.build(table.to_pylist(), about | {"sensitivity": norms}, schema)
    made = recertify(other, table["alpha"][0].as_py())
    return tables.build(made.to_pylist(), tables.read_job_record(other), schema)


@dataclass(frozen=True)
class Data:
    """Random images of 6 x 6 pixels in three classes."""

    count: int = 6
    fingerprint: str = "fake"
    classes: int = 3
    name: str = "fake/test"

    @property
    def labels(self) -> np.ndarray:
        return np.arange(self.count) % self.classes

    def batch(self, indices: np.ndarray | slice) -> torch.Tensor:
        rng = np.random.default_rng(0)
        return torch.from_numpy(rng.random((self.count, 1, 6, 6), dtype=np.float32)[indices])
