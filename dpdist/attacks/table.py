"""The table of attacked predictions: one row per attack, size and input; one canonical file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TABLE = "attacks.parquet"
CHECK_TABLE = "check.parquet"
_META = b"dpdist.attacks"

SCHEMA = pa.schema(
    [
        pa.field("attack", pa.string(), nullable=False),
        pa.field("size", pa.float64(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("distance", pa.float64(), nullable=False),
        pa.field("prediction", pa.int64(), nullable=False),
        pa.field("hits", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
    ]
)
CHECK_SCHEMA = pa.schema(
    [
        pa.field("attack", pa.string(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("certified", pa.int64(), nullable=False),
        pa.field("radius", pa.float64(), nullable=False),
        pa.field("distance", pa.float64(), nullable=False),
        pa.field("selected", pa.int64(), nullable=False),
        pa.field("prediction", pa.int64(), nullable=False),
        pa.field("k", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("p_lower", pa.float64(), nullable=False),
        pa.field("contradiction", pa.bool_(), nullable=False),
    ]
)


def write(
    rows: list[dict[str, Any]], schema: pa.Schema, about: Mapping[str, Any], path: Path
) -> pa.Table:
    """One Parquet file, whole or not at all, sorted; the same bytes for the same rows."""
    names = [name for name in ("attack", "size", "index") if name in schema.names]
    ordered = sorted(rows, key=lambda row: tuple(row[name] for name in names))
    note = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    table = pa.Table.from_pylist(ordered, schema=schema.with_metadata({_META: note}))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table, partial, row_group_size=1 << 20)
    os.replace(partial, path)
    return table
