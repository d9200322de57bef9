"""Philox4x32-10: random words that are a function of key and place, the same on every device.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It is written
as integer operations on tensors (and on plain integers), so that a GPU makes the words where they
are used, and a CPU the same ones. It passes the batteries of statistical tests and is no cipher:
who sees words can look for the key. Good for noise that is counted and whose seed is published with
the counts; not for noise that protects records (`dpdist.randomness.keys`).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpdist.base.errors import UserError

KEY_BYTES = 20  # of a unit's key: 64 bits are the generator's key, 96 the counter above the place
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
# The vectors that the authors publish with Random123: counter, key, words.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_WORD,) * 4, (_WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox(counter: tuple[Any, ...], key: tuple[int, int]) -> tuple[Any, ...]:
    """Four words from four words of counter: integers in [0, 2^32), or int64 tensors of such."""
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        (upper0, lower0), (upper1, lower1) = _product(a, 0), _product(c, 1)
        a, b, c, d = upper1 ^ b ^ low, lower1, upper0 ^ d ^ high, lower0
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return a, b, c, d


def _product(word: Any, which: int) -> tuple[Any, Any]:
    """Upper and lower half of word times factor. The factor less 2^32 is negative and of 31 bits,
    so that nothing exceeds 63 bits and a sign."""
    product = word * (_FACTORS[which] - (1 << 32))
    return (product >> 32) + word, product & _WORD


def words_on(key: bytes, first: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Four words, int64 (count,) each, of the places from `first` in the key's stream, which has
    2^32 places. Keys that differ in `KEY_BYTES` have streams without a place in common."""
    if first < 0 or first + count > 1 << 32:
        raise ValueError(f"a stream has 2^32 places, not {first + count}")
    low, high, *above = struct.unpack("<5I", key[:KEY_BYTES])
    places = torch.arange(first, first + count, device=device)
    return philox((places, *above), (low, high))


@cache
def check(device: torch.device) -> None:
    """Raise UserError unless the device gives the published words."""
    for counter, key, known in KNOWN:
        made = philox(tuple(torch.tensor([word], device=device) for word in counter), key)
        if tuple(int(word) for word in made) != known:
            raise UserError(f"{device} multiplies integers otherwise: its noise cannot be used")
