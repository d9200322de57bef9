"""What begins a new attempt, and under which keys: all that can change a sum, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.key_recorder import replace_everywhere
from support.training import Interrupt, execute, make

from dpdist.cluster import versions
from dpdist.core.errors import UserError
from dpdist.methods.noisy_records import NoisyRecordsExecution
from dpdist.privacy.ledger import Ledger
from dpdist.randomness.keys import new_run_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.job import prepare

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


@pytest.mark.slow
def test_another_number_of_threads_is_a_new_attempt(tmp_path):
    before = torch.get_num_threads()
    try:
        assert epochs_after(tmp_path, lambda: torch.set_num_threads(before + 1)) == 2
    finally:
        torch.set_num_threads(before)


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


def key_of_records(tmp: Path, name: str, patch: pytest.MonkeyPatch, **changes: Any) -> bytes:
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
        execute(prepare(recipe, folder, "test"))
    (key,) = found
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
