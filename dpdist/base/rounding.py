"""Numbers as text that states no more than the numbers do."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import SupportsFloat


def percent(share: SupportsFloat, digits: int = 2, *, up: bool = False) -> str:
    """Return a share in %, without its sign, rounded down.

    So 100 stands only where nothing is missing, and a lower bound is never printed larger than it
    is.

    Args:
        share: between 0 and 1.
        digits: behind the point.
        up: round up instead, for an upper bound.

    Example:
        >>> percent(9_996 / 10_000, 1), percent(0.29), percent(1e-9, up=True)
        ('99.9', '29.00', '0.01')
    """
    step = Decimal(1).scaleb(-digits)
    number = Decimal(repr(float(share))) * 100  # as it is written: 0.29 is 29, not a hair below
    return f"{number.quantize(step, rounding=ROUND_CEILING if up else ROUND_FLOOR):f}"


def exact(number: float) -> str:
    """Return a number with six digits where that is the number itself, else with all it has.

    Example:
        >>> exact(0.25), exact(0.12345678)
        ('0.25', '0.12345678')
    """
    short = f"{number:g}"
    return short if float(short) == float(number) else repr(float(number))
