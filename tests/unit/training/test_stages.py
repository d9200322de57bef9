"""A model that dpdist trained is trained again: what was paid before is found, and counted."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.own_loops import begin, ended, left, rows
from support.training import KEY, make
from torch import nn

import dpdist
from dpdist import PrivateTraining, UserError
from dpdist.data import load
from dpdist.privacy.budget import Charge, composed_guarantee
from dpdist.privacy.guarantee import BEGAN_APART, POST_PROCESSED
from dpdist.publishing import write_release
from dpdist.release.verify import verify_release
from dpdist.training.provenance import check_pretrained
from dpdist.training.records import data_source

WIDTH = 4
PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-3}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Net()


def training(folder: Path, model: nn.Module | None = None, **given: Any) -> PrivateTraining:
    torch.manual_seed(0)
    given = {"privacy": PRIVATE, "data": rows(60, 0, WIDTH), "batch_size": 12, "steps": 3, **given}
    return begin(folder, model or Net(), rate=0.2, **given)


@pytest.fixture
def first(tmp_path: Path) -> PrivateTraining:
    return ended(training(tmp_path / "first"))


def loaded(model: nn.Module) -> nn.Module:
    other = Net()
    other.load_state_dict(model.state_dict())
    return other


def a_copied_part(model: nn.Module) -> nn.Module:
    other = Net()
    other.first.load_state_dict(model.get_submodule("first").state_dict())
    for parameter in other.first.parameters():
        parameter.requires_grad_(False)
    return other


@pytest.mark.parametrize("way", [copy.deepcopy, loaded, a_copied_part])
def test_trained_weights_are_refused_unless_their_run_is_named(first, tmp_path, way):
    model = way(first.model)
    with pytest.raises(UserError, match="began_with") as refused:
        training(tmp_path / "second", model)
    assert str(tmp_path / "first") in str(refused.value)
    assert not (tmp_path / "second").exists()
    found = training(tmp_path / "second", model, began_with=first.run)
    assert [each.name for each in found.recipe.stages] == ["first"]


def test_weights_of_a_training_under_way_are_recognized(tmp_path):
    t = training(tmp_path / "elsewhere" / "first")
    t.step()
    for model in (t.model, loaded(t.model)):
        with pytest.raises(UserError, match="began_with"):
            training(tmp_path / "second", model)
    # Nothing of a network that was not trained is taken for it.
    training(tmp_path / "second").step()


def test_the_same_public_weights_are_nobody_s(tmp_path):
    public = Net()
    public.first.requires_grad_(False)
    training(tmp_path / "first", copy.deepcopy(public)).run_all()
    training(tmp_path / "second", copy.deepcopy(public)).step()


def test_the_guarantee_is_that_of_both_stages(first, tmp_path):
    alone = first.guarantee
    t = training(tmp_path / "second", first.model, began_with=str(first.run.path))
    assert t.guarantee.epsilon == pytest.approx(alone.epsilon)
    report = t.step()
    assert alone.epsilon < report.epsilon == t.guarantee.epsilon
    t.run_all()
    plan = first.plan
    charges = [Charge.for_plan(name, name, plan, plan.phases) for name in ("one", "two")]
    both = composed_guarantee(charges, plan.delta).epsilon
    facts = dpdist.load_results(t.run)
    card = facts.privacy_card()
    for epsilon in (t.guarantee.epsilon, facts.guarantee.epsilon, card["guarantee"]["epsilon"]):
        assert epsilon == pytest.approx(both, rel=1e-6)
    assert both > 1.2 * alone.epsilon
    assert "first" in card["extra"]["initial weights trained on"]


def test_a_third_stage_counts_the_first_two(first, tmp_path):
    second = training(tmp_path / "second", copy.deepcopy(first.model), began_with=first.run)
    second.model.first.requires_grad_(True)
    second.run_all()
    second.model.first.requires_grad_(False)
    third = ended(training(tmp_path / "third", second.model, began_with=second.run))
    assert third.guarantee.epsilon > second.guarantee.epsilon > first.guarantee.epsilon
    found = dpdist.load_results(third.run).privacy_card()
    assert len(found["mechanism"]) == 3
    assert "public" not in found["extra"]["frozen"]


def test_a_run_that_is_not_finished_counts_with_its_whole_plan(tmp_path):
    t = training(tmp_path / "first")
    t.step()
    whole = t.plan.guarantee().epsilon
    assert t.guarantee.epsilon < whole
    second = training(tmp_path / "second", t.model, began_with=t.run)
    assert second.guarantee.epsilon == pytest.approx(whole)


def test_restarts_of_the_first_stage_count(tmp_path):
    left(training(tmp_path / "first", resources={"checkpoint_seconds": 1e6}), 1)
    again = training(tmp_path / "first", resources={"micro_batch": 7})  # sums of other bits
    again.run_all()
    released = again.guarantee.epsilon
    second = training(tmp_path / "second", again.model, began_with=again.run)
    assert second.guarantee.epsilon == pytest.approx(released)
    assert released > again.plan.guarantee().epsilon


def test_words_of_the_first_stage_are_inherited(tmp_path):
    t = training(tmp_path / "first", privacy={**PRIVATE, "run_key": KEY}, private_metrics=True)
    assert t.guarantee.kind == "proved"
    t.run_all()
    second = ended(training(tmp_path / "second", t.model, began_with=t.run))
    facts = dpdist.load_results(second.run)
    assert facts.guarantee.kind == second.guarantee.kind == POST_PROCESSED
    assert facts.has_fixed_key and not facts.privacy_card()["private"]


def test_without_noise_before_nothing_is_proved_after(tmp_path):
    t = ended(training(tmp_path / "first", privacy={"noise_multiplier": 0, "delta": 1e-3}))
    second = ended(training(tmp_path / "second", t.model, began_with=t.run))
    assert math.isinf(second.guarantee.epsilon)
    assert not dpdist.load_results(second.run).privacy_card()["private"]


def test_two_relations_have_no_joint_number(tmp_path):
    t = ended(training(tmp_path / "first", privacy={**PRIVATE, "adjacency": "replace-one"}))
    second = ended(training(tmp_path / "second", t.model, began_with=t.run))
    facts = dpdist.load_results(second.run)
    card = facts.privacy_card()
    assert any(line.startswith(BEGAN_APART) for line in card["assumptions"])
    own = second.plan.guarantee().epsilon
    assert facts.guarantee.epsilon == pytest.approx(own)
    assert "replace-one" in facts.privacy_statement


def released(t: PrivateTraining) -> Path:
    write_release(t.run, not_private=True, license="MIT")
    return t.run.release_folder


@pytest.fixture
def factory(monkeypatch) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return "test_stages:net"


def test_a_release_is_a_first_stage(tmp_path, factory):
    t = ended(training(tmp_path / "first", factory=factory))
    release = dpdist.load(released(t), trusted_factory=factory)
    model = release.model.train()
    with pytest.raises(UserError, match="began_with"):
        training(tmp_path / "second", model)
    second = training(tmp_path / "second", model, began_with=release)
    assert second.guarantee.epsilon == pytest.approx(t.guarantee.epsilon)
    copied = shutil.copytree(release.path, tmp_path / "elsewhere")
    training(tmp_path / "third", loaded(model), began_with=copied)
    training(tmp_path / "third", model, began_with=t.run)  # in whose folder the release lies


def test_a_second_stage_is_released_and_verified(first, tmp_path, factory):
    t = ended(training(tmp_path / "second", first.model, began_with=first.run, factory=factory))
    folder = released(t)
    assert dpdist.load(folder).epsilon == pytest.approx(t.guarantee.epsilon)
    verify_release(folder, trusted_factory=factory)


def test_private_metrics_make_the_kind_assumed_wherever_it_stands(tmp_path, factory):
    shown = {"factory": factory, "private_metrics": True}
    t = training(tmp_path / "first", **shown)
    t.step()
    assert t.guarantee.kind == POST_PROCESSED
    t.close()
    again = training(tmp_path / "first", factory=factory)  # no longer asked for, and on record
    again.run_all()
    facts = dpdist.load_results(again.run)
    assert facts.guarantee.kind == again.guarantee.kind == POST_PROCESSED
    folder = released(again)
    said = dict(verify_release(folder, trusted_factory=factory))
    assert POST_PROCESSED in said["epsilon, recomputed"]


def test_a_recipe_does_not_begin_with_a_script_s_run(first, tmp_path):
    recipe, _ = make(
        tmp_path / "runs", "recipe", model={
            "name": "linear",
            "initial": {"folder": str(first.run.model_folder),
            "pretraining_data": "public pictures"},
        },
    )  # fmt: skip
    with pytest.raises(UserError):
        check_pretrained(recipe, load(data_source(recipe), "train"), "recipe")


def test_a_budget_over_both_stages_states_no_less(tmp_path):
    charged = {"privacy": {**PRIVATE, "budget": str(tmp_path / "budgets")}}
    t = ended(training(tmp_path / "first", **charged))
    second = ended(training(tmp_path / "second", t.model, began_with=t.run, **charged))
    facts = dpdist.load_results(second.run)
    assert facts.data_set_guarantee.epsilon == pytest.approx(facts.guarantee.epsilon, rel=1e-6)


@pytest.mark.slow
def test_a_search_is_a_first_stage(tmp_path):
    inputs, labels = rows(60, 0, WIDTH)

    def train(config: Any) -> PrivateTraining:
        model = nn.Linear(WIDTH, 2)
        return begin(
            config.folder, model, rate=config["lr"], data=config.data, privacy=config.privacy,
            batch_size=12, steps=2,
        )  # fmt: skip

    search = dpdist.tune(
        train, {"lr": {"choice": [0.1, 0.5]}}, data=(inputs[:40], labels[:40]),
        num_trials={"name": "fixed", "runs": 2}, score={"public": (inputs[40:], labels[40:])},
        privacy={"noise_multiplier": 4.0, "delta": 1e-3}, folder=tmp_path / "search",
        executor="local",
    )  # fmt: skip
    model = nn.Linear(WIDTH, 2)
    model.load_state_dict(load_file(search.best.model_folder / "model.safetensors"))
    with pytest.raises(UserError, match="began_with"):
        training(tmp_path / "second", model)
    second = training(tmp_path / "second", model, began_with=search.best)
    assert second.guarantee.epsilon == pytest.approx(search.guarantee.epsilon)
    assert second.step().epsilon > search.guarantee.epsilon


def test_a_run_does_not_begin_with_itself(first):
    with pytest.raises(UserError, match="began_with"):
        training(first.run.path, first.model, began_with=first.run)
