"""Printed shares and radii state no more than the numbers do, wherever they are printed."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dpdist.audits.membership_statistics import Estimate
from dpdist.core.console import (
    format_bound,
    format_exact,
    format_percent,
    format_significant,
)
from dpdist.privacy.budget import (
    BudgetExceeded,
    Charge,
    check_fits,
    composed_guarantee,
)
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("digits", [0, 2])
def test_shares_of_counts_are_nearest_and_their_bounds_one_sided(digits: int) -> None:
    step = Fraction(1, 10**digits)
    for whole in (3, 29, 10_000):
        for part in {0, 1, whole // 3, whole // 2, whole - 4, whole - 1, whole} & set(
            range(whole + 1)
        ):
            share = Fraction(100 * part, whole)
            low, near, high = (
                Fraction(format_percent(part / whole, digits, **how))
                for how in ({"round_down": True}, {}, {"round_up": True})
            )
            assert low <= share < low + step and high - step < share <= high
            assert abs(near - share) <= step / 2 or (near, high) == (low, 100)
            assert (near == 100) is (part == whole)
    assert format_percent(0.29, digits) == f"{Decimal(29):.{digits}f}"  # 100 * 0.29 is below 29


def test_bounds_state_no_more_than_they_are() -> None:
    for value in (0.12345, 0.9996, 1e-9, 0.25, -0.0004, 7.77777):
        assert float(format_bound(value)) <= value <= float(format_bound(value, round_up=True))
        assert value <= float(format_significant(abs(value), 3)) or value < 0
    assert (format_bound(0.25), format_bound(0.25, round_up=True)) == ("0.250", "0.250")
    assert (format_bound(-np.inf), format_bound(np.inf, round_up=True)) == ("-inf", "inf")


def test_what_is_spent_and_measured_is_rounded_the_safe_way() -> None:
    assert str(Estimate(0.5, 0.12399, 0.87601)) == "0.500 [0.123, 0.877]"
    assert str(Guarantee(1.00001, 1.2341e-5, "replace-one", "proved", "it")).startswith(
        "(1.001, 1.24e-05)-DP"
    )
    plan = PrivacyPlan(1000, (GaussianSteps(10, 2.0, 0.1),), 1e-5)
    charge = Charge.for_plan("a", "a", plan, plan.phases)
    spent = composed_guarantee([charge], 1e-5).epsilon
    total = composed_guarantee([charge, replace(charge, run="b")], 1e-5).epsilon
    with pytest.raises(BudgetExceeded) as error:
        new = replace(charge, run="b")
        check_fits(None, [charge], new, "add-or-remove-one", (spent, 1e-5))
    said = re.search(r"cost epsilon (\S+) at delta (\S+), .*ceiling of (\S+) .so far (\S+)\)$",
                     str(error.value))  # fmt: skip
    assert said is not None
    above, delta, ceiling, before = map(float, said.groups())
    assert total <= above <= total * 1.001 and spent <= before <= spent * 1.001
    assert (delta, ceiling) == (1e-5, spent)


def test_a_radius_is_the_one_that_was_asked_for() -> None:
    for radius in (0.0, 0.25, 0.1, 1.5, 0.12345678, 1 / 3, 1e-7, 123456.7):
        assert float(format_exact(radius)) == radius
    assert format_exact(0.25) == "0.25" and format_exact(0.12345678) == "0.12345678"
