"""`dpdist audit --kind membership`: the bank, its numbers, and that none of it leaves private/."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.folder_contents import contents
from support.settings import sets
from support.training import make, parameters, train

from dpdist import pipeline
from dpdist.audits import trainings
from dpdist.audits.membership import Membership
from dpdist.audits.membership_findings import ATTACKS, run_attacks
from dpdist.audits.membership_statistics import BankScores
from dpdist.audits.trainings import ShadowTrainer
from dpdist.core.errors import UserError
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe
from dpdist.training import job, records

SEED = "5b" * 32
HOME = "runs/x/private/attacks"


def recipe_of(tmp_path: Path, **more: Any) -> Recipe:
    """Full batches of a linear model: cheap, and its loss has a closed form."""
    values: dict[str, Any] = {
        "data__max_train": 120, "training__batch_size": 20, "training__steps": 3,
        "model": "linear", "privacy__run_key": None, "privacy__noise_multiplier": 3.0,
    }  # fmt: skip
    recipe, _ = make(tmp_path, **(values | more))
    (tmp_path / "x.yaml").write_text(recipe.to_yaml())
    return recipe


@pytest.mark.slow
def test_a_bank_is_attacked_and_stays_private(dpdist_without_ray: Any, tmp_path: Path) -> None:
    recipe_of(tmp_path)
    given = sets("membership", "models=4", "attacks=[lira,rmia]")
    asked = ("audit", "x.yaml", "--kind", "membership", *given)
    done = dpdist_without_ray(*asked)
    assert done.code == 0, done.err
    assert "confidence 98.75 %" in done.out  # alpha is shared with the attacks of other calls
    found = json.loads((tmp_path / HOME / "membership-coins-4/membership.json").read_text())
    assert [one["attack"] for one in found["attacks"]] == ["lira", "rmia"]
    assert found["proved"]["size_public"] is False  # the number of members is drawn as well
    assert found["attacks"][0]["one_run_epsilon"] <= found["proved"]["epsilon"]
    outside = [name for name in contents(tmp_path / "runs") if not name.startswith("x/private/")]
    assert sorted(outside) == ["x/recipe.yaml", "x/run.json"]
    # The same command attacks again, and trains nothing.
    before = contents(tmp_path / HOME)
    again = dpdist_without_ray(*asked)
    assert again.out == done.out and again.err == ""
    assert contents(tmp_path / HOME) == before


def test_the_papers_protocol_attacks_any_target_through_a_plain_shadow(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, privacy__noise_multiplier=0.0, privacy__clip_norm=0.01)
    settings = Membership(game="quarters", models=2, seed=SEED)
    (own, plan), (plain, free) = settings.plan_shadows(recipe, 108)
    assert own.method == recipe.method and plan.clip_norm == 0.01
    assert plain.privacy.clipping == "none" and free.clip_norm == math.inf
    assert plan.records == free.records == 27 and not plan.nominal


def test_the_number_of_members_is_declared_where_coins_draw_it(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    for game, nominal in (("coins", True), ("halves", False)):
        for _, plan in Membership(game=game).plan_shadows(recipe, 108):
            assert (plan.records, plan.nominal) == (54, nominal)


def test_each_shadow_has_a_key_and_members_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def training(*given: Any) -> None:
        raise Asked(*given)

    recipe = recipe_of(tmp_path)
    source, settings = records.data_source(recipe), Membership(models=3, seed=SEED)
    subject = SimpleNamespace(
        recipe=recipe,
        load_training_data=lambda: records.records_with_canaries(recipe, source),
        test_data=records.load_test_records(recipe, source),
    )
    trainer = ShadowTrainer(settings.job_spec(subject).setup_of_seed(SEED))  # type: ignore[arg-type]
    monkeypatch.setattr(trainings, "train_in_process", training)
    for number in range(3):
        with pytest.raises(Asked) as asked:
            trainer(number)
        of, _, of_all, members, key = asked.value.args
        secret = bytes.fromhex(SEED)
        assert of.method == recipe.method and key == derive_key(secret, "shadow", number)
        drawn = settings.game_rules.members(secret, number, len(of_all))
        assert members.tolist() == drawn.tolist()


@pytest.mark.parametrize(
    ("game", "seed", "alpha"),
    [("coins", None, 0.05 / (4 * 2)), ("coins", SEED, None), ("halves", None, None)],
)
def test_guesses_are_a_test_only_of_secret_coins_and_all_attacks_share_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, game: Any, seed: Any, alpha: float | None
) -> None:
    rng = np.random.default_rng(0)
    member = rng.random((4, 100)) < 0.5
    bank = BankScores(member, rng.normal(9 * member), np.zeros((4, 100, 3)), np.zeros((4, 9)))
    read = {"seed": SEED}, {1: bank, 5: bank}
    monkeypatch.setattr(Membership, "read", lambda *_: read)
    settings, path = Membership(game=game, models=4, seed=seed), tmp_path / "scores.parquet"
    found = run_attacks(settings, recipe_of(tmp_path), path, [ATTACKS["lira"]])
    assert [one.passes for one in found.attacks] == [1, 5]
    for one in found.attacks:
        test = one.one_run_test
        assert (test and (test.guesses, test.correct, test.alpha)) == (alpha and (2, 2, alpha))
    assert bool(found.ceilings) == (seed is None)


@pytest.mark.slow
def test_a_shadow_is_the_recipes_own_training(
    dpdist_without_ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters are those of a run of the recipe on its members, with its key."""
    recipe = recipe_of(tmp_path)
    settings = Membership(game="halves", models=2, seed=SEED)
    path = pipeline.evaluation_stage(recipe, _begun(recipe, tmp_path), settings)
    about, banks = settings.read(path)
    half = banks[1].member.shape[1] // 2
    assert about["seed"] == SEED and banks[1].member.sum(1).tolist() == [half, half]
    key = derive_key(bytes.fromhex(SEED), "shadow", 1).hex()
    privacy = recipe.privacy.model_copy(update={"run_key": key})
    kept, real = banks[1].member[1], records.records_with_canaries
    monkeypatch.setattr(job, "records_with_canaries", lambda *given: real(*given).select(kept))
    alone = RunFolder(tmp_path / "alone")
    train(recipe.model_copy(update={"privacy": privacy}), alone)
    tensors = load_file(path.parent / "models/0001/model.safetensors")
    found = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    assert torch.equal(found, parameters(alone))


