"""Columns become inputs by public constants: in Python, in files, at predictions, in a release."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from support.training import make, train
from typer.testing import CliRunner

import dpdist
from dpdist import models
from dpdist.cli import init
from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.publishing import write_release
from dpdist.runs.recipe import load_recipe
from dpdist.training.records import data_source, records_with_canaries

NAN = math.nan
DAYS = {"origin": "2000-01-01", "unit": "days"}
YES_NO = ["no", "yes"]


@pytest.mark.parametrize(
    ("rule", "cells", "wanted"),
    [
        ({}, [1, 2.5], [[1], [2.5]]),
        ({}, [True, False], [[1], [0]]),
        ({"range": [0, 10]}, [-5, 5, 20], [[0], [0.5], [1]]),
        ({"range": [0, 10], "missing": 5}, [None, 10], [[0.5], [1]]),
        ({"range": [0, 10], "missing": "flag"}, [None, NAN, 10], [[0, 1], [0, 1], [1, 0]]),
        ({"missing": 7}, [None, None], [[7], [7]]),
        ({"log1p": True}, [0, math.e - 1], [[0], [1]]),
        ({"log1p": True, "range": [0, 99]}, [-3, 9, 99], [[0], [0.5], [1]]),
        ({"categories": YES_NO}, ["yes ", "no", "?"], [[0, 1, 0], [1, 0, 0], [0, 0, 1]]),
        ({"categories": YES_NO, "missing": "flag"}, ["yes", "", None],
         [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]),
        ({"categories": YES_NO, "missing": "no", "codes": True}, ["yes", None, "x"],
         [[1], [0], [2]]),
        ({"categories": [3, 1], "codes": True}, [1.0, 3.0, 2.5], [[1], [0], [2]]),
        ({"categories": ["true"]}, [True, False], [[1, 0], [0, 1]]),
        ({"date": DAYS}, ["2000-01-02", "1999-12-31T12:00"], [[1], [-0.5]]),
        ({"date": DAYS, "missing": "flag"}, [None, datetime.date(2000, 2, 1)], [[0, 1], [31, 0]]),
        ({"date": {"origin": "2000-01-01", "unit": "hours"}},
         [datetime.datetime(2000, 1, 1, 3, tzinfo=datetime.UTC)], [[3]]),
        ({"range": [0, 2]}, [[0, 1], [2, 4]], [[0, 0.5], [1, 1]]),
        ({"text": 4, "missing": "flag"}, ["Cough, cough; a COLD.", None],  # CRC-32 modulo 4
         [[2 / 6**0.5, 0, 1 / 6**0.5, 1 / 6**0.5, 0], [0, 0, 0, 0, 1]]),
    ],
)  # fmt: skip
def test_cells_become_inputs(rule: dict, cells: list, wanted: list):
    made = dpdist.Preprocessing({"x": rule})
    for data in ({"x": cells}, pa.table({"x": cells}), pd.DataFrame({"x": cells})):
        if not (isinstance(data, pd.DataFrame) and data["x"].dtype == object):
            assert np.allclose(made.transform(data), wanted, atol=1e-6)
    if not isinstance(cells[0], list):
        assert len(made.get_feature_names_out()) == len(wanted[0])
        assert np.allclose(made.transform_record({"x": cells[0]}), wanted[0], atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "cells"),
    [
        ({}, [1, None, 2]), ({}, ["1", "s3cret", "2"]), ({}, [1.0, math.inf, 2]),
        ({"log1p": True}, [1, -1.6180339, 2]), ({"date": DAYS}, ["2000-01-01", "s3cret", ""]),
        ({"categories": ["a"]}, ["a", None, "s3cret"]), ({"range": [0, 1]}, [1, "s3cret", {}]),
        ({"date": DAYS}, [1618033, 1618033, 1]), ({"categories": ["a"]}, [["s3cret"], [], []]),
    ],
)  # fmt: skip
def test_no_message_holds_a_value(rule: dict, cells: list):
    with pytest.raises(UserError) as caught:
        dpdist.Preprocessing({"x": rule}).transform({"x": cells})
    said = str(caught.value)
    assert "column 'x'" in said and "s3cret" not in said and "618033" not in said


def test_sequences_are_those_of_pandas_and_of_one_person_alone():
    """A person's last rows in order, padded in front; another person's rows change nothing."""
    rng = np.random.default_rng(5)
    frame = pd.DataFrame(
        {
            "who": rng.integers(0, 30, 200).astype(str),
            "day": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 90, 200), "D"),
            "dose": rng.uniform(0, 10, 200),
            "ill": rng.integers(0, 2, 200),
        }
    )
    made = dpdist.Preprocessing({"dose": {"range": [0, 10]}})
    options = {"person": "who", "order": "day", "length": 5, "target": "ill"}
    found = made.sequences(frame, **options)
    assert sorted(found.persons) == sorted(frame["who"].unique())
    for number, who in enumerate(found.persons):
        own = frame[frame["who"] == who].sort_values("day", kind="stable")
        last = own["dose"].to_numpy()[-5:]
        assert np.allclose(found.inputs[number, 5 - len(last) :, 0], last / 10)
        assert found.inputs[number, :, 1].tolist() == [0] * (5 - len(last)) + [1] * len(last)
        assert not found.inputs[number, : 5 - len(last)].any()
        assert found.targets[number] == own["ill"].to_numpy()[-1]
        alone = made.sequences(own, **options)
        assert np.array_equal(alone.inputs[0], found.inputs[number])
    with pytest.raises(UserError, match="length"):
        made.sequences(frame, **{**options, "length": 0})
    frame.loc[3, "day"] = pd.NaT
    with pytest.raises(UserError, match="row 3: column 'day'"):
        made.sequences(frame, **options)


ANSWERS = "dose=0,60\nwart=a\nward=a,b\nadmitted=2000-01-01,2030-01-01\n\n"  # age is known


def rows(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        f"P{seed}-{n},{'' if n % 5 == 1 else rng.integers(20, 90)},{rng.uniform(0, 50):.3f},"
        f"{['a', 'b', 'c', ''][n % 4]},{'' if n % 7 == 2 else f'20{n % 20 + 10}-03-0{n % 9 + 1}'},"
        f"{str(n % 3 == 0).lower()},{n % 2}"
        for n in range(count)
    ]


HEADER = "code,age,dose,ward,admitted,smoker,ill"


def write(folder: Path, **changed: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    train_rows = rows(60, 0)
    train_rows[4] = changed.get("row4", train_rows[4])
    for split, some in (("train", train_rows), ("test", rows(20, 1))):
        Path(folder, f"{split}.csv").write_text("\n".join([HEADER, *some]) + "\n")
    return train_rows


def invoke(*words: str, given: str | None = None) -> str:
    done = CliRunner().invoke(app, words, input=given)
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def visits(tmp_path, monkeypatch) -> Path:
    """A folder of raw tables, and the recipe that init proposes with three answers."""
    monkeypatch.chdir(tmp_path)
    write(Path("visits"))
    monkeypatch.setattr(init, "_at_terminal", lambda: True)
    invoke("init", "visits", "--label", "ill", given=ANSWERS)
    return Path("visits.yaml")


def inputs(recipe: Path) -> np.ndarray:
    found = load_recipe(recipe)
    return np.asarray(records_with_canaries(found, data_source(found)).inputs)


def test_init_asks_what_nobody_knows_and_proposes_the_rest(visits):
    rules = load_recipe(visits).data.columns.preprocessing
    assert list(rules) == ["age", "smoker", "dose", "ward", "admitted"]
    assert (rules["age"].range, rules["age"].missing) == ((0, 120), 50)
    assert rules["ward"].categories == ("a", "b") and rules["admitted"].range == (0, 30)
    assert inputs(visits).shape == (60, 1 + 1 + 1 + 4 + 2)


def test_init_proposes_the_same_of_other_records(visits, monkeypatch):
    monkeypatch.setattr(init, "_at_terminal", lambda: False)
    first = invoke("init", "visits", "--label", "ill", "--output", "one.yaml")
    write(Path("visits"), row4="P0-4,99,1e6,zzz,1999-01-01,true,0")
    assert invoke("init", "visits", "--label", "ill", "--output", "one2.yaml") == first.replace(
        "one.yaml", "one2.yaml"
    )
    text = Path("one.yaml").read_text()
    assert text.replace('name: "one"', 'name: "one2"') == Path("one2.yaml").read_text()
    assert '# "ward": {categories: [A, B], missing: flag}' in text
    assert "zzz" not in first + text and "to fill in" in first


def test_a_changed_record_changes_its_own_inputs_only(visits):
    before = inputs(visits)
    write(Path("visits"), row4="P0-4,,999,zzz,,true,0")
    changed = (inputs(visits) != before).any(axis=1)
    assert changed.tolist() == [n == 4 for n in range(60)]


@pytest.mark.parametrize(
    "row",
    [
        "P0-4,131,90,x,2040-01-01,true,0", "P0-4,130,90,y,2040-01-01,true,0",
        "P0-4,130,90,x,2041-01-01,true,0",
    ],
)  # fmt: skip
def test_records_that_are_cut_alike_stay_two(visits, row):
    found = load_recipe(visits)
    write(Path("visits"), row4="P0-4,130,90,x,2040-01-01,true,0")
    first = records_with_canaries(found, data_source(found))
    write(Path("visits"), row4=row)
    second = records_with_canaries(found, data_source(found))
    assert np.array_equal(first.inputs, second.inputs)
    assert first.hashes[4] != second.hashes[4]


@pytest.mark.slow
def test_raw_rows_are_predicted_on_by_a_run_and_its_release(visits):
    data = load_recipe(visits).data.model_dump(mode="json")
    recipe, folder = make(Path("runs"), "visits", data=data, model={"name": "linear"},
                          training__steps=3)  # fmt: skip
    train(recipe, folder)
    write_release(folder, not_private=True)
    raw = "code,ward,age,smoker,admitted,dose\nx,a,,true,2015-01-01,30\ny,zzz,60,false,,15\n"
    Path("new.csv").write_text(raw)
    rules: dict[str, Any] = dict(recipe.data.columns.feature_rules)
    wanted = dpdist.Preprocessing(rules).transform("new.csv")
    assert np.allclose(wanted[1], [0.5, 0.25, 0, 0, 0, 1, 0, 0, 1])
    with torch.no_grad():
        outputs = models.load(folder.model_folder)(torch.from_numpy(wanted))
    labels, shares = outputs.argmax(1).tolist(), outputs.softmax(1)
    certified = ("--set", "certify.sigma=1e-6", "--set", "certify.n=200")
    for where in (folder.path, folder.release_folder):
        # Without noise: probabilities.
        for line, expected in zip(predicted(where), shares.tolist(), strict=True):
            assert line["radius"] is None
            assert [*line["probabilities"].values()] == pytest.approx(expected, abs=1e-6)
        assert [line["label"] for line in predicted(where, *certified)] == labels
    release = dpdist.load(folder.release_folder)
    raw_rows = {"ward": ["a", "zzz"], "age": [None, 60], "smoker": [True, False],
                "admitted": ["2015-01-01", None], "dose": [30, 15]}  # fmt: skip
    for given in ("new.csv", raw_rows, pd.DataFrame(raw_rows), wanted):
        assert torch.allclose(release.predict(given).softmax(1), shares, atol=1e-6)
    seen: list[torch.Tensor] = []
    release.model.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    record = {"ward": "zzz", "age": 60, "smoker": False, "admitted": None, "dose": 15}
    assert release.answerer(sigma=1e-6, n=100)(record).label == labels[1]
    read = torch.isclose(seen[-1], torch.from_numpy(wanted[1]), atol=1e-3)
    assert read.all(dim=1).any()


def test_a_model_of_counted_words_answers_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for split in ("train", "test"):
        rows = [f"cough {split} {n},1\nfine {split} {n},0" for n in range(20)]
        Path(f"notes/{split}.csv").write_text("\n".join(["note,label", *rows]))
    columns = {"features": ["note"], "preprocessing": {"note": {"text": 16}}}
    data = {"name": "notes", "root": ".", "classes": 2, "columns": columns}
    recipe, folder = make(Path("runs"), "notes", data=data, model={"name": "linear"})
    train(recipe, folder)
    Path("new.csv").write_text("note\nA fine cough\n")
    Path("new.txt").write_text("A fine cough\n")
    row, file, text = predicted(folder.path, "new.txt", "--text", "A fine cough")
    assert row["probabilities"] == file["probabilities"] == text["probabilities"]


def predicted(where: Path, *more: str) -> list[dict[str, Any]]:
    said = invoke("predict", str(where), "new.csv", "--json", *more)
    return [json.loads(line) for line in said.splitlines()]
