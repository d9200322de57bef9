"""Keyed Gaussian noise, added once per step to the summed gradient.

Floating-point Gaussians are not exactly Gaussian and the low bits of a noisy sum can betray it
(Mironov 2012, for Laplace). Noise is therefore drawn and added in float64 and the result rounded
to a grid about 2**-24 of the noise scale: the released value is then a coarse rounding
(post-processing) of a sum whose own error is near 2**-52 of the noise, far below the grid.
"""

from __future__ import annotations

import math

import numpy as np

from dpdist.randomness.keys import derive_key, words

_GRID_BITS = 24
_RARE = np.uint64(2**32)  # a first word below it is continued by another 64 bits


def standard_normal(key: bytes, start: int, count: int) -> np.ndarray:
    """Entries `start` to `start + count - 1` of the key's stream of N(0, 1) numbers: float64
    (count,).

    Box-Muller; entries 2j and 2j + 1 share a pair of words. The uniform under the logarithm is a
    multiple of 2^-64, where it is small of 2^-128, in (0, 1]: every draw is finite, and |z| reaches
    13.3, beyond which lies a mass of 3e-39. (53 bits end at 8.57, and the mass beyond, 1e-17, is
    what a delta near it would notice.)
    """
    if count <= 0:
        return np.empty(0)
    first, last = start // 2, (start + count + 1) // 2
    bits = words(key, 2 * first, 2 * (last - first)).reshape(-1, 2)
    length = np.sqrt(-2.0 * np.log(_uniform(bits[:, 0], key, first)))
    angle = (2.0**-53 * 2.0 * math.pi) * (bits[:, 1] >> np.uint64(11)).astype(np.float64)
    pairs = np.empty(bits.shape)
    np.multiply(length, np.cos(angle), out=pairs[:, 0])
    np.multiply(length, np.sin(angle), out=pairs[:, 1])
    skip = start - 2 * first
    return pairs.reshape(-1)[skip : skip + count]


def _uniform(bits: np.ndarray, key: bytes, first: int) -> np.ndarray:
    """Uniforms in (0, 1] of the words of the pairs `first`, `first + 1`, ...: float64."""
    uniform = (bits.astype(np.float64) + 1.0) * 2.0**-64
    for place in np.flatnonzero(bits < _RARE).tolist():  # one pair in 2^32
        more = words(derive_key(key, "tail"), first + place, 1)
        uniform[place] = (float(bits[place]) + (float(more[0]) + 1.0) * 2.0**-64) * 2.0**-64
    return uniform


def add_noise(total: np.ndarray, key: bytes, std: float) -> np.ndarray:
    """`total` + N(0, std**2 I), rounded to the grid: float64, the shape of `total`.

    Raises ValueError when `total` is not finite: clipping should have made that impossible.
    """
    if not np.isfinite(total).all():
        raise ValueError("the clipped sum is not finite; nothing is released")
    if std == 0:
        return total.astype(np.float64)
    noisy = total.astype(np.float64) + std * standard_normal(key, 0, total.size).reshape(
        total.shape
    )
    grid = 2.0 ** (math.floor(math.log2(std)) - _GRID_BITS)
    return np.round(noisy / grid) * grid
