"""A guarantee's text and JSON form never promise more than was proved."""

from __future__ import annotations

import json
import math

import pytest

from dpdist.privacy.guarantee import BEGAN_APART, Guarantee, format_epsilon


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


def test_an_earlier_run_that_epsilon_leaves_out_is_named_beside_it():
    apart = (BEGAN_APART + "runs/first",)
    alone = Guarantee(1.5, 1e-5, "add-or-remove-one", "proved", "PLD", apart)
    assert "runs/first" in str(alone) and "runs/first" in alone.row.beside


def test_infinity_survives_text_and_json():
    nothing = Guarantee(math.inf, 1e-5, "replace-one", "proved", "none")
    assert str(nothing).startswith("not private") and "-DP" not in str(nothing)
    assert format_epsilon(math.nan) == "nan"  # of a damaged file: never 0
    assert json.loads(json.dumps(nothing.to_dict(), allow_nan=False))["epsilon"] == "inf"
    assert format_epsilon("inf") == "inf"


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 0.1), (math.nan, 0.1), (1.0, 1.0)])
def test_impossible_guarantees(epsilon, delta):
    with pytest.raises(ValueError):
        Guarantee(epsilon, delta, "add-or-remove-one", "proved", "x")


SHORT = [0.1, 2.3, 1e-5, 2.675, 1234.0]


@pytest.mark.parametrize("value", SHORT)
def test_what_is_written_in_so_few_digits_stays_as_it_is(value):
    """0.1 was printed as 0.1001: its float lies 6e-18 above one tenth."""
    assert format_epsilon(value) == format_epsilon(value, lower_bound=True) == f"{value:g}"
    assert format_epsilon(value, 6) == f"{value:g}"


@pytest.mark.parametrize("value", [*SHORT, 1.13391, 1e-300, 3.0000000000000004, 1e300])
@pytest.mark.parametrize("digits", [1, 4, 6])
def test_text_read_back_is_never_below_the_value(value, digits):
    for near in (math.nextafter(value, 0), value, math.nextafter(value, math.inf)):
        assert float(format_epsilon(near, digits, lower_bound=True)) <= near
        assert near <= float(format_epsilon(near, digits))
    above = math.nextafter(0.1, 1)
    assert format_epsilon(above) == "0.1001"  # more than any float that 0.1 stands for
