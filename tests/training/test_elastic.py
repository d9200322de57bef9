"""Training workers that become more or fewer while they train."""

from __future__ import annotations

import pytest
import torch
from support.training import KEY, execute, make, train, train_and_crash

from dpdist.core.errors import UserError
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.training.job import prepare
from dpdist.training.monitoring import WorkerChangeReporter, WorkerGroup, append_group, read_groups

RANGE = {"min": 1, "max": 4}
BETWEEN = {"workers": RANGE, "checkpoint_seconds": 1e9}


def elastic(tmp_path, name: str, reproducible: bool, **resources):
    steps = {"batch_size": 40, "steps": 6, "learning_rate": 0.5, "reproducible": reproducible}
    return make(tmp_path, name, model="linear", training=steps, resources=BETWEEN | resources)


@pytest.mark.slow
def test_canonical_shards_change_no_bit_and_charge_nothing(tmp_path, monkeypatch):
    """2 workers, then 1, then 4; each group dies after a step on its ledger."""
    undisturbed = train(*elastic(tmp_path, "a", True))
    recipe, folder = elastic(tmp_path, "b", True)
    said: list[str] = []
    teller = WorkerChangeReporter(folder, said.append)
    train_and_crash(recipe, folder, monkeypatch, 2, 2)
    train_and_crash(recipe, folder, monkeypatch, 4, 1)
    teller.poll()
    assert torch.equal(train(recipe, folder, 4), undisturbed)
    teller.poll()
    ledger = Ledger.read(folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(6), 1) and len(ledger.attempts) == 1
    assert [(g.workers, g.again) for g in read_groups(folder)] == [(2, 0), (1, 0), (4, 0)]
    assert said == [
        "training: goes on with 1 worker (before: 2) from step 0: nothing is charged again",
        "training: goes on with 4 workers (before: 1) from step 0: nothing is charged again",
    ]


def test_without_them_every_change_is_charged_and_said(tmp_path):
    recipe, folder = elastic(tmp_path, "run", False)
    said: list[str] = []
    teller = WorkerChangeReporter(folder, said.append)
    job = prepare(recipe, folder, "test")
    execute(job, 2, until=4)
    kept = folder.checkpoints / "step-00000004"
    kept.rename(folder.path / "kept")  # as if no checkpoint had been written yet
    execute(job, 1, until=2)
    teller.poll()
    execute(job, 1)
    teller.poll()
    ledger = Ledger.read(folder.ledger)
    assert (
        ledger.release_counts == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1} and ledger.num_superseded == 4
    )
    assert ledger.guarantee(job.plan).epsilon > job.plan.guarantee().epsilon
    assert read_groups(folder) == [
        WorkerGroup(0, 2, "gloo", 0),
        WorkerGroup(0, 1, "gloo", 4),
        WorkerGroup(2, 1, "gloo", 2),
    ]
    assert [line.split(": ", 2)[1] for line in said] == [
        "goes on with 1 worker (before", "goes on with 1 worker from step 2",
    ]  # fmt: skip
    assert "up to 4 steps that were released before are charged again" in said[0]


@pytest.mark.slow
def test_under_a_ceiling_nothing_is_released_again(tmp_path, monkeypatch):
    """Of two workers' group that died; one worker would charge its steps again, two replay them."""
    more = {"budget": str(tmp_path / "b"), "budget_ceiling": 30.0}
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": KEY, **more}
    steps = {"batch_size": 40, "steps": 6, "learning_rate": 0.5}
    for place, reproducible in enumerate((False, True)):
        training = {**steps, "reproducible": reproducible}
        recipe, folder = make(
            tmp_path, f"run{place}", model="linear", training=training, privacy=privacy,
            resources={"checkpoint_seconds": 1e9},
        )  # fmt: skip
        job = prepare(recipe, folder, "test")
        execute(job, 2, until=2)  # a checkpoint
        train_and_crash(recipe, folder, monkeypatch, 1, 2)
        before = Ledger.read(folder.ledger)
        assert len(before.release_counts) == 4
        if reproducible:
            execute(job, 1)
        else:
            with pytest.raises(UserError, match=r"2 steps .*world_size"):
                execute(job, 1)
            assert len(Ledger.read(folder.ledger).attempts) == len(before.attempts)
            execute(job, 2)
        ledger = Ledger.read(folder.ledger)
        assert ledger.release_counts == dict.fromkeys(range(6), 1) and len(ledger.attempts) == 1


def test_a_line_that_was_cut_off_hides_no_later_one(tmp_path):
    folder = RunFolder(tmp_path)
    folder.private.mkdir()
    first, later = WorkerGroup(0, 2, "gloo", 0), WorkerGroup(3, 1, "gloo", 4)
    append_group(folder, first)
    with open(folder.worker_groups, "a") as file:
        file.write('{"step": 3, "wor')  # the disk was full
    assert read_groups(folder) == [first]
    append_group(folder, later)
    assert read_groups(folder) == [first, later]
