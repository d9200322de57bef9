"""privacy.unit: user in recipes: what is counted, refused and stated, and whole trainings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_loops import begin
from support.training import KEY, execute, parameters, train
from support.users import MOST, USERS, recipe_of, write

import dpdist
from dpdist import UserError
from dpdist.audits.membership import Membership
from dpdist.audits.registry import run_audit
from dpdist.audits.target import Target
from dpdist.config.sections import ManyRunsAudit
from dpdist.data.protocol import UserRecords, Users
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.poisoning.evaluation import Poisoning
from dpdist.privacy.plan import PrivacyPlan, UserUnit
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import make_plan
from dpdist.training import records as chosen
from dpdist.training.job import check_trainable, prepare
from dpdist.training.private_step import PrivateStep

pytestmark = pytest.mark.filterwarnings("ignore:privacy.run_key")


@pytest.fixture
def root(tmp_path) -> Path:
    write(tmp_path / "data")
    write(tmp_path / "data", split="test", seed=1, users=20, name="other {}")
    return tmp_path / "data"


def test_everything_is_counted_from_users(root):
    recipe = recipe_of(root)
    dataset, _ = check_trainable(recipe, "test")
    assert len(dataset) == USERS and len(dataset.labels) > 3 * USERS
    plan = make_plan(recipe, len(dataset), "test")
    step = plan.step(0)
    assert (plan.records, step.sample_rate, step.expected_batch) == (USERS, 0.2, 12)
    assert plan.steps == 2 * USERS // 12
    assert plan.user == UserUnit("patient", MOST)
    same = PrivacyPlan.dp_sgd(
        records=USERS, batch_size=12, noise_multiplier=1.0, steps=plan.steps, delta=1e-3,
        user=UserUnit("patient", MOST),
    )  # fmt: skip
    assert same == plan
    same = replace(same, user=None)
    assert plan.guarantee().epsilon == same.guarantee().epsilon


def test_parts_hold_whole_users_and_shares_are_of_users(root):
    recipe = recipe_of(root, data__public=0.3, data__private_eval_fraction=0.2, data__fraction=0.6)
    source = chosen.data_source(recipe)
    parts = [
        chosen.declared_public_records(recipe, source),
        chosen.private_records_between(recipe, source, 0.0, 0.2),
        chosen.training_records(recipe, source),
    ]
    users = [set(part.user_hashes.tolist()) for part in parts]
    assert all(users) and not set.intersection(*users) and sum(map(len, users)) < USERS
    assert not users[0] & users[1] and not users[1] & users[2] and not users[0] & users[2]


def test_one_person_s_records_move_nothing_else(root, tmp_path):
    """However many records a person has: number of users minus one, and the same sides for all."""
    settings = {
        "data__public": 0.2,
        "data__private_eval_fraction": 0.2,
        "data__max_train": 40,
        "data__fraction": 0.8,
    }
    own = write(tmp_path / "data")
    largest = max(set(own), key=own.count)
    recipe = recipe_of(root, **settings)
    before = chosen.records_with_canaries(recipe, chosen.data_source(recipe))
    write(tmp_path / "fewer", drop=largest)
    write(tmp_path / "fewer", split="test", seed=1, users=20, name="other {}")
    without = recipe_of(tmp_path / "fewer", **settings)
    after = chosen.records_with_canaries(without, chosen.data_source(without))
    one, other = set(before.user_hashes.tolist()), set(after.user_hashes.tolist())
    assert own.count(largest) > 3 and len(one - other) <= 1 and not other - one
    assert len(before) - len(after) == len(one - other)
    assert 10 < len(before) < 40


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"privacy__max_records_per_user": 0}, "max_records_per_user"),
        ({"privacy__adjacency": "replace-one"}, "adjacency"),
        ({"privacy__batch_cap": 20}, "batch_cap"),
        ({"privacy__nominal_records": 60}, "nominal_records"),
        ({"privacy__budget": "/tmp/budget"}, "budget"),
        ({"audit": {"kind": "many-runs"}}, "audit.kind"),
        ({"method": {"name": "functional"}}, "user works with"),
        ({"method": {"name": "secure-sgd", "redistribution": None}}, "user works with"),
        ({"method": {"name": "input-noise", "sigma": 0.1, "consistency": 1.0}}, "user works with"),
    ],
)
def test_what_is_not_made_for_users_is_refused(root, sections, said):
    with pytest.raises(UserError, match=said):
        recipe_of(root, **sections)


def test_audits_and_votes_of_single_records_are_refused(root, tmp_path):
    recipe = recipe_of(root)
    plan = make_plan(recipe, USERS, "test")
    target = Target(recipe, plan, plan.guarantee())
    with pytest.raises(UserError, match="unit: user"):
        run_audit(ManyRunsAudit(), target, tmp_path / "audit", lambda done, total: None)
    with pytest.raises(UserError, match=r"privacy\.unit"):
        Membership().plan_shadows(recipe, USERS)
    with pytest.raises(UserError, match=r"privacy\.unit"):
        Poisoning().training_plan(recipe, USERS)


@pytest.mark.parametrize(
    "change", [lambda own: [*own[:-2], None, None], lambda own: [float(len(each)) for each in own]]
)
def test_unknown_users_are_refused(root, change):
    write(root, change=change)
    with pytest.raises(UserError, match="patient"):
        check_trainable(recipe_of(root), "test")


def test_a_user_in_both_splits_is_refused(root):
    write(root, split="test", seed=1, users=3)
    with pytest.raises(UserError, match="3 users"):
        check_trainable(recipe_of(root), "test")


def test_a_run_on_a_parquet_file_states_its_users(root, tmp_path):
    recipe, folder = recipe_of(root), RunFolder(tmp_path / "run")
    train(recipe, folder)
    found = load_results(folder)
    assert found.guarantee.user is not None and found.plan.records == USERS
    card = found.privacy_card()
    assert card["unit"].startswith("a user") and card["records"] == USERS
    assert found.guarantee.relation == card["relation"]


def test_on_two_workers_a_user_lies_whole(root, tmp_path):
    """Sums are those of one worker, for a worker holds users: to the bit with canonical shards."""
    recipe = recipe_of(root, training__reproducible=True)
    one, two = (RunFolder(tmp_path / f"{count}") for count in (1, 2))
    execute(prepare(recipe, one, "test"), 1)
    execute(prepare(recipe, two, "test"), 2)
    assert torch.equal(parameters(one), parameters(two))


PRIVACY = {
    "noise_multiplier": 1.0, "delta": 1e-2, "unit": "user", "max_records_per_user": 2,
    "run_key": KEY,
}  # fmt: skip
WHOM = [f"p{place % 17}" for place in range(90)]


def points(count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def loop_of(folder: Path, data: Any = None, **options: Any) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    given = dpdist.as_records(points(), unit=WHOM) if data is None else data
    settings = {"data": given, "privacy": PRIVACY, "batch_size": 5, "steps": None, "epochs": 2}
    return begin(folder, torch.nn.Linear(4, 2), rate=0.5, **(settings | options))


def test_a_loop_of_one_s_own_counts_samples_and_states_users(tmp_path):
    training = loop_of(tmp_path / "run")
    assert training.plan.records == 17 and training.plan.step(0).sample_rate == 5 / 17
    assert training.remaining_steps == 2 * 17 // 5
    before = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    training.step()
    key = training._loop.step.key
    torch.manual_seed(0)
    engine = GradientEngine(
        torch.nn.Linear(4, 2), cross_entropy, clipping=FlatClipping(1.0),
        micro_batch=training._engine.micro_batch,
    )  # fmt: skip
    users = UserRecords(dpdist.as_records(points()), Users.from_values(WHOM, 2))
    alone = PrivateStep(engine, users, key, training._loop.step.attempt)
    expected = alone.gradient(0, training.plan.step(0))[0].clone()
    after = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    torch.testing.assert_close((before - after) / 0.5, expected.float(), rtol=1e-4, atol=1e-6)
    run = training.run_all()
    card = load_results(run).privacy_card()
    assert card["records"] == 17 and card["unit"].startswith("a user")


def test_a_loop_refuses_what_names_no_users(tmp_path):
    for data in (points(), dpdist.as_records(points(), unit=[*WHOM[:-1], 7])):
        with pytest.raises(UserError, match="unit"):
            loop_of(tmp_path / "none", data)
    with pytest.raises(UserError, match="unit"):
        dpdist.as_records(points(), unit=[*WHOM[:-1], None])


def test_a_private_user_is_not_held_out(tmp_path):
    inputs, labels = points(20)
    public = dpdist.as_records((inputs + 1, labels), unit=["p3", *["x"] * 19])
    with pytest.raises(UserError, match=r"eval_data: .*got 1 "):
        loop_of(tmp_path / "run", eval_data=public)
    with pytest.raises(UserError, match="eval_data"):
        loop_of(tmp_path / "run", eval_data=(inputs, labels))
