"""Printed shares and radii state no more than the numbers do, wherever they are printed."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dpdist.base.rounding import exact, percent
from dpdist.certification import reading
from dpdist.certification import table as tables
from dpdist.certification.catalogue import settings_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("digits", [0, 1, 2])
def test_shares_of_counts_are_rounded_down(digits: int) -> None:
    step = Fraction(1, 10**digits)
    for whole in (3, 7, 29, 100, 1000, 10_000):
        for part in {0, 1, whole // 3, whole // 2, whole - 4, whole - 1, whole} & set(
            range(whole + 1)
        ):
            share = Fraction(100 * part, whole)
            low, high = (Fraction(percent(part / whole, digits, up=up)) for up in (False, True))
            assert low <= share < low + step and high - step < share <= high
    assert percent(0.29, digits) == f"{Decimal(29):.{digits}f}"  # 100 * 0.29 is below 29


def test_what_is_not_all_is_not_printed_as_all() -> None:
    assert percent(9_996 / 10_000, 1) == "99.9" and percent(1.0, 1) == "100.0"
    assert percent(np.nextafter(1.0, 0)) == "99.99" and percent(np.float64(0.5)) == "50.00"
    assert percent(1e-9) == "0.00" and percent(1e-9, up=True) == "0.01"


def test_a_radius_is_the_one_that_was_asked_for() -> None:
    for radius in (0.0, 0.25, 0.1, 1.5, 0.12345678, 1 / 3, 1e-7, 123456.7):
        assert float(exact(radius)) == radius
    assert exact(0.25) == "0.25" and exact(0.12345678) == "0.12345678"


def test_target_radii_are_printed_as_they_are() -> None:
    radius = 0.12345678  # 0.123457 with six digits: more than is certified
    settings = settings_of(
        {"sigma": 0.5, "n": 1000, "mode": "target", "radii": [radius], "alpha": 0.01}
    )
    assert settings.folder_name == "sigma-0.5-target-r-0.12345678-n-1000"
    partial = {"selected": 0, "k": 990, "n": 1000, "looks": 1, "passed": 1, "hits": [990]}
    place = settings.place(None, ())  # type: ignore[arg-type]
    row = settings.row(0, 0, settings.verdict([partial], place), place)
    about = {"settings": settings.identity, "seed": "s"}
    found = reading.of(tables.build([row], about, settings.table_schema()))
    assert found.kind.lines(found, found.radii)[0] == (
        "certified at L2 radius 0.12345678", "100.00 %"
    )  # fmt: skip


def test_no_share_is_printed_by_a_rounding_of_its_own() -> None:
    """One function rounds: f"{100 * share:.1f} %" makes 100.0 of 9,996 in 10,000."""
    own = re.compile(r"\{100 \* [^{}]*:\.\d+f\}|:\.\d+f\} ?%")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("dpdist", "tuning")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if own.search(line)
    ]
    assert own.search('f"{100 * share:.1f} %"') and own.search('f"{share:.2f} %"')
    assert found == []
