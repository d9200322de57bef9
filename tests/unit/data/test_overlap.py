"""Records are compared one by one, by their inputs, wherever public ones must not be private."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.datasets import write_images

from dpdist import pipeline
from dpdist.core.errors import UserError
from dpdist.data import Dataset, DataSource, load, refuse_common_records
from dpdist.data.protocol import count_common
from dpdist.data.record_hashes import hash_inputs
from dpdist.publishing import write_release
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.pretraining import pretrain
from dpdist.training.records import data_source, private_records, records_with_canaries
from dpdist.tuning.search import prepare_search


def pixels(seed: int, count: int, side: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side), dtype=np.uint8)


def recipe(root: Path, **sections: Any) -> Recipe:
    own = sections.pop("data", {})
    raw = {
        "name": "run",
        "data": {"name": "mine", "root": str(root), "classes": 3, **own},
        "model": {"name": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "training": {"batch_size": 5, "steps": 2, "learning_rate": 0.1},
        **sections,
    }
    return parse_recipe(raw, "test")


@pytest.fixture
def root(tmp_path) -> Path:
    write_images(tmp_path / "mine", "train", pixels(0, 80))
    write_images(tmp_path / "mine", "test", pixels(1, 20))
    return tmp_path


def whole(root: Path, name: str) -> Dataset:
    return load(DataSource(name, 3, root), "train")


def test_neither_order_nor_label_nor_encoding_hides_a_record(root):
    records = whole(root, "mine")
    write_images(root / "shuffled", "train", pixels(0, 80)[::-1], np.full(80, 2))
    assert count_common(records, whole(root, "shuffled")) == 80
    write_images(root / "some", "train", np.concatenate([pixels(7, 30), pixels(0, 80)[40:45]]))
    assert count_common(records, whole(root, "some")) == 5
    assert count_common(whole(root, "some"), records) == 5
    deeper = pixels(0, 80).astype(np.uint16) * 257  # the same gray values in 16 bits
    write_images(root / "deeper", "train", deeper)
    assert count_common(records, whole(root, "deeper")) == 80
    one = pixels(0, 80)
    one[:, 0, 0] ^= 1
    write_images(root / "changed", "train", one)
    assert count_common(records, whole(root, "changed")) == 0


def test_the_fingerprint_of_the_first_records_is_of_no_other(root):
    write_images(root / "longer", "train", np.concatenate([pixels(0, 80)[:10], pixels(9, 70)]))
    first, same = (whole(root, name).first(10) for name in ("mine", "longer"))
    assert first.fingerprint == same.fingerprint
    assert first.fingerprint != whole(root, "mine").first(11).fingerprint


def test_inputs_of_another_shape_are_not_said_to_differ(root):
    write_images(root / "larger", "train", pixels(0, 80, side=5))
    larger = whole(root, "larger")
    assert not refuse_common_records(whole(root, "mine"), larger, "test", "are the same")


@pytest.mark.parametrize("part", [{}, {"private_eval_fraction": 0.5}, {"max_train": 20}])
def test_a_test_split_with_private_records_is_refused(root, part):
    """One of them, or all of them, in another order and under other labels."""
    for images in (np.concatenate([pixels(1, 20), pixels(0, 80)[3:4]]), pixels(0, 80)[::-1]):
        write_images(root / "mine", "test", images, np.zeros(len(images), int))
        with pytest.raises(UserError, match=r"data\.test"):
            prepare(recipe(root, data=part), RunFolder(root / "run"), "test")
        assert not (root / "run").exists()


def test_a_test_split_that_is_replaced_after_training_is_not_scored(root):
    described, folder = recipe(root), RunFolder(root / "run")
    worker.run_training(prepare(described, folder, "test"), Reducer(0, 1, torch.device("cpu")))
    write_images(root / "mine", "test", pixels(0, 80)[:10])
    with pytest.raises(UserError, match="10 of the 80"):
        pipeline.evaluate_stage(described, folder)
    assert not folder.evaluation.exists()
    (root / "mine" / "train.parquet").unlink()  # scored where no training records lie
    write_images(root / "mine", "test", pixels(1, 20))
    pipeline.evaluate_stage(described, folder)


def test_records_of_the_test_split_can_be_left_out_of_training(root):
    write_images(root / "mine", "test", np.concatenate([pixels(1, 20), pixels(0, 80)[3:6]]))
    described = recipe(root, data={"drop_test_records": True})
    job = prepare(described, RunFolder(root / "run"), "test")
    records = records_with_canaries(described, job.source)
    assert len(records) == job.plan.records == 77
    kept = np.delete(np.arange(80), [3, 4, 5])
    assert np.array_equal(records.inputs[:, 0], pixels(0, 80)[kept])
    assert np.array_equal(records.labels, (np.arange(80) % 3)[kept])
    worker.run_training(job, Reducer(0, 1, torch.device("cpu")))


def test_records_of_a_redistribution_must_not_be_private(root):
    write_images(root / "other", "train", pixels(0, 80)[10:30][::-1], np.ones(20, int))
    section = {"source": "public", "data": "other", "root": str(root), "classes": 3}
    described = recipe(
        root,
        model={"name": "small-cnn", "options": {"width": 4}},
        method={"name": "secure-sgd", "redistribution": section},
    )
    with pytest.raises(UserError, match=r"redistribution\.data: 20 "):
        prepare(described, RunFolder(root / "run"), "test")


def pretraining(root: Path, **data: Any) -> Recipe:
    public = {"training": {"batch_size": 5, "steps": 2, "learning_rate": 0.1}}
    if data:
        public["data"] = {"root": str(root), "classes": 3, **data}
    model = {"name": "linear", "initial": str(root / "weights")}
    return recipe(root, model=model, public=public, data={} if data else {"public": 0.5})


def test_records_of_a_pretraining_must_not_be_private(root):
    write_images(root / "other", "train", np.concatenate([pixels(9, 10), pixels(0, 80)[:4][::-1]]))
    with pytest.raises(UserError, match=r"public\.data: 4 "):
        pretrain(pretraining(root, name="other"), "test")
    write_images(root / "other", "train", np.concatenate([pixels(9, 10), pixels(1, 20)[:3]]))
    with pytest.raises(UserError, match="3 of the 13 "):
        pretrain(pretraining(root, name="other"), "test")


def trained(described: Recipe, path: Path):
    folder = RunFolder(path)
    worker.run_training(prepare(described, folder, "test"), Reducer(0, 1, torch.device("cpu")))
    return load_results(folder)


def beginning_with(folder: Path, root: Path, **data: Any) -> Recipe:
    return recipe(root, model={"name": "linear", "initial": {"folder": str(folder)}}, data=data)


def search_recipe(root: Path, **tune: Any) -> Recipe:
    space = {"training.learning_rate": {"choice": [0.1, 1.0]}}
    num_trials = {"name": "geometric", "mean": 2}
    return recipe(root, tune={"space": space, "num_trials": num_trials, **tune})


def test_records_that_a_search_is_scored_on_must_not_be_private(root):
    write_images(root / "other", "test", np.concatenate([pixels(9, 10), pixels(0, 80)[:4][::-1]]))
    asked = search_recipe(root, score={"public": {"name": "other"}})
    with pytest.raises(UserError, match=r"tune\.score\.public: 4 "):
        prepare_search(asked, RunFolder(root / "run"), "test")
    write_images(root / "mine", "test", pixels(0, 80)[::-1])
    with pytest.raises(UserError, match=r"data\.test: 80 "):
        prepare_search(search_recipe(root), RunFolder(root / "run"), "test")
    assert not (root / "run").exists()


@pytest.mark.slow
def test_a_model_of_a_run_on_these_records_is_refused_under_any_name(root):
    first = RunFolder(root / "first")
    trained(recipe(root), first.path)
    write_release(first)
    write_images(root / "renamed", "train", np.concatenate([pixels(8, 30), pixels(0, 80)[:1]]))
    write_images(root / "renamed", "test", pixels(2, 10))
    for place in ("release", "private/model"):
        with pytest.raises(UserError, match=r"1 of the 31 "):
            described = beginning_with(first.path / place, root, name="renamed")
            prepare(described, RunFolder(root / "run"), "test")
    # One that saw others may be used, even when both sets have one name, and nothing is assumed.
    write_images(root / "elsewhere" / "mine", "train", pixels(8, 30))
    write_images(root / "elsewhere" / "mine", "test", pixels(2, 10))
    described = beginning_with(first.release_folder, root / "elsewhere")
    card = trained(described, root / "run").privacy_card()
    assert "compared by content" in card["extra"]["initial weights trained on"]
    assert not any("no private record is among" in line for line in card["assumptions"])


@pytest.mark.slow
def test_a_model_alone_is_told_by_name_and_the_card_says_so(root):
    first = RunFolder(root / "first")
    trained(recipe(root), first.path)
    write_release(first)
    alone = root / "copied" / "release"
    shutil.copytree(first.release_folder, alone)
    with pytest.raises(UserError, match="mine"):
        prepare(beginning_with(alone, root), RunFolder(root / "run"), "test")
    write_images(root / "renamed", "train", pixels(8, 30))
    write_images(root / "renamed", "test", pixels(2, 10))
    card = trained(beginning_with(alone, root, name="renamed"), root / "run").privacy_card()
    told = "told apart by name only, not checked by record"
    assert card["assumptions"][-1] == f"no private record is among those of mine: {told}"


def test_max_train_chooses_by_hash_and_a_record_less_moves_no_other(root):
    """Every record keeps its side whatever one is removed, in every part of the split."""
    data = {"max_train": 30, "public": 0.2, "private_eval_fraction": 0.3}
    described = recipe(root, data=data)
    records, source = whole(root, "mine"), data_source(described)

    def parts() -> tuple[set[bytes], ...]:
        return tuple(
            {row.tobytes() for row in part.inputs}
            for part in (
                records_with_canaries(described, source),
                private_records(described, source),
            )
        )

    used, private = parts()
    assert used < private and 0.5 * 30 * 0.8 * 0.7 < len(used) < 2 * 30 * 0.8 * 0.7
    assert used != {row.tobytes() for row in records.inputs[:30]}
    for gone in range(0, 80, 9):
        less = np.delete(np.arange(80), gone)
        write_images(root / "mine", "train", pixels(0, 80)[less], (np.arange(80) % 3)[less])
        lost = {pixels(0, 80)[gone].tobytes()}
        assert parts() == (used - lost, private - lost)


def test_a_record_is_the_same_with_minus_zero():
    rows = np.array([[[0.0, 0.5]], [[-0.0, 0.5]], [[0.5, 0.0]]], dtype=np.float32)
    first, same, other = hash_inputs(rows)
    assert first == same != other
