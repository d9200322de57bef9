"""Parquet files that are read: regular, with a footer that is true; tables with the columns
expected and values in range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dpdist.base.errors import UserError
from dpdist.base.reading import check_text_name, reason, regular_file, shown

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# What a kind is called, and by which of pyarrow.types it is known.
_KINDS = {
    int: ("whole numbers", ("is_integer",)),
    float: ("numbers", ("is_floating",)),
    str: ("text", ("is_string", "is_large_string")),
}
# int, float or str, and the least value; object: whatever it holds, empty too.
Column = tuple[type, float | None]
_MOST_VALUES = 2**28  # in one table: a small file may name more than any memory holds


def open_parquet(path: str | Path) -> pq.ParquetFile:
    """Open a Parquet file, of which only the footer is read.

    Raises:
        NoSuchFile: nothing lies at the path.
        UserError: it is no regular file, its name is no text, its footer cannot be read, or the
            footer's number of rows is not that of its row groups.
    """
    import pyarrow.parquet as pq

    path = regular_file(path)  # a pipe would be waited for without end
    check_text_name(path)
    try:
        reader = pq.ParquetFile(path)
        names = reader.schema_arrow.names  # decoded only now
    except parquet_errors() as error:
        raise UserError(f"{path}: not a readable Parquet file: {reason(error)}") from error
    about = reader.metadata
    rows = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != about.num_rows:
        raise UserError(
            f"{path}: damaged: its footer counts {about.num_rows:,} rows, its row groups "
            f"{sum(rows):,}"
        )
    for name in names:
        check_text_name(name, f"{path}: column {name!r}")
    return reader


def parquet_errors() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises for a Parquet file that is damaged."""
    import pyarrow as pa

    return (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException)


def count_values(reader: pq.ParquetFile) -> int:
    """Return the number of values, of all columns and rows, that a file's footer counts."""
    about = reader.metadata
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    columns = range(about.num_columns)
    stated = sum(group.column(column).num_values for group in groups for column in columns)
    return max(stated, about.num_rows)


def read_table(path: str | Path, columns: Mapping[str, Column]) -> pa.Table:
    """A Parquet table of at least one row. columns: those that must be there, each filled, with the
    kind and the least of its values.

    Raises dpdist.base.reading.NoSuchFile, and UserError naming column and row for what does not
    fit.
    """
    path = Path(path)
    reader = open_parquet(path)
    if (values := count_values(reader)) > _MOST_VALUES:
        raise UserError(f"{path}: holds {values:,} values, at most {_MOST_VALUES:,} are read")
    try:
        table = reader.read()
        table.validate(full=True)
    except parquet_errors() as error:
        raise UserError(f"{path}: not a readable Parquet table: {reason(error)}") from error
    if table.num_rows != reader.metadata.num_rows:
        raise UserError(
            f"{path}: damaged: its footer counts {reader.metadata.num_rows:,} rows, "
            f"{table.num_rows:,} are there"
        )
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    missing = [name for name in columns if name not in names]
    if twice or missing:
        said = [f"no column {name!r}" for name in missing]
        said += [f"column {name!r} is there twice" for name in twice]
        raise UserError(f"{path}: damaged: {', '.join(said)}")
    if table.num_rows == 0:
        raise UserError(f"{path}: damaged: holds no rows")
    for name, (kind, least) in columns.items():
        _check_column(path, name, table[name], kind, least)
    return table


def _check_column(
    path: Path, name: str, values: pa.ChunkedArray, kind: type, least: float | None
) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind is object:
        return
    words, known = _KINDS[kind]
    if not any(getattr(pa.types, name)(values.type) for name in known):
        raise UserError(f"{path}: damaged: column {name!r} must hold {words}, holds {values.type}")
    wrong = pc.is_null(values, nan_is_null=kind is float)
    if least is not None:
        wrong = pc.or_kleene(wrong, pc.less(values, least))
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        right = words if least is None else f"{words} >= {least:g}"
        found = shown(values[row].as_py())
        raise UserError(f"{path}: damaged: row {row}, {name!r} must hold {right}, got {found}")
