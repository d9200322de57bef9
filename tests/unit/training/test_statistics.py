"""Statistics that a training needs and has no public constants for: bought once, and counted."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy.stats import kstest

import dpdist
from dpdist import UserError
from dpdist.data.histograms import count_cells, linear_edges
from dpdist.gradients.noise import add_noise
from dpdist.pipeline import dry_run
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianCounts, RepeatAndSelect, walk_phases
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe, check_plan, without_privacy
from dpdist.training import statistics as bought
from dpdist.training.job import prepare
from dpdist.training.statistics import release_counts
from dpdist.tuning.search import check_search

COUNT, DELTA = 600, 1e-4
AGE: dict[str, Any] = {"age": {"range": [0, 150]}}
PRIVATE: dict[str, Any] = {"noise_multiplier": 3.0, "delta": DELTA}


def table(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    income = rng.lognormal(10, 1, COUNT)
    income[rng.random(COUNT) < 0.2] = math.nan
    return {
        "age": rng.normal(45, 15, COUNT).clip(1, 99),
        "income": income,
        "ward": rng.choice(["surgery", "medicine"], COUNT).tolist(),
        "person": [f"person-{number}" for number in rng.integers(0, 200, COUNT)],
    }


def buy(folder: Path, data: Any = None, columns: Any = None, **given: Any) -> Any:
    return dpdist.statistics(
        table() if data is None else data, columns or {**AGE, "income": {}}, folder=folder,
        **{"privacy": PRIVATE, **given},
    )  # fmt: skip


def training(folder: Path, inputs: np.ndarray, **given: Any) -> dpdist.PrivateTraining:
    labels = torch.arange(len(inputs)) % 2
    model = torch.nn.Linear(inputs.shape[1], 2)
    data = given.pop("data", (torch.from_numpy(inputs), labels))
    return dpdist.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss="cross-entropy",
        batch_size=60, steps=5, folder=folder,
        **{"privacy": {"noise_multiplier": 1.0, "delta": DELTA}, **given},
    )  # fmt: skip


def by_hand(*events: dpa.DpEvent) -> float:
    accountant = PLDAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL)
    for event in events:
        accountant.compose(event)
    return float(accountant.get_epsilon(DELTA))


def test_constants_are_near_the_columns_own(tmp_path):
    data = table()
    columns = {**AGE, "income": {"missing": "flag"}, "ward": {"categories": ["surgery"]}}
    made = buy(tmp_path / "s", data, columns, privacy={**PRIVATE, "noise_multiplier": 0.3})
    low, high = made.columns["age"]["range"]
    assert 1 <= low < 25
    assert 70 < high <= 100
    assert made.columns["age"]["missing"] == pytest.approx(45, abs=3)
    assert made.columns["income"]["missing"] == "flag"  # given: nothing replaces it
    assert made.missing["income"] == pytest.approx(0.2, abs=0.03)
    inputs = made.transform(data)
    assert inputs.shape == (COUNT, 5)
    assert np.array_equal(inputs, dpdist.Preprocessing(made.columns).transform(data))


def test_copies_that_count_other_records_or_pay_another_price_share_no_noise(tmp_path):
    """Copies of a folder have one key: the same noise on other counts, or the same counts under
    two scales of it, would be none between them. The same counts are the same release."""
    counts = count_cells(table()["age"], linear_edges(0, 150))
    noise = {}
    for name, own, scale in (
        ("one", counts, 3.0),
        ("copy", counts, 3.0),
        ("other", counts + np.eye(len(counts))[40], 3.0),
        ("cheaper", counts, 6.0),
    ):
        plan = PrivacyPlan(COUNT, (GaussianCounts.of_columns(scale, 1),), DELTA)
        released = release_counts(tmp_path / name, plan, own, "7f" * 32)
        noise[name] = (released - own) / scale
    assert np.array_equal(noise["one"], noise["copy"])
    # Of thousands of independent pairs, one in a thousand are as near by chance.
    for name in ("other", "cheaper"):
        assert (np.abs(noise["one"] - noise[name]) > 0.003).mean() > 0.95


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_the_price_is_that_of_one_gaussian(tmp_path, adjacency):
    made = buy(tmp_path / "s", privacy={**PRIVATE, "adjacency": adjacency})
    # A replaced record moves two counts of a histogram: sqrt 2 of what one that is removed moves.
    noise = 3.0 if adjacency == "add-or-remove-one" else 3.0 / math.sqrt(2)
    found = by_hand(dpa.GaussianDpEvent(noise))
    assert made.guarantee.epsilon == pytest.approx(found, rel=2e-3)
    phase = GaussianCounts.of_columns(3.0, 2)
    card = json.loads((tmp_path / "s" / "statistics.json").read_text())["card"]
    assert card["accounted"]["phases"] == [phase.to_dict()]
    assert card["guarantee"]["epsilon"] == made.guarantee.epsilon


def test_statistics_and_training_are_one_guarantee(tmp_path):
    data = table()
    made = buy(tmp_path / "s", data)
    inputs = made.transform(data)
    found = training(tmp_path / "run", inputs, began_with=made)
    steps = dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(60 / COUNT, dpa.GaussianDpEvent(1.0)), 5
    )
    both = by_hand(dpa.GaussianDpEvent(3.0), steps)
    found.run_all()
    assert found.guarantee.epsilon == pytest.approx(both, rel=2e-3)
    assert found.guarantee.epsilon > found.plan.guarantee().epsilon
    facts = dpdist.load_results(found.run)
    assert facts.guarantee.epsilon == found.guarantee.epsilon
    assert any("histograms of the records" in line for line in facts.privacy_card()["mechanism"])
    named = training(tmp_path / "named", inputs, began_with=str(tmp_path / "s"))
    assert named.recipe.stages == found.recipe.stages


def test_a_target_covers_statistics_and_training(tmp_path):
    made = buy(tmp_path / "s", privacy={"epsilon": 0.5, "delta": DELTA})
    assert 0.49 < made.guarantee.epsilon <= 0.5
    inputs = made.transform(table())
    target = {"privacy": {"epsilon": 2.0, "delta": DELTA}}
    found = training(tmp_path / "run", inputs, began_with=made, **target)
    whole = found.recipe.guarantee_of(found.plan, found.plan.phases)
    assert 1.99 < whole.epsilon <= 2.0
    with pytest.warns(UserWarning, match="began_with"):
        alone = training(tmp_path / "alone", inputs, **target)
    assert alone.plan.training_phases[0].noise_multiplier < (
        found.plan.training_phases[0].noise_multiplier
    )
    with pytest.raises(UserError, match=r"privacy\.epsilon"):
        training(
            tmp_path / "none", inputs, began_with=made,
            privacy={"epsilon": 0.4, "delta": DELTA},
        )  # fmt: skip


def test_users_are_protected_whole(tmp_path):
    data, users = table(), {"unit": "user", "max_records_per_user": 3}
    made = buy(tmp_path / "s", data, privacy={**PRIVATE, **users}, user="person")
    count = len(set(data["person"]))
    assert made.guarantee.user is not None
    assert "person" in json.loads((made.path / "statistics.json").read_text())["card"]["unit"]
    records = dpdist.as_records(
        (torch.from_numpy(made.transform(data)), torch.arange(COUNT) % 2), unit=data["person"]
    )
    privacy = {"noise_multiplier": 1.0, "delta": DELTA, **users}
    found = training(tmp_path / "run", np.ones((2, 2)), data=records, began_with=made,
                     privacy=privacy)  # fmt: skip
    steps = dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(60 / count, dpa.GaussianDpEvent(1.0)), 5
    )
    both = by_hand(dpa.GaussianDpEvent(3.0), steps)
    whole = found.recipe.guarantee_of(found.plan, found.plan.phases)
    assert whole.epsilon == pytest.approx(both, rel=2e-3)
    with pytest.raises(UserError, match="began_with"):
        training(tmp_path / "other", made.transform(data), began_with=made)


def test_the_same_call_is_the_same_release(tmp_path):
    first = buy(tmp_path / "s")
    lines = (tmp_path / "s/private/ledger.jsonl").read_bytes()
    again = buy(tmp_path / "s")
    assert again.columns == first.columns
    wider = buy(tmp_path / "s", quantiles=(0.2, 0.8))
    assert wider.columns["age"]["range"][0] > first.columns["age"]["range"][0]
    assert (tmp_path / "s/private/ledger.jsonl").read_bytes() == lines
    assert buy(tmp_path / "other").columns != first.columns  # a key of its own


def test_a_killed_release_is_made_again_to_the_bit(tmp_path, monkeypatch):
    data, drawn = {"age": table()["age"].tolist()}, []

    def killed(*given: Any) -> Any:
        drawn.append(add_noise(*given).tolist())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bought, "add_noise", killed)
        buy(tmp_path / "s", data, AGE)
    with Ledger.read(tmp_path / "s/private/ledger.jsonl") as ledger:
        assert ledger.release_counts == {0: 1}  # before the noise was drawn
        assert not ledger.recorded_answers
    with pytest.raises(UserError):  # of what may have been seen already
        buy(tmp_path / "s", {"age": [99.0, *data["age"][1:]]}, AGE)
    made = buy(tmp_path / "s", data, AGE)
    with Ledger.read(tmp_path / "s/private/ledger.jsonl") as ledger:
        assert list(ledger.recorded_answers) == drawn and ledger.release_counts == {0: 1}
    assert made.guarantee.epsilon == pytest.approx(by_hand(dpa.GaussianDpEvent(3.0)), rel=2e-3)


def test_nothing_of_a_record_leaves_the_private_folder(tmp_path):
    data = table()
    data["age"][5] = 123.4375  # of one record alone
    data["income"] = [*data["income"][:-1], 987654.321]
    users = {"unit": "user", "max_records_per_user": 3}
    buy(tmp_path / "s", data, privacy={**PRIVATE, **users}, user="person")
    for path in (tmp_path / "s").rglob("*"):
        if path.is_file() and "private" not in path.parts:
            text = path.read_text()
            assert "123.4375" not in text
            assert "987654" not in text
            assert "person-" not in text
    assert (tmp_path / "s/private").stat().st_mode & 0o77 == 0
    with pytest.raises(UserError) as refused:
        buy(tmp_path / "t", {**data, "age": ["4711x"] * COUNT})
    assert "4711" not in str(refused.value)


def test_a_fixed_key_is_no_privacy_and_the_same_again(tmp_path):
    fixed = {**PRIVATE, "run_key": "5" * 64}
    first, second = (buy(tmp_path / name, privacy=fixed) for name in "ab")
    assert first.columns == second.columns
    assert "NOT PRIVATE" in str(first.guarantee)
    assert not json.loads((first.path / "statistics.json").read_text())["card"]["private"]
    found = training(tmp_path / "run", first.transform(table()), began_with=first)
    assert found.guarantee.fixed_key


@pytest.mark.slow
def test_a_search_over_a_function_counts_them_once(tmp_path):
    made = buy(tmp_path / "s", privacy={**PRIVATE, "noise_multiplier": 6.0})
    rng = np.random.default_rng(0)
    inputs = np.concatenate([made.transform(table()), rng.random((COUNT, 1))], 1, dtype=np.float32)
    labels = torch.arange(COUNT) % 2

    def train(config: Any) -> dpdist.PrivateTraining:
        model = torch.nn.Linear(inputs.shape[1], 2)
        return dpdist.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=config["lr"]), config.data,
            loss="cross-entropy", privacy=config.privacy, batch_size=50, steps=2,
            folder=config.folder, began_with=made,
        )  # fmt: skip

    search = dpdist.tune(
        train, {"lr": {"choice": [0.1, 0.5]}}, data=(torch.from_numpy(inputs[:500]), labels[:500]),
        num_trials={"name": "fixed", "runs": 2},
        score={"public": (torch.from_numpy(inputs[500:]), labels[500:])},
        privacy={"delta": DELTA, "epsilon": 2.0}, folder=tmp_path / "search", executor="local",
    )  # fmt: skip
    (steps,) = dpdist.load_results(search.best).account.whole.phases
    assert steps.steps == 4
    event = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(steps.noise_multiplier))
    both = by_hand(dpa.GaussianDpEvent(6.0), dpa.SelfComposedDpEvent(event, 4))
    assert search.guarantee.epsilon == pytest.approx(both, rel=2e-3)
    assert 1.99 < search.guarantee.epsilon <= 2.0


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"privacy": {"noise_multiplier": 0, "delta": DELTA}}, "noise_multiplier"),
        ({"privacy": {"noise_multiplier": 3.0, "delta": 0.01}}, "delta"),
        ({"privacy": {**PRIVATE, "budget": "budgets"}}, "budget"),
        ({"privacy": {**PRIVATE, "unit": "user", "max_records_per_user": 3}}, "user"),
        ({"user": "person"}, "user"),
        ({"data": {"age": [[1.0, 2.0]] * COUNT}, "columns": AGE}, "age"),
    ],
)
def test_what_cannot_be_counted_is_refused_before_anything_is_written(tmp_path, given, key):
    with pytest.raises(UserError, match=key):
        buy(tmp_path / "s", **given)
    assert not (tmp_path / "s").exists()


def test_a_budget_and_another_relation_do_not_compose(tmp_path):
    made = buy(tmp_path / "s")
    inputs = made.transform(table())
    for privacy in (
        {"noise_multiplier": 1.0, "delta": DELTA, "budget": str(tmp_path / "budgets")},
        {"noise_multiplier": 1.0, "delta": DELTA, "adjacency": "replace-one"},
    ):
        with pytest.raises(UserError):
            training(tmp_path / "run", inputs, began_with=made, privacy=privacy)


def test_every_count_gets_the_noise_that_is_paid_for(tmp_path):
    data = {"age": table()["age"]}
    exact = count_cells(np.float32(data["age"]).astype(float), linear_edges(0, 150))
    noise = []
    for name in ("a", "b", "c"):
        buy(tmp_path / name, data, AGE)
        with Ledger.read(tmp_path / name / "private/ledger.jsonl") as ledger:
            noise.append(np.array(ledger.recorded_answers[0]) - exact)
    wanted = 3.0 * math.sqrt(3)  # in units of what a record adds to three histograms
    assert np.std(noise) == pytest.approx(wanted, rel=0.03)
    assert np.mean(noise) == pytest.approx(0, abs=5 * wanted / math.sqrt(np.size(noise)))
    assert kstest(np.ravel(noise) / wanted, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(noise)[0, 1]) < 0.08  # each folder draws its own


# --- bought by a recipe, before its training

TRAINED, MULTIPLIER = 400, 4.0


def written(root: Path) -> Path:
    """Write a data set of visits; return its folder."""
    rng = np.random.default_rng(0)
    (root / "visits").mkdir()
    for split, count in (("train", TRAINED), ("test", 60)):
        with (root / f"visits/{split}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["age", "dose", "ward", "person", "ill"])
            for row in range(count):
                age = min(max(rng.normal(50, 15), 1), 99)
                dose = "" if rng.random() < 0.2 else f"{rng.lognormal(3, 1):.3f}"
                ward = rng.choice(["surgery", "medicine"])
                lines.writerow([f"{age:.3f}", dose, ward, f"{split}-{row // 4}", int(age > 50)])
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dpdist.RunFolder]:
    """A run that bought its constants, for tests that only read it, and the folder of all."""
    root = written(tmp_path_factory.mktemp("finished"))
    return root, ran(recipe_of(root), root)


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


def with_training(sampled: float, steps: int = 4) -> float:
    step = dpa.PoissonSampledDpEvent(sampled, dpa.GaussianDpEvent(1.5))
    return by_hand(dpa.GaussianDpEvent(MULTIPLIER), dpa.SelfComposedDpEvent(step, steps))


def test_constants_are_bought_before_the_training_and_counted_with_it(finished):
    root, folder = finished
    facts = dpdist.load_results(folder)
    assert facts.guarantee.epsilon == pytest.approx(with_training(40 / TRAINED), rel=2e-3)
    kept = folder.read_recipe()
    rules = kept.data.columns.preprocessing
    low, high = rules["age"].range
    assert 0 < low < high < 150
    assert rules["age"].missing == pytest.approx(50, abs=20)
    assert rules["dose"].missing == "flag"
    assert rules["ward"] == recipe_of(root).data.columns.preprocessing["ward"]
    assert kept.statistics.constants == {name: rules[name] for name in ("age", "dose")}
    assert "6 histograms of the records" in str(facts.privacy_card()["mechanism"])


@pytest.mark.slow
def test_a_run_that_is_repeated_buys_nothing_again(root):
    recipe = recipe_of(root)
    folder = ran(recipe, root)
    rules = folder.read_recipe().data.columns.preprocessing
    assert ran(recipe, root).read_recipe().data.columns.preprocessing == rules
    shutil.rmtree(root / "runs/run-statistics")  # the run has its constants itself
    assert ran(recipe, root).read_recipe().data.columns.preprocessing == rules
    assert ran(folder.read_recipe(), root) == folder
    assert not (root / "runs/run-statistics").exists()


def test_records_that_are_not_trained_on_are_not_counted(root, monkeypatch):
    seen: list[int] = []
    real = bought.buy

    def counted(path: Path, plan: Any, columns: Any, **given: Any) -> Any:
        seen.append(len(columns[0].values))
        return real(path, plan, columns, **given)

    monkeypatch.setattr(bought, "buy", counted)
    folder = ran(recipe_of(root, data={"private_eval_fraction": 0.5}), root)
    assert seen == [folder.read_plan().records]
    assert seen[0] < TRAINED


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


@pytest.mark.slow
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
    assert facts.guarantee.epsilon == pytest.approx(with_training(40 / TRAINED, steps=8), rel=2e-3)
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


def test_a_plan_without_its_statistics_is_refused(finished):
    _, folder = finished
    recipe, plan = folder.read_recipe(), folder.read_plan()
    check_plan(recipe, plan, 1.5, "plan")
    cheaper = plan.__class__.from_dict({**plan.to_dict(), "phases": plan.to_dict()["phases"][:1]})
    with pytest.raises(UserError, match="phases"):
        check_plan(recipe, cheaper, 1.5, "plan")
    assert without_privacy(recipe).statistics is None


def test_constants_of_another_run_are_not_used(finished):
    root, folder = finished
    again = folder.read_recipe().model_copy(update={"name": "second"})
    with pytest.raises(UserError, match=r"statistics\.constants"):
        ran(again, root)
    assert not (root / "runs/second").exists()
    with pytest.raises(UserError, match="statistics"):  # of which nothing was bought yet
        prepare(recipe_of(root), dpdist.RunFolder(root / "runs/third"), "recipe")
    assert not (root / "runs/third").exists()
