"""The mechanism audit where a user is the unit: a canary is a user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import train
from support.users import MOST, USERS, recipe_of, write
from torch import Tensor

from dpdist.audits.mechanism import run_scenarios
from dpdist.audits.registry import run_audit
from dpdist.audits.step_harness import WIDTH, StepHarness, probe_users
from dpdist.audits.target import target_of_recipe, target_of_run
from dpdist.config.sections import MechanismAudit
from dpdist.data.protocol import UserRecords, Users
from dpdist.gradients.clipping import make_clipping
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.training.canaries import (
    GradientCanaries,
    UsersWithCanaries,
    canary_coordinates,
    draw_coins,
)
from dpdist.training.records import data_source, records_with_canaries

ERROR, RELEASES = 1e-6, 2_000


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPDIST_CACHE", str(tmp_path / "cache"))


def found(pieces: type[StepHarness], scenarios: list[str], clipping: str = "flat") -> list[str]:
    """Return the scenes that pieces with a fault are found by."""

    def build(step_plan: StepPlan) -> StepHarness:
        key = derive_key(bytes(32), "groups", repr(step_plan))
        return pieces(step_plan, make_clipping(clipping, step_plan.clip_norm), 1, key, MOST)

    return run_scenarios(build, 1.0, RELEASES, ERROR, scenarios=scenarios).rejected_scenarios


# --- what is driven -----------------------------------------------------------------------------


def test_a_canary_is_a_group_of_more_records_than_count():
    groups = probe_users(np.array([5, -1, 7]), MOST)
    assert isinstance(groups, UserRecords) and len(groups) == 3
    assert len(groups.records) == 3 * (MOST + 1)
    inputs = groups.for_step(bytes(32)).batch(np.arange(3))
    assert inputs.shape == (3, MOST, WIDTH)
    assert torch.equal(inputs.sum((1, 2)), torch.tensor([MOST, 0.0, MOST]))


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per-layer"])
def test_a_group_moves_a_release_by_one_clip(clipping):
    """Without noise, worked out by hand: one clip along a group's coordinate, whatever its size."""
    step_plan = StepPlan(0.0, 1.0, 8.0, 0.7, None)
    rule = make_clipping(clipping, 0.7)
    harness = StepHarness(step_plan, rule, 2, bytes(32), MOST)
    assert harness.step.engine.records_per_example == MOST
    seen = harness.run_step(np.array([3, 9, -1, 9]), 0)
    assert seen is not None
    expected = np.zeros(WIDTH)
    expected[[3, 9]] = 1, 2
    along = seen.sum(0) / np.sqrt(2)
    np.testing.assert_allclose(along, expected / (1 + 2**-8), atol=2e-4)  # the clip's slack
    assert (along <= expected + 1e-9).all()


# --- faults -------------------------------------------------------------------------------------


class ClipsEachRecord(StepHarness):
    """Every record of a group joins and is clipped alone, as where records are the unit."""

    def records(self, coordinates: np.ndarray) -> Any:
        grouped = super().records(coordinates)
        assert isinstance(grouped, UserRecords)
        codes, first = np.unique(grouped.users.codes, return_index=True)
        assert len(codes) == len(coordinates) == len(first)
        return UserRecords(grouped.records, Users(np.arange(len(grouped.records)), MOST))


class AddsClippedRecords(StepHarness):
    """A wrong step: it clips each record of a group that joins, and not their sum."""

    class kind(StepHarness.kind):
        def _clipped_sums(self, step: int, step_plan: StepPlan) -> tuple[Tensor, Any]:
            rows, seen = super()._clipped_sums(step, step_plan)
            return rows * MOST, seen


class LessNoise(StepHarness):
    class kind(StepHarness.kind):
        def release(
            self, step: int, rows: Tensor, noise_std: float, flag: bool = False
        ) -> tuple[Tensor, bool]:
            return super().release(step, rows, 0.7 * noise_std, flag)


class DividesByJoined(StepHarness):
    """The sum is divided by the groups that there are."""

    def run_step(self, coordinates: np.ndarray, step: int) -> np.ndarray | None:
        seen = super().run_step(coordinates, step)
        return None if seen is None else seen / max(1, len(coordinates))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pieces", "by"),
    [
        (ClipsEachRecord, "canaries"), (AddsClippedRecords, "canaries"), (LessNoise, "canaries"),
        (DividesByJoined, "neighbor"),
    ],
)  # fmt: skip
def test_every_fault_is_found(pieces, by):
    assert found(pieces, [by]) == [by]


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_sound_pieces_are_not_accused(clipping):
    scenes = ["canaries", "neighbor", "witness", "alone"]
    assert found(StepHarness, scenes[: 4 if clipping == "flat" else 1], clipping) == []


