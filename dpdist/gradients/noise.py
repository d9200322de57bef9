"""Keyed Gaussian noise, added once per step to the summed gradient.

Floating-point Gaussians are not exactly Gaussian and the low bits of a noisy sum can betray it
(Mironov 2012, for Laplace). Noise is therefore drawn and added in float64 and the result rounded
to a grid about 2**-24 of the noise scale: the released value is then a coarse rounding
(post-processing) of a sum whose own error is near 2**-52 of the noise, far below the grid.

A key's numbers are a formula of its ChaCha20 words. Libraries and processors compute its logarithm,
sine and cosine to the last bit or the one before; so two of them make the same noise up to 2**-50
of its scale, and what each releases is a rounding of one and the same noisy sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from dpdist.randomness.keys import WordReader, derive_key, words

_GRID_BITS = 24
_RARE = np.uint64(2**32)  # a first word below it is continued by another 64 bits
_PIECE = 8192  # pairs of entries at a time: all that is made of them stays in a core's cache
_CALL = 2048  # numbers that torch transforms at a time where it has threads: for more it wakes them
_LANES = 64  # numbers are transformed in multiples of it: none depends on where a piece ends
_LEAST = torch.tensor(2.0**-64, dtype=torch.float64)


def standard_normal(key: bytes, start: int, count: int) -> np.ndarray:
    """Entries `start` to `start + count - 1` of the key's stream of N(0, 1) numbers: float64
    (count,).

    Box-Muller; entries 2j and 2j + 1 share a pair of words. The uniform under the logarithm is a
    multiple of 2^-64, where it is small of 2^-128, in (0, 1]: every draw is finite, and |z| reaches
    13.3, beyond which lies a mass of 3e-39. (53 bits end at 8.57, and the mass beyond, 1e-17, is
    what a delta near it would notice.)
    """
    drawn = np.empty(max(0, count))
    for place, normals in _pieces(key, start, count, 1.0):
        drawn[place : place + len(normals)] = normals
    return drawn


def add_noise(
    total: np.ndarray, key: bytes, std: float, start: int = 0, out: np.ndarray | None = None
) -> np.ndarray:
    """`total` + N(0, std**2 I), rounded to the grid: float64, the shape of `total`.

    start: which entries of the key's stream they get; a shard of a longer sum gets those of its
    place. out: float64 (size,), for the result; it may be `total` itself. Beside both it needs a
    megabyte, whatever their length. Raises ValueError when `total` is not finite: clipping should
    have made that impossible; what is in `out` then is nobody's.
    """
    summed = np.ascontiguousarray(total, dtype=np.float64).reshape(-1)
    noisy = np.empty_like(summed) if out is None else out
    if std == 0:
        require_finite(bool(np.isfinite(summed).all()))
        noisy[:] = summed
        return noisy.reshape(total.shape)
    exponent = grid_exponent(std)
    for place, normals in _pieces(key, start, len(summed), std):
        part = slice(place, place + len(normals))
        normals += summed[part]
        require_finite(bool(np.isfinite(normals).all()))
        normals *= 2.0**-exponent  # a power of two: exact
        np.rint(normals, out=normals)
        np.multiply(normals, 2.0**exponent, out=noisy[part])
    return noisy.reshape(total.shape)


def grid_exponent(std: float) -> int:
    """Of the grid that noise of this standard deviation is rounded to, a power of two."""
    return math.floor(math.log2(std)) - _GRID_BITS


def require_finite(finite: bool) -> None:
    if not finite:
        raise ValueError("the clipped sum is not finite; nothing is released")


def rare_word(word: int, key: bytes, pair: int) -> float:
    """The uniform in (0, 1] of a pair's first word, continued by the pair's own 64 bits more."""
    (more,) = words(derive_key(key, "tail"), pair, 1).tolist()
    return (float(word) + (float(more) + 1.0) * 2.0**-64) * 2.0**-64


def _pieces(key: bytes, start: int, count: int, scale: float) -> Iterator[tuple[int, np.ndarray]]:
    """(place, numbers): `scale` times the `count` entries from `start`, piece by piece. The numbers
    are the caller's to write to until the next piece."""
    first, last = start // 2, (start + count + 1) // 2
    size = min(_PIECE, last - first)
    reader = WordReader(key, 2 * first, 2 * (last - first), 2 * size) if size > 0 else None
    pairs = None
    for begin in range(first, last, _PIECE):
        size = min(_PIECE, last - begin)
        if pairs is None or pairs.count != size:
            pairs = _Pairs(size, scale)
        assert reader is not None
        entries = pairs.normals(reader.read().reshape(-1, 2), key, begin)
        low, high = max(start, 2 * begin), min(start + count, 2 * (begin + size))
        yield low - start, entries[low - 2 * begin : high - 2 * begin]


class _Pairs:
    """Room for so many pairs of entries, and what they are multiplied by."""

    def __init__(self, count: int, scale: float) -> None:
        self.count, self._factor = count, -2.0 * scale * scale
        made = np.ones((3, -(-count // _LANES) * _LANES))
        self._length, self._cosine, self._angle = made[:, :count]
        self._tensors = torch.from_numpy(made[:, :count])
        self._turns = np.empty(count, dtype=np.uint64)
        alone = torch.get_num_threads() == 1
        parts = torch.from_numpy(made).split(made.shape[1] if alone else _CALL, 1)
        self._calls = [tuple(part) for part in parts]
        self._entries = np.empty((count, 2))

    def normals(self, bits: np.ndarray, key: bytes, first: int) -> np.ndarray:
        """Both entries of the pairs number `first`, `first + 1`, ..., whose words are the bits
        (count, 2): float64 (2 * count,)."""
        self._uniform(bits, key, first)
        np.right_shift(bits[:, 1], np.uint64(11), out=self._turns)
        np.copyto(self._angle, self._turns.view(np.int64))
        self._angle *= 2.0**-53 * 2.0 * math.pi
        for length, cosine, angle in self._calls:
            length.log_().mul_(self._factor).sqrt_()
            torch.cos(angle, out=cosine)
            angle.sin_()
        np.multiply(self._length, self._cosine, out=self._entries[:, 0])
        np.multiply(self._length, self._angle, out=self._entries[:, 1])
        return self._entries.reshape(-1)

    def _uniform(self, bits: np.ndarray, key: bytes, first: int) -> None:
        """Uniforms in (0, 1] of the pairs' first words, where the length will be."""
        uniform = self._length
        halves = bits.view("<u4")  # numpy's own way from uint64 to float64 is five times slower
        np.copyto(uniform, halves[:, 1])
        np.copyto(self._angle, halves[:, 0])
        high, _, low = self._tensors
        torch.add(low, high, alpha=2.0**32, out=high)  # rounded once, as the products are exact
        rare = uniform.min() < _RARE
        torch.add(_LEAST, high, alpha=2.0**-64, out=high)
        if rare:  # one pair in 2^32
            for place in np.flatnonzero(bits[:, 0] < _RARE).tolist():
                uniform[place] = rare_word(int(bits[place, 0]), key, first + place)
