"""What somebody new meets first: near misses of keys, and room for workers."""

from __future__ import annotations

import pytest

from dpdist import pipeline
from dpdist.cluster import session
from dpdist.core.errors import UserError
from dpdist.runs.recipe import parse_recipe, resolve_recipe

BASE = {
    "name": "small",
    "data": {"name": "digits", "max_train": 200},
    "model": {"name": "linear"},
    "privacy": {"epsilon": 3, "delta": 1e-4},
    "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.5},
    "certify": {"sigma": 0.25, "n": 200, "max_inputs": 20},
}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.batchsize", "training.batch_size"),
        ("training.epsilon", "privacy.epsilon"),
        ("data.text.lenght", "data.text.length"),
        ("resource", "resources"),
    ],
)
def test_an_unknown_key_is_answered_with_the_near_one(key, meant):
    with pytest.raises(UserError) as refused:
        resolve_recipe(BASE, changes={key: 3})
    lines = str(refused.value).splitlines()
    assert any(line.startswith(f"recipe: {key}: ") and meant in line for line in lines)


def test_workers_that_the_machine_cannot_hold_are_refused_with_the_sum(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    have = session.count_local_cpus()
    recipe = parse_recipe(BASE | {"resources": {"workers": have + 6}}, "test")
    with pytest.raises(UserError) as refused:
        pipeline.run(recipe, runs=tmp_path)
    said = str(refused.value)
    assert said.startswith(f"resources.workers: must be at most {have}, got {have + 6}: ")
    assert list(tmp_path.iterdir()) == []
    rows = dict(pipeline.dry_run(recipe, runs=tmp_path))  # another machine may hold them
    assert rows["not on this machine"] == said and "guarantee" in rows
