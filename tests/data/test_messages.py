"""Messages about records: file, line or row, column and rule, and no value of a record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import dpdist
from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.data.column_names import check_names
from dpdist.data.discovery import inspect_csv_folder, inspect_folder
from dpdist.data.parquet import Columns, load_parquet

pytestmark = pytest.mark.guarantee

SECRET = "91370"


def refused(call, *args, **named) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **named)
    text = str(caught.value)
    assert SECRET not in text and "\n" not in text
    shown = "".join(str(each) for each in (caught.value.__cause__,) if each is not None)
    assert SECRET not in shown
    return text


def written(folder: Path, kind: str, train: list[str], test: list[str]) -> Path:
    (folder / "made").mkdir(parents=True)
    for split, lines in (("train", train), ("test", test)):
        (folder / f"{split}.{kind}").write_text("\n".join(lines) + "\n")
    return folder


def of_csv(folder: Path, train: list[str], test: list[str] | None = None) -> str:
    good = ["age,label", "1,0", "2,1"]
    written(folder, "csv", train, good if test is None else test)
    return refused(inspect_csv_folder, folder, folder / "made")


def test_a_csv_line_of_too_many_cells_is_named_by_its_line(tmp_path):
    said = of_csv(tmp_path, ["age,label", '"two\nlines",0', "", f"{SECRET},a,0"])
    assert "train.csv: line 5: must have 2 cells" in said


def test_a_fraction_beside_whole_numbers_is_named_by_row_and_column(tmp_path):
    good = ["age,label", "1,0", "2,1"]
    said = of_csv(tmp_path, good, ["age,label", "5,0", "", f"{SECRET}.5,1", "7,0"])
    assert "test.csv row 1: column 'age' must be int64" in said


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (f'{{"age": "{SECRET}", "label": 1}}', "line 3: column 'age' must be"),
        (f'["{SECRET}"]', "line 3: must be one JSON object"),
        (f'{{"age": {SECRET}', "line 3: must be one JSON object"),
        (f'{{"age": {SECRET}.5, "label": 1}}', "line 3: column 'age' must be int64"),
    ],
)
def test_a_line_of_jsonl_is_named(tmp_path, line, where):
    good = [json.dumps({"age": n, "label": n % 2}) for n in range(4)]
    written(tmp_path, "jsonl", good, [*good[:2], line])
    said = refused(inspect_csv_folder, tmp_path, tmp_path / "made")
    assert f"test.jsonl: {where}" in said


def test_labels_that_are_none_of_the_classes_are_named_by_their_row(tmp_path):
    number, text = tmp_path / "number.parquet", tmp_path / "text.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0], "label": [0, int(SECRET)]}), number)
    pq.write_table(pa.table({"x": [1.0, 2.0], "label": ["a", SECRET]}), text)
    columns = Columns(features=("x",))
    said = refused(load_parquet, [number], "n", 2, columns, tmp_path / "cache")
    assert "row 1: column 'label' must be 0 to 1" in said
    said = refused(load_parquet, [text], "t", 1, columns, tmp_path / "cache", ("a",))
    assert "row 1: column 'label' must be one of data.names" in said


@pytest.mark.parametrize(
    ("label", "rule"),
    [([f"{SECRET} ", SECRET], "has two classes"), ([-int(SECRET), 0], "must have classes from 0")],
)
def test_classes_that_cannot_be_numbered_are_named_by_their_column(tmp_path, label, rule):
    for split in ("train", "test"):
        pq.write_table(pa.table({"x": [1.0, 2.0], "label": label}), tmp_path / f"{split}.parquet")
    assert f"column 'label' {rule}" in refused(inspect_folder, tmp_path)


def test_a_damaged_parquet_file_is_told_in_own_words(tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"x": [SECRET] * 2000, "label": [0, 1] * 1000}), path, compression=None)
    raw = bytearray(path.read_bytes())
    begin = raw.index(SECRET.encode())
    raw[begin : begin + 400] = b"\xff" * 400
    path.write_bytes(raw)
    pq.write_table(pa.table({"x": ["a"], "label": [0]}), tmp_path / "test.parquet")
    columns = Columns(image="x")
    refused(load_parquet, [path], "n", 2, columns, tmp_path / "cache")


# --- names of columns -------------------------------------------------------------------------


HEADERLESS = {
    "numbers": [f"{SECRET},3.5,setosa", "5.1,3.5,setosa", "4.9,3.0,virginica"],
    "one number": [f"female,{SECRET}", "female,31", "male,32"],
    "texts": [f"x{SECRET},female,yes", "y,female,no", "z,male,yes"],
    "a date": [f"alice {SECRET},2024-01-05", "bob,2024-01-06"],
    "equal numbers": [f"{SECRET},{SECRET},a", "1,2,a"],
    "semicolons": [f"{SECRET};3.5;a", "5;1;a"],
    "a document": [f"{SECRET} and " + 20 * "words ", "other words"],
}


@pytest.mark.parametrize("case", HEADERLESS)
def test_a_csv_without_names_writes_no_record_into_a_public_recipe(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "st", "csv", HEADERLESS[case], HEADERLESS[case])
    done = CliRunner().invoke(app, ["init", "st"])
    assert isinstance(done.exception, UserError)
    assert SECRET not in f"{done.exception} {done.output}"
    assert not Path("st.yaml").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda columns: pd.DataFrame(columns),
        lambda columns: pa.table(columns),
        lambda columns: pq.write_table(pa.table(columns), "x.parquet") or Path("x.parquet"),
    ],
)
def test_tables_named_by_values_are_refused_in_python_too(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    columns = {f"{SECRET}.5": [1.0, 2.0], "setosa": [0, 1]}
    said = refused(dpdist.as_records, make(columns), target="nothing")
    assert "column 1" in said


def test_a_parquet_folder_named_by_values_is_refused(tmp_path):
    for split in ("train", "test"):
        table = pa.table({SECRET: [1.0, 2.0], "b": [0, 1]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    assert "(column 1)" in refused(inspect_folder, tmp_path)


def test_numbers_in_equal_steps_are_names():
    check_names([*map(str, range(64)), "label"], "x")  # a matrix without names, as pandas writes it
    check_names([*(f"{400 + 2.5 * n}" for n in range(30)), "label"], "x")  # a spectrum
    check_names(["", "age", "label", "sepal length (cm)", "income_2020", "v1.2"], "x")
    frame = pd.DataFrame(np.zeros((4, 2)))
    frame["label"] = [0, 1, 0, 1]
    assert len(dpdist.as_records(frame, target="label")) == 4
