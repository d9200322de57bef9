"""ChaCha20 as integer operations on tensors: a key's secret words, made where they are used.

RFC 8439, section 2.3. They are the words of `dpdist.randomness.keys.words`, bit for bit: the same
cipher, the same counter, a key of 256 bits. A CPU has a faster cipher there; this one is for GPUs,
where no word crosses over.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from dpdist.base.errors import UserError
from dpdist.randomness.keys import KEY_BYTES, words

WORDS = 16  # of 32 bits, in a block
_CONSTANTS = struct.unpack("<4i", b"expand 32-byte k")
_COUNTER = 12  # which word of a block
_BLOCKS = 1 << 32  # of a key's stream
_SIGN = 1 << 31
_DOUBLE_ROUNDS = 10
_CHECKED = (0, 1037), (_SIGN - 3, 7), (_BLOCKS - 2, 2)  # first block and how many


class KeyBlocks:
    """Room on a device for so many blocks of words, and for what is made on the way."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._counter = torch.empty(count, dtype=torch.int32, device=device)
        self._rows = [torch.empty(4, count, dtype=torch.int32, device=device) for _ in range(5)]
        self._words = torch.empty(WORDS, count, dtype=torch.int32, device=device)

    def fill(self, key: bytes, first: int) -> Tensor:
        """The blocks from number `first`: int32 (16, count), overwritten by the next call. Word w
        of block b is bits 32 w to 32 w + 31 of it, as a signed number. Raises ValueError beyond
        the stream's 2^32 blocks: its counter would begin again."""
        if first < 0 or first + self.count > _BLOCKS:
            raise ValueError(f"a key's stream has 2^32 blocks, not {first + self.count}")
        start = self._start(key)
        numbers = torch.arange(first, first + self.count, device=self.device)
        self._counter.copy_(numbers.bitwise_xor_(_SIGN).sub_(_SIGN))  # signed, as int32 has it
        a, b, c, d, free = self._rows
        for row, part in zip((a, b, c, d), start.split(4), strict=True):
            row.copy_(part.expand(-1, self.count))
        d[0] = self._counter
        for _ in range(_DOUBLE_ROUNDS):
            for turn in (1, -1):  # columns, then diagonals: the same, of rows that were rolled
                a, b, c, d, free = _quarter_round(a, b, c, d, free)
                b, c, d = (row.roll(-turn * by, 0) for by, row in enumerate((b, c, d), 1))
        torch.cat((a, b, c, d), out=self._words)
        self._words += start
        self._words[_COUNTER] += self._counter
        return self._words

    def _start(self, key: bytes) -> Tensor:
        """What every block begins with, its counter left out: int32 (16, 1)."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        numbers = [*_CONSTANTS, *struct.unpack("<8i", key), 0, 0, 0, 0]
        return torch.tensor(numbers, dtype=torch.int32).to(self.device).view(WORDS, 1)


def _quarter_round(a: Tensor, b: Tensor, c: Tensor, d: Tensor, free: Tensor) -> tuple[Tensor, ...]:
    """Section 2.1, of four columns (4, count) at once; and a tensor that is free again."""
    for left, right in ((16, 12), (8, 7)):
        a += b
        d ^= a
        d, free = _rotated(d, left, free), d
        c += d
        b ^= c
        b, free = _rotated(b, right, free), b
    return a, b, c, d, free


def _rotated(row: Tensor, left: int, out: Tensor) -> Tensor:
    """`row`, each word rotated. Words are signed: a shift to the right brings in their sign, which
    is cut off; what a product or a sum has beyond 32 bits is lost, as `check` makes sure."""
    torch.bitwise_right_shift(row, 32 - left, out=out)
    out &= (1 << left) - 1
    return out.add_(row, alpha=1 << left)


@cache
def check(device: torch.device) -> None:
    """Raise UserError unless the device gives the words that the CPU's cipher gives, at the
    beginning, in the middle and at the end of a stream."""
    key = bytes(range(KEY_BYTES))
    for first, count in _CHECKED:
        made = KeyBlocks(count, device).fill(key, first).T.contiguous().cpu().numpy()
        if made.tobytes() != words(key, first * WORDS // 2, count * WORDS // 2).tobytes():
            raise UserError(f"{device} computes integers otherwise: its noise cannot be used")
