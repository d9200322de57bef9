"""The privacy card."""

from __future__ import annotations

import json
import math
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
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, ParallelParts, RepeatAndSelect
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
    assert again["guarantee"]["kind"] == "proved"
    assert again["released_besides"] == []
    assert again["mechanism"][0].startswith("25 Gaussian steps")
    assert again["library"].startswith("dp-accounting ")
    deltas = {row["delta"]: row["epsilon"] for row in again["epsilon_at_delta"]}
    assert deltas[1e-4] == proved.epsilon < deltas[1e-6] < deltas[1e-8]
    page = card_markdown(again)
    for part in ("zero-out adjacency", "Poisson", "one record", EVALUATION_UNPROTECTED, "cnn"):
        assert part in page


def test_card_never_rounds_epsilon_down():
    described = build_card(PLAN)
    text = card_markdown(described).split("(", 1)[1].split(",", 1)[0]
    assert (
        described["guarantee"]["epsilon"]
        <= float(text)
        <= 1.001 * (described["guarantee"]["epsilon"])
    )


def test_card_of_a_run_without_noise():
    bare = PrivacyPlan.dp_sgd(
        records=1000, batch_size=50, noise_multiplier=0.0, steps=40, delta=1e-4
    )
    described = build_card(bare, private=False)
    assert json.loads(json.dumps(described, allow_nan=False))["guarantee"]["epsilon"] == "inf"
    assert "NOT private" in card_markdown(described)


def test_card_keeps_the_number_of_runs_secret():
    search = PrivacyPlan(1000, (RepeatAndSelect(PLAN.phases, 5, math.inf),), 1e-4)
    (sentence,) = build_card(search)["mechanism"]
    assert "secret random number of runs (Poisson, mean 5)" in sentence
    parts = PrivacyPlan(1000, (ParallelParts((PLAN.phases, (GaussianReleases(2.0),))),), 1e-4)
    assert "disjoint parts" in build_card(parts)["mechanism"][0]


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


@pytest.mark.slow
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
    assert "sum beside the training" in " ".join(described["assumptions"] + described["mechanism"])
    assert read_back(recompute_card(described, released)) == described
    for name, value in (("accounted", None), ("notes", [1])):
        with pytest.raises(UserError, match=f"card: damaged: {name}"):
            parse_card_plan(described | {name: value}, "card")
