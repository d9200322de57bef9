"""Recognize labels, identifiers and answers among the columns of a table.

Names of columns become public in recipes, cards and messages, so names that look like values raise
an error. A column that repeats the answer must not be an input. A column that names persons, and
repeats, is the unit that the guarantee should protect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from dpdist.core.files import data_error

NAMED_BY_VALUES = (
    "must have a first line of names, got what looks like values (column {}): names become public; "
    "write a first line of names"
)
_MOST_IN_NAME = 80  # characters
_LEAST_NUMBERED = 4  # columns whose names are numbers in equal steps
_VALUES = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?|\S+@\S+\.\S+")


LABELS = ("label", "labels", "class", "target", "y", "fine_label")
_PERSONS = frozenset(
    ("author", "client", "customer", "employee", "member", "owner", "participant", "patient",
     "person", "pid", "speaker", "student", "subject", "uid", "user")
)  # fmt: skip
_INDEX = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")
_LEAST_COMPARED = 20  # records; fewer may agree by chance
_COMPARED_FIRST = 1000


def is_label_name(name: str, names: Sequence[str]) -> bool:
    """Return whether a column is a label by its name; y next to x is a coordinate."""
    lower = name.lower()
    return lower in LABELS and not (lower == "y" and "x" in map(str.lower, names))


def is_identifier_name(name: str) -> bool:
    """Return whether a column identifies records or users by its name, or is pandas's index."""
    if _INDEX.fullmatch(name):
        return True
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return bool(words) and (words[-1] == "id" or words[-1] in _PERSONS)


def repeats_words(name: str, rows: int, values: int) -> str:
    """Return the warning about a column of identifiers that repeats."""
    return f"{name} repeats: {rows:,} rows of {values:,} values: a person?"


def tells_answer(column: np.ndarray, answer: np.ndarray) -> bool:
    """Return whether a column is the answer with other names for its values.

    Both have one value per record, (N,). Columns with fewer than 20 records, with one value, or
    with values that hardly repeat, are not.
    """
    if len(column) < _LEAST_COMPARED:
        return False
    for rows in dict.fromkeys((min(_COMPARED_FIRST, len(column)), len(column))):
        (values, first), (others, second) = (
            np.unique(each[:rows], return_inverse=True) for each in (column, answer)
        )
        pairs = len(np.unique(first.astype(np.int64) * len(others) + second))
        if not pairs == len(values) == len(others) <= rows // 2 or pairs < 2:
            return False
    return True


def check_names(names: Sequence[str], file: object) -> None:
    """Raise UserError for names of columns that look like values.

    In a file without a line of names they are the first record's values. Numbers, dates, addresses
    and long texts look like values; four or more numbers in equal steps, such as 0, 1, 2, 3, do
    not.

    Args:
        names: of all columns, in order.
        file: name of the file for the message, which shows no name of a column.
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
