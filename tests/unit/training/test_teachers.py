"""Teachers on disjoint shards: one record is one teacher's, and nobody else's in any way."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from support.datasets import write_split
from support.local_execution import run_without_ray
from support.training import KEY

from dpdist.cluster import job_folder
from dpdist.core.errors import UserError
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe, without_privacy
from dpdist.training import ensembles
from dpdist.training.ensembles import (
    TeacherEnsemble,
    TeacherSetup,
    TeacherTrainer,
    plan_of_shard,
    shards_by_hash,
    train_teachers,
)
from dpdist.training.job import TrainJob, prepare
from dpdist.training.loop import TrainingDiverged
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.worker import RecipeLearner

COUNT, RECORDS = 3, 40


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_num_threads()
    run_without_ray(monkeypatch)
    yield
    torch.set_num_threads(before)


def write(root: Path, keep: np.ndarray | slice) -> None:
    """A data set of made-up features, with two equal inputs under two labels; of its training
    records those in `keep`."""
    rng = np.random.default_rng(3)
    inputs = rng.random((RECORDS + 8, 6), dtype=np.float32)
    inputs[7] = inputs[30]
    labels = rng.integers(0, 3, len(inputs))
    train, test = np.arange(RECORDS)[keep], np.arange(RECORDS, len(inputs))
    for split, rows in (("train", train), ("test", test)):
        write_split(root / "made", split, x=inputs[rows], label=labels[rows])


def job_of(home: Path, keep: np.ndarray | slice = slice(None), **training: Any) -> TrainJob:
    """Epochs, momentum and a batch that no shard is a multiple of: whatever could follow N."""
    write(home / "data", keep)
    raw = {
        "name": "x",
        "data": {
            "name": "made", "root": str(home / "data"), "classes": 3,
            "columns": {"features": ["x"]},
        },
        "model": "linear",
        "method": {
            "name": "private-prediction", "teachers": COUNT, "logit_bound": 1, "queries": 2
        },
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "run_key": KEY},
        "training": {
            "batch_size": 6, "epochs": 2, "learning_rate": 0.5, "momentum": 0.5, **training
        },
    }  # fmt: skip
    return prepare(parse_recipe(raw, "test"), RunFolder(home / "run"), "test")


def models_of(job: TrainJob) -> list[bytes]:
    train_teachers(job, COUNT)
    home = job.folder.private / "teachers" / "models"
    return [(home / f"{n:04d}" / "model.safetensors").read_bytes() for n in range(COUNT)]


def changed(first: list[bytes], second: list[bytes]) -> list[int]:
    return [n for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainJob, list[bytes], np.ndarray]:
    """All teachers of all records, and in whose shard each record is."""
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        job = job_of(tmp_path_factory.mktemp("whole"))
        found = models_of(job)
        about = job_folder.read_job_record(
            job_folder.read_table(
                job.folder.private / "teachers/teachers.parquet", ensembles.COLUMNS, ensembles.KEY
            ),
            ensembles.KEY,
        )
        shared = TeacherSetup(job.recipe, COUNT, bytes.fromhex(about["seed"]))
        return job, found, TeacherTrainer(shared)._shards


@pytest.mark.parametrize("gone", [0, 7])
def test_one_record_is_one_teachers(gone, whole, tmp_path):
    """The first one, whose leaving moves every other; one of two equal ones."""
    _, before, shards = whole
    keep = np.arange(RECORDS) != gone
    assert changed(before, models_of(job_of(tmp_path, keep))) == [shards[gone]]


def test_a_records_shard_follows_from_key_and_input_alone(whole):
    _, _, shards = whole
    assert shards[7] == shards[30]  # equal inputs
    many = np.frombuffer(np.random.default_rng(0).bytes(16 * 3000), "V16")
    first, second = (shards_by_hash(many, key * 32, 10) for key in (b"a", b"b"))
    # Without the key nobody knows them: two keys agree by chance, on 300 +- 16.4 records.
    assert abs((first == second).sum() - 300) < 100
    order = np.random.default_rng(1).permutation(3000)
    assert np.array_equal(shards_by_hash(many[order], b"a" * 32, 10), first[order])
    assert np.array_equal(shards_by_hash(many[1:], b"a" * 32, 10), first[1:])


def test_an_empty_shard_and_one_that_diverges_stop_nothing(whole, monkeypatch):
    """Whether they do is a secret of the records."""
    job = whole[0]
    began = initial_model(
        job.recipe, model_spec(job.recipe, job.records_without_canaries())
    ).state_dict()
    trainer = TeacherTrainer(TeacherSetup(without_privacy(job.recipe), COUNT, b"k" * 32))
    trainer._shards[:] = 0

    def untrained(number: int) -> bool:
        found = load(trainer(number)["model.safetensors"])
        return all(torch.equal(found[name], value) for name, value in began.items())

    assert untrained(1) and not untrained(0)

    def diverged(*_: Any) -> None:
        raise TrainingDiverged

    monkeypatch.setattr(RecipeLearner, "not_finite", diverged)
    assert untrained(0)


def test_a_shard_smaller_than_a_batch_is_its_batch(whole):
    recipe = without_privacy(whole[0].recipe)
    for records, batch, steps in ((3, 3, 2), (6, 6, 2), (20, 6, 6)):
        own, plan = plan_of_shard(recipe, records)
        assert (own.training.batch_size, plan.steps, plan.records) == (batch, steps, records)
        assert plan.step(0).expected_batch == batch and plan.step(0).noise_std == 0
    assert math.isinf(plan.clip_norm)


def test_interrupted_it_continues_to_the_same_bytes(whole, tmp_path, monkeypatch):
    _, expected, _ = whole
    job = job_of(tmp_path)
    real, calls = TeacherTrainer.__call__, []

    def dies(self: TeacherTrainer, number: int) -> Any:
        calls.append(number)
        if calls == [0, 1]:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(TeacherTrainer, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        train_teachers(job, COUNT)
    assert models_of(job) == expected
    assert sorted(calls) == [0, 1, 1, 2]  # what was done is not done again
    assert (job.folder.private / "teachers").stat().st_mode & 0o077 == 0


def test_another_teacher_than_the_trained_one_is_refused(whole, tmp_path):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(whole[0].folder.path, folder.path)
    models = folder.private / "teachers" / "models"
    shutil.copy(models / "0000/model.safetensors", models / "0001/model.safetensors")
    with pytest.raises(UserError, match="0001"):
        TeacherEnsemble(folder)
