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
from PIL import Image
from support.datasets import png
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
    "plain": (lines(ROWS), True),
    "comma at the end": (lines([[*row, ""] for row in ROWS], names=[*NAMES, ""]), True),
    "two of them": (lines([[*row, "", ""] for row in ROWS], names=[*NAMES, "", ""]), True),
    "comma after the names": (lines(ROWS, names=[*NAMES, ""]), ["line 2", "4 cells"]),
    "cell too many": (lines([[*row, ""] for row in ROWS]), ["line 2", "3 cells"]),
    "CR": (lines(ROWS, end="\r"), True),
    "CRLF": (lines(ROWS, end="\r\n"), True),
    "mixed ends": (lines(ROWS).replace("\n", "\r\n", 3).replace("1\n", "1\r"), True),
    "byte-order mark": (lines(ROWS).encode("utf-8-sig"), True),
    "UTF-16": (lines(ROWS).encode("utf-16"), ["line 1", "UTF-16"]),
    "Latin-1": (lines(ROWS, names=["a", "b", "label"]).encode() + "é".encode("latin-1"),
                ["line 26", "Latin-1"]),
    "semicolons": (lines(ROWS, ";"), True),
    "decimal commas": (lines(ROWS, ";").replace(".", ","), True),
    "decimal commas and points": (lines(changed(1, lambda n, cell: cell.replace(".", ",")), ";"),
                                  ["1 features", "left out: a: text"]),
    "tabs": (lines(ROWS, "\t"), True),
    "bars": (lines(ROWS, "|"), True),
    "quoted names": (lines(ROWS).replace("a,b,label", '"a","b","label"'), True),
    "quoted newlines": (lines(with_first(lambda n: "two\nlines"), names=["note", *NAMES]), True),
    "hole after quoted newlines": (lines([["two\nlines", *row[:2], "" if n == 3 else row[2]]
                                          for n, row in enumerate(ROWS)],
                                         names=["note", *NAMES]), ["line 8", "'label'"]),
    "thousands": (lines(changed(1, lambda n, cell: f"1,{n:03d}")), MARKED),
    "thousands and semicolons": (lines(changed(1, lambda n, cell: f"1,{n:03d}"), ";"), MARKED),
    "decimal commas in quotes": (lines(changed(1, lambda n, cell: f"{n},5")), MARKED),
    **{f"missing as {text!r}": (hole(text), HOLE) for text in
       ("", " ", "NA", "N/A", "NaN", "null", "None", ".", "-", "?")},
    "holes in three columns": (
        lines([["", *row[1:]] if n == 3 else [row[0], "?", ""] if n == 5 else row
               for n, row in enumerate(ROWS)]),
        [f"{split}.csv: line 7: column 'label'" for split in ("train", "test")]),
    "label missing": (hole("?", 2), ["line 5", "'label'"]),
    "index": (lines(with_first(str), names=["", *NAMES]), True),
    "index read before": (lines(with_first(str), names=["Unnamed: 0", *NAMES]), True),
    "labels as fractions": (lines(changed(2, lambda n, cell: f"{cell}.0")), ["label"]),
    "labels as true and false": (lines(changed(2, lambda n, cell: str(cell == "1"))), True),
    "labels as t and f": (lines(changed(2, lambda n, cell: "ft"[int(cell)])), True),
    "labels below 0": (lines(changed(2, lambda n, cell: str(int(cell) - 1))), ["'label'", "-1"]),
    "labels from 1": (lines(changed(2, lambda n, cell: str(int(cell) + 1))), True),
    "a truth value": (lines(changed(1, lambda n, cell: str(n % 3 == 0).lower())), ["2 features"]),
    "dates with zones": (lines(with_first(lambda n: "2024-01-05T10:00:00+02:00"),
                               names=["when", *NAMES]), True),
    "gzip": (lambda: gzip.compress(lines(ROWS).encode()), True),
    "zip": (lambda: zipped(lines(ROWS)), True),
    "zip of two": (lambda: zipped(lines(ROWS), lines(ROWS)), ["train.csv.zip", "2"]),
    "no gzip": (lambda: lines(ROWS).encode(), ["train.csv.gz", "unpacked"]),
    "Excel": (lambda: excel(ROWS), True),
    "Excel with a hole": (lambda: excel([]), ["train.xlsx", "record"]),
    "Excel of two sheets": (lambda: excel(ROWS, ROWS), ["train.xlsx", "2"]),
    "no Excel": (lambda: lines(ROWS).encode(), ["train.xlsx", "unpacked"]),
}  # fmt: skip
ENDINGS = {"gzip": ".csv.gz", "no gzip": ".csv.gz", "zip": ".csv.zip", "zip of two": ".csv.zip"}


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


