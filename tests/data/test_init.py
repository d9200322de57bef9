"""`dpdist init`: what can be found out is found out; the recipe is valid and says what it means."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.datasets import png
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.runs.recipe import load_recipe
from dpdist.training.records import data_source, load_test_records, records_with_canaries


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
    assert recipe.data.columns.features == ["age", "weight"] and recipe.model.name == "linear"
    assert recipe.data.classes == 3 and train.input_shape == (2,)
    assert recipe.privacy.delta < 1 / 38 and recipe.training.batch_size == 4


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
    with pytest.raises(UserError, match=r"max_\*"):
        read("max_*")
