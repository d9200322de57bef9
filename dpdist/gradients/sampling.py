"""Keyed Poisson sampling: record i joins the step iff the generator gives it u_i < q, whoever
holds it.

The batch is then the same for any number of workers and exactly Poisson: the records join
independently, each with probability q. A worker whose share is empty still takes part in the step.
"""

from __future__ import annotations

import numpy as np

from dpdist.randomness.keys import words


def share(records: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous range [start, stop) of record positions that worker `rank` holds."""
    return records * rank // world_size, records * (rank + 1) // world_size


def poisson_sample(
    key: bytes,
    start: int,
    stop: int,
    sample_rate: float,
    *,
    batch_cap: int | None = None,
    records: int | None = None,
) -> np.ndarray:
    """Positions in [start, stop) that join the step: sorted int64.

    Every record of 0..records-1 joins with probability floor(sample_rate * 2**64) / 2**64,
    independently. With `batch_cap`, a batch larger than the cap is cut to a uniformly random
    subset of that size (truncated Poisson sampling); this needs `records`, because the cut depends
    on the whole batch.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if batch_cap is None:
        return start + np.flatnonzero(_joins(words(key, start, stop - start), sample_rate))
    if records is None:
        raise ValueError("batch_cap needs the number of records")
    draws = words(key, 0, records)
    batch = np.flatnonzero(_joins(draws, sample_rate))
    if len(batch) > batch_cap:
        # Given that a record joined, its word is uniform below the threshold: the smallest words
        # are a uniformly random subset.
        batch = np.sort(batch[np.argsort(draws[batch], kind="stable")[:batch_cap]])
    return batch[(batch >= start) & (batch < stop)]


def _joins(draws: np.ndarray, sample_rate: float) -> np.ndarray:
    if sample_rate == 1.0:
        return np.ones(len(draws), dtype=bool)
    return draws < np.uint64(int(sample_rate * 2.0**64))
