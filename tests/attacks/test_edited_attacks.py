"""Tables of attacks, of attacked certificates and of votes that were edited by hand.

Every column of each is edited, in one row and in all: the edit is refused, or the docs list it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.certificates import Data
from support.here import without_ray

from dpdist import bulk, models
from dpdist.attacks import job as attacks
from dpdist.attacks import table as tables
from dpdist.attacks.check import Check
from dpdist.attacks.reading import read_attack, read_check
from dpdist.attacks.settings import AttackSettings
from dpdist.base.errors import UserError
from dpdist.bulk.job import run
from dpdist.certification import job as certification
from dpdist.certification.catalogue import settings_of
from dpdist.poisoning import votes

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs/how-to/attacks.md"
FORMS = ("deterministic", "smoothed", "mean scores")


class Eight(Data):
    name = "fake/test"

    def __init__(self) -> None:
        super().__init__(8)


def model_of(folder: Path, noisy: bool) -> Path:
    spec = models.ModelSpec("small-cnn", (1, 6, 6), 3, {"width": 4}, hidden_noise=noisy)
    module = models.initialise(models.ModelSpec("small-cnn", (1, 6, 6), 3, {"width": 4}), 3)
    if noisy:
        shape = models.require_split(module).hidden_shape((1, 6, 6))
        models.attach_noise(module, torch.full(shape, 0.3))
    models.save(module, spec, folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The attack table of each form, a check of certificates, and a table of votes."""
    folder = tmp_path_factory.mktemp("made")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        for form in FORMS:
            model = model_of(folder / f"model of {form}", noisy=form == "mean scores")
            settings = AttackSettings(
                norm="l2", sizes=(0.1, 0.4), attacks=("fgsm", "pgd"), steps=2, draws=2, n=60,
                alpha=0.05, sigma=0.5 if form == "smoothed" else None, seed="1", batch=4,
            )  # fmt: skip
            attacks.attack_model(model, Eight(), settings, folder / form)
            found[form] = folder / form / tables.TABLE
        model = folder / "model of smoothed"
        section = {"sigma": 0.5, "n": 200, "n0": 20, "alpha": 0.05, "form": "eager", "seed": "1"}
        certification.certify(model, Eight(), settings_of(section), folder / "certified")
        settings = AttackSettings(attacks=("fgsm", "pgd"), steps=2, draws=2, seed="1", batch=4)
        check = Check(model, Eight(), folder / "certified" / certification.TABLE, settings)
        run(check, folder / "check", here=True)
        found["check"] = folder / "check" / tables.CHECK_TABLE
    rows = [
        {"model": m, "index": i, "label": i % 3, "vote": (m + i) % 3}
        for m in range(4)
        for i in range(5)
    ]
    asked = {"models": 4, "partitions": False, "sigma": None, "inputs": [0, 5, 1]}
    digest = bulk.label_digest(range(5), [i % 3 for i in range(5)])
    about = {"settings": asked, "seed": "s", bulk.LABELS: digest}
    table = bulk.build_table(rows, votes.SCHEMA, about, votes.KEY)
    bulk.write_table(table, folder / "votes.parquet")
    yield found | {"votes": folder / "votes.parquet"}


def read_of(name: str) -> Callable[[Path], Any]:
    if name == "check":
        return lambda path: read_check(path.with_name("check.json"))
    return votes.read_votes if name == "votes" else read_attack


def key_of(name: str) -> bytes:
    return votes.KEY if name == "votes" else tables.KEY


def others(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 0, 1000)
    elif isinstance(value, float):
        yield from (value + 0.3, value / 2, 0.0, -1.0, float("nan"))
    else:
        yield from (f"{value} of mine", "none", "fgsm", "")
    yield None


def listed(name: str) -> set[str]:
    """What the docs name of a table."""
    file = {"check": "check.parquet", "votes": "votes.parquet"}.get(name, "attacks.parquet")
    (line,) = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{file}`")]
    return set(line.split("|")[2].replace("`", "").replace(" ", "").split(","))


