"""A guarantee's text and JSON form never promise more than was proved."""

from __future__ import annotations

import json
import math

import pytest

from dpdist.privacy.guarantee import Guarantee, format_epsilon

pytestmark = pytest.mark.guarantee


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [(1.13391, "1.134"), (1.13341, "1.134"), (0.94213, "0.9422"), (12.0, "12"), (0.0, "0")],
)
def test_epsilon_is_rounded_up(epsilon, text):
    assert format_epsilon(epsilon) == text
    assert float(format_epsilon(epsilon)) >= epsilon


def test_lower_bounds_are_rounded_down():
    assert format_epsilon(3.24269, lower_bound=True) == "3.242"
    audited = Guarantee(3.24269, 1e-5, "add-or-remove-one", "audited", "canaries")
    assert str(audited).startswith("(3.242, 1e-05)-DP")


def test_infinity_survives_text_and_json():
    nothing = Guarantee(math.inf, 1e-5, "replace-one", "proved", "none")
    # A run without noise printed "(inf, 0.0001)-DP, proved by RDP".
    assert str(nothing).startswith("not private: no finite epsilon is proved")
    assert "-DP" not in str(nothing)
    assert format_epsilon(math.nan) == "nan"  # of a damaged file: never 0
    assert json.loads(json.dumps(nothing.to_dict(), allow_nan=False))["epsilon"] == "inf"
    assert format_epsilon("inf") == "inf"


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 0.1), (math.nan, 0.1), (1.0, 1.0), (1, -1)])
def test_impossible_guarantees(epsilon, delta):
    with pytest.raises(ValueError):
        Guarantee(epsilon, delta, "add-or-remove-one", "proved", "x")
