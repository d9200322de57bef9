"""Checkpoints: whole or not there, the newest is taken, everything a step changes is in them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from support.training import execute, make

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.models import ModelSpec
from dpdist.privacy.ledger import Anchor
from dpdist.randomness.keys import KEY_BYTES
from dpdist.runs.folder import RunFolder
from dpdist.training import checkpoint, provenance
from dpdist.training.checkpoint import TrainState
from dpdist.training.collectives import MissingRank
from dpdist.training.job import prepare

ANCHOR = Anchor(2, "ab" * 16)


def state(step: int) -> TrainState:
    flat = torch.arange(5.0) + step
    return TrainState(step, flat, {"momentum": -flat, "ema": flat / 3})


def test_the_newest_whole_one_comes_back_as_it_was(tmp_path):
    tmp_path = tmp_path / "checkpoints"  # which it makes, for its owner alone
    for step in (1, 9, 10, 100):
        checkpoint.save(tmp_path, state(step), ANCHOR)
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and found.step == 100
    assert torch.equal(found.parameters, state(100).parameters)
    for name, slot in state(100).slots.items():
        assert torch.equal(slot, found.slots[name])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_half_written_one_is_not_taken(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, state(3), ANCHOR)
    real = checkpoint.write_atomic

    def crash_at_the_end(path, content):
        if path.name == "done.json":
            raise KeyboardInterrupt
        real(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "write_atomic", crash_at_the_end)
        checkpoint.save(tmp_path, state(4), ANCHOR)
    assert (tmp_path / "step-00000004" / "state.safetensors").exists()
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and found.step == 3
    checkpoint.save(tmp_path, state(5), ANCHOR)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000003", "step-00000005"}


def test_the_digest_sees_every_bit_and_every_place():
    flat = torch.linspace(-1, 1, 7)
    reference = checkpoint.tensors_digest({"flat": flat})
    assert checkpoint.tensors_digest({"flat": flat.clone()}) == reference
    flat[6] = torch.nextafter(flat[6], torch.tensor(2.0))
    assert checkpoint.tensors_digest({"flat": flat}) != reference
    assert checkpoint.tensors_digest({"flat": flat.flip(0)}) != reference


def test_workers_that_start_from_different_checkpoints_stop(tmp_path, monkeypatch):
    """Two workers, one of which sees an older folder: nothing is released."""
    recipe, folder = make(tmp_path, training__steps=3)
    job = prepare(recipe, folder, "test")
    execute(job, 2, until=2)
    real, calls = checkpoint.load_latest, []

    def stale(*where):
        found = real(*where)
        calls.append(1)
        if len(calls) == 2:
            found.parameters[0] += 1
        return found

    monkeypatch.setattr(checkpoint, "load_latest", stale)
    with pytest.raises(MissingRank):
        execute(job, 2)


def test_the_run_key_is_secret_and_fresh(tmp_path):
    keys = set()
    for name in "ab":
        recipe, folder = make(tmp_path, name, privacy__run_key=None)
        prepare(recipe, folder, "test")
        keys.add(folder.read_run_key())
        assert folder.run_key.stat().st_mode & 0o777 == 0o600
    assert len(keys) == 2 and all(len(key) == KEY_BYTES for key in keys)
    fixed, marked = make(tmp_path, "d")
    prepare(fixed, marked, "test")
    assert marked.fixed_key_marker.exists() and marked.read_run_key().hex() == "5a" * 32


def test_records_of_a_pretrained_part_are_not_unpickled(tmp_path):
    """A pickle in records.npy is refused, and what it would have executed is not."""
    trap = tmp_path / "executed"

    class Trap:
        def __reduce__(self):
            return (open, (str(trap), "w"))

    spec = ModelSpec("linear", (1, 8, 8), 10, {})
    folder = tmp_path / "initial"
    models.save(models.initialize(spec, 3), spec, folder)
    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
    (folder / provenance.RECORDS_FILE).write_bytes(buffer.getvalue())
    about = {"data": "x", "fingerprint": "y", "records": 1, "inputs": [1, 8, 8]}
    about["model"] = models.model_hash(folder)
    provenance.write_json(folder / provenance.PROVENANCE_FILE, about)
    model = {"name": "linear", "initial": str(folder)}
    recipe, _ = make(tmp_path, model=model)
    with pytest.raises(UserError, match=r"records\.npy"):
        prepare(recipe, RunFolder(tmp_path / "run"), "test")
    assert not trap.exists()
