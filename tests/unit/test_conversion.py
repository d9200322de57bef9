"""Data sets of other forms: features of a network that saw no private record, and patients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support import foreign
from support.benchmarks import load as load_benchmark
from support.training import train

import dpdist
from dpdist import data, models
from dpdist.config.data import DataRecipe
from dpdist.core.errors import UserError
from dpdist.importing import ForeignModel
from dpdist.methods.base import PublicRecords
from dpdist.models import ModelSpec
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training import provenance
from dpdist.training.job import prepare
from dpdist.training.provenance import write_provenance
from dpdist.training.records import (
    data_source,
    external_public_records,
    method_public_records,
)

FEATURES = load_benchmark("papers/dplis/features")
make_features = FEATURES.make_features
FACTORY = "support.foreign:net"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "net.pt"
    torch.save(foreign.trained().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def made(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = ForeignModel(FACTORY, weights, mean=(0.3,), std=(0.4,))
    target = tmp_path_factory.mktemp("made") / "digit-features"
    return make_features("digits", network, target, pretraining_data="letters")


def rows(folder: Path, split: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pq.read_table(folder / f"{split}.parquet").to_pydict()
    return found


# --- features ---------------------------------------------------------------------------------


def test_features_are_what_the_network_gives_each_record_alone(made: Path) -> None:
    network = foreign.trained()
    for split in ("train", "test"):
        records, found = data.load(data.DataSource("digits", 10), split), rows(made, split)
        assert found["label"] == list(map(int, records.labels))
        for place in (0, 1, 255, 256, len(records) - 1):
            with torch.inference_mode():
                x = records.batch(slice(place, place + 1))
                own = network.features((x - 0.3) / 0.4)[0]
            assert torch.allclose(torch.tensor(found["features"][place]), own, atol=1e-5)


def recipe_on(made: Path, **more: dict[str, Any]) -> Any:
    raw: dict[str, Any] = {
        "name": "x", "data": {"name": made.name, "root": str(made.parent),
                              "columns": {"features": ["features"]}},
        "model": {"name": "linear"}, "method": {"name": "dp-sgd"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "clip_norm": 1.0},
        "training": {"batch_size": 32, "steps": 2, "learning_rate": 0.1},
    }  # fmt: skip
    for section, values in more.items():
        raw[section] |= values
    return parse_recipe(raw, "x")


def test_what_the_network_saw_reaches_the_run(made: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    train(recipe_on(made), folder)
    facts = load_results(folder)
    said = {"features by a network trained on": "letters (declared, not checked)"}
    assert facts.training_data_by_part == said
    assert any("letters: declared only" in line for line in facts.assumptions)
    record = json.loads(folder.pretraining_record.read_text())
    assert record["part"] == "features" and not record["checked"]
    written = json.loads((made / "features.json").read_text())
    assert written["features"] == 64 and written["data"] == "digits/train"
    assert list(written["weights"]) == ["net.pt"]
    others = data.load(data_source(recipe_on(made)), "test")  # features of the same shape
    assert not provenance.was_compared(folder.model_folder, others, "x")  # not by content


def test_features_say_so_themselves_without_the_file_beside_them(
    made: Path, tmp_path: Path
) -> None:
    """Without it they would train as any table, and what their network saw would be lost."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for split in ("train", "test"):
        shutil.copy(made / f"{split}.parquet", copy)
    assert data.holds_features(tmp_path, "copy")
    with pytest.raises(UserError, match=r"features\.json"):
        prepare(recipe_on(copy), RunFolder(tmp_path / "x"), "test")
    records = dpdist.as_records(made / "train.parquet", inputs=["features"], target="label")
    assert any("letters: declared only" in each for each in records.assumed)
    classes = int(records.targets(list(range(len(records)))).max()) + 1
    head = torch.nn.Linear(records.batch([0]).shape[1], classes)
    with pytest.raises(UserError, match=r"privacy\.budget:"):
        dpdist.PrivateTraining(
            head, torch.optim.SGD(head.parameters(), lr=0.1), records, loss="cross-entropy",
            privacy={"noise_multiplier": 1.0, "delta": 1e-3, "budget": str(tmp_path / "budgets")},
            batch_size=2, steps=1, folder=tmp_path / "own",
        )  # fmt: skip


def saved(folder: Path, seen: data.Dataset | None) -> Path:
    spec = ModelSpec("mlp", (1, 8, 8), 10, {"hidden": [6]})
    models.save(models.initialize(spec, 0), spec, folder)
    if seen is not None:
        write_provenance(folder, seen, {"made_by": {}})
    return folder


def test_a_folder_s_network_that_saw_private_records_is_refused(tmp_path: Path) -> None:
    own, other = (data.load(data.DataSource("digits", 10), split) for split in ("train", "test"))
    target = tmp_path / "made"
    with pytest.raises(UserError, match="digits/train"):
        make_features("digits", saved(tmp_path / "own", own), target)
    with pytest.raises(UserError, match="silent"):
        make_features("digits", saved(tmp_path / "silent", None), target)
    with pytest.raises(UserError, match="--pretraining-data:"):
        make_features("digits", saved(tmp_path / "said", other), target, pretraining_data="letters")
    assert not target.exists()
    make_features("digits", tmp_path / "said", target)
    about = json.loads((target / "features.json").read_text())
    assert about["checked"] and about["assumed"] is None
    assert "compared by content" in about["pretraining_data"]


# --- patients ---------------------------------------------------------------------------------


def test_features_take_no_other_part_and_no_budget_that_could_know_the_records(
    made: Path, tmp_path: Path
) -> None:
    """By content, features of two networks are two sets: one could pay for the other's records."""
    with pytest.raises(UserError, match=r"model\.initial:"):
        begun = recipe_on(made, model={"initial": {"folder": str(tmp_path)}})
        prepare(begun, RunFolder(tmp_path / "x"), "test")
    with pytest.raises(UserError, match=r"privacy\.budget:"):
        charged = recipe_on(made, privacy={"budget": str(tmp_path / "b")})
        prepare(charged, RunFolder(tmp_path / "y"), "test")


def test_features_are_no_public_records(made: Path) -> None:
    with pytest.raises(UserError, match=r"public\.data:"):
        external_public_records(DataRecipe(name=made.name, root=made.parent), None)
    named = PublicRecords("method.public", made.name, 10, made.parent)
    reads = SimpleNamespace(method=SimpleNamespace(public_records=named), data=recipe_on(made).data)
    with pytest.raises(UserError, match=r"method\.public:"):
        method_public_records(reads)  # type: ignore[arg-type]
