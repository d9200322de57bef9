"""The training loop without Ray: workers are threads that meet in a barrier.

The loop is the one Ray Train runs; only the all-reduce is replaced. Negative tests break it on
purpose and must be caught.
"""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from support.datasets import write_split
from support.threads import one_thread
from support.training import (
    ThreadReducer,
    execute,
    make,
    run_thread_workers,
    train,
    train_and_crash,
)

from dpdist.core.errors import UserError
from dpdist.gradients.engine import ClippedSum, GradientEngine
from dpdist.gradients.passes import rows_per_pass
from dpdist.gradients.sampling import Blocks
from dpdist.privacy.ledger import Ledger, LedgerError, ReplayConflict
from dpdist.runs.folder import RunFolder
from dpdist.training import checkpoint, private_step, worker
from dpdist.training.collectives import MissingRank
from dpdist.training.job import prepare


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[torch.Tensor, RunFolder]:
    """A training that nothing happened to: its parameters and its folder."""
    recipe, folder = make(tmp_path_factory.mktemp("undisturbed"))
    with one_thread():
        return train(recipe, folder), folder


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm())


def test_any_number_of_workers_gives_the_same_parameters(tmp_path):
    """Under a fixed key; expected batch 4 over 4 workers, so many local batches are empty."""
    more = {"training__batch_size": 4, "training__learning_rate": 0.05}
    one, four = (train(*make(tmp_path, f"w{count}", **more), count) for count in (1, 4))
    assert relative(one, four) < 1e-5


def test_reproducible_runs_are_bit_identical(tmp_path):
    more = {"training__reproducible": True, "training__steps": 4}
    one, three = (train(*make(tmp_path, f"w{count}", **more), count) for count in (1, 3))
    assert torch.equal(one, three)


def test_an_undisturbed_run_costs_what_the_plan_says(tmp_path):
    """The ledger holds each step once, and batches are Poisson. What is sampled, clipped, noised
    and divided is compared entry by entry in tests/wiring/test_one_step.py."""
    recipe, folder = make(tmp_path, privacy__clip_norm=0.7, privacy__noise_multiplier=1.3)
    train(recipe, folder)
    plan = prepare(recipe, folder, "test").plan
    ledger = Ledger.read(folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(12), 1)
    assert ledger.guarantee(plan) == plan.guarantee()
    batches = [json.loads(line)["examples"] for line in folder.metrics.read_text().splitlines()]
    assert len(set(batches)) > 1, "Poisson batches vary"


def test_exact_replay_after_a_crash_is_recorded_once(tmp_path, monkeypatch, undisturbed):
    recipe, folder = make(tmp_path, "b", resources__checkpoint_seconds=1e9)
    for at in (5, 7, 3):  # no checkpoint is ever reached: each restart replays from step 0
        train_and_crash(recipe, folder, monkeypatch, at)
    assert torch.equal(train(recipe, folder), undisturbed[0])
    ledger = Ledger.read(folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(12), 1)
    assert ledger.num_superseded == 0


def test_resume_from_a_checkpoint_equals_the_undisturbed_run(tmp_path, monkeypatch):
    more = {"training__optimizer": "adam", "training__momentum": 0.0, "training__ema": 0.9}
    undisturbed = train(*make(tmp_path, "a", **more))
    recipe, folder = make(tmp_path, "b", **more)
    train_and_crash(recipe, folder, monkeypatch, 8)
    assert checkpoint.load_latest(folder.checkpoints).step > 0
    assert torch.equal(train(recipe, folder), undisturbed)


def test_another_number_of_workers_is_a_new_attempt_and_is_charged(tmp_path, monkeypatch):
    recipe, folder = make(tmp_path, resources__checkpoint_seconds=1e9)
    train_and_crash(recipe, folder, monkeypatch, 5)
    train(recipe, folder, 2)
    plan = prepare(recipe, folder, "test").plan
    ledger = Ledger.read(folder.ledger)
    assert ledger.num_superseded == 6
    assert ledger.guarantee(plan).epsilon > plan.guarantee().epsilon
    assert [attempt["epoch"] for attempt in ledger.attempts] == [0, 1]


