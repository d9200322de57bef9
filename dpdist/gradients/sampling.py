"""Choose the records of a step by keyed Poisson sampling, and the blocks in which they run.

Record i joins the step iff the generator gives it u_i < q, whichever worker holds it. The batch is
then the same for any number of workers and exactly Poisson: the records join independently, each
with probability q. A worker whose share is empty still takes part in the step.

Which records run together is a function of each record's id and the step's key, never of a
record's place among the sampled ones: one record more or less changes one block and no other. A
block runs in passes of one fixed shape, filled up with rows that count for nothing, so that
kernels do not change with the other records of a batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpdist.randomness.keys import derive_key, stream_words

# --- Poisson sampling -------------------------------------------------------------------------


def worker_range(records: int, rank: int, world_size: int) -> tuple[int, int]:
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
    class_rates: Sequence[float] | None = None,
    classes_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Positions in [start, stop) that join the step: sorted int64.

    Every record of 0..records-1 joins with probability floor(sample_rate * 2**64) / 2**64,
    independently. With `batch_cap`, a batch larger than the cap is cut to a uniformly random
    subset of that size (truncated Poisson sampling); this needs `records`, because the cut depends
    on the whole batch.

    With `class_rates`, a record of class c joins with probability class_rates[c], of which
    `sample_rate` is the largest: of those that would join at the largest rate, the ones whose word
    is below their own class's. classes_of: positions (n,) to their classes (n,).
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


# most records of a block; `dpdist.gradients.clipping.sum_slack` rests on it
MAX_BLOCK_RECORDS = 1024
# Room above the expected number, in standard deviations: two per cent of the blocks are cut in two.
_CAPACITY_MARGIN = 2.0
_WORTH_IT = 0.03  # of the work: smaller passes that save less are not chosen


@dataclass(frozen=True)
class Blocks:
    """count: into how many blocks a batch is hashed. capacity: most records of one block; a block
    that has more is halved by the next bit of the hash, until none has.

    One record more or less changes the rows of at most capacity + 1 records: those of the block
    that holds it, or of the two halves of a block that it made overfull.
    """

    count: int
    capacity: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 1 <= self.capacity <= MAX_BLOCK_RECORDS:
            raise ValueError(f"no blocks: {self.count} of at most {self.capacity} records")

    @classmethod
    def for_batches(cls, records: int, sample_rate: float, batch_cap: int | None = None) -> Blocks:
        """Blocks for Poisson batches out of `records`: as few as `MAX_BLOCK_RECORDS` allows, none
        of them much larger than they will mostly be."""
        expected = max(1.0, records * sample_rate)
        if batch_cap is not None:
            expected = min(expected, float(batch_cap))
        count = 1
        while _capacity(expected, count, sample_rate) > MAX_BLOCK_RECORDS:
            count += 1
        capacity = _capacity(expected, count, sample_rate)
        return cls(count, min(capacity, batch_cap) if batch_cap is not None else capacity)

    def split(self, key: bytes, ids: np.ndarray) -> list[np.ndarray]:
        """Positions in `ids` (int64, distinct, >= 0), block by block; no block is empty.

        Within a block the order is the hash's, so it does not depend on the order of `ids` either.
        """
        hashes = keyed_hash(derive_key(key, "blocks"), ids)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        edges = [(i << 64) // self.count for i in range(self.count + 1)]
        return [
            order[first:last]
            for low, high in pairwise(edges)
            for first, last in self._halved(ordered, low, high)
        ]

    def _halved(self, ordered: np.ndarray, low: int, high: int) -> Iterator[tuple[int, int]]:
        first, last = _place(ordered, low), _place(ordered, high)
        if first == last:
            return
        if last - first <= self.capacity or high - low == 1:
            yield first, last
            return
        middle = (low + high) // 2
        yield from self._halved(ordered, low, middle)
        yield from self._halved(ordered, middle, high)

    def rows_per_pass(self, max_rows: int) -> int:
        """Rows of every pass: a block's capacity, or an equal part of it when that exceeds
        `max_rows` rows."""
        return math.ceil(self.capacity / math.ceil(self.capacity / max_rows))

    def choose_pass_rows(self, most: int, overhead: float, own_rows: bool = False) -> int:
        """Choose how many rows a pass has: the most for about the least work to be expected.

        Passes of a whole block have room above the expected number, which is filled up: 44 rows for
        32 records. Smaller passes leave less to fill up, and there are more of them. Those of 1, 2,
        3, 4, 6, 8, 12, 16, 24, ... rows are looked at: kernels and threads split them evenly, where
        others often have rows that round apart. The choice follows from the capacity and the
        arguments alone.

        Args:
            most: rows that a pass may have.
            overhead: what a pass costs besides its rows, in rows.
            own_rows: a block takes as many passes as its fullest row has records.
        """
        return _choose_pass_rows(self.capacity, most, overhead, own_rows)

    def rows_per_batch(
        self, records: int, sample_rate: float, rows: int | None, batch_cap: int | None = None,
        own_rows: bool = False,
    ) -> float:  # fmt: skip
        """Return how many rows the passes over a Poisson batch have on average, filled up.

        Args:
            records: from which the batch is drawn.
            sample_rate: probability with which each of them joins.
            rows: of a pass; None: a whole block.
            batch_cap: as of `for_batches`.
            own_rows: as of `choose_pass_rows`.
        """
        rows, share = rows or self.capacity, sample_rate / self.count
        if own_rows:
            members = min(records * sample_rate, batch_cap or records) / self.count
            return self.count * rows * _fullest_row(members, rows)
        if share >= 1:
            return float(math.ceil(records / rows) * rows)
        mean = records * share
        sizes = np.arange(1, min(records, math.ceil(mean + 10 * math.sqrt(mean) + 10)) + 1)
        steps = np.log((records - sizes + 1) / sizes) + math.log(share / (1 - share))
        chances = np.exp(records * math.log1p(-share) + np.cumsum(steps))  # binomial
        passes = np.ceil(np.minimum(sizes, batch_cap or records) / rows)
        return float(self.count * rows * (chances * passes).sum())

    def choose_rows(self, classes: np.ndarray) -> np.ndarray:
        """Choose the rows of a pass that records go into, for as few passes as can be expected.

        A class of few rows costs a pass for each time that its rows are full, so it is often
        cheaper to leave its rows empty. The choice follows from the rows and the capacity alone,
        never from the records that are there.

        Args:
            classes: (rows,) from `row_independence.find_row_classes`.

        Returns:
            A copy of classes with -1 for each row that stays empty: int64 (rows,).
        """
        names, sizes = np.unique(classes, return_counts=True)
        largest = np.argsort(-sizes, kind="stable")
        names, sizes = names[largest], sizes[largest]
        members = _usual_members(self.capacity)
        totals = np.cumsum(sizes)
        passes = [
            _expected_passes(members, sizes[: count + 1], int(totals[count]))
            for count in range(len(sizes))
        ]
        return np.where(np.isin(classes, names[: int(np.argmin(passes)) + 1]), classes, -1)

    def iter_passes(
        self, key: bytes, ids: np.ndarray, rows: int, classes: np.ndarray | None = None,
        own_rows: bool = False,
    ) -> Iterator[tuple[np.ndarray, slice | np.ndarray]]:  # fmt: skip
        """Yield positions in `ids` (int64, distinct) in passes of `rows` rows, filled up, and which
        rows are real. classes: from `row_independence.find_row_classes`. own_rows: every record has
        one row in all passes, by its id and the key."""
        if own_rows:
            classes = np.arange(rows)
        elif classes is not None:
            classes = self.choose_rows(classes)
        for block in self.split(key, ids):
            slots = None if classes is None else hash_rows(key, ids[block])
            yield from iter_padded_passes(block, rows, classes, slots)


def _expected_passes(members: float, sizes: np.ndarray, total: int) -> float:
    """Return in how many passes `members` records mostly run that are spread over classes of
    `sizes` rows, `total` in all, in proportion."""
    shares = sizes / total
    room = _CAPACITY_MARGIN * np.sqrt(members * shares * (1 - shares))
    return float(np.ceil((members * shares + room) / sizes).max())


def _fullest_row(members: float, rows: int) -> float:
    """Return how many records the fullest of `rows` rows has on average, where a Poisson number of
    them, of mean `members`, go into rows by their hashes."""
    mean = members / rows
    counts = np.arange(1, int(mean + 12 * math.sqrt(mean)) + 40)
    chances = np.exp(np.append(0.0, np.cumsum(np.log(mean / counts))) - mean)
    return float((1 - np.cumsum(chances).clip(max=1) ** rows).sum())


def iter_padded_passes(
    block: np.ndarray,
    rows: int,
    classes: np.ndarray | None = None,
    row_hashes: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, slice | np.ndarray]]:
    """The block in passes of `rows` rows, and which rows of each are real.

    The others repeat the pass's first record: whatever the model accepts. Where rows do not round
    alike, a record goes into a row of a class that follows from its own slot alone, so that one
    record more or less never moves another one into a row of another class.

    Args:
        block: (n,) members in their order.
        rows: of every pass.
        classes: (rows,) from `Blocks.choose_rows`, of which -1 stays empty; a class for each row
            gives every record a row of its own; None: all rows round alike.
        row_hashes: (n,) hashes of the members' ids; needed with classes.
    """
    if classes is None:
        for start in range(0, len(block), rows):
            members = block[start : start + rows]
            filler = np.repeat(members[:1], rows - len(members))
            yield np.concatenate([members, filler]), slice(len(members))
        return
    assert row_hashes is not None
    used = np.flatnonzero(classes >= 0)
    wanted = classes[used[(row_hashes % np.uint64(len(used))).astype(np.int64)]]
    turn, row = np.empty(len(block), np.int64), np.empty(len(block), np.int64)
    for one in np.unique(wanted):
        mine, own = np.flatnonzero(wanted == one), np.flatnonzero(classes == one)
        turn[mine] = np.arange(len(mine)) // len(own)
        row[mine] = own[np.arange(len(mine)) % len(own)]
    for number in range(int(turn.max(initial=-1)) + 1):
        mine = np.flatnonzero(turn == number)
        members = np.repeat(block[mine[:1]], rows)
        members[row[mine]] = block[mine]
        yield members, np.sort(row[mine])


def hash_rows(key: bytes, ids: np.ndarray) -> np.ndarray:
    """Return the hashes (n,) that choose the class of row of records with these ids."""
    return keyed_hash(derive_key(key, "rows"), ids)


@functools.lru_cache(maxsize=256)
def _choose_pass_rows(capacity: int, most: int, overhead: float, own_rows: bool) -> int:
    members = _usual_members(capacity)
    largest = math.ceil(capacity / math.ceil(capacity / most))

    def cost(rows: int) -> float:
        wide = math.sqrt(2 * members)
        reached = range(0, capacity, rows)  # records that so many passes hold
        passes = sum(math.erfc((held + 0.5 - members) / wide) / 2 for held in reached)
        passes = _fullest_row(members, rows) if own_rows else passes
        return round(passes * (rows + overhead) / members, 4)  # alike on every machine

    lengths = {first << power for first in (2, 3) for power in range(capacity.bit_length())}
    lengths = {1, largest} | {length for length in lengths if length <= min(most, capacity)}
    costs = {rows: cost(rows) for rows in lengths}
    enough = (1 + _WORTH_IT) * min(costs.values())
    return max(rows for rows, each in costs.items() if each <= enough)


def _usual_members(capacity: int) -> float:
    """Return about how many records a block of this capacity is made for (`_capacity`)."""
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
    """64-bit hashes, different for different ids: two rounds of SplitMix64's finaliser, keyed.

    They spread records, over blocks or attacks, and hide nothing: any function of id and key would
    do.
    """
    hashes = ids.astype(np.uint64)
    for word in stream_words(key, 0, 2):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + word
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes = hashes ^ (hashes >> np.uint64(31))
    return hashes
