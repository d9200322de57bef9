"""Budgets of data sets, and the privacy card."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from dpdist.commands.budget import app
from dpdist.errors import UserError
from dpdist.privacy.budget import BudgetExceeded, DataBudget, budgets_in
from dpdist.privacy.card import EVALUATION_UNPROTECTED, card, card_markdown
from dpdist.privacy.journal import JournalError
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import (
    GaussianSteps,
    LaplaceReleases,
    ParallelParts,
    PrivacyPlan,
    RepeatAndSelect,
)

PLAN = PrivacyPlan.dp_sgd(records=1000, batch_size=50, noise_multiplier=1.5, steps=40, delta=1e-4)
TWICE = PrivacyPlan(1000, PLAN.phases * 2, 1e-4)
DATA = "ab" * 16


def reserve(budget: DataBudget, run: str, **setting):
    return budget.reserve(run, f"name of {run}", 1000, PLAN.phases, delta=1e-4, **setting)


@pytest.fixture
def budget(tmp_path):
    with DataBudget.open(tmp_path / "budgets", DATA, "toy") as opened:
        yield opened


def test_runs_on_the_same_data_compose(budget):
    assert reserve(budget, "one").epsilon == PLAN.guarantee().epsilon
    total = reserve(budget, "two")
    assert total.epsilon == pytest.approx(TWICE.guarantee().epsilon)
    assert total.epsilon > PLAN.guarantee().epsilon
    assert budget.guarantee(1e-4) == total
    budget.close()
    with DataBudget.open(budget.path.parent, DATA) as again:
        assert again.guarantee(1e-4) == total
        assert again.data_name == "toy"


def test_a_continued_run_is_charged_once(budget):
    reserve(budget, "one")
    size = budget.path.stat().st_size
    assert reserve(budget, "one").epsilon == PLAN.guarantee().epsilon
    assert budget.path.stat().st_size == size


def test_settling_charges_what_was_released(budget, tmp_path):
    reserve(budget, "one")
    with Ledger.open(tmp_path / "private" / "ledger.jsonl", PLAN.fingerprint()) as ledger:
        ledger.begin_attempt({"world_size": "1"})
        for step in range(40):
            ledger.record(step, f"{step:064x}")
        ledger.begin_attempt({"world_size": "2"})
        for step in range(30, 40):
            ledger.record(step, f"{step + 1000:064x}")
        released = ledger.phases(PLAN)
    budget.settle("one", released)
    assert [charge.status for charge in budget.charges] == ["settled"]
    fifty = PrivacyPlan(1000, (GaussianSteps(50, 1.5, 0.05),), 1e-4)
    assert budget.guarantee(1e-4).epsilon == fifty.guarantee().epsilon
    with pytest.raises(JournalError, match="reserve comes before"):
        budget.settle("unknown", released)


def test_a_ceiling_refuses_and_records_nothing(budget):
    one = reserve(budget, "one", ceiling=5.0).epsilon
    size = budget.path.stat().st_size
    with pytest.raises(BudgetExceeded, match="above its ceiling"):
        reserve(budget, "two", ceiling=one + 0.01)
    assert budget.path.stat().st_size == size
    reserve(budget, "one", ceiling=one + 0.01)  # continuing the first run stays allowed
    reserve(budget, "two", ceiling=5.0)


def test_searches_and_single_runs_share_a_budget(budget):
    search = RepeatAndSelect(PLAN.phases, 5, 1.0)
    budget.reserve("search", "search", 1000, (search,), delta=1e-4)
    total = reserve(budget, "run")
    both = PrivacyPlan(1000, (search, *PLAN.phases), 1e-4).guarantee()
    assert total.epsilon == pytest.approx(both.epsilon)
    assert total.source.startswith("RDP")


def test_a_part_of_the_data_is_the_same_data(budget):
    budget.close()
    with DataBudget.open(budget.path.parent, f"{DATA}-first-100") as part:
        assert part.path == budget.path
    with pytest.raises(ValueError, match="fingerprint"):
        DataBudget.open(budget.path.parent, "../escape")


def test_damage_is_noticed(budget):
    reserve(budget, "one")
    reserve(budget, "two")
    budget.close()
    lines = budget.path.read_text().splitlines(keepends=True)
    budget.path.write_text("".join([lines[0], *lines[2:]]))
    with pytest.raises(JournalError):
        budgets_in(budget.path.parent)


def test_the_command(budget):
    reserve(budget, "one")
    reserve(budget, "two")
    folder = str(budget.path.parent)
    arguments = ["--folder", folder, "--delta", "1e-4"]
    shown = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    (entry,) = json.loads(shown.stdout)
    assert entry["epsilon"] == pytest.approx(TWICE.guarantee().epsilon)
    assert entry["data"] == DATA and entry["name"] == "toy"
    assert [run["epsilon"] for run in entry["runs"]] == [PLAN.guarantee().epsilon] * 2
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "toy: epsilon" in text and "name of two" in text
    with pytest.raises(UserError, match="not a folder"):
        CliRunner().invoke(app, ["--folder", folder + "x"], catch_exceptions=False)
    with pytest.raises(UserError, match="delta"):
        CliRunner().invoke(app, ["--folder", folder, "--delta", "1"], catch_exceptions=False)


# --- the card ---------------------------------------------------------------------------------


def test_card_of_a_run(tmp_path):
    with Ledger.open(tmp_path / "private" / "ledger.jsonl", PLAN.fingerprint()) as ledger:
        ledger.begin_attempt({"world_size": "1"})
        for step in range(25):
            ledger.record(step, f"{step:064x}")
        ledger.record_event("noise scale from private data", LaplaceReleases(4.0), "cd" * 32)
        described = card(PLAN, ledger, extra={"model": "cnn"})
        proved = ledger.guarantee(PLAN)
    again = json.loads(json.dumps(described, allow_nan=False))
    assert again["guarantee"]["epsilon"] == proved.epsilon
    assert again["guarantee"]["kind"] == "proved"
    assert again["released_besides"] == ["noise scale from private data"]
    assert again["mechanism"][0].startswith("25 Gaussian steps")
    assert again["library"].startswith("dp-accounting ")
    deltas = {row["delta"]: row["epsilon"] for row in again["epsilon_at_delta"]}
    assert deltas[1e-4] == proved.epsilon < deltas[1e-6] < deltas[1e-8]
    page = card_markdown(again)
    for part in ("add-or-remove-one", "Poisson", "one record", EVALUATION_UNPROTECTED, "cnn"):
        assert part in page


def test_card_never_rounds_epsilon_down():
    described = card(PLAN)
    text = card_markdown(described).split("(", 1)[1].split(",", 1)[0]
    assert (
        described["guarantee"]["epsilon"]
        <= float(text)
        <= 1.001 * (described["guarantee"]["epsilon"])
    )


def test_card_without_the_number_of_records():
    plan = PrivacyPlan(73_219, PLAN.phases, 1e-4)
    described = card(plan, show_records=False)
    assert described["records"] is None and described["plan"] is None
    assert "73219" not in json.dumps(described)
    assert "73219" not in card_markdown(described)
    assert "73219" in card_markdown(card(plan))


def test_card_of_a_run_without_noise():
    bare = PrivacyPlan.dp_sgd(
        records=1000, batch_size=50, noise_multiplier=0.0, steps=40, delta=1e-4
    )
    described = card(bare, private=False)
    assert json.loads(json.dumps(described, allow_nan=False))["guarantee"]["epsilon"] == "inf"
    assert "NOT private" in card_markdown(described)


def test_card_keeps_the_number_of_runs_secret():
    search = PrivacyPlan(1000, (RepeatAndSelect(PLAN.phases, 5, math.inf),), 1e-4)
    (sentence,) = card(search)["mechanism"]
    assert "secret random number of runs (Poisson, mean 5)" in sentence
    parts = PrivacyPlan(1000, (ParallelParts((PLAN.phases, (LaplaceReleases(2.0),))),), 1e-4)
    assert "disjoint parts" in card(parts)["mechanism"][0]
