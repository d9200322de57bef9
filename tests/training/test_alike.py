"""What must not differ (releases, checkpoints, block sizes) and what must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import make

from dpdist.methods.base import MethodState
from dpdist.randomness.keys import derive_key
from dpdist.training import ensembles
from dpdist.training.collectives import (
    Reducer,
    release_id,
)
from dpdist.training.ensembles import TeacherSetup, TeacherTrainer
from dpdist.training.job import prepare
from dpdist.training.loop import TrainingDiverged
from dpdist.training.model_setup import model_spec
from dpdist.training.private_step import build_shards
from dpdist.training.worker import (
    ensure_method_state,
    method_state_digest,
    read_method_state,
)

# --- releases


def test_a_release_is_named_by_every_number_of_its_sum():
    """And by whose it is."""
    total = np.arange(18.0)
    names = {release_id("a", total), release_id("b", total)}
    for place in (0, 7, 8, 17):
        other = total.copy()
        other[place] = np.nextafter(other[place], 1e9)
        names.add(release_id("a", other))
    assert len(names) == 6


# --- blocks


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("planned", [50, 1000])
def test_block_sizes_follow_the_declared_number_of_records_alone(planned, reproducible):
    reducer = Reducer(0, 1, torch.device("cpu"))
    found = {
        build_shards(records, planned, reducer, reproducible, nominal=True).largest_shard
        for records in (planned - 30, planned - 1, planned, planned + 1, planned + 500)
    }
    assert len(found) == 1
    count = build_shards(planned, planned, reducer, reproducible, nominal=True).num_rows
    assert found == {-(-planned // count)}


# --- what is fixed before the first step

NET = {"name": "hgm-cnn", "options": {"filters": [3], "kernels": [3], "strides": [2], "dense": 6}}
PAID = {
    "name": "secure-sgd",
    "sigma": 0.5,
    "redistribution": {"source": "paid", "noise_multiplier": 5, "sample_rate": 0.1},
}


def fixed_in(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    recipe, run = make(folder, data={"name": "digits", "max_train": 60}, model=NET, method=PAID,
                       training={"batch_size": 6, "steps": 2, "learning_rate": 0.1},
                       **{"privacy__delta": 1e-3, **changes})  # fmt: skip
    job = prepare(recipe, run, "test")
    assert ensure_method_state(job, model_spec(recipe, job.records()))
    return read_method_state(run)


@pytest.mark.slow
def test_what_is_fixed_is_repeatable_under_a_fixed_key_and_never_else(tmp_path):
    one, again = fixed_in(tmp_path / "one"), fixed_in(tmp_path / "again")
    assert one and one.keys() == again.keys()
    assert all(torch.equal(one[name], again[name]) for name in one)
    fresh = [fixed_in(tmp_path / name, privacy__run_key=None) for name in ("fresh", "other")]
    assert any(not torch.equal(fresh[0][name], fresh[1][name]) for name in one)


def test_the_digest_of_what_is_fixed_covers_every_tensor():
    tensors = {each: torch.arange(3.0) for each in "abc"}
    changed = [tensors | {name: torch.tensor([0.0, 1.0, 2.0001])} for name in "abc"]
    states = [MethodState(torch.nn.Identity(), each, bytes(32)) for each in (tensors, *changed)]
    assert len(set(map(method_state_digest, states))) == 4


# --- keys


def test_every_teacher_has_a_key_of_its_own(monkeypatch, tmp_path):
    seen = []

    def noted(recipe, plan, records, members, key, *_):
        seen.append(key)
        raise TrainingDiverged("noted")

    recipe, _ = make(tmp_path, data={"name": "digits", "fraction": 0.1}, model="linear",
                     method={"name": "private-prediction", "teachers": 4, "queries": 2,
                             "logit_bound": 1},
                     training={"batch_size": 6, "steps": 2, "learning_rate": 0.1})  # fmt: skip
    monkeypatch.setattr(ensembles, "train_in_process", noted)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    shared = bytes(range(32))
    trainer = TeacherTrainer(TeacherSetup(ensembles.without_privacy(recipe), 4, shared))
    for number in (0, 1, 2, 3, 1):
        trainer(number)
    assert len(set(seen)) == 4 and seen[4] == seen[1]
    assert not {shared, derive_key(shared, "shards")} & set(seen)