def test_same_noise_is_never_added_to_another_sum(tmp_path, monkeypatch):
    """A replay whose sum differs in one bit is refused; the next start takes a new epoch."""
    recipe, folder = make(tmp_path, resources__checkpoint_seconds=1e9)
    train_and_crash(recipe, folder, monkeypatch, 5)
    real = GradientEngine.clipped_sum

    def off_by_one_bit(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        result.flat[0] = torch.nextafter(result.flat[0], torch.tensor(torch.inf))
        return result

    monkeypatch.setattr(GradientEngine, "clipped_sum", off_by_one_bit)
    with pytest.raises(ReplayConflict):
        train(recipe, folder)
    assert Ledger.read(folder.ledger).epoch == 1
    train(recipe, folder)
    assert Ledger.read(folder.ledger).num_superseded == 6


def test_a_missing_rank_never_updates_the_model(tmp_path):
    """A worker that does not add its part to the sum is noticed before anything is released."""

    class Silent(ThreadReducer):
        def all_reduce(self, buffer):
            if self.rank == 1:
                buffer = torch.zeros_like(buffer)
            super().all_reduce(buffer)

    recipe, folder = make(tmp_path)
    job = prepare(recipe, folder, "test")
    with pytest.raises(MissingRank):
        run_thread_workers(2, lambda reducer: worker.run_training(job, reducer), Silent)
    assert Ledger.read(folder.ledger).release_counts == {}
    assert not folder.training_summary.exists()


def test_workers_that_drift_apart_are_noticed(tmp_path, monkeypatch):
    real = worker.FlatOptimizer.update
    threads = {}

    def drifting(self, flat, gradient, step):
        real(self, flat, gradient, step)
        if threads.setdefault(threading.get_ident(), len(threads)) == 1:
            flat[0] += 1e-3

    monkeypatch.setattr(worker.FlatOptimizer, "update", drifting)
    recipe, folder = make(tmp_path)
    with pytest.raises(MissingRank):
        train(recipe, folder, 2)
    assert not folder.checkpoints.exists(), "a restart would go on from one of the two"


def test_fixed_key_gives_the_same_run_and_a_fresh_key_another(tmp_path, undisturbed):
    assert torch.equal(undisturbed[0], train(*make(tmp_path, "same")))
    assert not torch.equal(undisturbed[0], train(*make(tmp_path, "c", privacy__run_key=None)))


def test_nothing_private_lies_outside_private(undisturbed):
    folder = undisturbed[1]
    assert {p.name for p in folder.path.iterdir()} == {"private", "recipe.yaml", "run.json"}
    assert folder.private.stat().st_mode & 0o777 == 0o700
    assert folder.run_key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "method",
    [
        "dp-sgd",
        {"name": "input-noise", "sigma": 0.3, "augmentations": 3},
        {"name": "secure-sgd", "sigma": 0.2, "redistribution": None},
    ],
)
def test_neighbor_replay(tmp_path, monkeypatch, method):
    """D and D' differ in one record; same keys, same state: every pre-noise sum differs by at most
    C, and by exactly nothing when the record was not drawn."""
    differences, drawn = _replay(tmp_path, monkeypatch, method, 3)
    assert 0 < sum(drawn) < len(drawn)
    for difference, took_part in zip(differences, drawn, strict=True):
        assert difference <= 1.0 + 1e-6
        if not took_part:
            assert difference == 0.0


def test_neighbor_replay_catches_a_clip_per_batch(tmp_path, monkeypatch):
    """Clipping the batch's mean gradient instead of each record's moves the sum by more than C."""

    def per_batch(self, inputs, targets, *, out, **_):
        loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.parameters)])
        gradient *= min(1.0, 1.0 / float(gradient.norm())) * len(inputs)
        return ClippedSum(out.copy_(gradient), len(inputs), 0, 0.0)

    monkeypatch.setattr(GradientEngine, "clipped_sum", per_batch)
    differences, _ = _replay(tmp_path, monkeypatch, "dp-sgd", 1)
    assert max(differences) > 1.01


