"""What begins a new attempt, under which keys, and what workers that come and go are charged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.key_recorder import replace_everywhere
from support.training import KEY, Interrupt, execute, make, train, train_and_crash

from dpdist.cluster import versions
from dpdist.core.errors import UserError
from dpdist.methods.base import MethodState
from dpdist.methods.noisy_records import NoisyRecordsExecution
from dpdist.privacy.ledger import Ledger
from dpdist.randomness.keys import new_run_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.collectives import Reducer, release_id
from dpdist.training.job import prepare
from dpdist.training.monitoring import WorkerGroup, read_groups
from dpdist.training.private_step import build_shards
from dpdist.training.worker import method_state_digest

STEPS = 4
SECRET = {"privacy__run_key": None, "privacy__delta": 1e-3}


def small(tmp: Path, name: str = "run", **sections: Any) -> tuple[Recipe, RunFolder]:
    training = {"batch_size": 12, "steps": STEPS, "learning_rate": 0.1}
    base: dict[str, Any] = {"data": {"name": "digits", "max_train": 120}, "model": "linear"}
    return make(tmp, name, training=training, **(base | sections))


def epochs_after(tmp: Path, change: Any = None) -> int:
    """Attempts of a run that pauses, sees the change, and goes on."""
    recipe, folder = small(tmp, **SECRET)
    execute(prepare(recipe, folder, "test"), until=2)
    if change is not None:
        change()
    execute(prepare(recipe, folder, "test"))
    ledger = Ledger.read(folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(STEPS), 1)
    assert ledger.epoch == len(ledger.attempts) - 1
    return len(ledger.attempts)


@pytest.mark.slow
def test_other_code_is_a_new_attempt(tmp_path, monkeypatch):
    """And the same code is none: an exact replay is charged once."""
    assert epochs_after(tmp_path / "same") == 1
    original = versions.code_digest

    def other() -> None:
        replace_everywhere(monkeypatch, original, lambda names: f"other {original(names)}")

    assert epochs_after(tmp_path / "other", other) == 2


def test_a_run_does_not_go_on_under_another_key(tmp_path):
    """Releases of one attempt would be of two keys, and none could be replayed."""
    recipe, folder = small(tmp_path, **SECRET)
    execute(prepare(recipe, folder, "test"), until=2)
    before = folder.ledger.read_bytes()
    own = folder.run_key.read_text()
    folder.run_key.write_text(new_run_key().hex())
    with pytest.raises(UserError, match="not the key"):
        execute(prepare(recipe, folder, "test"))
    assert folder.ledger.read_bytes() == before
    folder.run_key.write_text(own)
    execute(prepare(recipe, folder, "test"))
    assert Ledger.read(folder.ledger).epoch == 0


# --- the noise on records


def key_of_records(
    tmp: Path, name: str, patch: pytest.MonkeyPatch, workers: int = 1, **changes: Any
) -> bytes:
    """The key that a run draws the noise on its records from."""
    found: list[bytes] = []

    def seen(self: Any, records: Any, plan: Any, key: bytes) -> Any:
        found.append(key)
        raise Interrupt

    method = {"name": "noisy-records", "input_norm": 4.0, "label_epsilon": 3.0}
    privacy = {"noise_multiplier": 0.5, "delta": 1e-4, "adjacency": "replace-one"}
    privacy |= {"run_key": "5a" * 32, **changes.pop("privacy", {})}
    base = {"data": {"name": "digits"}, "method": method, "privacy": privacy}
    recipe, folder = small(tmp, name, **(base | changes))
    patch.setattr(NoisyRecordsExecution, "transform_records", seen)
    with pytest.raises(Interrupt):
        execute(prepare(recipe, folder, "test"), workers)
    (key,) = set(found)
    assert key != folder.read_run_key()
    return key


def test_no_two_plans_give_records_the_same_noise(tmp_path, monkeypatch):
    """Under one run key, as a fixed one is for several runs: noisy records of two plans would
    otherwise differ by what the noise hides."""
    changes: list[dict[str, Any]] = [
        {},
        {"privacy": {"noise_multiplier": 0.7}},
        {"privacy": {"run_key": "5b" * 32}},
    ]
    keys = [
        key_of_records(tmp_path, str(number), monkeypatch, **change)
        for number, change in enumerate(changes)
    ]
    assert len(set(keys)) == len(keys)
    assert key_of_records(tmp_path, "again", monkeypatch) == keys[0]


def test_all_attempts_of_a_run_give_records_the_same_noise(tmp_path, monkeypatch):
    """Drawn afresh in each attempt, it would average out."""
    secret = {"run_key": None}
    keys = [
        key_of_records(tmp_path, "run", monkeypatch, workers, privacy=secret) for workers in (1, 2)
    ]
    assert len(Ledger.read(RunFolder(tmp_path / "run").ledger).attempts) == 2
    assert keys[0] == keys[1]


RANGE = {"min": 1, "max": 4}
BETWEEN = {"workers": RANGE, "checkpoint_seconds": 1e9}


def elastic(tmp_path, name: str, reproducible: bool, **resources):
    steps = {"batch_size": 40, "steps": 6, "learning_rate": 0.5, "reproducible": reproducible}
    return make(tmp_path, name, model="linear", training=steps, resources=BETWEEN | resources)


def test_canonical_shards_change_no_bit_and_charge_nothing(tmp_path, monkeypatch):
    """2 workers, then 1, then 4; each group dies after a step on its ledger."""
    undisturbed = train(*elastic(tmp_path, "a", True))
    recipe, folder = elastic(tmp_path, "b", True)
    train_and_crash(recipe, folder, monkeypatch, 2, 2)
    train_and_crash(recipe, folder, monkeypatch, 4, 1)
    assert torch.equal(train(recipe, folder, 4), undisturbed)
    ledger = Ledger.read(folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(6), 1) and len(ledger.attempts) == 1
    assert [(g.workers, g.again) for g in read_groups(folder)] == [(2, 0), (1, 0), (4, 0)]


def test_without_them_every_change_is_charged_and_said(tmp_path):
    recipe, folder = elastic(tmp_path, "run", False)
    job = prepare(recipe, folder, "test")
    execute(job, 2, until=4)
    kept = folder.checkpoints / "step-00000004"
    kept.rename(folder.path / "kept")  # as if no checkpoint had been written yet
    execute(job, 1, until=2)
    execute(job, 1)
    ledger = Ledger.read(folder.ledger)
    assert ledger.release_counts == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1}
    assert ledger.guarantee(job.plan).epsilon > job.plan.guarantee().epsilon
    assert read_groups(folder) == [
        WorkerGroup(0, 2, "gloo", 0),
        WorkerGroup(0, 1, "gloo", 4),
        WorkerGroup(2, 1, "gloo", 2),
    ]


def test_under_a_ceiling_nothing_is_released_again(tmp_path, monkeypatch):
    """Of two workers' group that died; one worker would charge its steps again, two replay them."""
    more = {"budget": str(tmp_path / "b"), "budget_ceiling": 30.0}
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": KEY, **more}
    recipe, folder = make(
        tmp_path, model="linear", privacy=privacy, resources={"checkpoint_seconds": 1e9},
        training={"batch_size": 40, "steps": 6, "learning_rate": 0.5},
    )  # fmt: skip
    job = prepare(recipe, folder, "test")
    execute(job, 2, until=2)  # a checkpoint
    train_and_crash(recipe, folder, monkeypatch, 1, 2)
    with pytest.raises(UserError, match="world_size"):
        execute(job, 1)
    execute(job, 2)
    ledger = Ledger.read(folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(6), 1) and len(ledger.attempts) == 1


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


def test_the_digest_of_what_is_fixed_covers_every_tensor():
    tensors = {each: torch.arange(3.0) for each in "abc"}
    changed = [tensors | {name: torch.tensor([0.0, 1.0, 2.0001])} for name in "abc"]
    states = [MethodState(torch.nn.Identity(), each, bytes(32)) for each in (tensors, *changed)]
    assert len(set(map(method_state_digest, states))) == 4


# --- keys
