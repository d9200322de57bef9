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
from dpdist.audits.step_harness import StepHarness
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


class ClipsEachRecord(StepHarness):
    """Every record of a group joins and is clipped alone, as where records are the unit."""

    def records(self, coordinates: np.ndarray) -> Any:
        grouped = super().records(coordinates)
        assert isinstance(grouped, UserRecords)
        codes, first = np.unique(grouped.users.codes, return_index=True)
        assert len(codes) == len(coordinates) == len(first)
        return UserRecords(grouped.records, Users(np.arange(len(grouped.records)), MOST))


@pytest.mark.slow
def test_a_fault_of_groups_is_found_and_sound_pieces_are_not_accused():
    for pieces, rejected in ((ClipsEachRecord, ["canaries"]), (StepHarness, [])):

        def build(step_plan: StepPlan, pieces: type[StepHarness] = pieces) -> StepHarness:
            key = derive_key(bytes(32), "groups", repr(step_plan))
            return pieces(step_plan, make_clipping("flat", step_plan.clip_norm), 1, key, MOST)

        found = run_scenarios(build, 1.0, RELEASES, ERROR, scenarios=["canaries"])
        assert found.rejected_scenarios == rejected


def test_all_scenes_share_the_error():
    # Of two scenes too: which ones are shown may be chosen afterwards.
    def build(step_plan: StepPlan) -> StepHarness:
        return StepHarness(step_plan, make_clipping("flat", 1.0), 1, bytes(32), None)

    found = run_scenarios(build, 1.0, 10, 0.05, scenarios=["canaries", "alone"]).audits
    assert {name: audit.counts.alpha for name, audit in found.items()} == {
        "canaries": pytest.approx(0.01), "alone": pytest.approx(0.01)
    }  # fmt: skip


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
