"""The table of certificates: one row per input, one schema, one canonical file; and its exports."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist.certification.noise import format_radius
from dpdist.cluster import job_folder
from dpdist.cluster.job_folder import write_table as write
from dpdist.core.files import ColumnSpec, write_result

__all__ = [
    "COLUMNS",
    "KEY",
    "SCHEMA",
    "TABLE",
    "build",
    "read",
    "read_job_record",
    "write",
    "write_cohen_tsv",
    "write_csv",
]

TABLE = "certificates.parquet"
KEY = b"dpdist.certification"

SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("prediction", pa.int64(), nullable=False),
        pa.field("selected", pa.int64(), nullable=False),
        pa.field("k", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("n0", pa.int64(), nullable=False),
        pa.field("alpha", pa.float64(), nullable=False),
        pa.field("p_lower", pa.float64(), nullable=False),
        pa.field("radius", pa.float64(), nullable=False),
        pa.field("norm", pa.string(), nullable=False),
        pa.field("noise", pa.string(), nullable=False),
        pa.field("sigma", pa.float64(), nullable=False),
        pa.field("mode", pa.string(), nullable=False),
        pa.field("cap", pa.int64(), nullable=False),
        pa.field("looks", pa.int64(), nullable=False),
        pa.field("target", pa.float64()),
        pa.field("spending", pa.string(), nullable=False),
        pa.field("histogram", pa.list_(pa.int64())),
    ]
)

# What every reader relies on: the kind and the least of each column.
COLUMNS: dict[str, ColumnSpec] = {
    "index": (int, 0), "label": (int, 0), "prediction": (int, -1), "selected": (int, -1),
    "k": (int, 0), "n": (int, 0), "n0": (int, 0), "alpha": (float, 0), "p_lower": (float, 0),
    "radius": (float, 0), "norm": (str, None), "noise": (str, None), "sigma": (float, 0),
    "mode": (str, None), "cap": (int, 0), "looks": (int, 0), "spending": (str, None),
    "target": (object, None), "histogram": (object, None),
}  # fmt: skip


def build(
    rows: list[dict[str, Any]], job_record: Mapping[str, Any], schema: pa.Schema = SCHEMA
) -> pa.Table:
    """The rows sorted by index; ``job_record`` (what was executed) goes into the file's
    metadata."""
    return job_folder.build_table(
        sorted(rows, key=lambda row: row["index"]), schema, job_record, KEY
    )


def read_job_record(table: pa.Table) -> dict[str, Any]:
    """Return the executed settings: seed, model, data and classifier included."""
    return job_folder.read_job_record(table, KEY)


def read(path: Path) -> pa.Table:
    """A table of certificates. Raises UserError when it is none, or not of its settings."""
    return job_folder.read_table(path, COLUMNS, KEY)


def write_cohen_tsv(
    table: pa.Table, path: Path, seconds: Mapping[int, float] | None = None
) -> None:
    """Tab-separated columns of Cohen et al.'s published tables; radii rounded down, not to nearest.

    correct is 1 when the prediction is the label, abstentions count as wrong. seconds: time per
    input where known, 0 otherwise.
    """
    known = seconds or {}
    lines = ["idx\tlabel\tpredict\tradius\tcorrect\ttime"]
    for entry in table.select(["index", "label", "prediction", "radius"]).to_pylist():
        taken = datetime.timedelta(seconds=round(known.get(entry["index"], 0.0), 6))
        correct = int(entry["prediction"] == entry["label"])
        lines.append(
            f"{entry['index']}\t{entry['label']}\t{entry['prediction']}\t"
            f"{format_radius(entry['radius'])}\t{correct}\t{taken}"
        )
    write_result(path, "\n".join(lines) + "\n")


def write_csv(table: pa.Table, path: Path) -> None:
    """All columns, full precision."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.column_names)
    for entry in table.to_pylist():
        writer.writerow(
            [" ".join(map(str, v)) if isinstance(v, list) else v for v in entry.values()]
        )
    write_result(path, file.getvalue())


_MOST_LOOKED_AT = 1000


def input_range(dataset: Any, indices: Sequence[int]) -> tuple[float, float]:
    """Return the least and the largest number in up to 1,000 of the chosen inputs, spread out.

    It is computed whenever it is printed: a file of it would be held by nothing.
    """
    count = len(indices)
    places = np.unique(np.linspace(0, count - 1, min(count, _MOST_LOOKED_AT)).astype(np.int64))
    some = np.asarray(indices)[places]
    low, high = np.inf, -np.inf
    for start in range(0, len(some), 100):
        batch = dataset.batch(some[start : start + 100])
        low, high = min(low, float(batch.min())), max(high, float(batch.max()))
    return low, high


def range_words(low: float, high: float, sigma: float | None) -> str:
    """Return the range of inputs beside the noise, in words."""
    said = f"inputs lie in {low:.4g} to {high:.4g}"
    if not sigma or high <= low:
        return said
    return f"{said}; sigma {sigma:g} is {100 * sigma / (high - low):.3g} % of that range"
