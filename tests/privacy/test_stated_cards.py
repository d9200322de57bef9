"""A card from elsewhere is not believed where its own numbers contradict each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dpdist.core.errors import UserError
from dpdist.privacy.card import build_card, parse_card_plan
from dpdist.privacy.phases import GaussianReleases
from dpdist.privacy.plan import PrivacyPlan

PLAN = PrivacyPlan(1000, (GaussianReleases(4.0),), 1e-5)
TWICE = PrivacyPlan(1000, (GaussianReleases(4.0, 2),), 1e-5).guarantee()


def described(plan: PrivacyPlan = PLAN, **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps(build_card(plan, extra={"model": "cnn"}, **more)))


def with_epsilon(stated: dict[str, Any], name: str, epsilon: float | str) -> dict[str, Any]:
    return stated | {name: stated[name] | {"epsilon": epsilon}}


def test_what_is_as_it_was_written_is_read():
    assert parse_card_plan(described(), "card") == PLAN
    assert parse_card_plan(described(data_set=TWICE), "card") == PLAN
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
    stated, own = described(data_set=TWICE), PLAN.guarantee().epsilon
    with pytest.raises(UserError, match="data_set"):
        parse_card_plan(with_epsilon(stated, "data_set", 0.99 * own), "card")
    # Two accountants may differ in the last digits of the same; other deltas say nothing.
    assert parse_card_plan(with_epsilon(stated, "data_set", own * (1 - 1e-6)), "card") == PLAN
    larger = stated["data_set"] | {"epsilon": 0.5 * own, "delta": 1e-3}
    assert parse_card_plan(stated | {"data_set": larger}, "card") == PLAN