# content of test.csv beside a plain train.csv, and what `init` or `data check` refuses with
TESTS: dict[str, tuple[str, list[str]]] = {
    "whole numbers": (lines(changed(1, lambda n, cell: str(n + 9))), []),
    "labels as fractions": (lines(changed(2, lambda n, cell: f"{cell}.0")), []),
    "half a label": (lines(changed(2, lambda n, cell: f"{cell}.5")), ["line 2", "'label'"]),
    "no labels": (lines(changed(2, lambda n, cell: "-1")), ["line 2", "'label'"]),
    "semicolons": (lines(ROWS, ";").replace(".", ","), []),
    "texts": (lines(changed(1, lambda n, cell: "high" if n == 5 else cell)), ["line 7", "'b'"]),
}


@pytest.mark.parametrize("name", TESTS)
def test_a_test_split_is_read_as_the_training_split(name):
    content, wanted = TESTS[name]
    Path("st").mkdir()
    other = [[f"91371.{row[0][6:]}", *row[1:]] for row in ROWS]
    Path("st/train.csv").write_text(lines(other))
    Path("st/test.csv").write_text(content)
    done = CliRunner().invoke(app, ["init", "st"])
    if done.exception is None:
        done = CliRunner().invoke(app, ["data", "check", "st.yaml"])
    told = str(done.exception or "")
    check(told)
    assert (done.exception is None) == (not wanted) and all(part in told for part in wanted), told


