"""One reader of tables: every kind of file gives the same records, and no message quotes one."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.datasets import png
from support.training import make, train
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import dpdist
from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.data import Columns, DataSource, load
from dpdist.data.record_hashes import hash_inputs, hash_users
from dpdist.data.tables import open_table
from dpdist.runs.recipe import load_recipe

MARK = "91370"  # a value that no message may hold
GOOD = ["age,label", "1.5,0", "2.5,1", "3.5,0", "4.5,1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*options: str) -> str:
    done = CliRunner().invoke(app, ["init", "st", *options])
    if done.exception is not None:
        assert MARK not in f"{done.output} {done.exception} {done.exception.__cause__}"
        raise done.exception
    return done.stdout


def write(content: Any, name: str) -> None:
    path = Path("st", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name.endswith(".parquet"):
        pq.write_table(content if isinstance(content, pa.Table) else pa.table(content), path)
    else:
        path.write_text("\n".join(content) + "\n")


def rows_of(rows: list[dict[str, Any]]) -> list[str]:
    return [json.dumps(row) for row in rows]


AGES, LABELS = [1.5, 2.25, -3.0, 7.0, 0.1], [0, 1, 1, 0, 1]
WHO = ["a", "b", "b", "7", "c"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_every_kind_of_file_gives_the_same_records(kind):
    columns = {"age": AGES, "label": LABELS, "who": WHO}
    rows = pa.table(columns).to_pylist()
    lines = [",".join(columns), *(",".join(map(str, row.values())) for row in rows)]
    write({"parquet": columns, "csv": lines, "jsonl": rows_of(rows)}[kind], f"train.{kind}")
    source = DataSource("st", 2, Path(), columns=Columns(features=("age",), user="who"))
    split = load(source, "train")
    assert np.array_equal(split.inputs[:, 0], np.array(AGES, np.float32))
    assert split.labels.tolist() == LABELS and split.largest_user == 2
    # What budgets know records and persons by: the same whatever file they are in.
    assert np.array_equal(split.hashes, hash_inputs(np.array(AGES, np.float32)[:, None]))
    assert split.user_hashes.tobytes() == hash_users(WHO)
    records = dpdist.as_records(Path(f"st/train.{kind}"), inputs=["age"], target="label")
    assert torch.equal(records.batch(slice(None)), split.batch(slice(None)))


def test_folders_of_pictures_are_read_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    for split in ("train", "test"):
        for number in range(6):
            raw = png(pixels[number] + (split == "test"))
            write(raw, f"{split}/{('cat', 'dog')[number // 3]}/{number}.png")
    for name in ("train/cat/._0.png", "train/dog/.DS_Store", "._train.csv", "train/._x/0.png"):
        write(b"macOS", name)
    write(b"x", "train/dog/scan.dcm")
    before = sorted(Path("st").rglob("*"))
    out = init()
    assert all(told in out for told in ("6 training", "6 test", "images 1x8x8", ".dcm"))
    assert sorted(Path("st").rglob("*")) == before
    source = DataSource("st", 2, Path(), class_names=("cat", "dog"))
    split = load(source, "train")
    assert np.array_equal(split.inputs[:, 0], pixels) and split.labels.tolist() == [0] * 3 + [1] * 3
    write(png(255 - pixels[0]), "train/cat/0.png")  # a changed picture is read again
    assert not np.array_equal(load(source, "train").inputs, split.inputs)


def test_a_changed_file_is_read_again():
    write(GOOD, "train.csv")
    write(["age,label", "9.5,0", "8.5,1"], "test.csv")
    init()
    source = DataSource("st", 2, Path(), columns=Columns(features=("age",)))
    assert len(load(source, "train")) == 4
    write(GOOD[:-1], "train.csv")
    assert len(load(source, "train")) == 3


def test_parquet_is_read_some_rows_at_a_time():
    write({"x": np.arange(20_000.0), "label": [0, 1] * 10_000}, "train.parquet")
    sizes = [table.num_rows for _, table in open_table(Path("st/train.parquet")).rows(["x"])]
    assert sum(sizes) == 20_000 and max(sizes) <= 4096


def test_the_types_of_the_training_split_hold_for_the_test_split():
    """Person 7 would be another one where only numbers name persons."""
    write(["age,pid,label", "1,7,a", "2,p2,b"], "train.csv")
    write(["age,pid,label", "3,7,a", "4.5,8,b"], "test.csv")
    with pytest.raises(UserError, match="--user:"):
        init("--user", "pid", "--features", "age")
    source = DataSource(
        "st", 2, Path(), columns=Columns(features=("age",), user="pid"), class_names=("a", "b")
    )
    train, test = load(source, "train"), load(source, "test")
    assert np.intersect1d(train.user_hashes, test.user_hashes).size == 1


def test_blanks_around_a_label_are_no_part_of_it():
    write(["age,label", "1,ill", "2, ill", "3,well "], "train.csv")
    write(["age,label", "4,well", "5,ill "], "test.csv")
    assert "2 classes" in init()
    source = DataSource(
        "st", 2, Path(), columns=Columns(features=("age",)), class_names=("ill", "well")
    )
    assert load(source, "train").labels.tolist() == [0, 0, 1]


PARQUET = {"age": [1.5, 2.5, 3.5, 4.5], "label": [0, 1, 0, 1]}
CHATS = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2


def broken_text() -> pa.Table:
    offsets = pa.py_buffer(np.array([0, 1, 2, 3, 4], np.int32).tobytes())
    broken = pa.Array.from_buffers(pa.string(), 4, [None, offsets, pa.py_buffer(b"abc\xff")])
    return pa.table({**PARQUET, "label": broken})


def damaged() -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"age": [1.5] * 2000, "label": [MARK] * 1000 + ["b"] * 1000})
    pq.write_table(table, buffer, compression=None, use_dictionary=False)
    raw = bytearray(buffer.getvalue())
    begin = raw.index(MARK.encode())
    raw[begin + 100 : begin + 400] = b"\xff" * 300
    return bytes(raw)


# name of the file, content, options, and what the message must name.
FAULTS: dict[str, tuple[str, Any, tuple[str, ...], list[str]]] = {
    "cells": ("train.csv", ["age,label", '"two\nlines",0', "", f"{MARK},a,0"], (), ["line 5"]),
    "cells of CR": ("train.csv", f"age,label\r1,0\r2,1,{MARK}\r".encode(), (), ["line 3"]),
    "empty label": ("test.csv", ["age,label", "1.25,0", "2.25,"], (), ["line 3", "'label'"]),
    "other columns": ("test.csv", ["a,b", f"1,{MARK}"], (), ["test.csv", "'label'"]),
    "text for numbers": ("test.csv", ["age,label", "1,0", f"2,x{MARK}"], (), ["line 3", "'label'"]),
    "latin": ("train.csv", f"age,label\n1,{MARK}\n2,".encode() + b"\xe9\n", (), ["line 3"]),
    "no names": ("train.csv", [f"{MARK},3.5,setosa", "5.1,3.5,setosa"], (), ["column 3"]),
    "a date": ("train.csv", [f"alice {MARK},2024-01-05", "bob,2024-01-06"], (), ["column 2"]),
    "a document": ("train.csv", [f"{MARK} and " + 20 * "words ", "others"], (), ["column 1"]),
    "type": ("train.jsonl", [*rows_of([{"age": 1, "label": 0}]), "",
                             *rows_of([{"age": MARK, "label": 1}])], (), ["line 3", "'age'"]),
    "list": ("train.jsonl", ['{"age": 1}', f'["{MARK}"]'], (), ["line 2"]),
    "cut": ("train.jsonl", ['{"age": 1}', f'{{"age": {MARK}'], (), ["line 2"]),
    "chat": ("train.jsonl", rows_of([{"messages": CHATS[0]}, {"messages": [
        {"role": "user", "content": int(MARK)}]}]), (), ["line 2", "'messages'"]),
    "unknown label": ("test.parquet", {**PARQUET, "label": [0, 1, int(MARK), 0]}, (),
                      ["test.parquet row 2", "'label'"]),
    "one class": ("train.parquet", {**PARQUET, "label": [int(MARK)] * 4}, (), ["'label'"]),
    "negative": ("train.parquet", {**PARQUET, "label": [-int(MARK), 0, 1, 1]}, (), ["'label'"]),
    "null": ("train.parquet", {**PARQUET, "label": [0, None, 1, 0]}, (), ["row 1", "'label'"]),
    "not UTF-8": ("train.parquet", broken_text(), (), ["row 3", "'label'"]),
    "damaged": ("train.parquet", damaged(), (), ["near row", "'label'"]),
    "no Parquet": ("train.parquet", b"PAR1xx" + MARK.encode(), (), ["train.parquet"]),
    "names": ("train.parquet", {MARK: [1.5] * 4, "label": [0, 1] * 2}, (), ["column 1"]),
    "no picture": ("train/a/0.png", MARK.encode(), (), ["train/a/0.png"]),
    "image": ("train.parquet", {"image": [MARK.encode()] * 4, "label": [0, 1] * 2}, (), ["row 0"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_file_line_and_column(fault):
    name, content, options, told = FAULTS[fault]
    kind = name.rpartition(".")[2]
    good = {"csv": GOOD, "jsonl": rows_of(pa.table(PARQUET).to_pylist()), "parquet": PARQUET}
    for split in ("train", "test"):
        if kind == "png":
            for label in "ab":
                write(png(np.zeros((8, 8), np.uint8)), f"{split}/{label}/0.png")
        else:
            write(good[kind], f"{split}.{kind}")
    write(content, name)
    with pytest.raises(UserError) as caught:
        init(*options)
    said = str(caught.value)
    assert "\n" not in said and all(part in said for part in told), said
    assert not Path("st.yaml").exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "name"])
def test_only_regular_files_of_readable_names_are_opened(kind):
    """A pipe was waited for without end."""
    Path("st").mkdir()
    for name in ("train.parquet", "train.csv"):
        path = Path("st", name)
        if kind == "name":
            path = Path("st", os.fsdecode(b"\xff" + name.encode()))
            path.touch()
        else:
            os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
        with pytest.raises(UserError):
            open_table(path)


@pytest.mark.parametrize("nobody", ["", "  ", None])
def test_records_of_nobody_are_no_user(nobody):
    """They would count as those of one person."""
    write({**PARQUET, "pid": ["a", "b", nobody, "c"]}, "train.parquet")
    columns = Columns(features=("age",), user="pid")
    with pytest.raises(UserError, match=r"parquet row 2: column 'pid'"):
        load(DataSource("st", 2, Path(), columns=columns), "train")
    with pytest.raises(UserError, match="unit"):
        dpdist.as_records(Path("st/train.parquet"), inputs="age", target="label", unit="pid")
    assert hash_users([nobody]) == bytes(16)


def marked(path: str, kind: str) -> Path:
    """Write a table whose second row cannot be read as the first one; it holds the mark."""
    rows = [{"x": [1.0], "y": 0}, {"x": [float(MARK)], "y": MARK}]
    lines = ["x,y", "1,0", f"{MARK}.5,a{MARK}"]
    if kind == "parquet":
        pq.write_table(pa.table({"x": [1.0, 2.0], "y": ["0", MARK]}), path)
    else:
        Path(path).write_text("\n".join(lines if kind == "csv" else rows_of(rows)) + "\n")
    return Path(path)


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(MARK)]), MARK


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [1.0, 2.0], "y": ["0", MARK]})


DOORS: dict[str, Callable[[], Any]] = {
    "csv": lambda: marked("x.csv", "csv"),
    "jsonl": lambda: marked("x.jsonl", "jsonl"),
    "parquet": lambda: marked("x.parquet", "parquet"),
    "arrays": lambda: {"x": np.ones((2, 1)), "y": np.array(["0", MARK])},
    "ragged arrays": lambda: {"x": [[1.0], [float(MARK), 2.0]], "y": np.array([0, 1])},
    "pair": lambda: (np.ones((2, 1)), np.array([0, int(MARK)])),
    "mixed pandas": lambda: pd.DataFrame({"x": [1.0, MARK], "y": [0, 1]}, dtype=object),
    "arrow": lambda: pa.table({"x": [1.0, 2.0], "y": ["0", MARK]}),
    "data set": Items,
    "loader": lambda: DataLoader(Items(), batch_size=2),
    "list of rows": lambda: [{"x": [1.0], "y": 0}, {"x": [2.0], "y": MARK}],
    "datasets.Dataset": hugging_face,
}


@pytest.mark.parametrize("door", DOORS)
def test_no_door_of_python_tells_a_value(door, capfd):
    with pytest.raises(UserError) as caught:
        dpdist.as_records(DOORS[door](), target="y", classes=2)
    error: BaseException | None = caught.value
    while error is not None:
        assert MARK not in str(error)
        error = error.__cause__ if error.__suppress_context__ else error.__context__
    assert MARK not in "".join(capfd.readouterr())


def columns_of(split: str, kind: str) -> dict[str, Any]:
    shift = float(split == "test")
    cells = [float(f"{MARK}.{n}") + shift for n in range(16)]
    if kind == "texts":
        return {"text": [f"{split} say {MARK} {n}" for n in range(16)]}
    return {"x": cells, "label": [0, 1] * 8}


@pytest.mark.parametrize(
    "kind", ["csv", "jsonl", "parquet", "pictures", pytest.param("texts", marks=pytest.mark.slow)]
)
def test_a_run_tells_no_value_outside_private(kind, capfd):
    """The marks stand in features, in a text and in names of persons and of pictures."""
    for split in ("train", "test"):
        columns = columns_of(split, kind)
        rows = pa.table(columns).to_pylist()
        if kind == "pictures":
            for n in range(16):
                pixels = np.full((8, 8), n + 100 * (split == "test"), np.uint8)
                write(png(pixels), f"{split}/{'ab'[n % 2]}/{MARK}-{n}.png")
        elif kind in ("csv", "texts"):
            lines = [",".join(columns), *(",".join(map(str, row.values())) for row in rows)]
            write(lines, f"{split}.csv")
        else:
            write(columns if kind == "parquet" else rows_of(rows), f"{split}.{kind}")
    told = init()
    for command in (["data", "check", "st.yaml"], ["run", "st.yaml", "--dry-run"]):
        done = CliRunner().invoke(app, command)
        told += f"{done.output} {done.exception}"
    if kind in ("csv", "texts", "pictures"):
        raw = load_recipe(Path("st.yaml")).model_dump(mode="json")
        made, folder = make(Path("runs"), "st.yaml", data=raw["data"], model=raw["model"],
                            training__steps=1, training__batch_size=4)  # fmt: skip
        train(made, folder)
    outside = [
        path for path in Path().rglob("*")
        if path.is_file() and path.parts[0] != "st" and "private" not in path.parts
    ]  # fmt: skip
    written = "".join(path.read_bytes().decode(errors="replace") for path in outside)
    assert MARK not in told + written + "".join(capfd.readouterr()), told
