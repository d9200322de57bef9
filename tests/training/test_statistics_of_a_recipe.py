"""A recipe that buys the constants of its columns: once, before the training, in one budget."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from typer.testing import CliRunner

import dpdist
from dpdist import UserError
from dpdist.cli.main import app
from dpdist.pipeline import dry_run
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianCounts, RepeatAndSelect, walk_phases
from dpdist.publishing import write_release
from dpdist.release.verify import verify_release
from dpdist.runs.recipe import Recipe, check_plan, load_recipe, without_privacy
from dpdist.training import statistics as bought
from dpdist.training.job import prepare
from dpdist.tuning.search import check_search

COUNT, DELTA, MULTIPLIER = 400, 1e-4, 4.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "visits").mkdir()
    for split, count in (("train", COUNT), ("test", 60)):
        with (tmp_path / f"visits/{split}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["age", "dose", "ward", "person", "ill"])
            for row in range(count):
                age = min(max(rng.normal(50, 15), 1), 99)
                dose = "" if rng.random() < 0.2 else f"{rng.lognormal(3, 1):.3f}"
                ward = rng.choice(["surgery", "medicine"])
                lines.writerow([f"{age:.3f}", dose, ward, f"{split}-{row // 4}", int(age > 50)])
    return tmp_path


def recipe_of(root: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "run",
        "data": {
            "name": "visits", "root": str(root), "classes": 2,
            "columns": {
                "label": "ill", "features": ["ward", "dose", "age"],
                "preprocessing": {"ward": {"categories": ["surgery", "medicine"]}},
            },
        },
        "statistics": {
            "noise_multiplier": MULTIPLIER,
            "columns": {"age": {"range": [0, 150]}, "dose": {"missing": "flag"}},
        },
        "model": {"name": "linear"},
        "privacy": {"noise_multiplier": 1.5, "delta": DELTA},
        "training": {"batch_size": 40, "steps": 4, "learning_rate": 1.0},
    }  # fmt: skip
    for key, value in changes.items():
        values[key] = {**values[key], **value} if key in values and value else value
    return Recipe.model_validate(values)


def ran(recipe: Recipe, root: Path) -> dpdist.RunFolder:
    return dpdist.run(recipe, runs=root / "runs", executor="local")


def by_hand(sampled: float, steps: int = 4) -> float:
    accountant = PLDAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dpa.GaussianDpEvent(MULTIPLIER))
    step = dpa.PoissonSampledDpEvent(sampled, dpa.GaussianDpEvent(1.5))
    accountant.compose(dpa.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(DELTA))


def test_constants_are_bought_before_the_training_and_counted_with_it(root):
    recipe = recipe_of(root)
    folder = ran(recipe, root)
    facts = dpdist.load_results(folder)
    assert facts.guarantee.epsilon == pytest.approx(by_hand(40 / COUNT), rel=2e-3)
    kept = folder.read_recipe()
    rules = kept.data.columns.preprocessing
    low, high = rules["age"].range
    assert 0 < low < high < 150
    assert rules["age"].missing == pytest.approx(50, abs=20)
    assert rules["dose"].missing == "flag"
    assert rules["ward"] == recipe.data.columns.preprocessing["ward"]
    assert kept.statistics.constants == {name: rules[name] for name in ("age", "dose")}
    written = json.loads((root / "runs/run-statistics/statistics.json").read_text())
    assert written["missing"]["dose"] == pytest.approx(0.2, abs=0.2)
    assert "6 histograms of the records" in str(facts.privacy_card()["mechanism"])


def test_the_call_in_python_finds_the_same_constants(root):
    fixed = {"noise_multiplier": 1.5, "run_key": "7" * 64}
    folder = ran(recipe_of(root, privacy=fixed), root)
    found = folder.read_recipe().data.columns.preprocessing
    told = dpdist.statistics(
        root / "visits/train.csv", {"age": {"range": [0, 150]}, "dose": {"missing": "flag"}},
        privacy={"noise_multiplier": MULTIPLIER, "delta": DELTA, "run_key": "7" * 64},
        folder=root / "told",
    )  # fmt: skip
    for name, rule in told.columns.items():
        assert found[name].model_dump(mode="json", exclude_defaults=True) == rule
    assert dpdist.load_results(folder).guarantee.fixed_key


def test_a_run_that_is_repeated_buys_nothing_again(root):
    recipe = recipe_of(root)
    folder = ran(recipe, root)
    ledger = (root / "runs/run-statistics/private/ledger.jsonl").read_bytes()
    rules = folder.read_recipe().data.columns.preprocessing
    assert ran(recipe, root).read_recipe().data.columns.preprocessing == rules
    shutil.rmtree(root / "runs/run-statistics")  # the run has its constants itself
    assert ran(recipe, root).read_recipe().data.columns.preprocessing == rules
    assert ran(folder.read_recipe(), root) == folder
    assert not (root / "runs/run-statistics").exists()
    assert ledger


def test_a_kill_between_statistics_and_training_keeps_them(root, monkeypatch):
    recipe = recipe_of(root)
    with monkeypatch.context() as broken:
        broken.setattr("dpdist.training.job.CheckedTraining.begin", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ran(recipe, root)
    path = root / "runs/run-statistics"
    before = (path / "statistics.json").read_bytes(), (path / "private/ledger.jsonl").read_bytes()
    assert not (root / "runs/run").exists()
    folder = ran(recipe, root)
    after = (path / "statistics.json").read_bytes(), (path / "private/ledger.jsonl").read_bytes()
    assert after == before
    found = folder.read_recipe().statistics.constants["age"].range
    assert list(found) == json.loads(after[0])["columns"]["age"]["range"]


def test_records_that_are_not_trained_on_are_not_counted(root, monkeypatch):
    seen: list[int] = []
    real = bought.buy

    def counted(path: Path, plan: Any, columns: Any, **given: Any) -> Any:
        seen.append(len(columns[0].values))
        return real(path, plan, columns, **given)

    monkeypatch.setattr(bought, "buy", counted)
    folder = ran(recipe_of(root, data={"private_eval_fraction": 0.5}), root)
    assert seen == [folder.read_plan().records]
    assert seen[0] < COUNT


def test_epsilon_covers_statistics_and_training(root):
    privacy = {"epsilon": 1.0, "noise_multiplier": None, "delta": DELTA}
    recipe = recipe_of(root, privacy=privacy, statistics={"epsilon": 0.3, "noise_multiplier": None})
    folder = ran(recipe, root)
    facts = dpdist.load_results(folder)
    assert 0.99 < facts.guarantee.epsilon <= 1.0
    (counts,) = [p for p in folder.read_plan().phases if isinstance(p, GaussianCounts)]
    card = json.loads((root / "runs/run-statistics/statistics.json").read_text())["card"]
    assert 0.299 < card["guarantee"]["epsilon"] <= 0.3
    assert card["accounted"]["phases"] == [counts.to_dict()]


def test_a_release_holds_the_constants_and_verifies(root):
    folder = ran(recipe_of(root), root)
    write_release(folder)
    path = folder.release_folder
    verify_release(path)
    low, _ = folder.read_recipe().data.columns.preprocessing["age"].range
    assert any(str(low) in each.read_text() for each in path.glob("*.json"))


def test_users_are_counted_whole(root):
    users = {"unit": "user", "max_records_per_user": 2}
    recipe = recipe_of(
        root,
        data={"columns": {**recipe_of(root).data.columns.model_dump(mode="json"),
                          "preprocessing": {}, "features": ["dose", "age"], "user": "person"}},
        privacy=users, training={"batch_size": 20},
    )  # fmt: skip
    folder = ran(recipe, root)
    persons = COUNT // 4
    assert folder.read_plan().records == persons
    found = dpdist.load_results(folder).guarantee.epsilon
    assert found == pytest.approx(by_hand(20 / persons), rel=2e-3)
    card = json.loads((root / "runs/run-statistics/statistics.json").read_text())["card"]
    assert card["records"] == persons
    assert "a user adds at most 1" in str(card["assumptions"])


def test_a_search_buys_once_and_outside_its_trials(root):
    recipe = recipe_of(
        root,
        data={"private_eval_fraction": 0.0},
        tune={
            "space": {"training.learning_rate": {"choice": [0.1, 1.0]}},
            "num_trials": {"name": "fixed", "runs": 2},
            "score": {"objectives": {"accuracy": 1}, "public": {"name": "visits"}},
        },
    )  # fmt: skip
    told = dict(dry_run(recipe, runs=root / "runs"))
    folder = ran(recipe, root)
    with Ledger.read(root / "runs/run-statistics/private/ledger.jsonl") as ledger:
        assert ledger.release_counts == {0: 1}
    kept = folder.read_search_recipe().statistics.constants
    assert folder.read_recipe().data.columns.preprocessing["age"] == kept["age"]
    facts = dpdist.load_results(folder)
    counts = [p for p in facts.account.whole.phases if isinstance(p, GaussianCounts)]
    assert len(counts) == 1
    assert facts.guarantee.epsilon == pytest.approx(by_hand(40 / COUNT, steps=8), rel=2e-3)
    assert str(facts.guarantee) in told["guarantee"]
    assert ran(recipe, root) == folder


def test_a_secret_number_of_trials_is_composed_after_them(root):
    recipe = recipe_of(
        root, data={"private_eval_fraction": 0.2},
        tune={
            "space": {"training.learning_rate": {"choice": [0.1, 1.0]}},
            "num_trials": {"name": "geometric", "mean": 2},
            "score": {"objectives": {"accuracy": 1}},
        },
    )  # fmt: skip
    search = check_search(recipe, dpdist.RunFolder(root / "runs/run"), "recipe")
    *searched, last = search.cost.plan.phases
    assert isinstance(last, GaussianCounts)
    assert any(isinstance(phase, RepeatAndSelect) for phase in walk_phases(searched))
    assert not any(isinstance(phase, GaussianCounts) for phase in walk_phases(searched))
    trial, plan = search.example_trial()
    assert trial.statistics is None
    assert not any(isinstance(p, GaussianCounts) for p in plan.phases)


def test_a_search_does_not_choose_what_is_bought(root):
    tune = {
        "space": {"statistics.noise_multiplier": {"choice": [2.0, 4.0]}},
        "num_trials": {"name": "fixed", "runs": 2},
        "score": {"objectives": {"accuracy": 1}, "public": {"name": "visits"}},
    }
    with pytest.raises(UserError, match="statistics"):
        ran(recipe_of(root, tune=tune), root)
    assert not (root / "runs").exists()


def test_a_plan_without_its_statistics_is_refused(root):
    folder = ran(recipe_of(root), root)
    recipe, plan = folder.read_recipe(), folder.read_plan()
    check_plan(recipe, plan, 1.5, "plan")
    cheaper = plan.__class__.from_dict({**plan.to_dict(), "phases": plan.to_dict()["phases"][:1]})
    with pytest.raises(UserError, match="phases"):
        check_plan(recipe, cheaper, 1.5, "plan")
    assert without_privacy(recipe).statistics is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"statistics": {"epsilon": 1.0}}, "statistics"),
        ({"statistics": {"noise_multiplier": 0}}, "noise_multiplier"),
        ({"statistics": {"columns": {"ward": {}}}}, "ward"),
        ({"statistics": {"columns": {"other": {}}}}, "other"),
        ({"statistics": {"columns": {"age": {"range": [9, 1]}}}}, "range"),
        ({"statistics": {"columns": {"age": {"range": 7}}}}, "range"),
        ({"statistics": {"quantiles": [0.9, 0.1]}}, "quantiles"),
        ({"privacy": {"noise_multiplier": 0}}, "statistics"),
        ({"privacy": {"budget": "budgets"}}, "statistics"),
    ],
)
def test_what_cannot_be_bought_is_refused(root, changes, key):
    with pytest.raises(ValueError, match=key):
        recipe_of(root, **changes)


def test_a_constant_of_a_bought_column_is_not_given_as_well(root):
    own = recipe_of(root).model_dump(mode="json")
    assert Recipe.model_validate(own) == recipe_of(root)  # as a dry run writes it
    own["data"]["columns"]["preprocessing"]["age"]["range"] = [0, 100]
    with pytest.raises(ValueError, match=r"statistics\.columns\.age"):
        Recipe.model_validate(own)


def test_constants_of_another_run_are_not_used(root):
    folder = ran(recipe_of(root), root)
    again = folder.read_recipe().model_copy(update={"name": "second"})
    with pytest.raises(UserError, match=r"statistics\.constants"):
        ran(again, root)
    assert not (root / "runs/second").exists()
    with pytest.raises(UserError, match="statistics"):  # of which nothing was bought yet
        prepare(recipe_of(root), dpdist.RunFolder(root / "runs/third"), "recipe")
    assert not (root / "runs/third").exists()


def test_nothing_is_bought_for_a_run_that_cannot_start(root):
    with pytest.raises(UserError, match="batch_size"):
        ran(recipe_of(root, training={"batch_size": 10 * COUNT}), root)
    assert not (root / "runs").exists() or not any((root / "runs").iterdir())
    changed = recipe_of(root, privacy={"delta": 0.5})
    with pytest.raises(UserError, match="delta"):
        ran(changed, root)


def test_a_starter_recipe_says_how_to_buy_what_nobody_knows(root, monkeypatch):
    monkeypatch.chdir(root)
    done = CliRunner().invoke(app, ["init", "visits", "--label", "ill"])
    assert done.exit_code == 0, done.output
    text = (root / "visits.yaml").read_text()
    assert load_recipe(root / "visits.yaml").statistics is None
    section = [line for line in text.splitlines() if line.startswith("#   ")]
    for line in ("# statistics:", *section):
        text = text.replace(line, line.removeprefix("# ").removeprefix("# "), 1)
    (root / "visits.yaml").write_text(text)
    recipe = load_recipe(root / "visits.yaml")
    assert "dose" in recipe.statistics.columns
    told = dict(dry_run(recipe, runs=root / "runs"))
    assert "histograms" in told["bought before"]
    assert not (root / "runs").exists()