@pytest.mark.parametrize(("first", "refused"), [(2**53, False), (2**63, True), (2**70, True)])
def test_large_numbers_of_persons_are_kept_apart(first, refused):
    Path("st").mkdir()
    for split, begin in (("train", first), ("test", first + 1000)):
        rows = [[str(begin + n // 2), *row] for n, row in enumerate(ROWS)]
        Path("st", f"{split}.csv").write_text(lines(rows, names=["pid", *NAMES]))
    done = CliRunner().invoke(app, ["init", "st", "--user", "pid"])
    if refused:
        assert isinstance(done.exception, UserError) and "'pid'" in str(done.exception)
        assert str(first)[:8] not in str(done.exception)
        return
    split = load(data_source(load_recipe(Path("st.yaml"))), "train")
    assert split.num_groups == len(ROWS) // 2


@pytest.mark.parametrize(("shared", "cure"), [(1, "drop_test_records"), (20, "add a column")])
def test_equal_rows_on_both_sides_are_named(shared, cure):
    Path("st").mkdir()
    Path("st/train.csv").write_text(lines(ROWS))
    other = [[f"91371.{n}5", *row[1:]] for n, row in enumerate(ROWS)]
    Path("st/test.csv").write_text(lines([*ROWS[:shared], *other[shared:]]))
    CliRunner().invoke(app, ["init", "st"])
    done = CliRunner().invoke(app, ["run", "st.yaml", "--dry-run"])
    assert f"{shared} of the 24" in str(done.exception) and cure in str(done.exception)
    check(str(done.exception))


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
        ("0,9", {"range": (0, 9), "missing": 4.5}),
        ("0,9,flag", {"range": (0, 9), "missing": "flag"}),
        ("0,9,log1p", {"range": (0, 9), "missing": "flag", "log1p": True}),
        ("0,9,5", None),
        ("9,0", None),
    ],
)
def test_a_column_of_numbers_may_be_scaled_by_logarithms_and_flagged(said, rule):
    Path("st").mkdir()
    for split, first in (("train", 0), ("test", 1000)):
        rows = [[f"{first + n}", str(n % 2)] for n in range(40)]
        Path("st", f"{split}.csv").write_text(lines(rows, names=["spend", "label"]))
    done = CliRunner().invoke(app, ["init", "st", "--range", f"spend={said}"])
    if rule is None:
        assert isinstance(done.exception, UserError)
        return
    columns = load_recipe(Path("st.yaml")).data.columns
    assert columns.preprocessing["spend"].model_dump(exclude_defaults=True) == rule


def test_words_that_nobody_can_list_are_counted_by_hash():
    Path("st").mkdir()
    for split in ("train", "test"):
        rows = [[f"word{split}{n}", str(n), str(n % 2)] for n in range(40)]
        Path("st", f"{split}.csv").write_text(lines(rows, names=["note", "x", "label"]))
    CliRunner().invoke(app, ["init", "st", "--range", "note=text,16", "--range", "x=0,40"])
    recipe = load_recipe(Path("st.yaml"))
    assert recipe.data.columns.preprocessing["note"].text == 16
    assert load(data_source(recipe), "train").input_shape == (17,)


# --- images -------------------------------------------------------------------------------------


GRAY = np.random.default_rng(0).integers(0, 256, (6, 8), dtype=np.uint8)
COLOR = np.dstack([GRAY, GRAY[::-1], GRAY[:, ::-1]])


def saved(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    return saved(Image.fromarray(GRAY), exif=exif)


IMAGES: dict[str, tuple[Callable[[], bytes], np.ndarray | str]] = {
    "L": (lambda: png(GRAY), GRAY[None]),
    "RGB": (lambda: saved(Image.fromarray(COLOR)), COLOR.transpose(2, 0, 1)),
    "RGBA": (lambda: saved(Image.fromarray(COLOR).convert("RGBA")), COLOR.transpose(2, 0, 1)),
    "palette": (lambda: saved(Image.fromarray(GRAY).convert("P")), np.stack([GRAY] * 3)),
    "CMYK": (lambda: saved(Image.fromarray(COLOR).convert("CMYK"), "JPEG"), "CMYK"),
    "16 bit": (lambda: saved(Image.fromarray(GRAY.astype(np.uint16) * 257)),
               (GRAY / np.float32(255))[None]),
    "EXIF": (turned, GRAY[None]),  # as stored, at every door
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_a_mode_has_one_scale_at_all_doors(name):
    from dpdist.data.parquet import decode_picture

    raw, wanted = IMAGES[name][0](), IMAGES[name][1]
    for split in ("train", "test"):
        for kind in "ab":
            Path("st", split, kind).mkdir(parents=True)
            Path("st", split, kind, "0.png").write_bytes(raw)
    done = CliRunner().invoke(app, ["init", "st"])
    if isinstance(wanted, str):
        assert wanted in str(done.exception) and "0.png" in str(done.exception)
        return
    assert done.exception is None
    split = load(data_source(load_recipe(Path("st.yaml"))), "train")
    assert np.array_equal(split.inputs[0], wanted) and np.array_equal(decode_picture(raw), wanted)
    assert split.inputs.dtype == (np.float32 if name == "16 bit" else np.uint8)
    assert split.batch(slice(None)).min() >= 0 and split.batch(slice(None)).max() <= 1


# files beside those of the classes a and b, and what init says
FOLDERS: dict[str, tuple[list[str], list[str]]] = {
    "whole": ([], ["2 classes"]),
    "stray files": (["train/notes.txt", "train/a/Thumbs.db", "train/a/x.dcm"],
                    ["2 classes", "1 x file .db", "1 x file .dcm"]),
    "empty class": (["train/c/"], ["2 classes", "1 x folder without images"]),
    "unseen class": (["test/c/0.png"], ["test/c/0.png", "'label'", "class of the training split"]),
    "class of training alone": (["train/c/0.png"], ["3 classes"]),
    "images beside classes": (["train/0.png"], ["2 classes", "1 x image outside a class"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_what_lies_beside_images_is_named(name):
    others, wanted = FOLDERS[name]
    usual = [f"{split}/{kind}/0.png" for split in ("train", "test") for kind in "ab"]
    for number, each in enumerate([*usual, *others]):
        path = Path("st", each)
        if each.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(GRAY // 2 + number))
    done = CliRunner().invoke(app, ["init", "st"])
    told = f"{done.stdout} {done.exception or ''}"
    assert all(part in told for part in wanted), told


def test_images_without_classes_are_refused_with_the_cure():
    for split in ("train", "test"):
        Path("st", split).mkdir(parents=True)
        Path("st", split, "0.png").write_bytes(png(GRAY))
    done = CliRunner().invoke(app, ["init", "st"])
    assert isinstance(done.exception, UserError)
    assert "move them to train/CLASS/" in str(done.exception)
