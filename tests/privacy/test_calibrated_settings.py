"""Calibration answers for the whole setting that was asked for: relation and cap included."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.privacy.calibration import batch_size_for, noise_multiplier_for, steps_for
from dpdist.privacy.plan import PrivacyPlan

DATA = {"records": 400, "delta": 1e-4}
RELATIONS = ("add-or-remove-one", "replace-one")
SETTINGS = [
    pytest.param({"adjacency": relation, "batch_cap": cap}, id=f"{relation} cap {cap}")
    for relation, cap in itertools.product(RELATIONS, (None, 41))
]


def epsilon(**setting: Any) -> float:
    return PrivacyPlan.dp_sgd(**DATA, **setting).guarantee().epsilon


@pytest.mark.slow
@pytest.mark.parametrize("which", SETTINGS)
def test_noise_meets_the_target_of_the_setting(which):
    setting = {"batch_size": 40, "steps": 3, **which}
    noise = noise_multiplier_for(2.0, **DATA, **setting)
    assert 0.99 * 2.0 <= epsilon(noise_multiplier=noise, **setting) <= 2.0


@pytest.mark.slow
@pytest.mark.parametrize("which", SETTINGS)
def test_steps_meet_the_target_of_the_setting(which):
    setting = {"batch_size": 40, "noise_multiplier": 2.5, **which}
    steps = steps_for(3.0, **DATA, **setting)
    assert epsilon(steps=steps, **setting) <= 3.0 < epsilon(steps=steps + 1, **setting)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", RELATIONS)
def test_batch_sizes_meet_the_target_of_the_setting(adjacency):
    setting = {"steps": 3, "noise_multiplier": 2.5, "adjacency": adjacency}
    size = batch_size_for(2.0, **DATA, **setting)
    assert epsilon(batch_size=size, **setting) <= 2.0 < epsilon(batch_size=size + 1, **setting)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", RELATIONS)
@pytest.mark.parametrize(
    ("given", "capped"),
    [
        ({"batch-size": 40, "steps": 3}, True),
        ({"batch-size": 40, "noise-multiplier": 2.5}, True),
        ({"noise-multiplier": 2.5, "steps": 3}, False),
    ],
)
def test_the_commands_pass_the_whole_setting_on(given, capped, adjacency):
    """What is printed with an answer is the cost of that answer under what was asked for."""
    asked = {"epsilon": 3.0, **DATA, **given}
    if capped:
        asked["batch-cap"] = 41
    arguments = [part for name, value in asked.items() for part in (f"--{name}", str(value))]
    arguments += ["--replace-one"] * (adjacency == "replace-one")
    shown = CliRunner().invoke(app, ["account", *arguments, "--json"], catch_exceptions=False)
    answer = json.loads(shown.stdout)
    found = {name: answer[name] for name in ("batch_size", "steps", "noise_multiplier")}
    cap = 41 if capped else None
    proved = epsilon(**found, adjacency=adjacency, batch_cap=cap)
    assert answer["epsilon"] == pytest.approx(proved, rel=1e-9) and proved <= 3.0
    assert (answer["adjacency"], answer["batch_cap"]) == (adjacency, cap)
