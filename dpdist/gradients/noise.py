"""Keyed Gaussian noise, added once per step to the summed gradient, on the CPU or on a device.

Floating-point Gaussians are not exactly Gaussian and the low bits of a noisy sum can reveal the sum
(Mironov 2012, for Laplace). Noise is therefore drawn and added in float64 and the result rounded
to a grid about 2**-24 of the noise scale: the released value is then a coarse rounding
(post-processing) of a sum whose own error is near 2**-52 of the noise, far below the grid.

A key's numbers are a formula of its ChaCha20 words. Libraries and processors compute its
logarithm, sine and cosine to the last bit or the one before; so their noise agrees up to 2**-50 of
its scale, and their releases are roundings of the same noisy sum. On a device the words of a key
are those of the CPU's cipher, bit for bit, and the same formulas are evaluated in float64; on a CPU
the two agree to the bit. **Never run on a GPU**: tested on CPUs and
on a simulated device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpdist.core.errors import UserError
from dpdist.randomness import device_generators
from dpdist.randomness.keys import KEY_BYTES, WordReader, derive_key, stream_words

# --- on the CPU -------------------------------------------------------------------------------


_GRID_BITS = 24
_RARE = np.uint64(2**32)  # a first word below it is continued by another 64 bits
_PIECE = 8192  # pairs of entries at a time, which stay in a core's cache
_CALL = 2048  # numbers at a time that torch transforms without starting its threads
_LANES = 64  # numbers are transformed in multiples of it: none depends on the end of a piece
_LEAST = torch.tensor(2.0**-64, dtype=torch.float64)


def standard_normal(key: bytes, start: int, count: int) -> np.ndarray:
    """Return entries `start` to `start + count - 1` of the key's N(0, 1) stream: float64 (count,).

    Box-Muller; entries 2j and 2j + 1 share a pair of words. The uniform under the logarithm is a
    multiple of 2^-64, for small values of 2^-128, in (0, 1]: every entry is finite, and |z| reaches
    13.3; the mass beyond is 3e-39. (With 53 bits it would end at 8.57, with a mass beyond of 1e-17,
    which matters for a delta of that size.)
    """
    drawn = np.empty(max(0, count))
    for place, normals in _pieces(key, start, count, 1.0):
        drawn[place : place + len(normals)] = normals
    return drawn


def add_noise(
    total: np.ndarray, key: bytes, std: float, start: int = 0, out: np.ndarray | None = None
) -> np.ndarray:
    """Return `total` + N(0, std**2 I), rounded to the grid: float64, the shape of `total`.

    start: first entry of the key's stream; a shard of a longer sum uses its own position. out:
    float64 (size,), for the result; it may be `total` itself. A megabyte more is used, for any
    length. Raises ValueError if `total` is not finite, which clipping excludes; the contents of
    `out` are then undefined.
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
    """Return the exponent of the grid, a power of two, for noise of this standard deviation."""
    return math.floor(math.log2(std)) - _GRID_BITS


def require_finite(finite: bool) -> None:
    if not finite:
        raise ValueError("the clipped sum is not finite; nothing is released")


def extend_rare_word(word: int, key: bytes, pair: int) -> float:
    """Return the uniform in (0, 1] of a pair's first word, extended by 64 bits of the pair."""
    (more,) = stream_words(derive_key(key, "tail"), pair, 1).tolist()
    return (float(word) + (float(more) + 1.0) * 2.0**-64) * 2.0**-64


def _pieces(key: bytes, start: int, count: int, scale: float) -> Iterator[tuple[int, np.ndarray]]:
    """Yield places and numbers: `scale` times the `count` entries from `start`, piece by piece.

    The caller may overwrite the numbers.
    """
    first, last = start // 2, (start + count + 1) // 2
    size = min(_PIECE, last - first)
    reader = WordReader(key, 2 * first, 2 * (last - first), 2 * size) if size > 0 else None
    pairs = None
    for begin in range(first, last, _PIECE):
        size = min(_PIECE, last - begin)
        if pairs is None or pairs.count != size:
            pairs = _BoxMullerBuffer(size, scale)
        assert reader is not None
        entries = pairs.normals(reader.read().reshape(-1, 2), key, begin)
        low, high = max(start, 2 * begin), min(start + count, 2 * (begin + size))
        yield low - start, entries[low - 2 * begin : high - 2 * begin]


class _BoxMullerBuffer:
    """Buffers for pairs of entries, and their scale."""

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
        """Return both entries of the pairs from number `first`: float64 (2 * count,).

        bits: their words, (count, 2).
        """
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
        """Write uniforms in (0, 1] of the pairs' first words into the buffer of lengths."""
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
                uniform[place] = extend_rare_word(int(bits[place, 0]), key, first + place)


# --- on a device ------------------------------------------------------------------------------


_PAIRS = 4  # of entries, in a block of words
_DEVICE_LANES = 16  # blocks come in multiples of it: no entry depends on the end of a piece
# Blocks at a time: those of a CPU stay in its cache, on a GPU they take 110 MB, whatever the sum.
_DEVICE_PIECE, _DEVICE_PIECE_ON_CPU = 1 << 18, 1 << 12
_TOP = -(1 << 31)
_CHECKED, _CLOSE = 5000, 2.0**-45


