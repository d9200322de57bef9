"""How the workers share a step's release: every one makes the whole of it, or its own part.

A sharded release is the same release to the bit: sums add up in the same order, every entry gets
the noise of its place in the key's stream, ids in the ledger are made of the same digests, and
parameters are updated a leaf at a time in both. With three workers or more and without
`training.reproducible` a whole sum is added up in an order of the network's own; only then do last
bits differ. To share otherwise, add a class to `RELEASES`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpdist.gradients.sampling import share
from dpdist.training import checkpoint
from dpdist.training.optimizer import LEAF
from dpdist.training.reducer import Reducer
from dpdist.training.wire import Wire

_FLOAT64 = Wire()
_AT_ONCE = 32  # leaves that travel together, of all parts and rows


@dataclass(frozen=True)
class Shards:
    """Of the records, and whose they are. rows: length of the reduced stack; row r is worker 0's,
    then worker 1's, ... largest: records planned for any shard. mine: (row, first record, end) of
    this worker's shards. held: rows of each worker; where every worker has the same one row, they
    are stacked first."""

    rows: int
    largest: int
    mine: list[tuple[int, int, int]]
    held: Sequence[int] = (1,)


class Whole:
    """Every worker adds up, noises and updates everything."""

    def __init__(self, wire: Wire = _FLOAT64) -> None:
        self.wire = wire

    def own(self, reducer: Reducer, size: int) -> slice:
        """The entries of a vector of `size` that this worker releases and updates."""
        return slice(0, size)

    def sum(
        self, reducer: Reducer, rows: Tensor, shards: Shards, flag: bool
    ) -> tuple[Tensor, bool]:
        """Its entries of all workers' rows (S, size), added up in row order, maybe in the rows' own
        memory; and whether any flag was up. The rows are spent. Raises MissingRank unless all
        workers are counted."""
        return reducer.sum(rows, flag)

    def digests(self, reducer: Reducer, label: str, summed: np.ndarray, size: int) -> list[bytes]:
        """Of all leaves of a sum of `size` entries, given this worker's; for worker 0."""
        return leaf_digests(label, summed) if reducer.rank == 0 else []

    def complete(self, reducer: Reducer, flat: Tensor) -> None:
        """Bring what every worker updated of a vector to all."""

    def memory(self, size: int, slots: int, rows: int, workers: int) -> int:
        """Bytes on each worker, all through the training, that grow with the trained parameters.
        slots: vectors that the optimizer keeps. rows: of the reduced stack, where the release is
        made."""
        return size * (4 + 4 * slots + 8 * rows)

    def identity(self, reducer: Reducer, reproducible: bool) -> dict[str, str]:
        """What it adds to all that can change a sum."""
        return {}

    def kept(
        self, reducer: Reducer, folder: Path, step: int, slots: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], int]:
        """The optimizer's state that worker 0 keeps in a checkpoint, and in how many files beside
        its own the rest is by now."""
        return slots, 0


