"""Scans of patients in Parquet files, and recipes whose unit of privacy is the patient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpdist.runs.recipe import Recipe, parse_recipe
from support.training import KEY

USERS, MOST = 60, 3


def write(
    root: Path, *, split: str = "train", seed: int = 0, users: int = USERS, most: int = 9,
    name: str = "patient {}", change: Any = None, drop: object = None,
) -> list[Any]:  # fmt: skip
    """Write records of users of 1 to `most` into root/scans; return whom they belong to."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, most + 1, users)
    whom = np.repeat(np.arange(users), sizes)[generator.permutation(sizes.sum())]
    values = generator.random((len(whom), 3)).round(6)
    own: list[Any] = [
        name.format(each) if isinstance(name, str) else each for each in whom.tolist()
    ]
    own = change(own) if change is not None else own
    table = pa.table(
        {
            **{f"f{k}": values[:, k].astype(np.float32) for k in range(3)},
            "label": (values.sum(1) > 1.5).astype(np.int64),
            "patient": own,
        }
    )
    if drop is not None:
        kept = [each != drop for each in own]
        table, own = table.filter(pa.array(kept)), [each for each in own if each != drop]
    (root / "scans").mkdir(parents=True, exist_ok=True)
    pq.write_table(table, root / "scans" / f"{split}.parquet")
    return own


def recipe_of(root: Path, **sections: Any) -> Recipe:
    raw: dict[str, Any] = {
        "name": "x",
        "data": {
            "name": "scans", "root": str(root), "classes": 2,
            "columns": {"features": ["f*"], "user": "patient"},
        },
        "model": {"name": "linear"},
        "privacy": {
            "noise_multiplier": 1.0, "delta": 1e-3, "run_key": KEY, "unit": "user",
            "max_records_per_user": MOST,
        },
        "training": {"batch_size": 12, "epochs": 2, "learning_rate": 0.5},
        "resources": {"checkpoint_seconds": 1e-6},
    }  # fmt: skip
    for key, value in sections.items():
        section, _, name = key.partition("__")
        raw[section] = {**raw.get(section, {}), name: value} if name else value
    return parse_recipe(raw, "test")
