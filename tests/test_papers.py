"""The pages of the papers are what their generator prints; what they name makes a plan."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.special import gammaln, logsumexp
from support.benchmarks import load as load_benchmark

from dpdist.core.errors import UserError
from dpdist.data.tables import split_files
from dpdist.runs.recipe import built_in_recipes, make_plan, paper_recipes

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ROOT / "papers"
WRITE = "python papers/tables.py --write"
RECORDS = {
    "mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000, "idc": 39_952, "digits": 1_439,
    "docstrings": 40_000, "svhn": 73_257,
}  # fmt: skip

papers = vars(load_benchmark("papers/tables"))
ABOUT: dict[str, dict[str, Any]] = {name: papers["published"](name) for name in papers["PAPERS"]}
ITEMS = [(paper, item) for paper, about in ABOUT.items() for item in about["items"]]
ROWS = [(paper, item, row) for paper, item in ITEMS for row in item.get("rows", [])]
MEASURED = [line for name in ABOUT for line in papers["lines_of"](f"{name}/measured.jsonl")]
WITH_RECIPES = [
    *((row["recipe"], row.get("change")) for _, _, row in ROWS if "recipe" in row),
    *((name, None) for _, item in ITEMS for name in item.get("recipes", [])),
    *((one["recipe"], None) for a in ABOUT.values() for one in a["systems"] if "recipe" in one),
    *((line["recipe"], line["change"]) for line in MEASURED if line["recipe"] is not None),
]


def test_the_pages_are_what_the_generator_prints():
    made = papers["pages"]()
    assert {name: (PAPERS / name).read_text() for name in made} == made, WRITE


def test_the_pictures_are_what_the_generator_draws():
    drawn = papers["pictures"]()
    assert {name: (PAPERS / name).read_text() for name in drawn} == drawn, WRITE
    _, item = next(each for each in ITEMS if each[1]["id"] == "Figure 3" and each[0] == "dplis")
    points = sum(len(one.cells) for one in papers["results"]("dplis", item))
    assert (
        drawn[f"dplis/pictures/{item['pictures'][0]['file']}"].count("<circle") == points > 8
    )  # each mean is there


@pytest.mark.long
def test_every_recipe_named_loads_and_makes_a_plan():
    """With the change beside it; with epsilon as given, so noise is not sought here."""
    sizes = RECORDS | {
        name: budget["records"] for name, budget in ABOUT["dplis"]["budgets"].items()
    }
    seen = {json.dumps(one, sort_keys=True): one for one in WITH_RECIPES}
    for name, change in seen.values():
        recipe = papers["recipe_of"](name, change)
        if recipe.privacy.noise_multiplier is None:
            calibrated = {"privacy.epsilon": None, "privacy.noise_multiplier": 4.0}
            recipe = papers["recipe_of"](name, (change or {}) | calibrated)
        plan = make_plan(recipe, sizes[recipe.data.name], name)
        assert plan.records > 0, name
    with pytest.raises(UserError, match="no such recipe file"):
        papers["recipe_of"]("dplis-mnist-rnn")
    with pytest.raises(UserError, match=r"method\.radius"):
        papers["recipe_of"]("dplis-mnist-cnn", {"method.radius": "best"})


@pytest.mark.long
def test_heads_of_recipes_say_what_is_proved():
    """The epsilon that a recipe asks for, or that of its noise, to the last digit that is told."""
    proved: dict[Any, float] = {}
    told = 0
    for path in [*built_in_recipes(), *paper_recipes()]:
        head, recipe = path.read_text().splitlines()[0], papers["recipe_of"](path.stem)
        said = re.search(r"([\d.]*\d) proved", head)
        said = said or re.search(r"(?<!its )epsilon ([\d.]*\d)", head)
        if said is None:
            continue
        found = recipe.privacy.epsilon
        if found is None:
            plan = make_plan(recipe, RECORDS[recipe.data.name], path.stem)
            if plan.phases not in proved:
                proved[plan.phases] = plan.guarantee().epsilon
            found = proved[plan.phases]
        digits = len(said[1].partition(".")[2])
        assert f"{found:.{digits}f}" == said[1], head
        told += 1
    assert told > 30


def spent(rate: float, noise: float, steps: int, delta: float = 1e-5) -> float:
    """The paper's accountant: Renyi DP of the sampled Gaussian at whole orders, converted by
    RDP + ln(1 / delta) / (order - 1)."""
    best = math.inf
    for order in range(2, 65):
        k = np.arange(order + 1)
        terms = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms += (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / 2 / noise**2
        rdp = float(logsumexp(terms)) / (order - 1)
        best = min(best, steps * rdp - math.log(delta) / (order - 1))
    return best


@pytest.mark.long
def test_the_steps_of_each_budget_spend_what_is_printed():
    recipes = {
        (recipe.data.name, recipe.privacy.noise_multiplier, recipe.training.batch_size)
        for _, item, row in ROWS
        if "at" in item
        for recipe in [papers["recipe_of"](row["recipe"])]
    }
    assert len(recipes) == len(ABOUT["dplis"]["budgets"])
    for name, noise, batch in recipes:
        budget = ABOUT["dplis"]["budgets"][name]
        for epsilon, steps in budget["steps"].items():
            found = spent(batch / budget["records"], noise, steps)
            assert found == pytest.approx(epsilon, abs=0.012), (name, epsilon)
            a_round = budget["records"] // batch  # the authors' epoch
            whole = spent(batch / budget["records"], noise, round(steps / a_round) * a_round)
            assert whole == pytest.approx(epsilon, abs=0.01), (name, epsilon)
    small = vars(load_benchmark("papers/dplis/run"))
    for epsilon, steps in small["BUDGETS"].items():
        assert spent(64 / RECORDS["digits"], 1.1, steps) == pytest.approx(epsilon, abs=0.012)


def test_recipes_have_the_published_settings():
    for _, item, row in ROWS:
        if "keys" in item:
            fields = papers["recipe_of"](row["recipe"], row.get("change")).model_dump()
            sections = [key.split(".") for key in item["keys"]]
            assert [fields[section][name] for section, name in sections] == row["published"], row


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def test_published_figures_are_well_formed():
    for paper, item in ITEMS:
        assert {"id", "shows", "verdict"} <= item.keys(), (paper, item["id"])
        assert item.keys() & {"rows", "says", "run", "why"}, (paper, item["id"])
    for paper, item, row in ROWS:
        told = row["published"]
        assert 0 < len(told) <= len(item["columns"]), (paper, item["id"], row["row"])
        assert all(value is None or _is_number(value) for value in told), row
        assert any(value is not None for value in told), row
    for _, item in ITEMS:
        names = [row["row"] for row in item.get("rows", [])]
        assert len(set(names)) == len(names)


def test_intervals():
    interval = papers["interval"]
    one = interval([95.0], 1000)
    assert (one.low, one.high) == pytest.approx((93.46, 96.26), abs=0.01)  # Clopper and Pearson's
    three = interval([1.0, 2.0, 3.0], 1000)
    assert (three.value, three.high) == pytest.approx((2, 2 + 4.303 / math.sqrt(3)), abs=1e-3)
    spread = interval([1.0, 2.0, 3.0], None, "deviation")
    assert (spread.value, spread.low, spread.high) == pytest.approx((1, 0.521, 6.285), abs=1e-3)
    assert math.isinf(interval([3.0], None).high)


@pytest.mark.long
def test_trainings_are_read_at_each_budget_and_not_made_again(tmp_path, monkeypatch):
    benchmark = vars(load_benchmark("papers/dplis/run"))
    module = benchmark["main"].__globals__
    monkeypatch.setitem(module, "BUDGETS", {1.2: 2, 1.3: 4})
    rows = {"none": {"name": "dp-sgd"}, "R = 10": module["smoothed"](10)}
    monkeypatch.setitem(module, "SWEEPS", {"radius": rows})
    results = tmp_path / "dplis.jsonl"
    words = ["dplis.py", "--small", "--sweeps", "radius", "--seeds", "1", "--results", str(results)]
    monkeypatch.setattr("sys.argv", words)
    for _ in range(2):
        benchmark["main"]()
    lines = list(map(json.loads, results.read_text().splitlines()))
    assert [line["row"] for line in lines] == ["none", "R = 10"]
    for line in lines:
        assert list(line["steps"].values()) == [2, 4] and line["n"] == 358
        assert list(line["test"]) == list(line["train"]) == ["ε 1.20", "ε 1.30"]
        assert 0 < line["proved"]["ε 1.20"] < line["proved"]["ε 1.30"]


@pytest.mark.slow
def test_every_cell_that_a_cpu_trains_loads_and_makes_a_plan():
    """With a name of its own; with epsilon as given, so noise is not sought here."""
    script = vars(load_benchmark("papers/run_small"))
    found = script["cells"]()
    known = {(paper, item["id"]) for paper, item in ITEMS}
    assert len({script["run_name"](part) for part in found}) == len(found) > 20
    for part, cell in found.items():
        assert (cell.paper, cell.item) in known, part
        change = cell.change | {"name": script["run_name"](part)}
        recipe = papers["recipe_of"](cell.recipe, change)
        if recipe.privacy.noise_multiplier is None:
            change = change | {"privacy.epsilon": None, "privacy.noise_multiplier": 4.0}
            recipe = papers["recipe_of"](cell.recipe, change)
        plan = make_plan(recipe, RECORDS[recipe.data.name], part)
        assert ("NOT PRIVATE" in cell.row) <= (plan.guarantee().epsilon == math.inf), part


def test_rows_are_compared_image_by_image():
    """Five more images of 8 are right under one key, by McNemar's test 2 (1/2)^5; with a second key
    the interval is of the two differences. A column may have other inputs than the rest."""
    result = papers["Result"]
    few, most, all_right = "00", "f8", "ff"
    about = {"setting": "s", "commit": "c", "command": "c", "n": 8, "counts": {"clean": 50}}
    first = result("none", {"a": [0.0]}, right={"a": {0: few}, "b": {0: few}}, **about)
    other = result("R", {"a": [62.5]}, right={"a": {0: most}}, **about)
    told = "\n".join(papers["_others"]([first, other], "mean"))
    assert "| R, less none on the same images | +62 (p 0.062) |  |" in told
    assert "8 test inputs (clean: 50)" in told and (first.inputs("a"), first.inputs("clean")) == (
        8, 50,
    )  # fmt: skip
    first.right["a"][1], other.right["a"][1] = few, all_right
    ((_, told, *_),) = papers["_differences"]([first, other], ["a"])
    low, high = map(float, re.fullmatch(r"\+81 \[(.*), (.*)\]", told).groups())
    assert low < 62.5 and high > 100
    assert list(papers["_differences"]([first], ["a"])) == []


def test_test_images_are_thinned_and_training_records_are_not(tmp_path):
    script, common = vars(load_benchmark("papers/run_small")), load_benchmark("benchmarks/_common")
    for name in ("cifar10", "mnist"):
        common.make_images(tmp_path / "data", name, 6, 40)
    root = script["with_fewer_tests"](tmp_path / "data", tmp_path / "fewer")
    assert script["with_fewer_tests"](tmp_path / "data", tmp_path / "fewer") == root
    for split, step in (("train", 1), ("test", script["TESTS"])):
        whole, part = (
            pq.read_table(list(map(str, split_files(place, "mnist", split)))).to_pylist()
            for place in (tmp_path / "data", root)
        )
        assert part == whole[::step] and len(part) in (6, 4)