def device_standard_normal(device: torch.device, key: bytes, start: int, count: int) -> Tensor:
    """Return `standard_normal` of the same key, computed on the device: float64 (count,)."""
    drawn = torch.empty(max(0, count), dtype=torch.float64, device=device)
    for place, normals in _device_pieces(device, key, start, count, 1.0):
        drawn[place : place + len(normals)] = normals
    return drawn


def add_device_noise(total: Tensor, key: bytes, std: float, start: int = 0) -> Tensor:
    """Add N(0, std**2 I) to `total` in place, rounded to the grid, and return it.

    total: float64, contiguous. The noise is that of `add_noise` with the same key and start; the
    memory for a piece is used besides. Raises ValueError if `total` is not finite; its contents are
    then undefined.
    """
    summed = total.view(-1)
    if std == 0:
        require_finite(bool(summed.isfinite().all()))
        return total
    unit = 2.0 ** grid_exponent(std)
    finite = torch.ones((), dtype=torch.bool, device=total.device)
    for place, normals in _device_pieces(total.device, key, start, len(summed), std):
        part = summed[place : place + len(normals)]
        part += normals
        finite &= part.isfinite().all()
        part.mul_(1 / unit).round_().mul_(unit)  # powers of two: exact
    require_finite(bool(finite))
    return total


def _device_pieces(
    device: torch.device, key: bytes, start: int, count: int, scale: float
) -> Iterator[tuple[int, Tensor]]:
    """Yield places and numbers: `scale` times the `count` entries from `start`, piece by piece.

    Each piece overwrites the last one.
    """
    each = 2 * _PAIRS
    first, last = start // each, -(-(start + count) // each)
    most = _DEVICE_PIECE_ON_CPU if device.type == "cpu" else _DEVICE_PIECE
    piece = None
    for begin in range(first, last if count > 0 else first, most):
        size = -(-min(most, last - begin) // _DEVICE_LANES) * _DEVICE_LANES
        if piece is None or piece.blocks.count != size:
            piece = _DeviceBoxMullerBuffer(size, scale, device)
        entries = piece.normals(key, begin)
        low, high = max(start, each * begin), min(start + count, each * (begin + size))
        yield low - start, entries[low - each * begin : high - each * begin]


class _DeviceBoxMullerBuffer:
    """Buffers for the entries of blocks, and their scale."""

    def __init__(self, count: int, scale: float, device: torch.device) -> None:
        self.blocks = device_generators.ChaChaBlocks(count, device)
        self._factor = -2.0 * scale * scale
        rooms = (torch.empty(_PAIRS, count, dtype=torch.float64, device=device) for _ in range(3))
        self._length, self._cosine, self._angle = rooms
        self._entries = torch.empty(count, _PAIRS, 2, dtype=torch.float64, device=device)

    def normals(self, key: bytes, first: int) -> Tensor:
        """Return the entries of the blocks from number `first`: float64 (8 * count,)."""
        length, cosine, angle = self._length, self._cosine, self._angle
        words = self.blocks.fill(key, first).view(_PAIRS, -1, self.blocks.count)
        low, high, low_turn, high_turn = words.unbind(1)
        _unsigned(high, length)
        _unsigned(low, angle)
        torch.add(angle, length, alpha=2.0**32, out=length)  # rounded once: the product is exact
        length.mul_(2.0**-64).add_(2.0**-64)
        self._continue(high == 0, key, first)
        _unsigned(high_turn, cosine)
        angle.copy_(low_turn.bitwise_right_shift(11).bitwise_and_((1 << 21) - 1))
        angle.add_(cosine, alpha=2.0**21).mul_(2.0**-53 * 2.0 * math.pi)
        length.log_().mul_(self._factor).sqrt_()
        torch.cos(angle, out=cosine)
        angle.sin_()
        torch.mul(length.T, cosine.T, out=self._entries[..., 0])
        torch.mul(length.T, angle.T, out=self._entries[..., 1])
        return self._entries.view(-1)

    def _continue(self, rare: Tensor, key: bytes, first: int) -> None:
        """Extend the pairs with a first word below 2^32, one in 2^32, by 64 bits."""
        if not bool(rare.any()):
            return
        for pair, block in rare.nonzero().tolist():
            word = self._length[pair, block]
            number = _PAIRS * (first + block) + pair
            whole = round(float(word) * 2.0**64) - 1  # as the sum was exact: below 2^33
            word.fill_(extend_rare_word(whole, key, number))


def _unsigned(word: Tensor, out: Tensor) -> None:
    """Write signed words into `out` as the unsigned numbers of their bits."""
    out.copy_(word.bitwise_xor(_TOP)).add_(2.0**31)


@cache
def check_device_noise(device: torch.device) -> None:
    """Raise UserError unless the device's noise is that of a CPU, to 2^-45 of its scale."""
    device_generators.check_chacha20(device)
    key = bytes(range(KEY_BYTES))
    made = device_standard_normal(device, key, 3, _CHECKED).cpu()
    off = (made - torch.from_numpy(standard_normal(key, 3, _CHECKED))).abs().max()
    if not off <= _CLOSE:
        raise UserError(
            f"resources.noise: must be host on {device}: its noise is off by {float(off):.1g}",
            see="explanation/gradients.md#on-a-gpu",
        )
