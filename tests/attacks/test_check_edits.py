"""Edited tables of certificates, and those of something else: what a check makes of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.certificates import certify, check_certificates
from support.folder_contents import changed_at
from support.separable_points import Points

from dpdist import models
from dpdist.attacks.job import CertificateCheckJob
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.table import CHECK_TABLE, VERDICT, read_check
from dpdist.certification import job
from dpdist.certification import table as certificates
from dpdist.certification.cohen import Cohen
from dpdist.certification.subject import Subject
from dpdist.cluster.resumable_job import run_job
from dpdist.core.errors import UserError

CERTIFY = Cohen(sigma=0.25, n0=50, n=500, batch=250, seed="1")
ATTACK = AttackSettings(attacks=("fgsm",), samples=2, seed="2", batch=20)
POINTS = Points(8, count=12, near=0.05, far=0.6)
# What a table says and nobody else knows. The check attacks what is then claimed.
OWN_WORD = {
    "about.classifier.batch", "about.classifier.check", "about.classifier.machine",
    "about.classifier.notes", "about.classifier.torch_version",  # how it was counted
    "about.seed", "about.settings.batch", "about.settings.backend",
    "about.settings.radii",  # what is shown
    "about.clean_wrong", "about.input_range", "about.input_range.*", "about.input_shape",
    "about.input_shape.*",  # of the data, which is not asked again
}  # fmt: skip


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


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, each in inner:
        found.append((*path, key))
        if isinstance(each, dict | list):
            found += leaves(each, (*path, key))
    return found


def others(value: Any) -> list[Any]:
    """Other values of its kind, and of none."""
    if isinstance(value, bool):
        found: list[Any] = [not value]
    elif isinstance(value, int):
        found = [value + 1, max(0, value - 1), -1, 2**40]
    elif isinstance(value, float):
        found = [value * 1.01 + 0.01, value / 2, 0.0, float("inf")]
    elif isinstance(value, str):
        found = [f"{value} of mine", "l1", ""]
    else:
        found = ["x", 1]
    return [other for other in [*found, None, [], {}] if other != value]


def believed(place: Path, table: pa.Table, output: Path) -> bool:
    """Whether a check takes the table; it then ends with a verdict."""
    path = output / "certificates" / job.TABLE
    try:
        certificates.write(table, path)
    except pa.ArrowException:
        return False  # no file can hold it
    try:
        work = CertificateCheckJob(Subject.load(place / "model"), POINTS, path, ATTACK)
        run_job(work, output / "check", actors=1)
    except UserError as error:
        assert str(error) and "\n" not in str(error)
        return False
    assert read_check(output / "check" / VERDICT)["inputs"] == len(work._submitted)
    return True


@pytest.mark.slow
def test_every_edit_of_a_table_is_refused_or_its_own_word(place, tmp_path):
    table = certificates.read(place / "certificates" / job.TABLE)
    about, rows = certificates.read_job_record(table), table.to_pylist()
    schema, passed, tried = table.schema.remove_metadata(), set(), 0
    for path in leaves(about):
        value = about
        for part in path:
            value = value[part]
        for number, other in enumerate(others(value)):
            said = ".".join("*" if isinstance(part, int) else str(part) for part in path)
            try:
                made = certificates.build(rows, changed_at(about, path, other), schema)
            except ValueError:
                continue  # infinity is no JSON
            tried += 1
            if believed(place, made, tmp_path / f"{tried}-{number}"):
                passed.add(f"about.{said}")
    for row in (0, 5):
        for column, value in rows[row].items():
            for other in others(value):
                try:
                    made = certificates.build(changed_at(rows, (row, column), other), about, schema)
                except (pa.ArrowException, ValueError, TypeError):
                    continue  # no table can hold it
                tried += 1
                if believed(place, made, tmp_path / f"{tried}-row"):
                    passed.add(column)
    assert tried > 150
    assert passed == OWN_WORD, sorted(passed ^ OWN_WORD)


@pytest.mark.parametrize("kind", ["model", "data", "labels", "fewer inputs", "half", "pieces"])
def test_tables_of_something_else_are_refused(place, tmp_path, kind):
    model, data, path = place / "model", POINTS, tmp_path / job.TABLE
    shutil.copy(place / "certificates" / job.TABLE, path)
    if kind == "model":
        spec = models.ModelSpec("linear", (8,), 2)
        models.save(models.initialize(spec, 7), spec, model := tmp_path / "model")
    elif kind == "data":
        data = replace(POINTS, fingerprint="others")
    elif kind == "fewer inputs":
        data = replace(POINTS, count=5)
    elif kind == "labels":
        table = certificates.read(path)
        about = {k: v for k, v in certificates.read_job_record(table).items() if k != "labels"}
        rows = [row | {"label": 1 - row["label"]} for row in table.to_pylist()]
        certificates.write(certificates.build(rows, about, table.schema.remove_metadata()), path)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plausible", False), ("contradictions", 1), ("certified", 11), ("inputs", 1000),
        ("alpha", 0.5), ("allowed", 3), ("p_value", 0.5),
    ],
)  # fmt: skip
def test_a_verdict_is_made_again_from_the_points(place, tmp_path, name, value):
    """A report believed whatever check.json said."""
    shutil.copytree(place / "check", again := tmp_path / "check")
    said = read_check(again / VERDICT)
    assert said[name] != value and said["model"] == models.model_hash(place / "model")
    raw = json.loads((again / VERDICT).read_text())
    (again / VERDICT).write_text(json.dumps(raw | {name: value}))
    with pytest.raises(UserError, match=f"damaged: {name} must be"):
        read_check(again / VERDICT)


@pytest.mark.parametrize("kind", ["gone", "contradiction", "row", "settings"])
def test_points_that_were_edited_are_refused(place, tmp_path, kind):
    shutil.copytree(place / "check", again := tmp_path / "check")
    path = again / CHECK_TABLE
    table = pq.read_table(path)
    if kind == "gone":
        path.unlink()
    elif kind == "contradiction":  # another class answers there, and it is called none
        column = pa.array(1 - table["certified"].to_numpy())
        place_of = table.schema.get_field_index("prediction")
        pq.write_table(table.set_column(place_of, table.schema.field(place_of), column), path)
    elif kind == "row":
        pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), path)
    else:
        (key,) = [key for key in table.schema.metadata if key == b"dpdist.attacks"]
        said = json.loads(table.schema.metadata[key])
        said["again"]["alpha"] = 0.5
        more = table.schema.metadata | {key: json.dumps(said).encode()}
        pq.write_table(table.replace_schema_metadata(more), path)
    with pytest.raises(UserError):
        read_check(again / VERDICT)


def test_a_weaker_attack_does_not_take_back_what_another_found(here, place, tmp_path):
    """The verdict is on all points that the folder has, with the error of all."""
    path = place / "certificates" / job.TABLE
    for attacks in (("pgd",), ("fgsm",)):
        attack = replace(ATTACK, attacks=attacks)
        table, verdict = check_certificates(
            place / "model", POINTS, path, attack, tmp_path / "check", actors=1
        )
    assert set(table["attack"].to_pylist()) == {"fgsm", "pgd"}
    assert verdict.error == pytest.approx(3 * 0.001)
    assert np.unique(table["index"].to_numpy(), return_counts=True)[1].tolist() == [2] * (
        table.num_rows // 2
    )
    assert read_check(tmp_path / "check" / VERDICT)["plausible"]
