from __future__ import annotations

import json

import pytest
import typer
from scipy import stats
from support.processes import processor_seconds
from typer.testing import CliRunner

from dpdist.cli import certify
from dpdist.core.errors import UserError

pytestmark = pytest.mark.whole

app = typer.Typer()
app.command("radius")(certify.radius_command)
ARGS = ["--hits", "99000", "--draws", "100000", "--alpha", "0.001", "--sigma", "0.5"]


def test_json_has_the_promised_keys() -> None:
    result = CliRunner().invoke(app, [*ARGS, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    p = stats.beta.ppf(0.001, 99000, 1001)
    assert answer["p_lower"] == pytest.approx(p, rel=1e-12)
    assert answer["radius"] == pytest.approx(0.5 * stats.norm.ppf(p), rel=1e-9)
    assert answer["abstain"] is False


def test_abstains_below_one_half() -> None:
    args = ["--hits", "50000", "--draws", "100000", "--sigma", "0.5"]
    answer = json.loads(CliRunner().invoke(app, [*args, "--json"]).output)
    assert answer["abstain"] is True and answer["radius"] == 0.0
    assert "ABSTAIN" in CliRunner().invoke(app, args).output


def test_impossible_counts_are_a_user_error() -> None:
    result = CliRunner().invoke(app, ["--hits", "11", "--draws", "10", "--sigma", "0.5"])
    assert isinstance(result.exception, UserError)
    assert "11 of 10" in str(result.exception)


@pytest.mark.long
def test_starts_fast_without_torch_and_ray() -> None:
    code = (
        "import sys, dpdist.cli.certify;"
        "bad = {'torch', 'ray', 'pandas', 'scipy.stats'} & set(sys.modules);"
        "assert not bad, bad"
    )
    _, took = processor_seconds(code)
    _, least = processor_seconds("import typer, scipy.special")
    assert took < 3 * least
