"""The noise of `dpdist.gradients.noise`, made on the device where the sums lie.

The same stream: the words of a key are those of the CPU's cipher, bit for bit, and what is made of
them are the same formulas in float64. A device's logarithm, sine and cosine may differ from a
CPU's in their last bits, as two CPUs' may; all else is exact in IEEE arithmetic. On a CPU the two
agree to the bit. **Never run on a GPU**: tested on CPUs and on a simulated device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from dpdist.base.errors import UserError
from dpdist.gradients.noise import grid_exponent, rare_word, require_finite, standard_normal
from dpdist.randomness import chacha
from dpdist.randomness.keys import KEY_BYTES

_PAIRS = 4  # of entries, in a block of words
_LANES = 16  # blocks are made in multiples of it: no entry depends on where a piece ends
# Blocks at a time: those of a CPU stay in its cache, on a GPU they take 110 MB, whatever the sum.
_PIECE, _PIECE_ON_CPU = 1 << 18, 1 << 12
_TOP = -(1 << 31)
_CHECKED, _CLOSE = 5000, 2.0**-45


def standard_normal_on(device: torch.device, key: bytes, start: int, count: int) -> Tensor:
    """`standard_normal` of the same key, made there: float64 (count,) on the device."""
    drawn = torch.empty(max(0, count), dtype=torch.float64, device=device)
    for place, normals in _pieces(device, key, start, count, 1.0):
        drawn[place : place + len(normals)] = normals
    return drawn


def add_noise_on(total: Tensor, key: bytes, std: float, start: int = 0) -> Tensor:
    """`total`, float64 and contiguous, with N(0, std**2 I), rounded to the grid: written over it.

    `add_noise` of the same key and start; beside the sum it needs a piece's room, whatever their
    length. Raises ValueError when `total` is not finite; what is left in it then is nobody's.
    """
    summed = total.view(-1)
    if std == 0:
        require_finite(bool(summed.isfinite().all()))
        return total
    unit = 2.0 ** grid_exponent(std)
    finite = torch.ones((), dtype=torch.bool, device=total.device)
    for place, normals in _pieces(total.device, key, start, len(summed), std):
        part = summed[place : place + len(normals)]
        part += normals
        finite &= part.isfinite().all()
        part.mul_(1 / unit).round_().mul_(unit)  # powers of two: exact
    require_finite(bool(finite))
    return total


def _pieces(
    device: torch.device, key: bytes, start: int, count: int, scale: float
) -> Iterator[tuple[int, Tensor]]:
    """(place, numbers): `scale` times the `count` entries from `start`, piece by piece, each
    overwritten by the next."""
    each = 2 * _PAIRS
    first, last = start // each, -(-(start + count) // each)
    most = _PIECE_ON_CPU if device.type == "cpu" else _PIECE
    piece = None
    for begin in range(first, last if count > 0 else first, most):
        size = -(-min(most, last - begin) // _LANES) * _LANES
        if piece is None or piece.blocks.count != size:
            piece = _Piece(size, scale, device)
        entries = piece.normals(key, begin)
        low, high = max(start, each * begin), min(start + count, each * (begin + size))
        yield low - start, entries[low - each * begin : high - each * begin]


class _Piece:
    """Room for the entries of so many blocks, and what they are multiplied by."""

    def __init__(self, count: int, scale: float, device: torch.device) -> None:
        self.blocks, self._factor = chacha.KeyBlocks(count, device), -2.0 * scale * scale
        rooms = (torch.empty(_PAIRS, count, dtype=torch.float64, device=device) for _ in range(3))
        self._length, self._cosine, self._angle = rooms
        self._entries = torch.empty(count, _PAIRS, 2, dtype=torch.float64, device=device)

    def normals(self, key: bytes, first: int) -> Tensor:
        """The entries of the blocks from number `first`: float64 (8 * count,)."""
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
        """Give the pairs whose first word is below 2^32, one in 2^32, another 64 bits."""
        if not bool(rare.any()):
            return
        for pair, block in rare.nonzero().tolist():
            word = self._length[pair, block]
            number = _PAIRS * (first + block) + pair
            whole = round(float(word) * 2.0**64) - 1  # as the sum was exact: below 2^33
            word.fill_(rare_word(whole, key, number))


def _unsigned(word: Tensor, out: Tensor) -> None:
    """Signed words as the unsigned numbers of their bits, in float64."""
    out.copy_(word.bitwise_xor(_TOP)).add_(2.0**31)


@cache
def check(device: torch.device) -> None:
    """Raise UserError unless the device makes the noise that a CPU makes, to 2^-45 of its scale."""
    chacha.check(device)
    key = bytes(range(KEY_BYTES))
    made = standard_normal_on(device, key, 3, _CHECKED).cpu()
    off = (made - torch.from_numpy(standard_normal(key, 3, _CHECKED))).abs().max()
    if not off <= _CLOSE:
        raise UserError(
            f"resources.noise: must be host on {device}: its noise is off by {float(off):.1g}"
        )