def written(path: Path, to: Path, rows: list[dict[str, Any]], name: str) -> bool:
    """Write a table in which other rows stand, and whether one can hold them."""
    table = bulk.read_table(path, {}, key_of(name))
    about = bulk.about_table(table, key_of(name))
    to.mkdir(exist_ok=True)
    if name == "check":
        (to / "check.json").write_bytes(path.with_name("check.json").read_bytes())
    try:
        changed = bulk.build_table(rows, table.schema.remove_metadata(), about, key_of(name))
        bulk.write_table(changed, to / path.name)
    except (pa.ArrowException, TypeError, OverflowError):
        return False
    return True


def believed(path: Path, to: Path, rows: list[dict[str, Any]], name: str) -> bool:
    if not written(path, to, rows, name):
        return False
    try:
        read_of(name)(to / path.name)
    except UserError:
        return False
    return True


NAMES = (*FORMS, "check", "votes")


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_of_any_column_is_refused_or_listed(
    made: dict[str, Path], tmp_path: Path, name: str
) -> None:
    read_of(name)(made[name])
    table = bulk.read_table(made[name], {}, key_of(name))
    rows, passed = table.to_pylist(), set()
    for column in table.column_names:
        for some in (slice(0, 1), slice(len(rows) - 1, None), slice(None)):
            for value in others(rows[some][0][column]):
                changed = [dict(row) for row in rows]
                for row in changed[some]:
                    row[column] = value
                if changed != rows and believed(made[name], tmp_path / "x", changed, name):
                    passed.add(column)
    assert passed <= listed(name)


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_left_out_or_moved(made: dict[str, Path], tmp_path: Path, name: str) -> None:
    rows = bulk.read_table(made[name], {}, key_of(name)).to_pylist()
    for changed in (rows[1:], rows[:-1], [rows[1], rows[0], *rows[2:]], [*rows, rows[-1]]):
        assert written(made[name], tmp_path / "x", changed, name)
        with pytest.raises(UserError, match="damaged"):
            read_of(name)(tmp_path / "x" / made[name].name)


def test_a_sure_answer_is_no_abstention_and_an_unsure_one_no_answer(
    made: dict[str, Path], tmp_path: Path
) -> None:
    rows = bulk.read_table(made["smoothed"], {}, tables.KEY).to_pylist()
    for hits, prediction, possible in (
        (60, -1, False), (60, 1, True), (30, -1, True), (3, 1, False), (30, 1, True),
    ):  # fmt: skip
        changed = [{**rows[0], "hits": hits, "prediction": prediction}, *rows[1:]]
        assert believed(made["smoothed"], tmp_path / "x", changed, "smoothed") is possible


def test_the_verdict_on_certificates_follows_from_the_attacked_points(
    made: dict[str, Path], tmp_path: Path
) -> None:
    path = made["check"].with_name("check.json")
    whole, before = json.loads(path.read_text()), read_check(path)
    printed = (
        "plausible", "contradictions", "certified", "inputs", "alpha", "allowed", "p_value",
        "certificates",
    )  # fmt: skip
    rows = bulk.read_table(made["check"], {}, tables.KEY).to_pylist()
    assert written(made["check"], tmp_path / "x", rows, "check")
    for name in whole:
        for value in others(whole[name]) if not isinstance(whole[name], list) else ([], ["pgd"]):
            if value == whole[name]:
                continue
            (tmp_path / "x/check.json").write_text(json.dumps({**whole, name: value}))
            try:
                again = read_check(tmp_path / "x/check.json")
            except UserError:
                continue
            assert {key: again[key] for key in printed} == {key: before[key] for key in printed}
    # All points certified as another class: contradictions that the verdict must count.
    other = [
        {**row, "prediction": (row["certified"] + 1) % 3, "selected": (row["certified"] + 1) % 3,
         "contradiction": True}
        for row in rows
    ]  # fmt: skip
    assert written(made["check"], tmp_path / "x", other, "check")
    with pytest.raises(UserError, match=r"contradictions does not follow from check\.parquet"):
        read_check(tmp_path / "x/check.json")
    assert np.unique([row["index"] for row in rows]).size == before["certified"]


def test_labels_of_votes_are_those_of_the_data(made: dict[str, Path], tmp_path: Path) -> None:
    rows = bulk.read_table(made["votes"], {}, votes.KEY).to_pylist()
    changed = [row | {"label": (row["label"] + 1) % 3} for row in rows]
    assert written(made["votes"], tmp_path / "x", changed, "votes")
    with pytest.raises(UserError, match="its labels are not those it was made with"):
        votes.read_votes(tmp_path / "x/votes.parquet")
