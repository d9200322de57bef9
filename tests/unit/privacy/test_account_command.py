"""`dpdist account`: answers, keys, errors, speed."""

from __future__ import annotations

import json

import pytest
from scipy import stats
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.privacy import calibration
from dpdist.privacy.plan import PrivacyPlan

RUN = ["--records", "60000", "--batch-size", "256", "--delta", "1e-5"]


def answer(*arguments: str):
    result = CliRunner().invoke(app, ["account", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def text(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["account", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_epsilon():
    found = answer(*RUN, "--noise-multiplier", "1.1", "--steps", "3516")
    assert found["epsilon"] == pytest.approx(1.134, abs=5e-4)
    assert found["adjacency"] == "add-or-remove-one"
    assert "1.13392" in text(*RUN, "--noise-multiplier", "1.1", "--steps", "3516")


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize(
    ("given", "cap"),
    [
        ({"batch_size": 40, "steps": 3}, 41),
        ({"batch_size": 40, "noise_multiplier": 2.5}, 41),
        ({"noise_multiplier": 2.5, "steps": 3}, None),
    ],
    ids=["noise", "steps", "batch size"],
)
def test_what_is_found_meets_the_target_of_the_whole_setting(given, cap, adjacency):
    """Noise, steps or batch size: what is printed is its cost under what was asked for."""
    data = {"records": 400, "delta": 1e-4}
    asked = {"epsilon": 3.0, **data, **given} | ({"batch_cap": cap} if cap else {})
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    found = answer(*arguments, *["--replace-one"] * (adjacency == "replace-one"))
    setting = {name: found[name] for name in ("batch_size", "steps", "noise_multiplier")}
    plan = PrivacyPlan.dp_sgd(**data, **setting, adjacency=adjacency, batch_cap=cap)
    proved = plan.guarantee().epsilon
    assert found["epsilon"] == pytest.approx(proved, rel=1e-9) and 2 < proved <= 3.0
    assert (found["adjacency"], found["batch_cap"]) == (adjacency, cap)


def test_no_noise_is_valid_json():
    found = answer(*RUN, "--noise-multiplier", "0", "--steps", "10")
    assert found["epsilon"] == "inf"


@pytest.mark.slow
def test_search():
    rows = answer(*RUN, "--noise-multiplier", "1.1", "--steps", "3516", "--trials", "10")
    cost = {row["num_trials"]: row["epsilon"] for row in rows}
    assert cost["Poisson, mean 10"] == pytest.approx(2.160, abs=2e-3)
    assert cost["geometric, mean 10"] == pytest.approx(1.712, abs=2e-3)
    assert cost["logarithmic, mean 10"] == pytest.approx(1.622, abs=2e-3)
    assert cost["one run"] < cost["logarithmic, mean 10"] < cost["fixed, 10 runs"]


def test_the_most_steps_that_are_tried_are_no_answer_without_a_word():
    data = ("--records", "1000000", "--batch-size", "256", "--delta", "1e-7")
    arguments = ["account", *data, "--noise-multiplier", "4", "--epsilon", "8", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(done.stdout)["steps"] == calibration.MAX_STEPS
    assert "steps: " in done.stderr


def test_a_radius_is_that_of_exact_bounds():
    found = answer("--hits", "99000", "--samples", "100000", "--sigma", "0.5")
    p = stats.beta.ppf(0.001, 99000, 1001)
    assert found["p_lower"] == pytest.approx(p, rel=1e-12)
    assert found["radius"] == pytest.approx(0.5 * stats.norm.ppf(p), rel=1e-9)
    assert not found["abstain"]
    even = ("--hits", "50000", "--samples", "100000", "--sigma", "0.5")
    assert answer(*even)["abstain"] and answer(*even)["radius"] == 0.0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--epsilon", "-1", *RUN, "--steps", "10"],
        ["--epsilon", "0.0001", *RUN, "--noise-multiplier", "0.4"],
        [*RUN[:-1], "1.0", "--noise-multiplier", "1", "--steps", "10"],
        [*RUN, "--noise-multiplier", "1", "--steps", "5", "--trials", "0"],
        [*RUN, "--claims"],
        ["--hits", "11", "--samples", "10", "--sigma", "0.5"],
    ],
)
def test_bad_values_are_refused(arguments):
    with pytest.raises(UserError):
        CliRunner().invoke(app, ["account", *arguments], catch_exceptions=False)
