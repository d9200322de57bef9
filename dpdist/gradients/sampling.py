"""Choose the records of a step by keyed Poisson sampling, and the blocks in which they run.

Record i joins the step iff its keyed uniform u_i < q, on any worker. The batch is then the same for
any number of workers and exactly Poisson: the records join independently, each with probability q.
A worker without sampled records still takes part in the step.

The block of a record is a function of its id and the step's key, never of its place among the
sampled records: one record more or less changes only one block.
`dpdist.gradients.passes` cuts a block into passes of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpdist.randomness.keys import derive_key, stream_words

# --- Poisson sampling -------------------------------------------------------------------------


def worker_range(records: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the contiguous range [start, stop) of record positions of worker `rank`."""
    return records * rank // world_size, records * (rank + 1) // world_size


def poisson_sample(
    key: bytes,
    start: int,
    stop: int,
    sample_rate: float,
    *,
    batch_cap: int | None = None,
    records: int | None = None,
    class_rates: Sequence[float] | None = None,
    classes_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Return the positions in [start, stop) that join the step: sorted int64.

    Every record of 0..records-1 joins with probability floor(sample_rate * 2**64) / 2**64,
    independently. With `batch_cap`, a batch larger than the cap is cut to a uniformly random
    subset of that size (truncated Poisson sampling); this needs `records`, because the cut depends
    on the whole batch.

    With `class_rates`, whose maximum is `sample_rate`, a record of class c joins with probability
    class_rates[c]: of the records that join at the largest rate, those join whose word is below the
    threshold of their class. classes_of: from positions (n,) to their classes (n,).
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if class_rates is not None:
        if batch_cap is not None or classes_of is None or max(class_rates) != sample_rate:
            raise ValueError("class rates need classes, their largest as sample_rate, and no cap")
        draws = stream_words(key, start, stop - start)
        joined = np.flatnonzero(_joins(draws, sample_rate))
        classes = np.asarray(classes_of(start + joined))
        kept = np.zeros(len(joined), dtype=bool)
        for place, rate in enumerate(class_rates):
            own = classes == place
            kept[own] = _joins(draws[joined[own]], rate)
        return start + joined[kept]
    if batch_cap is None:
        return start + np.flatnonzero(_joins(stream_words(key, start, stop - start), sample_rate))
    if records is None:
        raise ValueError("batch_cap needs the number of records")
    draws = stream_words(key, 0, records)
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


# --- blocks of records ------------------------------------------------------------------------


MAX_BLOCK_RECORDS = 1024  # `dpdist.gradients.clipping.sum_slack` rests on it
# Room above the expected number, in standard deviations: two percent of the blocks are halved.
_CAPACITY_MARGIN = 2.0


@dataclass(frozen=True)
class Blocks:
    """A partition of a batch into blocks by keyed hashes.

    count: number of blocks. capacity: largest number of records of a block; a larger block is
    halved by the next bit of the hash, repeatedly. One record more or less changes the rows of at
    most capacity + 1 records: those of its block, or of the two halves of a block that it exceeds.
    """

    count: int
    capacity: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 1 <= self.capacity <= MAX_BLOCK_RECORDS:
            raise ValueError(f"no blocks: {self.count} of at most {self.capacity} records")

    @classmethod
    def for_batches(cls, records: int, sample_rate: float, batch_cap: int | None = None) -> Blocks:
        """Return the fewest blocks for Poisson batches out of `records`, with capacities a little
        above the usual number of records."""
        expected = max(1.0, records * sample_rate)
        if batch_cap is not None:
            expected = min(expected, float(batch_cap))
        count = 1
        while _capacity(expected, count, sample_rate) > MAX_BLOCK_RECORDS:
            count += 1
        capacity = _capacity(expected, count, sample_rate)
        return cls(count, min(capacity, batch_cap) if batch_cap is not None else capacity)

    def labeled(self, key: bytes, ids: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """Return names of blocks and positions in `ids` (int64, distinct, >= 0); no block is empty.

        The name is the range of hashes. If one more record joins, blocks of the same name differ in
        at most that record. Within a block the order is that of the hashes, so it does not depend
        on the order of `ids`.
        """
        hashes = keyed_hash(derive_key(key, "blocks"), ids)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        edges = [(i << 64) // self.count for i in range(self.count + 1)]
        return [
            (name, order[first:last])
            for low, high in pairwise(edges)
            for name, first, last in self._halved(ordered, low, high)
        ]

    def _halved(self, ordered: np.ndarray, low: int, high: int) -> Iterator[tuple[str, int, int]]:
        first, last = _place(ordered, low), _place(ordered, high)
        if first == last:
            return
        if last - first <= self.capacity or high - low == 1:
            yield f"{low:x}-{high:x}", first, last
            return
        middle = (low + high) // 2
        yield from self._halved(ordered, low, middle)
        yield from self._halved(ordered, middle, high)


def usual_members(capacity: int) -> float:
    """Return the expected number of records for which `_capacity` returns this capacity."""
    return max(1.0, capacity - _CAPACITY_MARGIN * math.sqrt(capacity))


def _capacity(expected: float, count: int, sample_rate: float) -> int:
    mean = expected / count
    spread = mean * (1 - sample_rate / count)
    return math.ceil(mean + _CAPACITY_MARGIN * math.sqrt(spread))


def _place(ordered: np.ndarray, edge: int) -> int:
    if edge >> 64:
        return len(ordered)
    return int(np.searchsorted(ordered, np.uint64(edge)))


def keyed_hash(key: bytes, ids: np.ndarray) -> np.ndarray:
    """Return 64-bit hashes, distinct for distinct ids: two keyed rounds of SplitMix64's finalizer.

    They distribute records, over blocks or attacks, and need not be secure.
    """
    hashes = ids.astype(np.uint64)
    for word in stream_words(key, 0, 2):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + word
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes = hashes ^ (hashes >> np.uint64(31))
    return hashes
