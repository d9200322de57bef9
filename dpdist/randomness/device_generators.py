"""Random words computed on the device where they are used: Philox4x32-10 and ChaCha20.

Both are integer operations on tensors, so that a GPU has the same words as a CPU.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
2011) passes statistical tests and is not a cipher: an adversary that sees words can search for the
key. It suits noise of counts whose seed is published, not noise that protects records. ChaCha20
(RFC 8439, section 2.3) protects records: its words are those of
`dpdist.randomness.keys.stream_words`, bit for bit, with the same counter and a key of 256 bits. A
CPU uses a faster cipher; this one is for GPUs, where no word crosses over.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpdist.core.errors import UserError
from dpdist.randomness.keys import KEY_BYTES, stream_words

# --- Philox -----------------------------------------------------------------------------------


PHILOX_KEY_BYTES = 20  # of a unit's key: 64 bits of key, 96 bits of counter above the place
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
# The vectors that the authors publish with Random123: counter, key, words.
PHILOX_TEST_VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_WORD,) * 4, (_WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox(counter: tuple[Any, ...], key: tuple[int, int]) -> tuple[Any, ...]:
    """Return four words from four words of counter: integers in [0, 2^32), or int64 tensors."""
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        (upper0, lower0), (upper1, lower1) = _product(a, 0), _product(c, 1)
        a, b, c, d = upper1 ^ b ^ low, lower1, upper0 ^ d ^ high, lower0
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return a, b, c, d


def _product(word: Any, which: int) -> tuple[Any, Any]:
    """Return the upper and lower half of word times factor.

    The factor less 2^32 is negative and of 31 bits, so that nothing exceeds 63 bits and a sign.
    """
    product = word * (_FACTORS[which] - (1 << 32))
    return (product >> 32) + word, product & _WORD


def philox_words(key: bytes, first: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return four words, int64 (count,) each, of the places from `first` in the key's stream.

    A stream has 2^32 places. Keys that differ in their first 20 bytes have disjoint streams.
    """
    if first < 0 or first + count > 1 << 32:
        raise ValueError(f"a stream has 2^32 places, not {first + count}")
    low, high, *above = struct.unpack("<5I", key[:PHILOX_KEY_BYTES])
    places = torch.arange(first, first + count, device=device)
    return philox((places, *above), (low, high))


@cache
def check_philox(device: torch.device) -> None:
    """Raise UserError unless the device returns the published words."""
    for counter, key, known in PHILOX_TEST_VECTORS:
        made = philox(tuple(torch.tensor([word], device=device) for word in counter), key)
        if tuple(int(word) for word in made) != known:
            raise UserError(f"{device} multiplies integers otherwise: its noise cannot be used")


# --- ChaCha20 ---------------------------------------------------------------------------------


WORDS = 16  # of 32 bits, in a block
_CONSTANTS = struct.unpack("<4i", b"expand 32-byte k")
_COUNTER = 12  # which word of a block
_BLOCKS = 1 << 32  # of a key's stream
_SIGN = 1 << 31
_DOUBLE_ROUNDS = 10
_CHECKED = (0, 1037), (_SIGN - 3, 7), (_BLOCKS - 2, 2)  # first block and how many


class ChaChaBlocks:
    """Buffers on a device for blocks of words, and for intermediate results."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._counter = torch.empty(count, dtype=torch.int32, device=device)
        self._rows = [torch.empty(4, count, dtype=torch.int32, device=device) for _ in range(5)]
        self._words = torch.empty(WORDS, count, dtype=torch.int32, device=device)

    def fill(self, key: bytes, first: int) -> Tensor:
        """Return the blocks from number `first`: int32 (16, count), overwritten by the next call.

        Word w of block b is bits 32 w to 32 w + 31 of it, as a signed number. Raises ValueError
        beyond the stream's 2^32 blocks, where the counter would restart.
        """
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
        """Return the first state of every block without its counter: int32 (16, 1)."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        numbers = [*_CONSTANTS, *struct.unpack("<8i", key), 0, 0, 0, 0]
        return torch.tensor(numbers, dtype=torch.int32).to(self.device).view(WORDS, 1)


def _quarter_round(a: Tensor, b: Tensor, c: Tensor, d: Tensor, free: Tensor) -> tuple[Tensor, ...]:
    """Return the quarter round (section 2.1) of four columns (4, count), and a free tensor."""
    for left, right in ((16, 12), (8, 7)):
        a += b
        d ^= a
        d, free = _rotated(d, left, free), d
        c += d
        b ^= c
        b, free = _rotated(b, right, free), b
    return a, b, c, d, free


def _rotated(row: Tensor, left: int, out: Tensor) -> Tensor:
    """Return `row` with each word rotated.

    Words are signed: a right shift brings in their sign, which is masked out; the part of a product
    or sum beyond 32 bits is lost, as `check_chacha20` verifies.
    """
    torch.bitwise_right_shift(row, 32 - left, out=out)
    out &= (1 << left) - 1
    return out.add_(row, alpha=1 << left)


@cache
def check_chacha20(device: torch.device) -> None:
    """Raise UserError unless the device returns the words of the CPU's cipher.

    They are compared at the beginning, in the middle and at the end of a stream.
    """
    key = bytes(range(KEY_BYTES))
    for first, count in _CHECKED:
        made = ChaChaBlocks(count, device).fill(key, first).T.contiguous().cpu().numpy()
        if made.tobytes() != stream_words(key, first * WORDS // 2, count * WORDS // 2).tobytes():
            raise UserError(f"{device} computes integers otherwise: its noise cannot be used")
