"""Sums that travel in float32 move by no more than the clip norm, whoever joins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom
from support.training import ThreadReducer, execute, make, release_ids, run_thread_workers, train

from dpdist.core.errors import UserError
from dpdist.privacy.ledger import Ledger
from dpdist.training import model_setup, private_step, worker
from dpdist.training.collectives import MAX_CLIP_REDUCTION, ReduceDtype, ShardedUpdate, Shards
from dpdist.training.job import prepare
from dpdist.training.model_setup import describe_cost

pytestmark = pytest.mark.guarantee

FLOAT32 = {"release": "sharded", "wire": "float32", "checkpoint_seconds": 1e9}


def small(tmp_path, name: str, workers: int = 1, training: dict | None = None, **resources):
    """Six steps of a linear model; in float32 unless told otherwise."""
    steps = {"batch_size": 40, "steps": 6, "learning_rate": 0.5, "momentum": 0.5}
    return make(
        tmp_path, name, model="linear", training=steps | (training or {}),
        resources={**FLOAT32, "workers": workers, **resources},
    )  # fmt: skip


# ---- one record more or less


@pytest.mark.parametrize("power", [8, 12, 16])
def test_neighbours_that_rounding_drives_apart_stay_within_the_room(power):
    """Every entry of a sum of 2^power aligned records lies just below a midpoint of float32's, and
    the record that joins lifts each just above one: the worst there is, and the room holds it."""
    wire, size = ReduceDtype("float32", 2.0**power), 512
    clip = 1 / (1 + wire.clip_reduction)
    each = clip / np.sqrt(size)
    top = np.float32(each * (wire.max_records - 2))
    unit = float(np.spacing(top))
    sums = np.full(size, float(top) + unit * (0.5 - 1e-6))
    step = unit * (np.floor(each / unit - 1e-5) + 2e-6)  # of the record in each entry, at most each
    assert np.linalg.norm(sums + step) <= wire.max_records * clip and step <= each
    sent = [wire.cast(torch.from_numpy(s)).double() for s in (sums, sums + step)]
    moved = float((sent[1] - sent[0]).norm())
    # By one unit in each entry more than the record itself, a fourth of the room at least.
    assert moved - step * np.sqrt(size) > 0.25 * wire.clip_reduction * clip
    assert moved <= 1


def test_random_neighbours_stay_within_the_clip():
    wire = ReduceDtype("float32", 1000.0)
    generator = np.random.default_rng(0)
    for _ in range(50):
        records = generator.standard_normal((1000, 40)) * np.exp(generator.normal(0, 3, 40))
        records *= 3 / (1 + wire.clip_reduction) / np.linalg.norm(records, axis=1, keepdims=True)
        one = wire.cast(torch.from_numpy(records.sum(0))).double()
        other = wire.cast(torch.from_numpy(records[1:].sum(0))).double()
        assert float((one - other).norm()) <= 3


@pytest.mark.parametrize("mean", [0.1, 4, 40, 512, 8192])
def test_a_share_has_more_records_than_there_is_room_for_with_no_probability(mean):
    records = 20 * max(1, int(mean))
    wire = ReduceDtype.for_batches("float32", 2 * mean, 2)
    assert binom.sf(wire.max_records, records, mean / records) < 4e-31
    assert (
        wire.max_records <= mean + 13 * np.sqrt(mean) + 80
    )  # and not much more room than that wants
    assert ReduceDtype.for_batches("float32", 2 * mean, 2, cap=3).max_records == 3


def test_the_room_is_for_the_largest_batch_of_any_phase(tmp_path):
    recipe, folder = small(tmp_path, "run", 2)
    plan = prepare(recipe, folder, "test").plan
    (phase,) = plan.phases
    larger = replace(phase, sample_rate=4 * phase.sample_rate)
    wire = model_setup.build_reduce_dtype(recipe, replace(plan, phases=(phase, larger)))
    assert (
        wire
        == ReduceDtype.for_batches("float32", 160, 2)
        != model_setup.build_reduce_dtype(recipe, plan)
    )


def test_the_room_is_for_the_fewest_workers_there_may_be(tmp_path):
    recipe, folder = small(tmp_path, "run", {"min": 1, "max": 4})
    plan = prepare(recipe, folder, "test").plan
    assert model_setup.build_reduce_dtype(recipe, plan) == ReduceDtype.for_batches("float32", 40, 1)


@pytest.mark.parametrize("shard", [0, 7])
def test_every_sum_of_a_worker_is_counted(tmp_path, monkeypatch, shard):
    """Of its canonical shards one alone has more records than there is room for."""
    recipe, folder = small(tmp_path, "run", training={"reproducible": True})
    job = prepare(recipe, folder, "test")
    real, calls = private_step.PrivateStep.members, []

    def members(self, key, begin, end, step_plan):
        calls.append(begin)
        many = len(calls) == shard + 1
        return np.arange(begin, end) if many else real(self, key, begin, end, step_plan)[:2]

    monkeypatch.setattr(private_step.PrivateStep, "members", members)
    monkeypatch.setattr(
        model_setup.ReduceDtype, "for_batches", lambda *arguments: ReduceDtype("float32", 3.0)
    )
    with pytest.raises(ValueError, match="a sum of more than 3 records; nothing is released"):
        execute(job)
    assert len(calls) == shard + 1 and Ledger.read(folder.ledger).release_counts == {}


def test_a_sum_of_more_records_is_not_sent(tmp_path, monkeypatch):
    recipe, folder = small(tmp_path, "run")
    job = prepare(recipe, folder, "test")
    monkeypatch.setattr(
        model_setup.ReduceDtype, "for_batches", lambda *arguments: ReduceDtype("float32", 3.0)
    )
    with pytest.raises(ValueError, match="a sum of more than 3 records; nothing is released"):
        execute(job)
    assert Ledger.read(folder.ledger).release_counts == {}


# ---- in a run


def test_the_clip_makes_room_and_float32_is_what_is_sent(tmp_path, monkeypatch):
    engines, sent = [], []
    real = worker.build_engine

    def build(*arguments):
        engines.append(real(*arguments))
        return engines[-1]

    class Looking(ThreadReducer):
        def all_to_all(self, numbers, send_sizes, receive_sizes):
            sent.append(numbers.dtype)
            return super().all_to_all(numbers, send_sizes, receive_sizes)

    monkeypatch.setattr(worker, "build_engine", build)
    recipe, folder = small(tmp_path, "run", 2)
    job = prepare(recipe, folder, "test")
    run_thread_workers(2, lambda reducer: worker.run_training(job, reducer), Looking)
    room = ReduceDtype.for_batches("float32", 40, 2).clip_reduction
    assert room == pytest.approx(2**-23 * (1 + np.ceil(21 + np.sqrt(140 * 21) + 140 / 3)))
    assert {e.clipping.sensitivity for e in engines} == {1 / (1 + room)}
    assert set(sent) == {torch.float32} and len(sent) == 12


def test_without_the_room_nothing_is_trained(tmp_path, monkeypatch):
    recipe, folder = small(tmp_path, "run")
    job = prepare(recipe, folder, "test")
    monkeypatch.setattr(model_setup, "build_reduce_dtype", lambda *arguments: ReduceDtype())
    with pytest.raises(UserError, match="sensitivity exceeds the plan's clip norm"):
        execute(job)


@pytest.mark.long
def test_any_number_of_workers_gives_the_same_bits_and_nearly_those_of_float64(tmp_path):
    same = {"reproducible": True}
    found = {}
    for name, workers, resources in (
        ("one", 1, {}), ("two", 2, {}), ("three", 3, {}), ("wide", 2, {"wire": "float64"}),
    ):  # fmt: skip
        recipe, folder = small(tmp_path, name, workers, same, **resources)
        found[name] = train(recipe, folder, workers), release_ids(folder)
    for name in ("two", "three"):
        assert torch.equal(found[name][0], found["one"][0]) and found[name][1] == found["one"][1]
    assert set(found["one"][1]).isdisjoint(found["wide"][1])
    torch.testing.assert_close(found["one"][0], found["wide"][0], rtol=1e-4, atol=1e-4)


def test_what_arrived_is_added_up_in_float64(tmp_path):
    """1 + 2^-30 from another worker: float32 would lose it."""
    found = []

    def add(reducer):
        row = torch.tensor([[1.0, 2.0**-30][reducer.rank]], dtype=torch.float64)[None]
        shards = Shards(1, 1, [(0, 0, 1)], [1, 1])
        found.append(
            ShardedUpdate(ReduceDtype("float32", 9.0)).sum_rows(reducer, row, shards, False)[0]
        )

    run_thread_workers(2, add)
    assert sorted(map(torch.Tensor.tolist, found)) == [[], [1 + 2.0**-30]]
    assert all(total.dtype == torch.float64 for total in found)


def test_another_wire_is_another_attempt(tmp_path):
    """Its sums differ, so that sampling and noise are drawn afresh."""
    recipe, folder = small(tmp_path, "run", wire="float64", checkpoint_seconds=1e-6)
    execute(prepare(recipe, folder, "test"), until=3)
    recipe, _ = small(tmp_path, "run")
    execute(prepare(recipe, folder, "test"))
    attempts = Ledger.read(folder.ledger).attempts
    assert [a["identity"].get("wire") for a in attempts] == [None, "float32, 164"]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("reproducible", [True, False])
def test_the_wire_belongs_to_an_attempt_on_any_number_of_workers(workers, reproducible):
    class Group:
        world_size = workers

    wide, narrow = (
        ShardedUpdate(wire).fingerprint_entries(Group(), reproducible)
        for wire in (ReduceDtype(), ReduceDtype("float32", 9.0))
    )
    assert narrow == wide | {"wire": "float32, 9"}


def test_a_dry_run_says_what_it_costs(tmp_path):
    recipe, folder = small(tmp_path, "run", 2)
    rows = dict(describe_cost(recipe, prepare(recipe, folder, "test").plan))
    assert rows["wire"].startswith("float32, 4 bytes a parameter; the clip is 0.00")
    assert "wire" not in dict(describe_cost(*(lambda r, f: (r, prepare(r, f, "t").plan))(
        *small(tmp_path, "other", 2, wire="float64"))))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resources": {**FLOAT32, "release": "whole"}},
         r"resources\.wire: must be float64 with resources\.release: whole, got float32"),
        ({"resources": FLOAT32, "privacy__nominal_records": 400, "data": {"name": "digits"}},
         r"resources\.wire: must be float64 with privacy\.nominal_records"),
        ({"resources": {**FLOAT32, "wire": "float16"}}, r"resources\.wire: must be one of"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        prepare(*make(tmp_path, **({"model": "linear"} | changes)), "test")


def test_where_the_room_would_be_large_float64_stays():
    wire = ReduceDtype.for_batches("float32", 70_000, 1)
    assert wire.clip_reduction > MAX_CLIP_REDUCTION
    assert "room for sums of 65,536 records, here a worker may have 73" in wire.unsupported_reason
    assert ReduceDtype.for_batches("float32", 70_000, 2).unsupported_reason == ""
