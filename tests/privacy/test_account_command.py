"""`dpdist account`: answers, keys, errors, speed."""

from __future__ import annotations

import json
from functools import cache

import pytest
from scipy import stats
from support.processes import processor_seconds
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.papers import published

RUN = ["--records", "60000", "--batch-size", "256", "--delta", "1e-5"]
KEYS = {
    "epsilon", "delta", "accountant", "adjacency", "noise_multiplier", "sample_rate", "steps",
}  # fmt: skip


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
    assert set(found) >= KEYS
    assert found["epsilon"] == pytest.approx(1.134, abs=5e-4)
    assert found["accountant"].startswith("PLD")
    assert found["adjacency"] == "add-or-remove-one"
    shown = text(*RUN, "--noise-multiplier", "1.1", "--steps", "3516")
    assert "1.13392" in shown and "Poisson" in shown


@pytest.mark.slow
def test_noise_steps_and_batch_meet_their_targets():
    noise = answer("--epsilon", "1", *RUN, "--steps", "3516")
    assert set(noise) >= KEYS
    assert noise["noise_multiplier"] == pytest.approx(1.185, abs=1.5e-3)
    steps = answer("--epsilon", "2", *RUN, "--noise-multiplier", "1.1")
    assert set(steps) >= KEYS and 10_000 < steps["steps"] < 10_300
    batch = answer(
        "--epsilon", "2", "--records", "60000", "--delta", "1e-5",
        "--noise-multiplier", "1.1", "--steps", "3516",
    )  # fmt: skip
    for found, target in ((noise, 1), (steps, 2), (batch, 2)):
        assert 0.99 * target <= found["epsilon"] <= target


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
    assert "95 % of K" in text(*RUN, "--noise-multiplier", "1.1", "--steps", "50", "--trials", "3")


def test_a_radius_is_that_of_exact_bounds():
    found = answer("--hits", "99000", "--samples", "100000", "--sigma", "0.5")
    p = stats.beta.ppf(0.001, 99000, 1001)
    assert found["p_lower"] == pytest.approx(p, rel=1e-12)
    assert found["radius"] == pytest.approx(0.5 * stats.norm.ppf(p), rel=1e-9)
    assert not found["abstain"]
    even = ("--hits", "50000", "--samples", "100000", "--sigma", "0.5")
    assert answer(*even)["abstain"] and answer(*even)["radius"] == 0.0
    assert "ABSTAIN" in text(*even)


@pytest.mark.slow
def test_claims(monkeypatch):
    monkeypatch.setattr(published, "published_claims", cache(published.published_claims))
    rows = answer("--claims")
    assert {"system", "claimed", "proved", "verdict", "reason"} <= set(rows[0])
    shown = text("--claims")
    assert "not sound" in shown and "TransDenoiser" in shown and "prints 15.79" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--epsilon", "0", *RUN, "--steps", "10"],
        ["--epsilon", "-1", *RUN, "--steps", "10"],
        ["--epsilon", "0.0001", *RUN, "--noise-multiplier", "0.4"],
        [*RUN[:-1], "1.0", "--noise-multiplier", "1", "--steps", "10"],
        ["--records", "100", "--batch-size", "101", "--delta", "1e-5",
         "--noise-multiplier", "1", "--steps", "10"],
        [*RUN, "--noise-multiplier", "-1", "--steps", "10"],
        [*RUN, "--noise-multiplier", "1", "--steps", "0"],
        [*RUN, "--noise-multiplier", "1", "--steps", "5", "--trials", "0"],
        [*RUN],
        [*RUN, "--noise-multiplier", "1"],
        [*RUN, "--claims"],
        ["--hits", "11", "--samples", "10", "--sigma", "0.5"],
        ["--hits", "1", "--samples", "10"],
        [],
    ],
)  # fmt: skip
def test_bad_values_are_one_clear_line(arguments):
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["account", *arguments], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(("account: ", "--"))


@pytest.mark.e2e
def test_epsilon_starts_fast_and_imports_neither_torch_nor_ray():
    """Imports included, within three times the processor time of importing what it stands on."""
    code = (
        "import sys\n"
        "import dpdist.cli.account\n"
        "from dpdist.cli.main import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'ray'} & set(sys.modules)\n"
    )
    arguments = ["account", *RUN, "--noise-multiplier", "1.1", "--steps", "3516", "--json"]
    printed, took = processor_seconds(code, *arguments)
    assert json.loads(printed)["epsilon"] == pytest.approx(1.134, abs=5e-4)
    _, least = processor_seconds("import typer, scipy.stats, dp_accounting.pld.common")
    assert took < 3 * least
