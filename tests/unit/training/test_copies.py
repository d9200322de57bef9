"""Two copies of a run folder that both go on: an attack, in which everything is changed in one copy
that its owner can change, and the sums and noises of the two are compared.

A plain copy cannot be told from the original, so it must not matter: no step that is new to either
may draw what the other draws.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.training import execute, make, train_and_crash

from dpdist.core.errors import UserError
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder, complete_checkpoints
from dpdist.runs.recipe import Recipe, load_recipe
from dpdist.training import checkpoint, private_step, worker
from dpdist.training.job import prepare
from dpdist.training.trainer import _budget_charged
from dpdist.training.worker import recipe_digest

STEPS, FORK = 8, 3
SECRET = {"noise_multiplier": 2.0, "delta": 1e-5}
Sums = dict[int, tuple[np.ndarray, np.ndarray]]  # by step: what was summed, and its noise


def begun(tmp: Path, **more: Any) -> tuple[Recipe, RunFolder]:
    """A run without a fixed key that was paused after three steps, and its folder."""
    recipe, folder = make(
        tmp, model="linear", privacy=SECRET | more.pop("privacy", {}),
        training={"batch_size": 40, "steps": STEPS, "learning_rate": 0.5}, **more,
    )  # fmt: skip
    execute(prepare(recipe, folder, "test"), until=FORK)
    return recipe, folder


def copied(folder: RunFolder, name: str = "copy") -> RunFolder:
    copy = RunFolder(folder.path.parent / name)
    shutil.copytree(folder.path, copy.path)
    return copy


def gone_on(recipe: Recipe, folder: RunFolder, workers: int = 1) -> Sums:
    """Go on to the end: the sums and noises of all steps that this process took."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    real, job = private_step.add_noise, prepare(recipe, folder, "test")
    first = checkpoint.newest_step(folder.checkpoints)

    def watched(total: np.ndarray, *rest: Any) -> np.ndarray:
        before = total.copy()
        noisy = real(total, *rest)
        found.append((before, noisy - before))
        return noisy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_step, "add_noise", watched)
        execute(job, workers)
    return dict(enumerate(found[::workers], first))


def shared(one: Sums, other: Sums) -> list[int]:
    """The steps of which the noise of both is the same; chance has no part in it."""
    return [s for s in one if s in other and np.abs(one[s][1] - other[s][1]).max() < 1e-3]


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON or YAML file in place."""
    text = path.read_text()
    raw = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    change(raw)
    path.write_text(json.dumps(raw) if path.suffix == ".json" else yaml.safe_dump(raw))


@pytest.mark.slow
def test_plain_copies_share_no_noise_on_new_steps(tmp_path):
    recipe, folder = begun(tmp_path)
    copies = [copied(folder, f"copy{n}") for n in range(2)]
    runs = [gone_on(recipe, each) for each in (folder, *copies)]
    for place, one in enumerate(runs):
        assert sorted(one) == list(range(FORK, STEPS))
        for other in runs[:place]:
            assert shared(one, other) == []
            assert all(not np.array_equal(one[s][0], other[s][0]) for s in one)  # nor a batch
    plan = folder.read_plan()
    for each in (folder, *copies):
        ledger = Ledger.read(each.ledger)
        assert len(ledger.attempts) == 1 and ledger.num_superseded == 0
        assert ledger.guarantee(plan) == plan.guarantee()  # a new step is charged once


@pytest.mark.slow
def test_an_announced_step_is_the_same_release_in_both_or_none(tmp_path):
    """Step 4 was announced when the process died: both copies replay it, with the same noise on the
    same sum. Where a copy's parameters are others, its sum is another and its noise too."""
    recipe, folder = begun(tmp_path)
    train_and_crash(recipe, folder, pytest.MonkeyPatch(), 1)
    copies = [copied(folder, f"copy{n}") for n in range(2)]
    forge_checkpoint(copies[1])
    one, same = gone_on(recipe, folder), gone_on(recipe, copies[0])
    assert sorted(one) == sorted(same) == [4, 5, 6, 7]
    assert shared(one, same) == [4] and np.array_equal(one[4][0], same[4][0])
    with pytest.raises(worker.ReplayConflict):
        gone_on(recipe, copies[1])
    moved = gone_on(recipe, copies[1])
    assert shared(one, moved) == [] and Ledger.read(copies[1].ledger).num_superseded == 1


def forge_checkpoint(folder: RunFolder) -> None:
    """Other parameters in the newest checkpoint, sealed as its own."""
    state = checkpoint.load_latest(folder.checkpoints)
    state.parameters += 0.1
    path = complete_checkpoints(folder.checkpoints)[-1] / "state.safetensors"
    tensors = {"flat": state.parameters, **{f"slot.{k}": v for k, v in state.slots.items()}}
    checkpoint._write(path, tensors)


# --- the plan is held against the recipe


def another_method(raw: dict[str, Any]) -> None:
    raw["method"] = {"name": "functional"}


def test_a_plan_is_executed_by_no_other_recipe(tmp_path):
    """Begun as sampled dp-sgd; then functional, which takes all records into each of its ten sums,
    at that plan's noise: refused before anything is summed, whatever was forged beside it."""
    _, folder = begun(tmp_path)
    edit(folder.recipe_file, another_method)
    with pytest.raises(UserError, match=r"method\."):
        prepare(load_recipe(folder.recipe_file), folder, "test")
    edit(folder.start_record, lambda raw: another_method(raw["recipe"]))
    with pytest.raises(UserError, match=r"plan\.json: phases"):
        prepare(load_recipe(folder.recipe_file), folder, "test")


# --- what both cost


@pytest.mark.slow
def test_the_budget_is_charged_for_what_both_released(tmp_path):
    """Charged Renyi divergence is that of all steps that anybody released."""
    limit = {"budget": str(tmp_path / "budgets"), "budget_ceiling": 20.0}
    recipe, folder = make(
        tmp_path, model="linear", privacy=SECRET | limit,
        training={"batch_size": 40, "steps": STEPS, "learning_rate": 0.5},
    )  # fmt: skip

    def on(folder: RunFolder, until: int | None = None) -> None:
        job = prepare(recipe, folder, "test")
        with _budget_charged(job):
            execute(job, until=until)

    on(folder, FORK)
    copy = copied(folder)
    on(copy)
    on(folder)
    (budget,) = read_budgets(tmp_path / "budgets")
    plan, cost = folder.read_plan(), budget.ceiling.cost
    released = FORK + 2 * (STEPS - FORK)
    assert budget.spent == pytest.approx(cost(plan.executed_phases([released]), plan.records))


def test_the_recipe_s_digest_covers_what_a_user_s_code_imports(tmp_path, monkeypatch):
    """A changed module beside the user's own is other code, though the own file is not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "replayed.py").write_text("from replayed_beside import WIDTH\n")
    recipe, _ = make(tmp_path, model="linear")
    model = recipe.model.model_copy(update={"name": "replayed:made"})
    recipe, digests = recipe.model_copy(update={"model": model}), set()
    for width in (4, 5):
        (tmp_path / "replayed_beside.py").write_text(f"WIDTH = {width}\n")
        digests.add(recipe_digest(recipe))
    assert len(digests) == 2
