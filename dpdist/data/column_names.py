"""Say by its name, and by its values, what a column of a table is: no input, whoever it names.

Names of columns become public in recipes, cards and messages, so names that look like values are
refused. The answer by another name would be read by the model. A column that names persons, and
repeats, is whom the guarantee should protect.
"""

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


LABELS = ("label", "labels", "class", "target", "y", "fine_label")
_PERSONS = frozenset(
    ("author", "client", "customer", "employee", "member", "owner", "participant", "patient",
     "person", "pid", "speaker", "student", "subject", "uid", "user")
)  # fmt: skip
_INDEX = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")
_LEAST_COMPARED = 20  # records; fewer may agree by chance
_COMPARED_FIRST = 1000


def is_label_name(name: str, names: Sequence[str]) -> bool:
    """Return whether a column is a label by its name; y beside x is a coordinate."""
    lower = name.lower()
    return lower in LABELS and not (lower == "y" and "x" in map(str.lower, names))


def is_identifier_name(name: str) -> bool:
    """Return whether a column names records, or whom they belong to, by its name.

    The index that pandas writes has no name, or one of its own.
    """
    if _INDEX.fullmatch(name):
        return True
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return bool(words) and (words[-1] == "id" or words[-1] in _PERSONS)


def repeats_words(name: str, rows: int, values: int) -> str:
    """Return what is told of a column that names whom records belong to, and repeats."""
    return f"{name} repeats: {rows:,} rows of {values:,} values: a person?"


def tells_answer(column: np.ndarray, answer: np.ndarray) -> bool:
    """Return whether a column is the answer but for the names of its values.

    Both have one value per record, (N,). Columns of fewer than 20 records, of one value, and of
    values that hardly repeat, are not.
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
