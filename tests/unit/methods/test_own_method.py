"""A method of one's own: one class in one file, named by a recipe, and nothing else touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from support.extension_examples import EXAMPLES, TOY
from support.recipes import write_recipe
from support.training import execute

from dpdist.core.errors import UserError
from dpdist.privacy.phases import GaussianReleases, GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import load_recipe, parse_recipe
from dpdist.training.job import prepare

RECIPE = {
    "name": "toy",
    "data": {"name": "digits"},
    "model": {"name": "mine:patches", "options": {"width": 4}},
    "method": {"name": "varied:Varied", "copies": 3},
    "privacy": {"epsilon": 3.0, "delta": 1e-4},
    "training": {"batch_size": 200, "steps": 2, "learning_rate": 0.5},
}


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Path:
    """A folder with the class's file and a model's, in which Python finds them."""
    (tmp_path / "varied.py").write_text(TOY)
    (tmp_path / "mine.py").write_text(EXAMPLES["mine.py"])
    write_recipe(tmp_path, RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("varied", "mine"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_its_price_claim_and_assumptions_are_the_run_s(beside):
    """Its command, on Ray: tests/e2e/test_end_to_end.py."""
    recipe, folder = load_recipe(beside / "r.yaml"), RunFolder(beside / "run")
    execute(prepare(recipe, folder, "test"))
    facts, plan = load_results(folder), folder.read_plan()
    paid, steps = plan.phases
    assert paid == GaussianReleases(5.0) and isinstance(steps, GaussianSteps)
    assert 2.99 < facts.guarantee.epsilon == plan.guarantee().epsilon <= 3
    alone = PrivacyPlan(plan.records, (steps,), plan.delta, 1.0)
    assert alone.guarantee().epsilon < 2.98  # the sum is paid out of the same epsilon
    assert facts.claim.verdict == "not sound" and facts.claim.claimed.epsilon == 0.5
    card = json.dumps(facts.privacy_card())
    assert "the class varied:Varied states its privacy cost correctly" in card
    assert "the sum is forgotten" in card


def test_its_own_rules_and_types_are_the_recipe_s(beside):
    for changed, key in (
        ({"method": {"name": "varied:Varied", "copies": 0}}, r"method\.copies"),
        ({"method": {"name": "varied:Varied", "copy": 2}}, r"method\.copy"),
        ({"method": "varied:Nobody"}, "method"),
        ({"method": "os:getcwd"}, "method"),
        ({"privacy": {**RECIPE["privacy"], "batch_cap": 300}}, r"privacy\.batch_cap"),
    ):
        with pytest.raises(UserError, match=key):
            parse_recipe({**RECIPE, **changed}, "r.yaml")
    recipe = parse_recipe(RECIPE, "r.yaml")
    assert parse_recipe(yaml.safe_load(recipe.to_yaml()), "again") == recipe


def test_paths_of_a_method_found_by_name_begin_at_the_recipes_folder(tmp_path):
    own = {"name": "functional", "relevance": {"root": "there"}}
    path = write_recipe(tmp_path, {**RECIPE, "method": own})
    assert load_recipe(path).method.relevance.root == tmp_path / "there"
