"""Blocks on Ray actors, journalled: an interrupted attack continues, whoever continues it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.journal import Journal
from cluster.pool import Chunk, PoolSettings, run_chunks
from cluster.reading import read_json
from cluster.storage import write_json
from dpdist.attacks.worker import Block
from dpdist.errors import UserError

FORMAT = 1
Progress = Callable[[int, int, float], None]
Rows = list[dict[str, Any]]


def pin(
    output: Path, wanted: Mapping[str, Any], seed: str | None, begin: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What is executed in ``output``: stored before the first block, and kept when continued.

    wanted: what results depend on. begin: the rest (seed, executed classifier), called for a new
    folder only. Raises UserError when the folder holds another attack, naming what differs.
    """
    path = output / "settings.json"
    plain = json.loads(json.dumps({"format": FORMAT, **wanted}))
    if path.exists():
        about = read_json(path, {"format": int, "seed": str, "settings": dict})
        stored_seed = about["seed"]
        if about["format"] > FORMAT:
            raise UserError(f"{path}: written by a newer version of dpdist")
        old, new = _flat(about), _flat(plain)
        differences = [
            f"{key} was {old.get(key)!r}, now {new[key]!r}"
            for key in new
            if old.get(key) != new[key]
        ]
        if seed is not None and seed != stored_seed:
            differences.append(f"seed was {stored_seed!r}, now {seed!r}")
        if differences:
            raise UserError(
                f"{output}: holds another attack ({'; '.join(differences)}); choose another "
                "folder with --output, or remove this one"
            )
        return about
    about = {**plain, **json.loads(json.dumps(begin()))}
    write_json(path, about)
    return about


def run_blocks(
    output: Path,
    worker: Callable[..., Callable[[Any], Rows]],
    shared: Any,
    blocks: Mapping[str, Block],
    *,
    actors: int | None,
    silence: float,
    progress: Progress | None,
) -> dict[str, Rows]:
    """Rows of all blocks by key, also of those that an earlier call finished.

    silence: seconds after which a worker without an answer must be hanging. progress(inputs done,
    inputs in all, inputs per second). Raises ClusterError when the cluster cannot do it.
    """
    with Journal(output / "journal.jsonl") as journal:
        rows: dict[str, Rows] = {entry["key"]: entry["rows"] for entry in journal.entries}
        inputs = {key: block.high - block.low for key, block in blocks.items()}
        total = sum(inputs.values())
        before = done = sum(inputs[key] for key in blocks if key in rows)
        begun = time.monotonic()

        def on_result(key: str, found: Rows) -> None:
            nonlocal done
            journal.append({"key": key, "rows": found})
            rows[key] = found
            done += inputs[key]
            show()

        def show() -> None:
            if progress is not None:
                elapsed = max(time.monotonic() - begun, 1e-9)
                progress(done, total, (done - before) / elapsed)

        show()
        chunks = [
            Chunk(key, block, float(place))
            for place, (key, block) in enumerate(blocks.items())
            if key not in rows
        ]
        run_chunks(worker, shared, chunks, on_result, PoolSettings(actors, stall_after=silence))
    return rows


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in about.items() if key not in ("settings", "format")}
    return flat | dict(about.get("settings", {}))
