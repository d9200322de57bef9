"""The privacy card, and those from elsewhere whose numbers contradict each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dpdist.core.errors import UserError
from dpdist.privacy.card import (
    EVALUATION_UNPROTECTED,
    build_card,
    card_markdown,
    parse_card_plan,
    recompute_card,
)
from dpdist.privacy.guarantee import POST_PROCESSED
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases, GaussianSteps
from dpdist.privacy.plan import PrivacyPlan

PLAN = PrivacyPlan.dp_sgd(records=1000, batch_size=50, noise_multiplier=1.5, steps=40, delta=1e-4)


def test_card_of_a_run(tmp_path):
    with Ledger.open(tmp_path / "private" / "ledger.jsonl", PLAN.fingerprint()) as ledger:
        ledger.begin_attempt({"world_size": "1"})
        for step in range(25):
            ledger.record(step, f"{step:064x}")
        described = build_card(PLAN, ledger, extra={"model": "cnn"})
        proved = ledger.guarantee(PLAN)
    again = json.loads(json.dumps(described, allow_nan=False))
    assert again["guarantee"]["epsilon"] == proved.epsilon
    assert again["mechanism"][0].startswith("25 Gaussian steps")
    deltas = {row["delta"]: row["epsilon"] for row in again["epsilon_at_delta"]}
    assert deltas[1e-4] == proved.epsilon < deltas[1e-6] < deltas[1e-8]
    page = card_markdown(again)
    for part in ("zero-out adjacency", "Poisson", EVALUATION_UNPROTECTED, "cnn"):
        assert part in page


def test_card_never_rounds_epsilon_down():
    described = build_card(PLAN)
    text = card_markdown(described).split("(", 1)[1].split(",", 1)[0]
    epsilon = described["guarantee"]["epsilon"]
    assert epsilon <= float(text) <= 1.001 * epsilon


def read_back(described: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(described))


def test_the_kind_follows_from_the_assumptions():
    line = f"{POST_PROCESSED}: a part was changed between two steps"
    described = read_back(
        build_card(PLAN, assumptions=[line], extra={"model": "cnn"}, kind=POST_PROCESSED)
    )
    plan = parse_card_plan(described, "card")
    assert read_back(recompute_card(described, plan)) == described
    edited = described | {"guarantee": described["guarantee"] | {"kind": "proved"}}
    assert recompute_card(edited, plan)["guarantee"]["kind"] == POST_PROCESSED


def test_a_card_is_made_again_from_its_phases(tmp_path):
    """Superseded steps included."""
    phases = (GaussianReleases(4.0), GaussianSteps(2, 3.0, 0.1))
    plan = PrivacyPlan(100, phases, 1e-4)
    with Ledger.open(tmp_path / "private" / "ledger.jsonl", plan.fingerprint()) as ledger:
        for world_size in ("1", "2"):
            ledger.begin_attempt({"world_size": world_size})
            for step in range(2):
                ledger.record(step, f"{step:064x}")
        described = read_back(build_card(plan, ledger, notes=["a note"], extra={"model": "cnn"}))
    released = parse_card_plan(described, "card")
    assert released.steps == 4 and len(released.phases) == 2
    assert read_back(recompute_card(described, released)) == described
    for name, value in (("accounted", None), ("notes", [1])):
        with pytest.raises(UserError, match=name):
            parse_card_plan(described | {name: value}, "card")


# --- cards from elsewhere

RELEASE = PrivacyPlan(1000, (GaussianReleases(4.0),), 1e-5)
TWICE = PrivacyPlan(1000, (GaussianReleases(4.0, 2),), 1e-5).guarantee()


def described(plan: PrivacyPlan = RELEASE, **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps(build_card(plan, extra={"model": "cnn"}, **more)))


def with_epsilon(stated: dict[str, Any], name: str, epsilon: float | str) -> dict[str, Any]:
    return stated | {name: stated[name] | {"epsilon": epsilon}}


def test_what_is_as_it_was_written_is_read():
    assert parse_card_plan(described(), "card") == RELEASE
    assert parse_card_plan(described(data_set=TWICE), "card") == RELEASE
    bare = PrivacyPlan(1000, (GaussianReleases(0.0),), 1e-5)
    assert parse_card_plan(described(bare, private=False), "card") == bare


def test_nothing_with_an_infinite_epsilon_is_called_private():
    for epsilon in ("inf", "Infinity"):
        with pytest.raises(UserError):
            parse_card_plan(with_epsilon(described(), "guarantee", epsilon), "card")


@pytest.mark.parametrize("epsilon", ["nan", -1.0, "many"])
@pytest.mark.parametrize("name", ["guarantee", "data_set"])
def test_an_epsilon_is_a_number_from_zero_on(name, epsilon):
    with pytest.raises(UserError, match=rf"{name}\.epsilon"):
        parse_card_plan(with_epsilon(described(data_set=TWICE), name, epsilon), "card")


def test_all_runs_on_a_data_set_cost_no_less_than_one_of_them():
    stated, own = described(data_set=TWICE), RELEASE.guarantee().epsilon
    with pytest.raises(UserError, match="data_set"):
        parse_card_plan(with_epsilon(stated, "data_set", 0.99 * own), "card")
    # Two accountants may differ in the last digits of the same; other deltas say nothing.
    assert parse_card_plan(with_epsilon(stated, "data_set", own * (1 - 1e-6)), "card") == RELEASE
    larger = stated["data_set"] | {"epsilon": 0.5 * own, "delta": 1e-3}
    assert parse_card_plan(stated | {"data_set": larger}, "card") == RELEASE
