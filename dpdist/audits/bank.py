"""A bank of shadow models: trained in bulk, scored once, attacked many times.

models/0007/    weights and description of model 7, and its scores
scores.parquet  of every record under every model: written last
settings.json, journal.jsonl: as of every bulk job

Here is the table and its one reader; `dpdist.audits.bank_job` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdist import bulk
from dpdist.base.errors import UserError
from dpdist.base.table_files import Column

TABLE = "scores.parquet"
KEY = b"dpdist.bank"
TOP = 3
_TOPS = tuple(f"top{place}" for place in range(1, TOP + 1))
SCHEMA = pa.schema(
    [
        pa.field("model", pa.int64(), nullable=False),
        pa.field("passes", pa.int64(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("member", pa.int8(), nullable=False),  # -1: a test record, in no model
        pa.field("phi", pa.float64(), nullable=False),
        *(pa.field(name, pa.float64(), nullable=False) for name in _TOPS),
    ]
)
COLUMNS: dict[str, Column] = {
    "model": (int, 0), "passes": (int, 1), "index": (int, 0), "member": (int, -1),
    "phi": (float, None), **dict.fromkeys(_TOPS, (float, 0)),
}  # fmt: skip


def table_of(model: int, scores: Mapping[str, np.ndarray]) -> pa.Table:
    """All that one model says of all records, then of the population, pass after pass."""
    member = scores["member"].astype(np.int8)
    tables = []
    for passes in sorted(int(name.split("/")[1]) for name in scores if name.startswith("phi/")):
        phi, top = scores[f"phi/{passes}"], scores[f"top/{passes}"]
        outside = len(phi) - len(member)
        columns: dict[str, np.ndarray] = {
            "model": np.full(len(phi), model),
            "passes": np.full(len(phi), passes),
            "index": np.concatenate([np.arange(len(member)), np.arange(outside)]),
            "member": np.concatenate([member, np.full(outside, -1, np.int8)]),
            "phi": phi,
            **dict(zip(_TOPS, top.T, strict=True)),
        }
        tables.append(pa.table(columns, schema=SCHEMA))
    return pa.concat_tables(tables)


@dataclass(frozen=True, eq=False)
class BankScores:
    """What the models of a bank say, at one number of passes.

    member (S, N) bool, phi (S, N), top (S, N, 3): of the records. population (S, Z): phi of points
    that are in no model.
    """

    member: NDArray[np.bool_]
    phi: NDArray[np.float64]
    top: NDArray[np.float64]
    population: NDArray[np.float64]

    @property
    def models(self) -> int:
        return len(self.phi)


def read_scores(path: Path) -> tuple[dict[str, Any], dict[int, BankScores]]:
    """What was executed, and the scores of a bank by number of passes. Raises UserError."""
    table = bulk.read_table(path, COLUMNS, KEY)
    about = bulk.about_table(table, KEY, str(path))
    number, passes, member = (table[name].to_numpy() for name in ("model", "passes", "member"))
    models = int(number.max()) + 1
    found = {}
    for each in np.unique(passes).tolist():
        own, outside = (passes == each) & (member >= 0), (passes == each) & (member < 0)
        if not own.any() or own.sum() % models or outside.sum() % models:
            raise UserError(f"{path}: damaged: not every model scores every record")
        found[each] = BankScores(
            member[own].reshape(models, -1) == 1,
            table["phi"].to_numpy()[own].reshape(models, -1),
            np.stack([table[n].to_numpy()[own].reshape(models, -1) for n in _TOPS], axis=-1),
            table["phi"].to_numpy()[outside].reshape(models, -1),
        )
    return about, found
