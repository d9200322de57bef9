"""A method of one's own: one class in one file, named by a recipe, and nothing else touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from support.extension_examples import EXAMPLES, TOY
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe

from dpdist.core.errors import UserError
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases, GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import load_recipe, parse_recipe

RECIPE = {
    "name": "toy",
    "data": {"name": "digits"},
    "model": {"name": "mine:patches", "options": {"width": 4}},
    "method": {"name": "varied:Varied", "copies": 3},
    "privacy": {"epsilon": 3.0, "delta": 1e-4},
    "training": {"batch_size": 200, "steps": 10, "learning_rate": 0.5},
    "certify": {"sigma": 0.25, "n": 200, "max_inputs": 10, "radii": [0.1]},
    "resources": {"workers": 2},
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
def test_it_is_trained_certified_reported_and_released(beside, monkeypatch, capsys):
    """Without Ray; on it: tests/test_end_to_end.py."""
    run_without_ray(monkeypatch)

    def dpdist(*arguments: str) -> str:
        done = command(monkeypatch, capsys, beside, *arguments)
        assert done.code == 0, f"{done.out}\n{done.err}"
        return done.out

    dpdist("run", "r.yaml", "--dry-run")
    dpdist("run", "r.yaml")
    run = beside / "runs" / "toy"
    plan = PrivacyPlan.from_dict(json.loads((run / "private/plan.json").read_text()))
    paid, steps = plan.phases
    assert paid == GaussianReleases(5.0) and isinstance(steps, GaussianSteps)
    assert 2.99 < plan.guarantee().epsilon <= 3
    alone = PrivacyPlan(plan.records, (steps,), plan.delta, 1.0)
    assert alone.guarantee().epsilon < 2.98  # the sum is paid out of the same epsilon
    ledger = Ledger.read(run / "private/ledger.jsonl")
    assert ledger.guarantee(plan).epsilon == plan.guarantee().epsilon
    assert (run / "private/teachers").exists()
    for once in ("before-*", "after-*"):  # by each worker
        assert len(list((run / "private").glob(once))) == 2
    assert list((run / "certificates").rglob("*.parquet"))
    assert "Varied, Theorem 0" in (run / "report/index.html").read_text()
    dpdist("release", str(run))
    card = (run / "release/privacy_card.json").read_text()
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
    path = write_recipe(tmp_path, {**RECIPE, "certify": None, "method": own})
    assert load_recipe(path).method.relevance.root == tmp_path / "there"