def test_a_recipe_that_needs_teachers_is_refused_before_a_shadow_is_trained() -> None:
    with pytest.raises(UserError, match="digits-pate"):
        Membership().plan_shadows(load_recipe(find_recipe("digits-pate")), 1400)


def _begun(recipe: Recipe, tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / recipe.name)
    folder.create_or_open(recipe)
    return folder


@pytest.mark.slow
def test_an_interrupted_bank_continues_to_the_same_bytes(
    dpdist_without_ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path)
    folder = _begun(recipe, tmp_path)
    whole = pipeline.evaluation_stage(recipe, folder, Membership(models=3, seed=SEED))
    broken = folder.private / "attacks" / "broken"
    settings = Membership(models=3, seed=SEED)
    real = ShadowTrainer.__call__

    def dies(self: ShadowTrainer, number: int) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return real(self, number)

    with monkeypatch.context() as inner, pytest.raises(KeyboardInterrupt):
        inner.setattr(ShadowTrainer, "__call__", dies)
        pipeline.evaluation_stage(recipe, folder, settings, broken)
    assert (broken / "models/0000").is_dir() and not (broken / "scores.parquet").exists()
    again = pipeline.evaluation_stage(recipe, folder, settings, broken)
    for name in ("scores.parquet", "models/0002/model.safetensors"):
        assert (again.parent / name).read_bytes() == (whole.parent / name).read_bytes()
    # Another recipe's bank.
    other = recipe_of(tmp_path, training__learning_rate=0.3)
    with pytest.raises(UserError, match="learning_rate"):
        pipeline.evaluation_stage(other, folder, settings, broken)
    with pytest.raises(UserError, match="seed_given"):  # no ceiling is valid for it
        pipeline.evaluation_stage(recipe, folder, Membership(models=3), broken)
    assert broken.stat().st_mode & 0o077 == 0
