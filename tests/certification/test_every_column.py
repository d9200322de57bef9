"""Every column of a table of every mode: an edit is refused, or the docs list the column.

No list of columns stands here: those of each table's own schema are edited, one row at a time and
all rows alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_edited_tables import SECTIONS, made

from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.certification.registry import CERTIFICATES
from dpdist.core.errors import UserError

__all__ = ["made"]
LIKE_OTHERS = {"bernstein", "betting", "one-sided", "scores"}  # dear, and tried by night
DOCS = Path(__file__).parents[2] / "benchmarks/results/releases.md"


def others(value: Any) -> Iterator[Any]:
    """Other values of the same kind, and none."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 0, 2 * value + 1)
    elif isinstance(value, float):
        yield from (value * 1.001 + 1e-6, value + 0.1, value - 0.1, 0.0, float("nan"), float("inf"))
    elif isinstance(value, str):
        words = ("none", "fixed", "anytime", "gaussian", "laplace", "l1", "l2", "linf", "counts")
        yield from (f"{value} of mine", "", *words)
    elif isinstance(value, list):
        for place in {0, len(value) // 2, len(value) - 1} if value else ():
            for step in (1, -1):
                yield [*value[:place], value[place] + step, *value[place + 1 :]]
        yield from (value[:-1], [*value, 0], value[::-1], [])
    else:
        yield from (0, 1, 0.1, [1, 2, 3])
    yield None


def rows_to_edit(rows: list[dict[str, Any]]) -> list[slice]:
    """One that is certified, one that abstains, and all."""
    answers = [row["prediction"] >= 0 for row in rows]
    places = [answers.index(answer) for answer in sorted(set(answers))]
    return [*(slice(place, place + 1) for place in places), slice(None)]


def believed(path: Path, to: Path, column: str, rows: slice, value: Any) -> bool:
    """Whether readers take a table in which these rows say another value."""
    table = tables.read(path)
    changed = table.to_pylist()
    for row in changed[rows]:
        row[column] = value
    try:
        tables.write(
            tables.build(changed, tables.read_job_record(table), table.schema.remove_metadata()), to
        )
    except (pa.ArrowException, TypeError, OverflowError):
        return False  # no such table can be written
    try:
        table_reader.read(to)
    except UserError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each in LIKE_OTHERS)) for each in SECTIONS],
)
def test_an_edit_of_any_column_is_refused_or_listed(
    made: dict[str, Path], tmp_path: Path, name: str
) -> None:
    found, passed, tried = table_reader.read(made[name]), set(), 0
    rows = found.table.to_pylist()
    for column in found.table.column_names:
        for some in rows_to_edit(rows):
            was = [row[column] for row in rows[some]]
            for value in others(was[0]):
                if any(repr(value) != repr(each) for each in was):
                    tried += 1
                    if believed(made[name], tmp_path / "x.parquet", column, some, value):
                        passed.add(column)
    assert passed <= found.certificate_class.sampled_columns and tried > 5 * len(
        found.table.column_names
    )


@pytest.mark.slow
def test_rows_stand_in_the_order_of_their_inputs(made: dict[str, Path], tmp_path: Path) -> None:
    table = tables.read(made["fixed"])
    swapped = table.take([1, 0, *range(2, table.num_rows)])
    tables.write(swapped, tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet"):
        table_reader.read(tmp_path / "x.parquet")


@pytest.mark.slow
def test_every_listed_column_is_one_that_an_edit_passes(
    made: dict[str, Path], tmp_path: Path
) -> None:
    """The list names no more than it must."""
    left = {(kind.mode_name(), column) for kind in CERTIFICATES for column in kind.sampled_columns}
    for path in made.values():
        found = table_reader.read(path)
        rows, mode = found.table.to_pylist(), found.certificate_class.mode_name()
        for column in [name for of, name in sorted(left) if of == mode]:
            for some in rows_to_edit(rows)[:-1]:
                was = rows[some][0][column]
                if any(
                    value != was and believed(path, tmp_path / "x.parquet", column, some, value)
                    for value in others(was)
                ):
                    left.discard((mode, column))
                    break
    assert left == set()
