"""The table of votes, and its one reader: what each of many models says of each input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdist import bulk
from dpdist.base.errors import UserError
from dpdist.base.reading import check_shape, shown
from dpdist.base.table_files import Column

TABLE = "votes.parquet"
KEY = b"dpdist.votes"
FILE = "votes.safetensors"  # of one model: "votes", int64 (N,)
NONE = -1  # the vote of a training, or an answer, whose numbers are no numbers
_MOST = 100_000  # classes
MOST_VOTES = 2**26  # of a table: more would not be read back
SCHEMA = pa.schema(
    [
        pa.field("model", pa.int64(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("vote", pa.int64(), nullable=False),
    ]
)
COLUMNS: dict[str, Column] = {
    "model": (int, 0), "index": (int, 0), "label": (int, 0), "vote": (int, NONE)
}  # fmt: skip
_SHAPE = {
    "settings": dict, "settings.models": int, "settings.partitions": bool,
    "settings.sigma": float | None, "settings.inputs": list,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Votes:
    """about: what was executed. index, label (N,): of the inputs. vote (M, N): classes, or NONE."""

    about: dict[str, Any]
    index: NDArray[np.int64]
    label: NDArray[np.int64]
    vote: NDArray[np.int64]

    @property
    def settings(self) -> dict[str, Any]:
        return self.about.get("settings", {})

    def counts(self, models: slice) -> NDArray[np.int64]:
        """How many of these models vote for each class: int64 (N, classes)."""
        classes = int(max(self.vote.max(), self.label.max())) + 1
        return np.stack([(self.vote[models] == c).sum(0) for c in range(classes)], axis=1)


def read_votes(path: Path) -> Votes:
    """Raises UserError for a table that is damaged, or not of its settings."""
    table = bulk.read_table(path, COLUMNS, KEY)
    about = check_shape(bulk.about_table(table, KEY, str(path)), str(path), _SHAPE)
    if not isinstance(about["settings"].get("bag", 1), int):
        raise UserError(f"{path}: damaged: settings.bag must be int")
    model, index, label, vote = (table[name].to_numpy() for name in COLUMNS)
    models = int(model.max()) + 1 if len(model) else 0
    inputs = len(model) // max(models, 1)
    regular = models > 0 and len(model) == models * inputs
    regular = regular and (model == np.repeat(np.arange(models), inputs)).all()
    for column in (index, label):
        regular = regular and (column == np.tile(column[:inputs], models)).all()
    named = max(label.max(initial=0), vote.max(initial=0)) < _MOST
    if not (regular and named) or len(np.unique(index[:inputs])) < inputs:
        raise UserError(f"{path}: damaged: not one vote of every model on every input")
    asked = about["settings"]
    if asked["models"] != models or not _is_range(asked["inputs"], index[:inputs]):
        raise UserError(
            f"{path}: damaged: {models:,} models vote on {inputs:,} inputs, its settings say "
            f"{asked['models']:,} on the inputs {shown(asked['inputs'])}"
        )
    bulk.check_labels(about, index, label, path)
    return Votes(about, index[:inputs], label[:inputs], vote.reshape(models, inputs))


def _is_range(stated: list[Any], index: NDArray[np.int64]) -> bool:
    """Whether start, stop and step, as settings state them, are those of these inputs."""
    if len(stated) != 3 or not all(type(end) is int and abs(end) < 2**31 for end in stated):
        return False
    return stated[2] > 0 and np.array_equal(index, np.arange(*stated))
