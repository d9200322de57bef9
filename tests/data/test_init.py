"""`dpdist init`: what can be found out is found out; the recipe is valid and says what it means."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.datasets import png
from support.parquet_footers import rewrite_row_count
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.data import discovery
from dpdist.data.discovery import inspect_folder
from dpdist.runs.recipe import load_recipe
from dpdist.training.records import data_source, load_test_records, records_with_canaries

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def picture(seed: int, shape=(10, 10)) -> bytes:
    return png(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def written(columns: dict[str, list], name: str = "mine", metadata=None, test="test") -> Path:
    """Train and test splits: the last two rows are for testing."""
    Path(name).mkdir()
    for split, rows in (("train", slice(0, -2)), (test, slice(-2, None))):
        table = pa.table({key: values[rows] for key, values in columns.items()})
        table = table.replace_schema_metadata(metadata)
        pq.write_table(table, Path(name, f"{split}.parquet"))
    return Path(name)


def started(folder: Path, *options: str):
    """The recipe that was written, and the records it reads: those of training and of testing."""
    done = CliRunner().invoke(app, ["init", str(folder), *options])
    assert done.exit_code == 0, done.exception
    recipe = load_recipe(Path(f"{folder.name}.yaml"))
    source = data_source(recipe)
    return recipe, records_with_canaries(recipe, source), load_test_records(recipe, source)


def test_pictures_in_a_column_with_labels_in_words():
    columns = {
        "scan": [{"bytes": picture(i), "path": None} for i in range(8)],
        "class": ["well", "ill"] * 4,
    }
    recipe, train, test = started(written(columns, test="validation"))
    assert recipe.data.names == ["ill", "well"] and recipe.data.classes == 2
    assert (recipe.data.columns.image, recipe.data.columns.label) == ("scan", "class")
    assert (recipe.data.test, recipe.model.name) == ("validation", "small-cnn")
    assert train.input_shape == (1, 10, 10) and train.labels.tolist() == [1, 0] * 3
    assert len(test) == 2


def test_names_that_the_file_s_metadata_say():
    names = {"info": {"features": {"label": {"names": ["a", "b", "c"]}}}}
    columns = {"image": [picture(i, (24, 24, 3)) for i in range(6)], "label": [0, 1, 0, 1, 0, 1]}
    recipe, train, _ = started(written(columns, metadata={"huggingface": json.dumps(names)}))
    assert recipe.data.names == ["a", "b", "c"] and train.classes == 3
    assert recipe.model.name == "tf-cnn" and train.input_shape == (3, 24, 24)
    assert recipe.data.columns.image == "image"


def test_numbers_in_columns():
    columns = {
        "age": [float(i) for i in range(40)], "weight": list(range(40)), "y": [0, 1, 2, 1] * 10
    }  # fmt: skip
    recipe, train, _ = started(written(columns))
    assert recipe.data.columns.features == ["age", "weight"] and recipe.model.name == "mlp"
    assert recipe.data.classes == 3 and train.input_shape == (2,)
    assert recipe.privacy.delta < 1 / 38 and recipe.training.batch_size == 4


def photographs(name: str, *splits: str, count: int = 3) -> Path:
    """A folder of pictures of cats and dogs."""
    for split in splits:
        for number, kind in enumerate(("cat", "dog")):
            folder = Path(name, split, kind)
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.png").write_bytes(picture(100 * number + i + 10 * len(split)))
    return Path(name)


def make_pets() -> None:
    photographs("pets", "train")
    photographs("pets", "test", count=1)


def test_folders_of_pictures_become_parquet():
    make_pets()
    Path("pets/train/dog/3.png").symlink_to("0.png")  # a link to a picture of the folder
    Path("link").symlink_to("pets")
    assert CliRunner().invoke(app, ["init", "link", "--output", "l.yaml"]).exit_code == 0
    Path("pets/train/dog/3.png").unlink()
    for path in Path("pets").glob("*.parquet"):
        path.unlink()
    recipe, train, _ = started(Path("pets"))
    assert recipe.data.names == ["cat", "dog"] and train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    again = inspect_folder(Path("pets"))  # from the Parquet files now
    assert again.class_names == ("cat", "dog") and again.train_records == 6


@pytest.mark.parametrize("fault", ["no test", "another class", "damaged", "name", "no room"])
def test_a_refusal_leaves_no_parquet_behind(fault, monkeypatch):
    """It would be taken for the data by the next attempt, whatever the pictures are then."""
    folder = photographs("pets", "train", *(["test"] if fault != "no test" else []))
    first, options = folder / "train" / "cat" / "0.png", []
    if fault == "another class":
        (folder / "test" / "dog").rename(folder / "test" / "cow")
    elif fault == "damaged":
        first.write_bytes(b"no picture")
    elif fault == "name":
        (folder := folder.rename("my pets"))
    elif fault == "no room":
        options = ["--output", "nowhere/x.yaml"]
        Path("nowhere").write_text("a file")
    before = sorted(folder.rglob("*"))
    done = CliRunner().invoke(app, ["init", str(folder), *options])
    assert done.exit_code != 0 and "wrote" not in done.output
    assert ".dpdist-init-" not in str(done.exception)
    assert sorted(folder.rglob("*")) == before and not list(Path().glob("*.yaml"))
    if fault == "another class":
        (folder / "test" / "cow").rename(folder / "test" / "dog")
    elif fault == "damaged":
        first.write_bytes(picture(5))
    elif fault == "no test":
        photographs("pets", "test")
    elif fault == "name":
        folder = folder.rename("pets")
    (folder / ".left").mkdir()  # by a process that was killed
    (folder / ".left" / "train.parquet").write_bytes(b"stale")
    recipe, train, test = started(folder)
    assert recipe.data.names == ["cat", "dog"] and (len(train), len(test)) == (6, 6)


@pytest.mark.parametrize("way", ["a file", "a class", "a pipe", "no room", "no test split"])
def test_pictures_from_outside_the_folder_are_not_copied(way, monkeypatch):
    """Nor anything that is no file; and what cannot be written whole is not written."""
    make_pets()
    Path("secret").mkdir()
    Path("secret/0.png").write_text("root:x:0:0")
    if way == "a file":
        Path("pets/test/dog/1.png").symlink_to(Path("secret/0.png").resolve())
        said = r"pets/test/dog/1.png: a link must not lead out of pets, .*secret/0.png"
    elif way == "a class":
        Path("pets/train/eel").symlink_to(Path("secret").resolve())
        said = r"pets/train/eel/0.png: a link must not lead out of pets"
    elif way == "a pipe":
        os.mkfifo("pets/test/dog/1.png")
        said = "is a pipe, must be a regular file"
    elif way == "no room":
        real = discovery._write_split

        def full(folder: Path, *rest) -> None:
            if folder.name == "test":
                raise UserError("no room")
            real(folder, *rest)

        monkeypatch.setattr(discovery, "_write_split", full)
        said = "no room"
    else:
        shutil.rmtree("pets/test")
        said = "no test split: put its pictures into test/CLASS/"
    done = CliRunner().invoke(app, ["init", "pets"])
    assert isinstance(done.exception, UserError) and re.search(said, str(done.exception))
    assert sorted(os.listdir()) == ["pets", "secret"]
    assert {path.name for path in Path("pets").iterdir()} <= {"train", "test"}


def test_what_cannot_be_found_out_is_said():
    def said(folder: str) -> str:
        done = CliRunner().invoke(app, ["init", folder])
        assert isinstance(done.exception, UserError), done.output
        return str(done.exception)

    assert "no such folder" in said("nowhere")
    Path("empty").mkdir()
    assert "no training split (looked for train.parquet" in said("empty")
    written({"a": [1.0] * 4, "b": [2.0] * 4}, "unlabelled")
    assert "no column label" in said("unlabelled")
    written({"image": [b"no picture"] * 4, "label": [0, 1, 0, 1]}, "damaged")
    assert "row 0: the image cannot be decoded" in said("damaged")
    written({"x": [1.0] * 4, "label": [0, 1, 0, 1]}, "fine")
    Path("fine.yaml").write_text("mine")
    assert "fine.yaml: exists already" in said("fine")
    assert Path("fine.yaml").read_text() == "mine"
    (Path("pictures") / "train" / "cat").mkdir(parents=True)
    (Path("pictures") / "train" / "cat" / "0.png").write_bytes(picture(7))
    Path("pictures.yaml").write_text("mine")
    assert "pictures.yaml: exists already" in said("pictures")
    assert not list(Path("pictures").glob("*.parquet"))  # nothing was written for nothing
    written({"x": [1.0] * 4, "label": [0, 1, 0, 1]}, "my data")
    assert "data.name: must be letters, digits" in said("my data")
    assert not Path("my data.yaml").exists()


def test_a_pattern_stands_for_the_columns_that_it_fits():
    columns = {
        "mean_a": [1.0, 2.0, 3.0, 4.0], "std_a": [0.0] * 4, "mean_b": [5.0, 6.0, 7.0, 8.0],
        "label": [0, 1, 0, 1],
    }  # fmt: skip
    folder = written(columns)
    started(folder)

    def read(features: str):
        recipe = Path("mine.yaml").read_text()
        raw = recipe.replace('features: ["mean_a", "std_a", "mean_b"]', f"features: {features}")
        Path("other.yaml").write_text(raw)
        recipe = load_recipe(Path("other.yaml"))
        return records_with_canaries(recipe, data_source(recipe))

    assert np.asarray(read("mean_*").inputs).tolist() == [[1.0, 5.0], [2.0, 6.0]]
    assert read("'*'").input_shape == (3,)
    with pytest.raises(UserError, match=r"no column fits 'max_\*'; it has mean_a, std_a"):
        read("max_*")


def test_a_folder_whose_name_yaml_would_read_as_a_number():
    recipe, *_ = started(written({"x": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 0, 1]}, "2024"))
    assert (recipe.name, recipe.data.name) == ("2024", "2024")


def refused(folder: Path | str) -> str:
    """The one line about a folder that `dpdist init` leaves as it is."""
    before = sorted(Path().rglob("*"))
    done = CliRunner().invoke(app, ["init", str(folder)])
    assert isinstance(done.exception, UserError), done.exception
    assert sorted(Path().rglob("*")) == before
    assert "\n" not in str(done.exception) and "wrote" not in done.output
    return str(done.exception)


@pytest.mark.parametrize("kind", ["not Parquet", "pipe", "device", "other label", "other rows"])
@pytest.mark.parametrize("place", ["train-1.parquet", "test.parquet"])
def test_each_file_is_looked_at(place, kind):
    folder = written({"x": [1.0] * 6, "label": [0, 1] * 3})
    (folder / "train.parquet").rename(folder / "train-0.parquet")
    path = folder / place
    path.unlink(missing_ok=True)
    if kind == "not Parquet":
        path.write_bytes(b"PAR1xx")
        right = "not a readable Parquet file"
    elif kind == "other label" and place.startswith("train"):
        pq.write_table(pa.table({"x": [1.0], "label": ["a"]}), path)
        right = "label column 'label' is string"
    elif kind in ("other label", "other rows"):
        pq.write_table(pa.table({"x": [1.0] * 100, "label": [0, 1] * 50}), path)
        rewrite_row_count(path, 100, 5, only_in_all=True)
        right = "its footer counts 5 rows, its row groups 100"
    else:
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
        right = f"is a {kind}, must be a regular file"
    said = refused(folder)
    assert place in said and right in said


@pytest.mark.parametrize(
    "names", [b"\xff{", b"[" * 100_000, b"9" * 6000, ["a", "\ud800"], ["a", None], ["a", {}], "ab"]
)
def test_names_of_classes_that_nobody_can_read_are_counted_instead(names):
    if not isinstance(names, bytes):
        names = json.dumps({"info": {"features": {"label": {"names": names}}}}).encode()
    columns = {"x": [float(i) for i in range(6)], "label": [0, 1, 2] * 2}
    recipe, *_ = started(written(columns, metadata={"huggingface": names}))
    assert recipe.data.classes == 3 and recipe.data.class_names == ["0", "1", "2"]


def test_names_of_files_that_are_no_text():
    folder = os.fsencode(written({"x": [1.0] * 6, "label": [0, 1] * 3}))
    os.rename(folder, b"n\xff")
    assert "the name must be UTF-8 text" in refused(os.fsdecode(b"n\xff"))
    os.rename(b"n\xff/train.parquet", b"n\xff/train-\xff.parquet")
    os.rename(b"n\xff", b"n")
    assert "the name must be UTF-8 text" in refused("n")


def huge(width: int, height: int) -> bytes:
    """A PNG of so many pixels, of which few are there."""
    raw = bytearray(picture(0))
    raw[16:24] = struct.pack(">II", width, height)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


@pytest.mark.parametrize(
    "kind", ["pipe", "device", "3 GB", "900 megapixels", "name", "class", "no picture"]
)
def test_pictures_that_cannot_be_taken_leave_nothing_behind(kind):
    for split in ("train", "test"):
        for name in "ab":
            (Path("pets") / split / name).mkdir(parents=True)
            (Path("pets") / split / name / "0.png").write_bytes(picture(0))
    path = Path("pets/test/b/1.png")  # met after train.parquet is whole
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "3 GB":
        path.touch()
        os.truncate(path, 3 << 30)
    elif kind == "name":
        Path(os.fsdecode(b"pets/test/b/\xff.png")).write_bytes(picture(0))
    elif kind == "class":
        Path(os.fsdecode(b"pets/test/\xff")).mkdir()
        Path(os.fsdecode(b"pets/test/\xff/1.png")).write_bytes(picture(0))
    else:
        (path.parent / "0.png").write_bytes(
            huge(30_000, 30_000) if kind == "900 megapixels" else b"x"
        )
    right = {"pipe": "is a pipe", "device": "is a device", "3 GB": "at most 268,435,456 are read",
             "900 megapixels": "900000000 pixels", "no picture": "decoded: no picture"}  # fmt: skip
    assert right.get(kind, "the name must be UTF-8 text") in refused("pets")


def test_the_comment_on_workers_names_the_key_that_lets_them_change():
    started(written({"a": [0.1 * i for i in range(8)], "label": [0, 1] * 4}))
    (line,) = (each for each in Path("mine.yaml").read_text().splitlines() if "workers:" in each)
    assert line.endswith("# keep it during a run, or set training.reproducible: true")


def test_pictures_that_changed_are_refused_and_others_are_told():
    make_pets()
    for name in ("a.dcm", "b.DCM", "notes.txt", ".DS_Store"):
        Path("pets/train/dog", name).write_bytes(b"x")
    done = CliRunner().invoke(app, ["init", "pets"])
    assert "left out: 1 x file .dcm: no picture in PNG, " in done.output, done.exception
    assert "1 x file .txt" in done.output and "DS_Store" not in done.output
    Path("pets/train/dog/2.png").write_bytes(b"no picture")  # in place of a record
    stale = "train.parquet must be as train is, which changed since"
    done = CliRunner().invoke(app, ["data", "check", "pets.yaml"])
    assert isinstance(done.exception, UserError) and stale in str(done.exception)
    done = CliRunner().invoke(app, ["init", "pets", "--output", "2.yaml"])
    assert isinstance(done.exception, UserError) and stale in str(done.exception)
    assert not Path("2.yaml").exists()
    for path in Path("pets").glob("*.parquet"):
        path.unlink()
    done = CliRunner().invoke(app, ["init", "pets", "--output", "2.yaml"])
    done = CliRunner().invoke(app, ["data", "check", "2.yaml"])
    assert "train.parquet row 5 ('dog/2.png'): the image cannot be decoded" in str(done.exception)
