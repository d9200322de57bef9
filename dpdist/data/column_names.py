"""Check names of columns, which become public in recipes, cards and messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from dpdist.core.files import data_error

NAMED_BY_VALUES = (
    "must have a line of names, got what looks like values as the names of columns (column {}), "
    "which become public; write a first line of names"
)
_MOST_IN_NAME = 80  # characters
_LEAST_NUMBERED = 4  # columns that are named by numbers in equal steps
_VALUES = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?|\S+@\S+\.\S+")


def check_names(names: Sequence[str], file: object) -> None:
    """Raise UserError for names of columns that look like values.

    Such names are the first record's values, if a file has no line of names. Numbers, dates,
    addresses and long texts look like values. Four or more numbers in equal steps, such as 0, 1, 2,
    3, are names.

    Args:
        names: of all columns, in order.
        file: of the columns, for the message, which holds no name.
    """
    numbers = {}
    for place, name in enumerate(names):
        with suppress(ValueError):
            numbers[place] = float(name)
    steps = np.diff(list(numbers.values()))
    if len(numbers) >= _LEAST_NUMBERED and steps[0] != 0 and np.allclose(steps, steps[0]):
        numbers = {}
    others = {
        place
        for place, name in enumerate(names)
        if len(name) > _MOST_IN_NAME or _VALUES.fullmatch(name.strip())
    }
    if found := sorted(others | numbers.keys()):
        raise data_error(file, NAMED_BY_VALUES.format(", ".join(str(n + 1) for n in found[:8])))
