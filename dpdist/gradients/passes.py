"""Cut keyed blocks of records into passes of the model, by one of two layouts.

`standard`: a block's records run in the order of their hashes, in passes of one length; its last
pass has the remaining records. One more record moves others of its block by a row, and may move one
into a different pass. The change of a record's clipped gradient is assumed to be small
(`dpdist.gradients.clipping.assumed_move`), and the clip leaves room for it.

`fixed-row`: every record has a row that follows from its id and the step's key. All passes have one
length; empty rows repeat a record and do not count. One more record changes the passes of others in
its row, never their rows. This layout is slower: a block takes as many passes as its fullest row
has records.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from dpdist.gradients.sampling import Blocks, keyed_hash, usual_members
from dpdist.randomness.keys import derive_key

Rounding = Literal["standard", "fixed-row"]

_PASS_COST = 4.0  # fixed cost of a pass, in rows


def rows_per_pass(blocks: Blocks, most: int, rounding: Rounding = "standard") -> int:
    """Return the rows of a pass, from a block's capacity and these arguments alone.

    Args:
        blocks: of the step.
        most: rows that a pass may have.
        rounding: `standard` returns a block's capacity, or an equal part of it if that is above
            `most`; `fixed-row` returns the length with about the least expected work.
    """
    if rounding == "standard":
        return math.ceil(blocks.capacity / math.ceil(blocks.capacity / most))
    return _fixed_rows(blocks.capacity, most)


def rows_per_batch(
    blocks: Blocks, members: float, rows: int, rounding: Rounding = "standard"
) -> float:
    """Return the average number of rows of the passes over a batch.

    Args:
        blocks: of the step.
        members: expected number of records in the batch.
        rows: of a pass.
        rounding: layout of the passes.
    """
    if rounding == "standard":
        return members
    return blocks.count * rows * _fullest_row(members / blocks.count, rows)


def labeled_passes(
    blocks: Blocks, key: bytes, ids: np.ndarray, rows: int, rounding: Rounding = "standard"
) -> Iterator[tuple[tuple[str | int, ...], np.ndarray, slice | np.ndarray]]:
    """Yield the passes over a batch, each with a label that keys its random numbers.

    The label (`dpdist.gradients.random_passes`) of a pass of one row is its record; for `fixed-row`
    it is one for all passes, for `standard` block and number.

    Args:
        blocks: of the step.
        key: 32 bytes of the step.
        ids: int64 (n,), distinct ids of the records.
        rows: of a pass.
        rounding: layout of the passes.

    Yields:
        The label, positions in `ids`, one for each row of the pass, and which rows count.
    """
    label: tuple[str | int, ...]
    for name, block in blocks.labeled(key, ids):
        if rounding == "standard":
            for number, start in enumerate(range(0, len(block), rows)):
                members = block[start : start + rows]
                alone = rows == 1
                label = ("record", int(ids[members[0]])) if alone else ("pass", name, number)
                yield label, members, slice(len(members))
        else:
            for members, real in _fixed_row_passes(block, hash_rows(key, ids[block]), rows):
                label = ("record", int(ids[members[0]])) if rows == 1 else ("step",)
                yield label, members, real


def hash_rows(key: bytes, ids: np.ndarray) -> np.ndarray:
    """Return the hashes (n,) that choose the rows of records with these ids."""
    return keyed_hash(derive_key(key, "rows"), ids)


def _fixed_row_passes(
    block: np.ndarray, hashes: np.ndarray, rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield passes in which each member is in the row of its hash."""
    row = (hashes % np.uint64(rows)).astype(np.int64)
    turn = np.empty(len(block), np.int64)  # in which pass of its row a member runs
    for one in np.unique(row):
        mine = np.flatnonzero(row == one)
        turn[mine] = np.arange(len(mine))
    for number in range(int(turn.max(initial=-1)) + 1):
        mine = np.flatnonzero(turn == number)
        members = np.repeat(block[mine[:1]], rows)  # empty rows repeat a valid record
        members[row[mine]] = block[mine]
        yield members, np.sort(row[mine])


def _fullest_row(members: float, rows: int) -> float:
    """Return the average number of records in the fullest of `rows` rows.

    A Poisson number of records, of mean `members`, go into rows by their hashes.
    """
    mean = members / rows
    counts = np.arange(1, int(mean + 12 * math.sqrt(mean)) + 40)
    chances = np.exp(np.append(0.0, np.cumsum(np.log(mean / counts))) - mean)
    return float((1 - np.cumsum(chances).clip(max=1) ** rows).sum())


@functools.lru_cache(maxsize=256)
def _fixed_rows(capacity: int, most: int) -> int:
    members = usual_members(capacity)
    largest = math.ceil(capacity / math.ceil(capacity / most))
    lengths = {first << power for first in (2, 3) for power in range(capacity.bit_length())}
    lengths = {1, largest} | {length for length in lengths if length <= min(most, capacity)}
    # Rounded: the same choice on every machine.
    return min(
        sorted(lengths, reverse=True),
        key=lambda rows: round(_fullest_row(members, rows) * (rows + _PASS_COST), 4),
    )
