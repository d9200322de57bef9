"""A sharded release is the whole one to the bit, in shards that fit together again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.training import (
    ThreadReducer,
    execute,
    make,
    release_ids,
    run_thread_workers,
    train,
    train_and_crash,
)

from dpdist.core.errors import UserError
from dpdist.privacy.ledger import Ledger
from dpdist.training import checkpoint, collectives, worker
from dpdist.training.collectives import MissingRank
from dpdist.training.job import prepare

pytestmark = pytest.mark.guarantee

SHARDED = {"resources": {"checkpoint_seconds": 1e-6, "release": "sharded"}}
ADAM = {"optimizer": "adam", "momentum": 0.0, "ema": 0.9, "weight_decay": 0.01}


@pytest.fixture(autouse=True)
def _small_leaves(monkeypatch):
    """650 parameters are eleven leaves, the last one shorter; two of two workers' travel at once,
    one of more."""
    for module in (collectives, collectives):
        monkeypatch.setattr(module, "LEAF", 64)
    monkeypatch.setattr(collectives, "_LEAVES_PER_EXCHANGE", 4)


def small(tmp_path, name: str, training: dict | None = None, **more):
    """Six steps of a linear model."""
    steps = {"batch_size": 40, "steps": 6, "learning_rate": 0.5, "momentum": 0.5}
    return make(tmp_path, name, model="linear", training=steps | (training or {}), **more)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "training"),
    [(1, {}), (2, {"ema": 0.9}), (2, ADAM), (3, {"reproducible": True}),
     (8, ADAM | {"reproducible": True})],
)  # fmt: skip
def test_parameters_and_ledger_are_the_whole_release_s(tmp_path, workers, training):
    whole, folder = small(tmp_path, "whole", training)
    shards, other = small(tmp_path, "sharded", training, **SHARDED)
    assert torch.equal(train(whole, folder, workers), train(shards, other, workers))
    assert release_ids(folder) == release_ids(other) and len(set(release_ids(folder))) == 6


@pytest.mark.slow
def test_every_worker_holds_its_part_of_the_optimizer_s_state(tmp_path):
    recipe, folder = small(tmp_path, "run", ADAM, **SHARDED)
    train(recipe, folder, 3)
    (newest,) = [p for p in folder.checkpoints.iterdir() if p.name == "step-00000006"]
    names = [checkpoint.part_name(rank, 3) for rank in range(3)]
    assert {p.name for p in newest.iterdir()} == {*names, "state.safetensors", "done.json"}
    parts = [checkpoint._tensors(newest / name) for name in names]
    assert all(part.keys() == {"slot.mean", "slot.square", "slot.ema"} for part in parts)
    assert [len(part["slot.ema"]) for part in parts] == [192, 256, 202]


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "then"),
    [((1, {}), (2, SHARDED)), ((3, SHARDED), (1, {})), ((3, SHARDED), (2, SHARDED))],
    ids=["whole to shards", "shards to whole", "three shards to two"],
)
def test_another_number_of_workers_takes_over(tmp_path, monkeypatch, first, then):
    """Canonical shards: a run that began in parts, or whole, ends as if nothing had happened."""
    training = ADAM | {"reproducible": True}
    undisturbed = train(*small(tmp_path, "a", training))
    recipe, folder = small(tmp_path, "b", training, **first[1])
    train_and_crash(recipe, folder, monkeypatch, 3, first[0])
    assert checkpoint.load_latest(folder.checkpoints).step > 0
    recipe, _ = small(tmp_path, "b", training, **then[1])
    assert torch.equal(train(recipe, folder, then[0]), undisturbed)
    assert Ledger.read(folder.ledger).num_superseded == 0


@pytest.mark.slow
def test_a_checkpoint_lacks_no_part(tmp_path, monkeypatch):
    """One whose second part was not written is not taken; one that lost it is called damaged."""
    recipe, folder = small(tmp_path, "run", **SHARDED)
    job = prepare(recipe, folder, "test")
    execute(job, 2, until=2)
    real = checkpoint.save_part

    def full(where, step, rank, count, slots):
        if rank == 1:
            raise OSError("no room")
        real(where, step, rank, count, slots)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(checkpoint, "save_part", full)
        execute(job, 2)
    assert checkpoint.load_latest(folder.checkpoints).step == 2
    (folder.checkpoints / "step-00000002" / checkpoint.part_name(1, 2)).unlink()
    with pytest.raises(UserError, match="no such file"):
        execute(job, 2)


def test_a_worker_that_takes_no_part_is_noticed(tmp_path):
    class Silent(ThreadReducer):
        def all_reduce(self, buffer):
            super().all_reduce(torch.zeros_like(buffer) if self.rank == 1 else buffer)

    recipe, folder = small(tmp_path, "run", **SHARDED)
    job = prepare(recipe, folder, "test")
    with pytest.raises(MissingRank):
        run_thread_workers(2, lambda reducer: worker.run_training(job, reducer), Silent)
    assert Ledger.read(folder.ledger).release_counts == {}


def test_a_release_is_named_by_every_leaf_of_its_sum():
    """And by whose it is; one leaf by its own digest, whatever the others are."""
    total = np.arange(130.0)
    names = {collectives.release_id("a", collectives.leaf_digests("a", total))}
    names.add(collectives.release_id("b", collectives.leaf_digests("b", total)))
    for place in (0, 63, 64, 129):
        other = total.copy()
        other[place] = np.nextafter(other[place], 1e9)
        names.add(collectives.release_id("a", collectives.leaf_digests("a", other)))
    assert len(names) == 6
    (leaf,) = collectives.leaf_digests("a", total[:64])
    assert collectives.release_id("a", [leaf]) == leaf.hex()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy__noise_multiplier": 0, "privacy__clipping": "none"}, "without noise"),
        ({"audit": {"kind": "canaries", "canaries": 20}}, "audited run"),
        ({"method": "functional"}, "without gradient steps"),
    ],
)
def test_what_looks_at_whole_releases_is_refused(tmp_path, changes, message):
    recipe, folder = make(tmp_path, **({"model": "linear"} | changes | SHARDED))
    with pytest.raises(UserError, match=rf"resources\.release: must be whole .*{message}"):
        prepare(recipe, folder, "test")
