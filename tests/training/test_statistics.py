"""Statistics that a training needs and has no public constants for: bought once, and counted."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import warnings
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
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianCounts
from dpdist.privacy.plan import PrivacyPlan
from dpdist.training.statistics import release_counts

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
    assert made.columns["ward"] == {"categories": ["surgery"]}
    assert made.missing["income"] == pytest.approx(0.2, abs=0.03)
    inputs = made.transform(data)
    assert inputs.shape == (COUNT, 5)
    assert np.array_equal(inputs, dpdist.Preprocessing(made.columns).transform(data))
    assert made.guarantee.epsilon > 0
    with pytest.raises(UserError, match="fit"):
        made.fit(data)


def test_dates_and_logarithms_have_ranges_too(tmp_path):
    days = [f"20{20 + row % 4}-03-01" for row in range(COUNT)]
    columns = {
        "day": {"date": {"origin": "2000-01-01", "unit": "years"}, "range": [0, 100]},
        "income": {"log1p": True},
    }
    fixed = {**PRIVATE, "run_key": f"{2:064x}"}  # 600 records: one range in seven is wider
    made = buy(tmp_path / "s", {**table(), "day": days}, columns, privacy=fixed)
    low, high = made.columns["day"]["range"]
    assert 15 < low < high < 30
    assert made.columns["income"]["range"][0] >= 0
    assert np.isfinite(made.transform({**table(), "day": days})).all()


def test_copies_that_count_other_records_share_no_noise(tmp_path):
    """Copies of a folder have one key: the same noise on other counts would be none between them.
    The same counts are the same release."""
    plan = PrivacyPlan(COUNT, (GaussianCounts.of_columns(3.0, 1),), DELTA)
    counts = count_cells(table()["age"], linear_edges(0, 150))
    counts_of = {"one": counts, "copy": counts, "other": counts + np.eye(len(counts))[40]}
    noise = {
        name: release_counts(tmp_path / name, plan, own, "7f" * 32) - own
        for name, own in counts_of.items()
    }
    assert np.array_equal(noise["one"], noise["copy"])
    # Of thousands of independent pairs, one in a thousand are as near by chance.
    assert (np.abs(noise["one"] - noise["other"]) > 0.01).mean() > 0.95


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


@pytest.mark.parametrize(
    "change",
    [
        {"data": table(seed=1)},
        {"columns": AGE},
        {"columns": {"age": {"range": [0, 200]}, "income": {}}},
        {"privacy": {**PRIVATE, "noise_multiplier": 4.0}},
    ],
)
def test_another_release_needs_another_folder(tmp_path, change):
    buy(tmp_path / "s")
    before = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="another"):
        buy(tmp_path / "s", **change)
    assert {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()} == before


_KILLED = """
import json, os, signal, sys
from pathlib import Path
from dpdist.training import statistics as bought
import dpdist

draw = bought.add_noise
def killed(*given):
    noisy = draw(*given)
    Path(sys.argv[3]).write_text(json.dumps(noisy.tolist()))
    os.kill(os.getpid(), signal.SIGKILL)
bought.add_noise = killed
dpdist.statistics(json.loads(Path(sys.argv[1]).read_text()), {"age": {"range": [0, 150]}},
                  privacy={"noise_multiplier": 3.0, "delta": 1e-4}, folder=sys.argv[2])