def _replay(tmp_path, monkeypatch, method, workers):
    """The pre-noise sums of six steps, on D and on D' (the special record never joins), all at the
    parameters that the run began with: nothing is learned of the sums.

    Returns the norms of the differences, and whether the record was drawn on D.
    """
    records, special, steps = 60, 17, 6
    sums: dict[bool, list[np.ndarray]] = {True: [], False: []}
    drawn: dict[bytes, bool] = {}  # by the key of the step, which all workers share
    sample = private_step.poisson_sample
    for present in (True, False):
        recipe, folder = make(
            tmp_path, str(present), method=method,
            data={"name": "digits", "max_train": records},
            training__steps=steps, training__batch_size=20, privacy__delta=1e-3,
        )  # fmt: skip

        def members(key, *args, present=present, **kwargs):
            batch = sample(key, *args, **kwargs)
            drawn[key] = drawn.get(key, False) or special in batch
            return batch if present else batch[batch != special]

        def capture(total, key, std, start, out, captured=sums[present]):
            captured.append(total.copy())
            return np.zeros_like(total)

        with monkeypatch.context() as patch:
            patch.setattr(private_step, "poisson_sample", members)
            patch.setattr(private_step, "add_noise", capture)
            train(recipe, folder, workers)
    assert len(drawn) == steps
    # Each worker adds the step's noise, and none begins a step before all have ended the last.
    pairs = zip(*(sums[present][::workers] for present in (True, False)), strict=True)
    return [float(np.linalg.norm(a - b)) for a, b in pairs], list(drawn.values())


def test_a_lost_ledger_is_not_forgotten(tmp_path, monkeypatch):
    """Without the entries of the checkpointed steps, epsilon would be understated."""
    recipe, folder = make(tmp_path)
    train_and_crash(recipe, folder, monkeypatch, 8)
    job = prepare(recipe, folder, "test")
    folder.ledger.unlink()
    with pytest.raises(LedgerError, match="lacks records"):
        execute(job)
    folder.anchor.unlink()
    with pytest.raises(LedgerError, match="lacks releases"):
        execute(job)
    assert not folder.training_summary.exists()


def test_a_run_is_not_continued_on_other_records(tmp_path):
    rows = np.arange(400.0).reshape(100, 4)
    for split, count in (("train", 100), ("test", 50)):
        write_split(tmp_path / "mine", split, x=rows[:count] + count, label=np.arange(count) % 10)
    section = {"name": "mine", "root": str(tmp_path), "columns": {"features": ["x"]}}
    recipe, folder = make(tmp_path, data=section, model={"name": "linear"})
    prepare(recipe, folder, "test")
    write_split(tmp_path / "mine", x=rows + 100, label=np.arange(1, 101) % 10)
    with pytest.raises(UserError, match="mine/train"):
        prepare(recipe, folder, "test")


def test_the_test_split_is_not_the_private_one(tmp_path):
    write_split(tmp_path / "mine", x=np.arange(40.0), label=np.arange(40) % 10)
    section = {
        "name": "mine", "root": str(tmp_path), "columns": {"features": ["x"]}, "test": "train",
        "max_train": 30,
    }  # fmt: skip
    recipe, folder = make(tmp_path, data=section, model={"name": "linear"}, training__batch_size=4)
    with pytest.raises(UserError, match="40 of the 40 "):
        prepare(recipe, folder, "test")
    assert not folder.path.exists()


def test_every_pass_of_a_run_has_the_shape_that_the_plan_gives(tmp_path, monkeypatch):
    """With fixed rows the model never sees how large a batch is."""
    shapes, batches = set(), set()

    def watched(name, sizes):
        real = getattr(GradientEngine, name)

        def call(self, inputs, *rest, **options):
            sizes.add(len(inputs))
            return real(self, inputs, *rest, **options)

        monkeypatch.setattr(GradientEngine, name, call)

    watched("clipped_sum", batches)
    watched("_per_example_gradients", shapes)
    train(*make(tmp_path, training__steps=6, resources__rounding="fixed-row"), 2)
    assert len(batches) > 2
    blocks = Blocks.for_batches(200, 0.1)
    assert shapes == {rows_per_pass(blocks, blocks.capacity, "fixed-row")}
