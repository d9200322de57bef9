"""The table of attacked predictions: one row per attack, size and input; one canonical file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from dpdist import bulk
from dpdist.base.reading import check_shape
from dpdist.base.table_files import Column

TABLE = "attacks.parquet"
CHECK_TABLE = "check.parquet"
KEY = b"dpdist.attacks"
# What a table says of how the attacked classifier answers; by votes where it says nothing.
ANSWERS, MEAN_SCORES, VOTES = "answers", "mean scores", "votes"

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
# What every reader relies on: the kind and the least of each column, and what was executed.
COLUMNS: dict[str, Column] = {
    "attack": (str, None), "size": (float, 0), "index": (int, 0), "label": (int, 0),
    "distance": (float, 0), "prediction": (int, -1), "hits": (int, 0), "n": (int, 1),
}  # fmt: skip
_ABOUT = {
    "settings.norm": str, "settings.sigma": float | None, "settings.steps": int,
    "settings.restarts": int, "settings.draws": int, "settings.n": int, "settings.alpha": float,
    "noise.kind": str, "model": str, "data": str, "input_shape": list,
}  # fmt: skip
# What a table of attacked points says of the certificates that were attacked.
CHECKED = "checked"
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
CHECK_COLUMNS: dict[str, Column] = {
    "attack": (str, None), "index": (int, 0), "certified": (int, 0), "radius": (float, 0),
    "distance": (float, 0), "selected": (int, 0), "prediction": (int, -1), "k": (int, 0),
    "n": (int, 0), "p_lower": (float, 0), "contradiction": (object, None),
}  # fmt: skip


def about(table: pa.Table) -> dict[str, Any]:
    """What was executed: settings, seed, model, data, noise."""
    return bulk.about_table(table, KEY)


def read(path: Path) -> pa.Table:
    """A table of attacks. Raises UserError when it is none, or not of its settings."""
    table = bulk.read_table(path, COLUMNS, KEY)
    check_shape(about(table), str(path), _ABOUT)
    return table
