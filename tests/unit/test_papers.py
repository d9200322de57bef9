"""The pages of the papers are what their generator prints; what they name makes a plan."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp
from support.benchmarks import load as load_benchmark

from dpdist.runs.recipe import built_in_recipes, make_plan, paper_recipes

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    small = vars(load_benchmark("papers/dplis/run"))
    for epsilon, steps in small["BUDGETS"].items():
        assert spent(64 / RECORDS["digits"], 1.1, steps) == pytest.approx(epsilon, abs=0.012)


def test_recipes_have_the_published_settings():
    for _, item, row in ROWS:
        if "keys" in item:
            fields = papers["recipe_of"](row["recipe"], row.get("change")).model_dump()
            sections = [key.split(".") for key in item["keys"]]
            assert [fields[section][name] for section, name in sections] == row["published"], row
