"""Parquet tables that are read back: whole, with the columns expected and values in range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dpdist.base.errors import UserError
from dpdist.base.reading import reason, regular_file, shown

if TYPE_CHECKING:
    import pyarrow as pa

# What a kind is called, and by which of pyarrow.types it is known.
_KINDS = {
    int: ("whole numbers", ("is_integer",)),
    float: ("numbers", ("is_floating",)),
    str: ("text", ("is_string", "is_large_string")),
}
# int, float or str, and the least value; object: whatever it holds, empty too.
Column = tuple[type, float | None]


def read_table(path: str | Path, columns: Mapping[str, Column]) -> pa.Table:
    """A Parquet table of at least one row. columns: those that must be there, each filled, with the
    kind and the least of its values.

    Raises dpdist.base.reading.NoSuchFile, and UserError naming column and row for what does not
    fit.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = regular_file(path)
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet table: {reason(error)}") from error
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
