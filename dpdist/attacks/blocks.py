"""Blocks on Ray actors, journalled: an interrupted attack continues, whoever continues it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from cluster.journal import Journal
from cluster.pool import Chunk, PoolSettings, run_chunks
from dpdist.attacks.worker import Block
from dpdist.bulk import Progress

Rows = list[dict[str, Any]]


def run_blocks(
    journal: Journal,
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
