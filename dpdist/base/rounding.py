"""Numbers as text that states no more than the numbers do.

A float stands for the shortest decimal that reads back as it: 0.1 is printed as 0.1 in either
direction, although the float lies 6e-18 above one tenth. So the rule that every text keeps is about
floats: read back as one, an upper bound's text is never below the bound, a lower bound's never
above it. What a decimal and its float differ by, half a unit in the last of 53 bits, is less than
the slack with which epsilons and radii are computed.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
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
    return _rounded(Decimal(repr(float(share))) * 100, digits, up)


def bound(number: SupportsFloat, digits: int = 3, *, up: bool = False) -> str:
    """Return a bound with so many digits behind the point, rounded down; up: rounded up.

    Example:
        >>> bound(0.9996), bound(0.0001, up=True), bound(float("inf"), up=True)
        ('0.999', '0.001', 'inf')
    """
    return _rounded(Decimal(repr(float(number))), digits, up)


def significant(number: SupportsFloat, digits: int = 4, *, down: bool = False) -> str:
    """Return an upper bound with so many significant digits, rounded up.

    Args:
        number: the bound; infinity and NaN are named.
        digits: at most 15, which a float holds.
        down: round down instead, for a lower bound.

    Example:
        >>> significant(1e-5), significant(1.23456e-5), significant(99.99999)
        ('1e-05', '1.235e-05', '100')
        >>> significant(0.1), significant(0.1, down=True), significant(0.12345, down=True)
        ('0.1', '0.1', '0.1234')
    """
    context = Context(prec=digits, rounding=ROUND_FLOOR if down else ROUND_CEILING)
    return f"{float(context.plus(Decimal(repr(float(number))))):.{digits}g}"


def confidence(error: SupportsFloat) -> str:
    """Return 1 less an error in %, without its sign and with all its digits.

    Example:
        >>> confidence(0.05), confidence(1e-6)
        ('95', '99.9999')
    """
    left = (1 - Decimal(repr(float(error)))) * 100
    text = f"{left:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _rounded(number: Decimal, digits: int, up: bool) -> str:
    """A number as it is written: 0.29 is 29 %, not a hair below."""
    if not number.is_finite():
        return str(float(number))
    step = Decimal(1).scaleb(-digits)
    return f"{number.quantize(step, rounding=ROUND_CEILING if up else ROUND_FLOOR):f}"


def exact(number: float) -> str:
    """Return a number with six digits where that is the number itself, else with all it has.

    Example:
        >>> exact(0.25), exact(0.12345678)
        ('0.25', '0.12345678')
    """
    short = f"{number:g}"
    return short if float(short) == float(number) else repr(float(number))
