"""`dpdist account`: answers, keys, errors, speed."""

from __future__ import annotations

import json
from functools import cache

import pytest
from support.processes import processor_seconds
from typer.testing import CliRunner

from dpdist.cli.account import account_app
from dpdist.core.errors import UserError
from dpdist.papers import published

pytestmark = pytest.mark.whole

RUN = ["--records", "60000", "--batch-size", "256", "--delta", "1e-5"]
KEYS = {
    "epsilon", "delta", "accountant", "neighbours", "noise_multiplier", "sample_rate", "steps",
}  # fmt: skip


def answer(*arguments: str):
    result = CliRunner().invoke(account_app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def text(*arguments: str) -> str:
    result = CliRunner().invoke(account_app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_epsilon():
    found = answer("epsilon", *RUN, "--noise-multiplier", "1.1", "--steps", "3516")
    assert set(found) >= KEYS
    assert found["epsilon"] == pytest.approx(1.134, abs=5e-4)
    assert found["accountant"].startswith("PLD")
    assert found["neighbours"] == "add-or-remove-one"
    shown = text("epsilon", *RUN, "--noise-multiplier", "1.1", "--steps", "3516")
    assert "1.13392" in shown and "Poisson" in shown


@pytest.mark.long
def test_noise_steps_and_batch_meet_their_targets():
    noise = answer("noise", "--epsilon", "1", *RUN, "--steps", "3516")
    assert set(noise) >= KEYS
    assert noise["noise_multiplier"] == pytest.approx(1.185, abs=1.5e-3)
    steps = answer("steps", "--epsilon", "2", *RUN, "--noise-multiplier", "1.1")
    assert set(steps) >= KEYS and 10_000 < steps["steps"] < 10_300
    batch = answer(
        "batch", "--epsilon", "2", "--records", "60000", "--delta", "1e-5",
        "--noise-multiplier", "1.1", "--steps", "3516",
    )  # fmt: skip
    for found, target in ((noise, 1), (steps, 2), (batch, 2)):
        assert 0.99 * target <= found["epsilon"] <= target


@pytest.mark.long
def test_relation_and_cap():
    setting = [*RUN, "--noise-multiplier", "1.1", "--steps", "1000"]
    plain = answer("epsilon", *setting)
    replaced = answer("epsilon", *setting, "--neighbours", "replace-one")
    assert replaced["neighbours"] == "replace-one"
    assert replaced["epsilon"] > 1.5 * plain["epsilon"]
    assert answer("epsilon", *setting, "--batch-cap", "300")["epsilon"] > plain["epsilon"]


def test_no_noise_is_valid_json():
    found = answer("epsilon", *RUN, "--noise-multiplier", "0", "--steps", "10")
    assert found["epsilon"] == "inf"


@pytest.mark.long
def test_search():
    rows = answer("search", *RUN, "--noise-multiplier", "1.1", "--steps", "3516", "--runs", "10")
    cost = {row["law"]: row["epsilon"] for row in rows}
    assert cost["Poisson, mean 10"] == pytest.approx(2.160, abs=2e-3)
    assert cost["geometric, mean 10"] == pytest.approx(1.712, abs=2e-3)
    assert cost["logarithmic, mean 10"] == pytest.approx(1.622, abs=2e-3)
    assert cost["one run"] < cost["logarithmic, mean 10"] < cost["fixed, 10 runs"]
    assert "95 % of K" in text(
        "search", *RUN, "--noise-multiplier", "1.1", "--steps", "50", "--runs", "3"
    )


@pytest.mark.long
def test_mechanisms(tmp_path):
    rows = {row["epsilon"]: row for row in answer("mechanisms")}
    assert rows[1.0]["analytic"] == pytest.approx(3.7306, abs=1e-4)
    assert rows[10.0]["classical_true_delta"] == pytest.approx(2.3e-5, rel=0.02)
    picture = tmp_path / "figure.png"
    assert "not a theorem" in text("mechanisms", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no such folder"):
        text("mechanisms", "--plot", str(tmp_path / "no" / "figure.png"))


@pytest.mark.long
@pytest.mark.parametrize("form", ["pdf", "svg", "png"])
def test_a_date_of_pictures_that_is_none_is_refused(tmp_path, monkeypatch, form):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "x")
    picture = tmp_path / f"figure.{form}"
    with pytest.raises(UserError, match="SOURCE_DATE_EPOCH: must be a whole number"):
        text("mechanisms", "--plot", str(picture))
    assert not picture.exists()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    text("mechanisms", "--plot", str(picture))
    assert picture.exists()


@pytest.mark.long
def test_shuffling():
    found = answer("shuffling", "--noise-multiplier", "0.4", "--steps", "10000", "--delta", "1e-5")
    assert found["shuffled_epsilon_at_least"] > 2 * found["poisson_epsilon_at_most"] > 0
    assert "no upper bound" in text(
        "shuffling", "--noise-multiplier", "1", "--steps", "50", "--delta", "1e-5"
    )


@pytest.mark.long
def test_claims(monkeypatch):
    monkeypatch.setattr(published, "published_claims", cache(published.published_claims))
    rows = answer("claims")
    assert {"system", "claimed", "proved", "verdict", "reason"} <= set(rows[0])
    shown = text("claims")
    assert "not sound" in shown and "TransDenoiser" in shown and "prints 15.79" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["noise", "--epsilon", "0", *RUN, "--steps", "10"],
        ["noise", "--epsilon", "-1", *RUN, "--steps", "10"],
        ["steps", "--epsilon", "0.0001", *RUN, "--noise-multiplier", "0.4"],
        ["epsilon", *RUN[:-1], "1.0", "--noise-multiplier", "1", "--steps", "10"],
        ["epsilon", "--records", "100", "--batch-size", "101", "--delta", "1e-5",
         "--noise-multiplier", "1", "--steps", "10"],
        ["epsilon", *RUN, "--noise-multiplier", "-1", "--steps", "10"],
        ["epsilon", *RUN, "--noise-multiplier", "1", "--steps", "0"],
        ["search", *RUN, "--noise-multiplier", "1", "--steps", "5", "--runs", "0"],
        ["mechanisms", "--delta", "2"],
    ],
)  # fmt: skip
def test_bad_values_are_one_clear_line(arguments):
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(account_app, arguments, catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(("account ", "--"))


@pytest.mark.long
def test_epsilon_starts_fast_and_imports_neither_torch_nor_ray():
    """Imports included, within three times the processor time of importing what it stands on."""
    code = (
        "import sys\n"
        "from dpdist.cli.account import account_app as app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'ray'} & set(sys.modules)\n"
    )
    arguments = ["epsilon", *RUN, "--noise-multiplier", "1.1", "--steps", "3516", "--json"]
    printed, took = processor_seconds(code, *arguments)
    assert json.loads(printed)["epsilon"] == pytest.approx(1.134, abs=5e-4)
    _, least = processor_seconds("import typer, scipy.stats, dp_accounting.pld.common")
    assert took < 3 * least