"""


def test_a_killed_release_is_made_again_to_the_bit(tmp_path):
    data = {"age": table()["age"].tolist()}
    (tmp_path / "data.json").write_text(json.dumps(data))
    given = [str(tmp_path / name) for name in ("data.json", "s", "noisy.json")]
    ended = subprocess.run([sys.executable, "-c", _KILLED, *given], check=False)
    assert ended.returncode == -signal.SIGKILL
    with Ledger.read(tmp_path / "s/private/ledger.jsonl") as ledger:
        assert ledger.release_counts == {0: 1}  # before the noise was drawn
        assert not ledger.recorded_answers
    assert not (tmp_path / "s/statistics.json").exists()
    (tmp_path / "s/.statistics.json.99999999-00000000").write_text("cut off")  # as a kill may leave
    with pytest.raises(UserError, match="another folder"):  # of what may have been seen already
        buy(tmp_path / "s", {"age": [99.0, *data["age"][1:]]}, AGE)
    made = buy(tmp_path / "s", data, AGE)
    with Ledger.read(tmp_path / "s/private/ledger.jsonl") as ledger:
        assert list(ledger.recorded_answers) == [json.loads((tmp_path / "noisy.json").read_text())]
        assert ledger.release_counts == {0: 1}
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
    for wrong in (["4711x"] * COUNT, [*data["age"][:-1], math.inf]):
        with pytest.raises(UserError) as refused:
            buy(tmp_path / "t", {**data, "age": wrong})
        assert "4711" not in str(refused.value)
    nobody = {**data, "person": [*data["person"][:-1], ""]}
    with pytest.raises(UserError, match="person"):
        buy(tmp_path / "t", nobody, privacy={**PRIVATE, **users}, user="person")


def test_a_fixed_key_is_no_privacy_and_the_same_again(tmp_path):
    fixed = {**PRIVATE, "run_key": "5" * 64}
    first, second = (buy(tmp_path / name, privacy=fixed) for name in "ab")
    assert first.columns == second.columns
    assert "NOT PRIVATE" in str(first.guarantee)
    assert not json.loads((first.path / "statistics.json").read_text())["card"]["private"]
    found = training(tmp_path / "run", first.transform(table()), began_with=first)
    assert found.guarantee.fixed_key
    with pytest.raises(UserError, match="fixed"):
        buy(first.path)


def test_statistics_that_a_training_leaves_out_are_noticed(tmp_path):
    made = buy(tmp_path / "s")
    inputs = made.transform(table())
    with pytest.warns(UserWarning, match="began_with"):
        training(tmp_path / "run", inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(tmp_path / "named", inputs, began_with=made)
        training(tmp_path / "other", inputs[:-1])  # of other records


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{"noise_multiplier": 2.0}, {"epsilon": 2.0}])
def test_a_search_over_a_function_counts_them_once(tmp_path, privacy):
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
        privacy={"delta": DELTA, **privacy}, folder=tmp_path / "search", executor="local",
    )  # fmt: skip
    (steps,) = dpdist.load_results(search.best).account.whole.phases
    assert steps.steps == 4
    event = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(steps.noise_multiplier))
    both = by_hand(dpa.GaussianDpEvent(6.0), dpa.SelfComposedDpEvent(event, 4))
    assert search.guarantee.epsilon == pytest.approx(both, rel=2e-3)
    if "epsilon" in privacy:
        assert 1.99 < search.guarantee.epsilon <= 2.0


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"columns": {"ward": {"categories": ["surgery"]}}}, "columns"),
        ({"privacy": {"noise_multiplier": 0, "delta": DELTA}}, "noise_multiplier"),
        ({"privacy": {"noise_multiplier": 3.0, "delta": 0.01}}, "delta"),
        ({"privacy": {**PRIVATE, "budget": "budgets"}}, "budget"),
        ({"privacy": {**PRIVATE, "unit": "user", "max_records_per_user": 3}}, "user"),
        ({"user": "person"}, "user"),
        ({"quantiles": (0.9, 0.1)}, "quantiles"),
        ({"columns": {"ages": {}}}, "ages"),
        ({"data": {"age": [[1.0, 2.0]] * COUNT}, "columns": AGE}, "age"),
        ({"columns": {"ward": {}}}, "ward"),
        ({"columns": {"age": {"range": [1e9, 1e9 + 1e-6]}}}, "range"),
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


@pytest.mark.parametrize("lost", ["run.key", "ledger.jsonl"])
def test_a_folder_that_lost_its_key_or_ledger_releases_nothing(tmp_path, lost):
    first = buy(tmp_path / "s")
    (tmp_path / "s/private" / lost).unlink()
    before = (tmp_path / "s/statistics.json").read_bytes()
    with pytest.raises(UserError):
        buy(tmp_path / "s")
    assert (tmp_path / "s/statistics.json").read_bytes() == before
    assert first.columns


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="must be new"):
        buy(tmp_path / "s")
    assert [each.name for each in (tmp_path / "s").iterdir()] == ["notes.txt"]
