"""Sums and comparisons over the training workers; a missing worker is an error, never a smaller
sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class MissingRank(RuntimeError):
    """A step in which some worker did not take part; it never updates the model."""


class Reducer:
    """Sums over the workers; with one worker, nothing to do."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._room, self._rows = torch.zeros(0, dtype=torch.float64), torch.zeros(0)

    @property
    def backend(self) -> str:
        """What workers on this kind of device talk through."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def rows(self, count: int, size: int) -> Tensor:
        """Zeros (count, size), float64, for `sum`: the memory of the last ones, if as many. New
        memory costs more than all that is done with it: the kernel clears it page by page."""
        if len(self._room) != count * size + 2:
            self._room = torch.empty(count * size + 2, dtype=torch.float64, device=self.device)
        self._rows = self._room.zero_()[:-2].view(count, size)
        return self._rows

    def sum(self, rows: Tensor, flag: bool) -> tuple[Tensor, bool]:
        """Sum of float64 rows (S, size) over workers, added up in row order; and whether any flag
        was up. Made where this worker's rows lie, if they are those of `rows`.

        Every worker also adds a one: raises MissingRank unless all are counted.
        """
        tail = torch.tensor([1.0, float(flag)], dtype=torch.float64, device=self.device)
        if rows is self._rows:
            buffer = self._room
            buffer[-2:] = tail
        else:
            buffer = torch.cat([rows.reshape(-1), tail])
        self.all_sum(buffer)
        present, flags = buffer[-2:].tolist()
        if present != self.world_size:
            raise MissingRank(f"{present:g} of {self.world_size} workers took part in the step")
        total = buffer[:-2].view_as(rows)
        result = total[0]
        for row in total[1:]:
            result += row
        return result, flags > 0

    def everybody(self, flag: bool) -> bool:
        """Whether any worker's flag was up. Raises MissingRank unless all take part."""
        return self.sum(torch.zeros(1, 0, dtype=torch.float64, device=self.device), flag)[1]

    def exchange(self, sent: Tensor, sizes: Sequence[int], awaited: Sequence[int]) -> Tensor:
        """Send each worker its piece of `sent` (sizes, in order of rank): what came from each, of
        the awaited sizes, one behind the other."""
        if self.world_size == 1:
            return sent
        found = sent.new_empty(sum(awaited))
        dist.all_to_all_single(found, sent.contiguous(), list(awaited), list(sizes))
        return found

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Make `tensor` that of worker `source`, in place."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=source)

    def all_sum(self, buffer: Tensor) -> None:
        """Sum `buffer` over the workers, in place."""
        if self.world_size > 1:
            dist.all_reduce(buffer)

    def same_everywhere(self, digest: Tensor) -> bool:
        """Whether all workers hold the same int64 (1,)."""
        if self.world_size == 1:
            return True
        low, high = digest.to(self.device).clone(), digest.to(self.device).clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        return bool((low == high).all())

    def from_first(self, value: int) -> int:
        """Worker 0's integer, on all."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        self.broadcast(tensor, 0)
        return int(tensor.item())

    def gather(self, text: str) -> list[str]:
        """One short string of each worker, in order of rank."""
        if self.world_size == 1:
            return [text]
        padded = text.encode()[:512].ljust(512, b"\0")
        raw = torch.tensor(list(padded), dtype=torch.uint8, device=self.device)
        parts = [torch.empty_like(raw) for _ in range(self.world_size)]
        dist.all_gather(parts, raw)
        return [bytes(part.cpu().tolist()).rstrip(b"\0").decode() for part in parts]