# --- of recipes and of runs ---------------------------------------------------------------------


FEW = MechanismAudit(releases=400, workers=1)


def scans(root: Path) -> Path:
    write(root)
    write(root, split="test", seed=1, users=20, name="other {}")
    return root


@pytest.mark.slow
def test_a_recipe_s_mechanism_is_held_against_what_is_proved_of_users(tmp_path):
    recipe = recipe_of(scans(tmp_path / "data"), audit=FEW.model_dump(mode="json"))
    target = target_of_recipe(recipe, "test")
    assert target.plan.records == USERS
    audited = run_audit(FEW, target, tmp_path / "audit", lambda done, total: None)
    assert audited.adjacency == target.proved.relation
    assert audited.adjacency.startswith("zero-out of a user")
    assert audited.details["records_of_a_user"] == MOST and audited.verdict == "consistent"
    assert 0 < audited.epsilon < audited.proved == target.proved.epsilon


@pytest.mark.slow
def test_of_a_run(tmp_path, dpdist, monkeypatch):
    run = RunFolder(tmp_path / "runs" / "x")
    train(recipe_of(scans(tmp_path / "data"), privacy__run_key=None), run)
    words = ("audit", "x", "--runs", tmp_path / "runs", "--set", "audit.workers=1")
    done = dpdist(*words, "--set", "audit.releases=400")
    assert done.code == 0, done.err
    (audited,) = load_results(run).audits
    assert "zero-out of a user" in audited.summary_line


# --- one training with many canary groups -------------------------------------------------------


CANARIES = {"kind": "canaries", "canaries": 40, "guesses": 20}


def planted(root: Path, **sections: Any) -> Any:
    """A recipe whose model has a coordinate for each canary."""
    model = {"name": "mlp", "options": {"hidden": [16]}}
    steps = {"training__steps": 6, "training__epochs": None, "model": model}
    return recipe_of(root, **{"audit": CANARIES, **steps, **sections})


def test_canary_groups_lie_behind_the_groups_and_are_counted(tmp_path):
    recipe = planted(scans(tmp_path / "data"))
    plain = recipe.model_copy(update={"audit": None})
    source = data_source(recipe)
    whole, groups = (records_with_canaries(each, source) for each in (recipe, plain))
    assert isinstance(whole, UsersWithCanaries) and len(whole) == USERS + 40
    assert whole.num_records == len(groups) == USERS
    assert whole.fingerprint != groups.fingerprint
    assert target_of_recipe(recipe, "test").plan.records == USERS + 40
    some = np.array([0, 7, USERS - 1])
    assert torch.equal(whole.batch(some), groups.batch(some))


def test_a_canary_group_that_is_in_adds_one_clip_along_its_coordinate(tmp_path, monkeypatch):
    """Whenever it joins, and nothing else; one that is out adds nothing. The audit finds no more
    than is proved of groups."""
    kept, found = GradientCanaries.add_to_sums, list[tuple[np.ndarray, np.ndarray]]()

    def noted(self: Any, sums: Tensor, members: Any) -> None:
        before = sums.sum(0).numpy().copy()
        kept(self, sums, members)
        joined = np.concatenate([each for _, each in members])
        found.append((sums.sum(0).numpy() - before, joined[joined >= USERS] - USERS))

    monkeypatch.setattr(GradientCanaries, "add_to_sums", noted)
    recipe, run = planted(scans(tmp_path / "data")), RunFolder(tmp_path / "run")
    train(recipe, run)
    coins = draw_coins(run.read_run_key(), 40)
    assert len(found) == 6 and 0 < coins.sum() < 40 and sum(len(each) for _, each in found) > 15
    for added, joined in found:
        expected = np.zeros(len(added))
        expected[canary_coordinates(40, len(added))[joined[coins[joined]]]] = 1.0
        np.testing.assert_allclose(added, expected, atol=1e-9)
    facts = load_results(run)
    target = target_of_run(run, facts.guarantee)
    audited = run_audit(recipe.audit, target, tmp_path / "audit", lambda done, total: None)
    assert audited.adjacency.startswith("zero-out of a user")
    assert audited.verdict == "consistent" and 0 <= audited.epsilon < audited.proved
    assert "40 of its 100 users are gradient canaries" in str(facts.canary_notice)
