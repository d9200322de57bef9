"""Class counts bought with noise: their price, the one draw, and the runs built on them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from typer.testing import CliRunner

from dpdist import pipeline
from dpdist.cli.init import data_app
from dpdist.core.errors import UserError
from dpdist.core.files import FEATURES_KEY
from dpdist.privacy import budget as budget_module
from dpdist.privacy.budget import (
    BudgetExceeded,
    BudgetTerms,
    Charge,
    RenyiFilter,
    composed_guarantee,
    read_budgets,
    release_once,
)
from dpdist.privacy.card import bounding_guarantee, card_markdown
from dpdist.privacy.ledger import JournalError
from dpdist.privacy.phases import ClassRates, GaussianCounts, GaussianSteps, phase_from_dict
from dpdist.privacy.plan import PrivacyPlan, parse_plan
from dpdist.release import model_card
from dpdist.reports.facts import read_facts
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training import job
from dpdist.training.job import buy_class_counts, check_training
from dpdist.training.trainer import _budget_charged

pytestmark = pytest.mark.guarantee

ONE, REPLACED = "add-or-remove-one", "replace-one"
RECORDS = np.random.default_rng(0).random(1000)
COUNTS = {"ill": 30, "well": 970}


def terms_of(neighbours: Any = ONE, epsilon: float = 4.0) -> BudgetTerms:
    return BudgetTerms(RenyiFilter.for_ceiling(epsilon, 1e-4, neighbours))


def charge_of(deviation: float = 5.0) -> Charge:
    return Charge("counts", "class counts", 1000, (GaussianCounts(deviation),), "reserved")


class Drawer:
    """Gives an answer that follows from the key, and remembers the keys."""

    def __init__(self, crash: bool = False) -> None:
        self.keys: list[bytes] = []
        self.crash = crash

    def __call__(self, key: bytes) -> dict[str, int]:
        self.keys.append(key)
        if self.crash:
            raise KeyboardInterrupt
        return {"ill": 1 + key[0], "well": 900 + key[1]}


def buy(folder: Path, drawer: Drawer, **changes: Any) -> tuple[str, dict[str, int]]:
    given: dict[str, Any] = {
        "records": RECORDS, "charge": charge_of(), "terms": terms_of(), "neighbours": ONE,
        "question": b"which", "source": b"exact", "draw": drawer, **changes,
    }  # fmt: skip
    return release_once(folder, **given)


# --- the price ----------------------------------------------------------------------------------


def delta_by_integration(epsilon: float, deviation: float, shifts: tuple[float, ...]) -> float:
    """Integrate the hockey stick of two histograms, over the counts in which they differ."""
    step, reach = deviation / 20, 7 * deviation
    grid = np.arange(-reach, reach, step)
    axes = np.meshgrid(*[grid] * len(shifts), indexing="ij")
    here: Any = math.prod(norm.pdf(axis, 0, deviation) for axis in axes)
    there: Any = math.prod(
        norm.pdf(axis, shift, deviation) for axis, shift in zip(axes, shifts, strict=True)
    )
    return float(np.maximum(here - math.exp(epsilon) * there, 0).sum() * step ** len(shifts))


@pytest.mark.parametrize(("neighbours", "shifts"), [(ONE, (1.0,)), (REPLACED, (1.0, -1.0))])
@pytest.mark.parametrize("deviation", [2.0, 7.0])
def test_the_price_is_that_of_the_histograms_themselves(neighbours, shifts, deviation):
    """A record more moves one count by 1; a replaced one moves two, and never one by 2."""
    charge = charge_of(deviation)
    found = composed_guarantee([charge], 1e-4, neighbours)
    exact = brentq(lambda at: delta_by_integration(at, deviation, shifts) - 1e-4, 0.01, 10)
    assert found.epsilon == pytest.approx(exact, rel=2e-3)  # the grid of the integral
    length = math.hypot(*shifts) / deviation  # a Gaussian's divergence of order a: a length^2 / 2
    ceiling = terms_of(neighbours).ceiling
    assert ceiling is not None
    cost = ceiling.cost(charge.phases, 1000)
    assert cost == pytest.approx(ceiling.order * length**2 / 2, rel=1e-9)
    twice = composed_guarantee([charge, charge], 1e-4, neighbours).epsilon
    both = delta_by_integration(twice, deviation / math.sqrt(2), shifts)
    assert both == pytest.approx(1e-4, rel=0.02)


def test_counts_beside_steps_compose_and_keep_their_form():
    steps = GaussianSteps(1, 5.0, 1.0)
    mixed = Charge("a", "a", 1000, (steps, GaussianCounts(5.0)), "reserved")
    same = Charge("b", "b", 1000, (GaussianSteps(2, 5.0, 1.0),), "reserved")
    one, other = (composed_guarantee([each], 1e-5).epsilon for each in (mixed, same))
    assert one == pytest.approx(other, rel=1e-3)  # at one record more or less both move by 1
    one, other = (composed_guarantee([each], 1e-5, REPLACED).epsilon for each in (mixed, same))
    assert one < 0.95 * other  # a gradient may turn over, a record's class may not
    for phase in mixed.phases:
        assert phase_from_dict(json.loads(json.dumps(phase.to_dict()))) == phase
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="deviation"):
            GaussianCounts(wrong)


def test_a_plan_says_where_its_counts_were_bought():
    bought = ClassRates.for_batch([1.0, 4.0], [900, 100], 0.13, "counts-1")
    public = ClassRates.for_batch([1.0, 4.0], [900, 100], 0.13)
    assert bought.scaled(0.1).charge == "counts-1" and "charge" not in public.to_dict()
    plans = [
        PrivacyPlan(1000, (GaussianSteps(3, 1.0, each.largest, None, each),), 1e-4)
        for each in (bought, public)
    ]
    for plan in plans:
        assert parse_plan(plan.to_dict(), "test") == plan
    said, usual = (" ".join(plan.assumptions) for plan in plans)
    assert "counts-1" in said and "this epsilon leaves their release out" in said
    assert "declared" not in said and "declared" in usual
    assert plans[0].fingerprint() != plans[1].fingerprint()
    with pytest.raises(ValueError, match="charge"):
        ClassRates((0.1,), (1,), 3)  # type: ignore[arg-type]


# --- the one draw -------------------------------------------------------------------------------


def test_a_question_is_charged_before_its_answer_and_answered_once(tmp_path):
    seen: list[tuple[str, bool]] = []

    class Looking(Drawer):
        def __call__(self, key: bytes) -> dict[str, int]:
            (budget,) = read_budgets(tmp_path)
            (charge,) = budget.charges
            seen.append((charge.status, "source" in budget.find_release(charge.run)))
            return super().__call__(key)

    drawer = Looking()
    first = buy(tmp_path, drawer)
    assert seen == [("reserved", True)]
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert buy(tmp_path, drawer) == first and len(drawer.keys) == 1
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    (budget,) = read_budgets(tmp_path)
    (charge,) = budget.charges
    assert (charge.run, charge.status) == (first[0], "settled")


def test_a_crash_before_the_answer_costs_and_the_next_call_draws_the_same(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        buy(tmp_path, dead := Drawer(crash=True))
    (budget,) = read_budgets(tmp_path)
    assert budget.spent > 0 and [charge.status for charge in budget.charges] == ["reserved"]
    spent = budget.spent
    with pytest.raises(BudgetExceeded, match="other numbers"):  # the same noise on another sum
        buy(tmp_path, late := Drawer(), source=b"other")
    assert late.keys == []
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    one, two = Drawer(), Drawer()
    assert buy(tmp_path, one) == buy(tmp_path.with_name("copy"), two)
    assert dead.keys == one.keys == two.keys
    assert read_budgets(tmp_path)[0].spent == spent


def test_other_noise_questions_sources_and_folders_have_other_keys(tmp_path):
    keys = []
    for at, changes in enumerate(
        ({}, {"question": b"other"}, {"source": b"other"}, {"charge": charge_of(6.0)})
    ):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / "records.key").write_text("ab" * 32)  # as in a copy
        name, _ = buy(folder, drawer := Drawer(), **changes)
        assert ("ab" * 4) not in name
        keys += drawer.keys
    buy(tmp_path / "new", drawer := Drawer())
    assert len({*keys, *drawer.keys}) == 5


def test_the_same_question_at_other_noise_is_refused(tmp_path):
    first = buy(tmp_path, Drawer())
    for deviation in (4.0, 6.0):
        with pytest.raises(BudgetExceeded, match=r"was charged as counts-.* deviation 5; ask with"):
            buy(tmp_path, late := Drawer(), charge=charge_of(deviation))
        assert late.keys == []
    (charge,) = read_budgets(tmp_path)[0].charges
    assert charge.phases == (GaussianCounts(5.0),) and buy(tmp_path, Drawer()) == first


def test_nobody_charges_the_question_anew_between_check_and_draw(tmp_path, monkeypatch):
    """Two processes ask for the same counts at once, with different noise: one is refused.

    Otherwise both would have an answer, and only the cheaper charge would be on record.
    """
    opened, real = [0], budget_module._open_budgets

    def opening(folder: Path) -> Any:
        opened[0] += 1
        if opened[0] == 2:  # the lock was let go of: another process is faster
            buy(tmp_path, Drawer(), charge=charge_of(500.0))
        return real(folder)

    monkeypatch.setattr(budget_module, "_open_budgets", opening)
    name, answer = buy(tmp_path, Drawer())
    opened[0] = 10
    with pytest.raises(BudgetExceeded, match="was charged as counts-"):
        buy(tmp_path, Drawer(), charge=charge_of(500.0))
    (budget,) = read_budgets(tmp_path)
    assert [charge.phases for charge in budget.charges] == [(GaussianCounts(5.0),)]
    assert budget.find_release(name)["answer"] == answer  # no other one was given to anybody


def test_a_divergence_that_is_no_number_fits_under_no_ceiling(tmp_path, monkeypatch):
    monkeypatch.setattr(RenyiFilter, "cost", lambda *given: math.nan)
    with pytest.raises(BudgetExceeded, match="would take"):
        buy(tmp_path, drawer := Drawer())
    assert drawer.keys == []


def test_what_does_not_fit_is_neither_charged_nor_drawn(tmp_path):
    drawer = Drawer()
    with pytest.raises(BudgetExceeded, match="of what the ceiling"):
        buy(tmp_path, drawer, charge=charge_of(0.1))
    with pytest.raises(BudgetExceeded, match="needs budget_ceiling"):
        buy(tmp_path, drawer, terms=BudgetTerms())
    assert drawer.keys == [] and read_budgets(tmp_path) == []
    buy(tmp_path, drawer)
    with pytest.raises(BudgetExceeded, match="fixed before"):
        buy(tmp_path, drawer, question=b"other", terms=terms_of(epsilon=9.0))
    for at in range(200):  # each costs, until one is refused
        before = len(drawer.keys)
        try:
            buy(tmp_path, drawer, question=bytes([at]))
        except BudgetExceeded:
            assert len(drawer.keys) == before
            break
    (budget,) = read_budgets(tmp_path)
    ceiling = budget.terms.ceiling
    assert ceiling is not None and 10 < len(budget.charges) < 200
    one = ceiling.cost(charge_of().phases, 1000)
    assert ceiling.share - one < budget.spent <= ceiling.share
    assert buy(tmp_path, drawer)[0] == budget.charges[0].run  # an answer that is paid for is given


def test_a_changed_answer_damages_the_budget(tmp_path):
    _, counts = buy(tmp_path, Drawer())
    (file,) = tmp_path.glob("*.budget.jsonl")
    said = file.read_text()
    file.write_text(said.replace(f'"ill":{counts["ill"]}', f'"ill":{counts["ill"] + 1}'))
    assert file.read_text() != said
    with pytest.raises(JournalError, match="corrupt"):
        buy(tmp_path, Drawer())


# --- recipes ------------------------------------------------------------------------------------


WELL, ILL = 180, 20


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPDIST_CACHE", str(tmp_path / "cache"))


def write(root: Path, name: str, labels: np.ndarray, seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    for split in ("train", "test"):
        values = generator.random(len(labels)).astype(np.float32)
        table = pa.table({"f": values, "label": labels})
        (root / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / name / f"{split}.parquet")


@pytest.fixture
def root(tmp_path) -> Path:
    labels = np.random.default_rng(5).permutation(np.repeat([0, 1], [WELL, ILL]))
    write(tmp_path / "data", "scans", labels)
    write(tmp_path / "data", "others", labels, 9)
    return tmp_path / "data"


def raw_recipe(root: Path, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "name": "x",
        "data": {
            "name": "scans", "root": str(root), "names": ["well", "ill"],
            "columns": {"features": ["f"]}, "rates": {"ill": 4, "well": 1},
            "class_counts": str(root / "counts.json"),
        },
        "model": {"name": "linear"},
        "privacy": {
            "noise_multiplier": 2.0, "delta": 1e-3, "budget": str(root / "budgets"),
            "budget_ceiling": 9.0,
        },
        "training": {"batch_size": 20, "steps": 3, "learning_rate": 0.5},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, field = key.partition("__")
        raw[section][field] = value
    return raw


def bought(root: Path, noise: float = 4.0, **changes: Any) -> dict[str, Any]:
    raw = raw_recipe(root, data__rates={}, data__class_counts={}, **changes)
    return buy_class_counts(parse_recipe(raw, "r.yaml"), noise, "r.yaml")


def save(root: Path, value: dict[str, Any]) -> dict[str, Any]:
    (root / "counts.json").write_text(json.dumps(value))
    return value


def test_a_run_on_bought_counts_names_their_charge_and_counts_it(root, tmp_path):
    value = save(root, bought(root))
    recipe = parse_recipe(raw_recipe(root), "r.yaml")
    assert recipe.data.class_counts == value["counts"]
    assert recipe.data.counts_charge == value["charge"]
    assert parse_recipe(recipe.model_dump(mode="json"), "again") == recipe
    run = check_training(recipe, RunFolder(tmp_path / "run"), "r.yaml").begin()
    assert run.plan.step(0).expected_batch == 20
    from support.training import execute

    with _budget_charged(run):
        execute(run)
    facts = read_facts(run.folder)
    assert any(value["charge"] in line for line in facts.guarantee.assumptions)
    (budget,) = read_budgets(root / "budgets")
    assert [charge.name for charge in budget.charges] == ["class counts", "x"]
    ceiling = budget.terms.ceiling
    assert ceiling is not None
    counts, steps = (ceiling.cost(each.phases, each.records) for each in budget.charges)
    assert counts == pytest.approx(ceiling.order / 2 / 4.0**2) and steps > 0
    assert budget.spent == counts + steps
    card, own = facts.privacy_card(), f"bought before as {value['charge']}, which it leaves out"
    total = "bounded by epsilon 9 at delta 0.001"  # the model tells of the counts, too
    assert total in model_card._privacy_sentence(card) and bounding_guarantee(card)["epsilon"] == 9
    for said in (
        model_card._privacy_section(card), card_markdown(card), facts.privacy_statement,
        str(facts.guarantee),
    ):  # fmt: skip
        assert own in said
    assert "e^epsilon = 8.11e+03" in model_card._privacy_section(card)  # of epsilon 9
    alone = card | {"data_set": None}
    assert own in model_card._privacy_sentence(alone)
    usual = card | {"assumptions": []}
    assert "bounded by epsilon 9 " not in model_card._privacy_sentence(usual)


def test_a_dry_run_refuses_what_its_run_would_and_charges_nothing(root, tmp_path):
    def dry(**changes: Any) -> None:
        recipe = parse_recipe(raw_recipe(root, **changes), "r.yaml")
        pipeline.dry_run(recipe, runs=tmp_path / "runs", context="r.yaml")

    public: dict[str, Any] = {"data__class_counts": {"well": WELL, "ill": ILL}}
    dry(**public)
    assert not (root / "budgets").exists() and not (tmp_path / "runs").exists()
    value = save(root, bought(root))
    (before,) = read_budgets(root / "budgets")
    dry()
    with pytest.raises(UserError, match="no budget of these records"):
        dry(privacy__budget=str(root / "elsewhere"))
    assert not (root / "elsewhere").exists()
    with pytest.raises(UserError, match="no budget of these records"):
        dry(data__name="others")
    with pytest.raises(UserError, match="fixed before its first run"):
        dry(privacy__budget_ceiling=8.0)
    with pytest.raises(UserError, match=r"would take .* of what the ceiling"):
        dry(privacy__noise_multiplier=0.4)
    over = parse_recipe(raw_recipe(root, privacy__noise_multiplier=0.4), "r.yaml")
    run = check_training(over, RunFolder(tmp_path / "runs" / "x"), "r.yaml").begin()
    with pytest.raises(UserError, match=r"would take .* of what the ceiling"), _budget_charged(run):
        pytest.fail("it was trained")
    with pytest.raises(UserError, match=r"would take .* of what the ceiling"):  # as before
        dry(privacy__noise_multiplier=0.4)
    shutil.rmtree(tmp_path / "runs")
    well, ill = value["counts"].values()
    save(root, value | {"counts": {"well": well - 1, "ill": ill + 1}})
    with pytest.raises(UserError, match=r"what .* released must be"):
        dry()
    assert read_budgets(root / "budgets")[0].charges == before.charges


def test_a_run_without_the_budget_that_paid_is_refused(root, tmp_path):
    value = save(root, bought(root))

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=match) as one:
            recipe = parse_recipe(raw_recipe(root, **changes), "r.yaml")
            run = check_training(recipe, RunFolder(tmp_path / "run"), "r.yaml").begin()
            with _budget_charged(run):
                pytest.fail("it was trained")
        assert "\n" not in str(one.value)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    none: dict[str, Any] = {"privacy__budget": None, "privacy__budget_ceiling": None}
    refused("privacy.budget_ceiling: must be given, with the budget", **none)
    parse_recipe(raw_recipe(root, privacy__noise_multiplier=0, **none), "r.yaml")  # no promise
    refused("must be given", privacy__budget_ceiling=None)
    refused("must be given", privacy__budget_composition="non-adaptive")
    refused("no budget of these records", privacy__budget=str(root / "elsewhere"))
    refused("no budget of these records", data__name="others")  # of as many records
    unknown = {"data__counts_charge": "counts-0123456789abcdef"}
    refused("no budget of these records", data__class_counts=value["counts"], **unknown)
    refused("counts_charge: must be left out beside a file", **unknown)
    search: dict[str, Any] = {"space": {"training.learning_rate": {"choice": [0.1, 0.2]}}}
    search |= {"law": {"name": "fixed", "runs": 2}, "score": {"public": {"name": "others"}}}
    with pytest.raises(UserError, match=r"tune: must be left out with data\.class_counts that wer"):
        parse_recipe(raw_recipe(root) | {"tune": search}, "r.yaml")
    refused("takes them for public numbers; name the file", data__class_counts=value["counts"])
    ill = value["counts"]["ill"] + 1
    save(root, value | {"counts": {"ill": ill, "well": WELL + ILL - ill}})
    refused("released must be")
    save(root, value | {"counts": {"ill": "many", "well": 3}})
    refused(r"data\.class_counts\.ill")
    save(root, {"counts": value["counts"]})
    refused(r"data\.class_counts: .*damaged")
    (root / "counts.json").unlink()
    refused("dpdist data counts RECIPE --noise NUMBER` wrote, got .*where nothing lies")
    (budget,) = read_budgets(root / "budgets")
    assert [charge.name for charge in budget.charges] == ["class counts"]


@pytest.mark.parametrize("neighbours", [ONE, REPLACED])
def test_the_noise_is_as_large_as_the_relation_asks(tmp_path, neighbours):
    """The variance over 1,200 classes, which misses these limits less often than once in 10^6."""
    classes, each, noise = 1200, 20, 3.0
    write(tmp_path, "many", np.repeat(np.arange(classes), each))
    raw = raw_recipe(
        tmp_path, data__name="many", data__names=[], data__rates={}, data__class_counts={},
        data__classes=classes, privacy__delta=1e-5, privacy__neighbours=neighbours,
    )  # fmt: skip
    value = buy_class_counts(parse_recipe(raw, "r.yaml"), noise, "r.yaml")
    sensitivity = math.sqrt(2) if neighbours == REPLACED else 1.0
    assert value["deviation"] == pytest.approx(noise * sensitivity)
    assert value["neighbours"] == neighbours and sum(value["counts"].values()) == classes * each
    told = np.array([value["counts"][str(number)] for number in range(classes)])
    assert 0.78 < told.var() / (noise * sensitivity) ** 2 < 1.25
    exact = brentq(
        lambda at: delta_by_integration(at, noise, (1.0,)) - 1e-5, 0.01, 10
    )  # the same under both: noise is in units of the sensitivity
    assert value["epsilon"] == pytest.approx(exact, rel=5e-3)


def test_a_secret_number_of_records_is_told_by_no_count(root):
    """With a nominal number the counts add up to that, whatever the true one is."""
    setting = {"privacy__nominal_records": 300, "privacy__neighbours": ONE}
    value = bought(root, 4.0, **setting)
    assert sum(value["counts"].values()) == 300 != WELL + ILL
    assert value["relation"] == "add-or-remove-one"
    (budget,) = read_budgets(root / "budgets")
    assert [(charge.records, charge.nominal) for charge in budget.charges] == [(300, True)]


def test_noisy_counts_become_whole_ones_of_the_public_sum():
    generator = np.random.default_rng(1)
    for _ in range(200):
        classes = int(generator.integers(2, 12))
        noisy = generator.normal(20, 40, classes)
        total = int(generator.integers(classes, 400))
        found = job._whole_counts(noisy, total)
        assert sum(found) == total and min(found) >= 1
    assert job._whole_counts(np.array([-50.0, 30.0, 10.0]), 41) == [1, 30, 10]
    assert job._whole_counts(np.array([100.0, 1.0, 1.0]), 3) == [1, 1, 1]


def test_counts_of_features_are_not_charged_in_place_of_their_records(root):
    """A budget would know the features alone, and not the records that they were made of."""
    file = root / "scans" / "train.parquet"
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({FEATURES_KEY: "net saw letters"}), file)
    with pytest.raises(UserError, match=r"privacy\.budget: must be left out, .* are features that"):
        bought(root)
    assert not (root / "budgets").exists()


def test_counts_are_refused_where_nobody_could_use_them(root):
    none: dict[str, Any] = {"privacy__budget": None, "privacy__budget_ceiling": None}
    number = {"data__targets": "number", "data__names": [], "training__loss": "mse"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("privacy.budget: must be the folder", none),
        ("needs budget_ceiling", {"privacy__budget_ceiling": None}),
        ("needs budget_ceiling", {"privacy__budget_composition": "non-adaptive"}),
        ("targets: number there is none", number),
        ("would take", {"privacy__budget_ceiling": 0.5}),
    ]
    for match, changes in cases:
        with pytest.raises(UserError, match=match):
            bought(root, 1.0, **changes)
    assert read_budgets(root / "budgets") == []


def test_the_command_writes_the_same_counts_each_time(root, tmp_path, monkeypatch):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(raw_recipe(root)))  # it names the file that is yet to be written
    asked = ["counts", str(recipe), "--noise", "4", "--output", "counts.json"]
    monkeypatch.chdir(root)  # another folder than the recipe's, at which its paths begin
    texts = []
    for _ in range(2):
        result = CliRunner().invoke(data_app, asked)
        assert result.exit_code == 0, result.output
        assert "charged as counts-" in result.output and "alone epsilon" in result.output
        assert f"data: {{class_counts: {root / 'counts.json'}, rates: ...}}" in result.output
        texts.append((root / "counts.json").read_bytes())
    assert texts[0] == texts[1] and str(tmp_path) not in texts[0].decode()
    assert parse_recipe(raw_recipe(root), "r.yaml").data.counts_charge in texts[0].decode()
    (budget,) = read_budgets(root / "budgets")
    assert len(budget.charges) == 1