class Sharded(Whole):
    """Every worker its own part, cut at whole leaves, and of momentum, Adam's state and averages
    that part alone."""

    def own(self, reducer: Reducer, size: int) -> slice:
        return _parts(size, reducer.world_size)[reducer.rank]

    def sum(
        self, reducer: Reducer, rows: Tensor, shards: Shards, flag: bool
    ) -> tuple[Tensor, bool]:
        flagged = reducer.everybody(flag)
        parts = _parts(rows.shape[1], reducer.world_size)
        total = rows[0, parts[reducer.rank]]
        # A piece at a time: neither what is sent nor what arrives needs memory of its own length.
        step = LEAF * max(1, _AT_ONCE // max(len(parts), shards.rows))
        for low in range(0, max(part.stop - part.start for part in parts), step):
            pieces = [
                slice(min(p.start + low, p.stop), min(p.start + low + step, p.stop)) for p in parts
            ]
            found = self._exchanged(reducer, rows, pieces, shards)
            total[low : low + step] = found  # over rows of its own, which were just sent
        return total, flagged

    def _exchanged(
        self, reducer: Reducer, rows: Tensor, pieces: list[slice], shards: Shards
    ) -> Tensor:
        """This worker's piece of the sum, given all workers' rows."""
        world, held, own = reducer.world_size, shards.held, pieces[reducer.rank]
        first = shards.mine[0][0] if shards.mine else 0
        mine = rows[first : first + len(shards.mine)]
        sent = torch.cat([self.wire.sent(mine[:, piece]).reshape(-1) for piece in pieces])
        sizes = [len(mine) * (piece.stop - piece.start) for piece in pieces]
        length = own.stop - own.start
        found = reducer.exchange(sent, sizes, [count * length for count in held])
        stack = found.view(sum(held), length)
        total = stack[0].to(rows.dtype)
        for row in stack[1:]:
            total += row
        # A sum over several workers has no negative zero: they add zeros to each other's rows.
        return total.add_(0.0) if world > 1 and shards.rows > 1 else total

    def digests(self, reducer: Reducer, label: str, summed: np.ndarray, size: int) -> list[bytes]:
        raw = torch.zeros(-(-size // LEAF), 32, dtype=torch.uint8)
        first = self.own(reducer, size).start // LEAF
        for place, digest in enumerate(leaf_digests(label, summed), first):
            raw[place] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        raw = raw.to(reducer.device)
        reducer.all_sum(raw)  # others hold zeros in its place
        return [bytes(row) for row in raw.cpu().tolist()]

    def complete(self, reducer: Reducer, flat: Tensor) -> None:
        for rank, part in enumerate(_parts(len(flat), reducer.world_size)):
            if part.start < part.stop:
                reducer.broadcast(flat[part], rank)

    def memory(self, size: int, slots: int, rows: int, workers: int) -> int:
        return size * (4 + 8 * rows) + 4 * slots * -(-size // workers)

    def identity(self, reducer: Reducer, reproducible: bool) -> dict[str, str]:
        ordered = reproducible or reducer.world_size < 3
        wire = {} if self.wire == _FLOAT64 else {"wire": f"{self.wire.name}, {self.wire.most:g}"}
        return wire | ({} if ordered else {"sums": "in order of rank"})

    def kept(
        self, reducer: Reducer, folder: Path, step: int, slots: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], int]:
        if not slots:
            return {}, 0
        checkpoint.save_part(folder, step, reducer.rank, reducer.world_size, slots)
        reducer.gather("written")  # nobody's part may be missing once worker 0 says it is done
        return {}, reducer.world_size


RELEASES: dict[str, type[Whole]] = {"whole": Whole, "sharded": Sharded}


def _parts(size: int, count: int) -> list[slice]:
    """Contiguous parts of a vector, one a worker; of a short one, some are empty."""
    cuts = [share(-(-size // LEAF), rank, count) for rank in range(count)]
    return [slice(min(size, LEAF * low), min(size, LEAF * high)) for low, high in cuts]


def leaf_digests(label: str, summed: np.ndarray) -> list[bytes]:
    """Of the bits of float64 (size,), leaf by leaf, and of whose sum it is."""
    found = []
    for at in range(0, len(summed), LEAF):
        digest = hashlib.blake2b(label.encode(), digest_size=32, person=b"dpdist.release")
        digest.update(np.ascontiguousarray(summed[at : at + LEAF]).data)
        found.append(digest.digest())
    return found


def release_id(label: str, leaves: Sequence[bytes]) -> str:
    """Of a whole sum, from its leaves' digests; of a single leaf, its own."""
    if len(leaves) == 1:
        return leaves[0].hex()
    digest = hashlib.blake2b(label.encode(), digest_size=32, person=b"dpdist.leaves")
    digest.update(b"".join(leaves))
    return digest.hexdigest()
