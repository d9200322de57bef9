"""Odd exports and folders of images: each is read as what it says, or refused without a value."""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.data import load
from dpdist.runs.recipe import load_recipe
from dpdist.training.records import data_source

ROWS = [[f"91370.{n}5", f"{n % 7}.25", f"{n % 2}"] for n in range(24)]
NAMES = ["a", "b", "label"]
Rows = list[list[str]]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(rows: Rows, between: str = ",", end: str = "\n", names: list[str] | None = None) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=between, lineterminator=end)
    writer.writerows([NAMES if names is None else names, *rows])
    return text.getvalue()


def changed(column: int, change: Callable[[int, str], str]) -> Rows:
    """The rows with other cells in a column, from row number and cell."""
    return [
        [change(n, cell) if column == place else cell for place, cell in enumerate(row)]
        for n, row in enumerate(ROWS)
    ]


def with_first(cell: Callable[[int], str]) -> Rows:
    return [[cell(n), *row] for n, row in enumerate(ROWS)]


def hole(text: str, column: int = 0) -> str:
    return lines(changed(column, lambda n, cell: text if n == 3 else cell))


def excel(*sheets: Rows) -> bytes:
    book = pytest.importorskip("openpyxl").Workbook()
    for number, rows in enumerate(sheets):
        sheet = book.active if number == 0 else book.create_sheet()
        sheet.append(NAMES)
        for row in rows:
            sheet.append([float(row[0]), float(row[1]), int(row[2])])
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def zipped(*texts: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.csv", text)
    return buffer.getvalue()


# content of train.csv (or of another ending), what init prints or refuses with; True: as ROWS.
HOLE = ["train.csv: line 5", "'a'", "missing"]
MARKED = ["1 features", "left out: b: text"]
EXPORTS: dict[str, tuple[str | bytes | Callable[[], bytes], bool | list[str]]] = {
    "comma at the end": (lines([[*row, ""] for row in ROWS], names=[*NAMES, ""]), True),
    "comma after the names": (lines(ROWS, names=[*NAMES, ""]), ["line 2"]),
    "cell too many": (lines([[*row, ""] for row in ROWS]), ["line 2"]),
    "mixed ends": (lines(ROWS).replace("\n", "\r\n", 3).replace("1\n", "1\r"), True),
    "byte-order mark": (lines(ROWS).encode("utf-8-sig"), True),
    "UTF-16": (lines(ROWS).encode("utf-16"), ["line 1"]),
    "Latin-1": (lines(ROWS, names=["a", "b", "label"]).encode() + "é".encode("latin-1"),
                ["line 26"]),
    "decimal commas": (lines(ROWS, ";").replace(".", ","), True),
    "decimal commas and points": (lines(changed(1, lambda n, cell: cell.replace(".", ",")), ";"),
                                  ["1 features", "left out: a: text"]),
    "tabs": (lines(ROWS, "\t"), True),
    "quoted newlines": (lines(with_first(lambda n: "two\nlines"), names=["note", *NAMES]), True),
    "hole after quoted newlines": (lines([["two\nlines", *row[:2], "" if n == 3 else row[2]]
                                          for n, row in enumerate(ROWS)],
                                         names=["note", *NAMES]), ["line 8", "'label'"]),
    "thousands": (lines(changed(1, lambda n, cell: f"1,{n:03d}")), MARKED),
    "thousands and semicolons": (lines(changed(1, lambda n, cell: f"1,{n:03d}"), ";"), MARKED),
    "decimal commas in quotes": (lines(changed(1, lambda n, cell: f"{n},5")), MARKED),
    **{f"missing as {text!r}": (hole(text), HOLE) for text in ("", "N/A", ".")},
    "label missing": (hole("?", 2), ["line 5", "'label'"]),
    "index": (lines(with_first(str), names=["", *NAMES]), True),
    "labels as fractions": (lines(changed(2, lambda n, cell: f"{cell}.0")), ["label"]),
    "labels as true and false": (lines(changed(2, lambda n, cell: str(cell == "1"))), True),
    "labels below 0": (lines(changed(2, lambda n, cell: str(int(cell) - 1))), ["'label'"]),
    "labels from 1": (lines(changed(2, lambda n, cell: str(int(cell) + 1))), True),
    "dates with zones": (lines(with_first(lambda n: "2024-01-05T10:00:00+02:00"),
                               names=["when", *NAMES]), True),
    "gzip": (lambda: gzip.compress(lines(ROWS).encode()), True),
    "zip": (lambda: zipped(lines(ROWS)), True),
    "zip of two": (lambda: zipped(lines(ROWS), lines(ROWS)), ["train.csv.zip"]),
    "Excel": (lambda: excel(ROWS), True),
    "Excel of two sheets": (lambda: excel(ROWS, ROWS), ["train.xlsx"]),
}  # fmt: skip
ENDINGS = {"gzip": ".csv.gz", "zip": ".csv.zip", "zip of two": ".csv.zip"}


def check(told: str) -> None:
    assert "91370" not in told and ".25" not in told, told


@pytest.mark.parametrize("name", EXPORTS)
def test_an_odd_export_is_read_or_refused(name):
    if "Excel" in name:
        pytest.importorskip("openpyxl")
    content, wanted = EXPORTS[name]
    ending = ".xlsx" if "Excel" in name else ENDINGS.get(name, ".csv")
    made = content() if callable(content) else content
    Path("st").mkdir()
    Path("st", f"train{ending}").write_bytes(made.encode() if isinstance(made, str) else made)
    Path("st", f"test{ending}").write_bytes(Path("st", f"train{ending}").read_bytes())
    done = CliRunner().invoke(app, ["init", "st"])
    told = f"{done.stdout} {done.exception or ''} {getattr(done.exception, '__cause__', '')}"
    if wanted == HOLE:  # filled by a rule of the recipe, if it has one
        done = CliRunner().invoke(app, ["data", "check", "st.yaml"])
        told += f"{done.stdout} {done.exception or ''}"
    check(told)
    if wanted is not True:
        assert isinstance(wanted, list) and all(part in told for part in wanted), told
        return
    assert done.exception is None, told
    split = load(data_source(load_recipe(Path("st.yaml"))), "train")
    assert np.array_equal(split.inputs, np.array([row[:2] for row in ROWS], np.float32))
    assert split.labels.tolist() == [int(row[2]) for row in ROWS]


@pytest.mark.parametrize(("first", "refused"), [(2**53, False), (2**63, True)])
def test_large_numbers_of_persons_are_kept_apart(first, refused):
    Path("st").mkdir()
    for split, begin in (("train", first), ("test", first + 1000)):
        rows = [[str(begin + n // 2), *row] for n, row in enumerate(ROWS)]
        Path("st", f"{split}.csv").write_text(lines(rows, names=["pid", *NAMES]))
    done = CliRunner().invoke(app, ["init", "st", "--user", "pid"])
    if refused:
        assert isinstance(done.exception, UserError)
        assert str(first)[:8] not in str(done.exception)
        return
    split = load(data_source(load_recipe(Path("st.yaml"))), "train")
    assert split.num_groups == len(ROWS) // 2


def test_equal_rows_of_two_persons_are_two_records_and_a_person_in_both_files_is_refused():
    """Equal rows of two persons are ordinary; a person in both files would be published."""
    Path("st").mkdir()
    for split, first in (("train", 0), ("test", 1000)):
        rows = [[str(first + n // 2), *row] for n, row in enumerate(ROWS)]
        Path("st", f"{split}.csv").write_text(lines(rows, names=["pid", *NAMES]))
    CliRunner().invoke(app, ["init", "st", "--user", "pid"])
    checked = CliRunner().invoke(app, ["data", "check", "st.yaml"])
    assert checked.exception is None, checked.exception
    rows = [[str(n // 2), *row] for n, row in enumerate(ROWS[::-1])]
    Path("st", "test.csv").write_text(lines(rows, names=["pid", *NAMES]))
    done = CliRunner().invoke(app, ["data", "check", "st.yaml"])
    assert isinstance(done.exception, UserError) and "12 users" in str(done.exception)


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ("0,9,flag", {"range": (0, 9), "missing": "flag"}),
        ("0,9,log1p", {"range": (0, 9), "missing": "flag", "log1p": True}),
        ("text,16", {"text": 16}),  # words that nobody can list, counted by hash
    ],
)
def test_a_column_may_be_scaled_flagged_or_hashed(said, rule):
    Path("st").mkdir()
    for split, first in (("train", 0), ("test", 1000)):
        cell = "word {}" if "text" in said else "{}"
        rows = [[cell.format(first + n), str(n % 2)] for n in range(40)]
        Path("st", f"{split}.csv").write_text(lines(rows, names=["spend", "label"]))
    CliRunner().invoke(app, ["init", "st", "--range", f"spend={said}"])
    columns = load_recipe(Path("st.yaml")).data.columns
    assert columns.preprocessing["spend"].model_dump(exclude_defaults=True) == rule
