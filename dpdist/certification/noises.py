"""The table of smoothing noises: how to draw each, and what a probability under it certifies.

``sigma`` is the standard deviation per coordinate for every noise. To add one, add a class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from dpdist.certification import radii

if TYPE_CHECKING:
    from torch import Tensor

_HALF_STEP = np.float32(2.0**-32)
_STEP = np.float32(2.0**-31)
# Numbers made at a time: what they go through stays in a core's cache, in blocks of memory that
# are used again. Of 784,000 at once every step went to main memory and back: half the speed.
_PIECE = 1 << 14


class Noise(Protocol):
    """Draws into flat ``out`` from at least as many uniform int32 ``words``, which may be spoilt.

    A Gaussian takes them in pairs: an odd ``out`` needs one word more. `numbers` is for tensors on
    any device: float32 (n,) twice, from two words each, int64 (n,) of 32 bits.
    """

    name: ClassVar[str]
    norm: ClassVar[str]

    @property
    def sigma(self) -> float: ...

    def draw(self, words: np.ndarray, out: np.ndarray) -> None: ...

    def numbers(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]: ...

    def radius(self, p_lower: radii.Radius | float) -> radii.Radius: ...

    def probability_for_radius(self, radius: float) -> float:
        """The probability above which ``radius`` is certified."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """N(0, sigma^2) per coordinate: L2 radius (Cohen et al., ICML 2019, Theorem 1)."""

    sigma: float
    name: ClassVar[str] = "gaussian"
    norm: ClassVar[str] = "l2"

    def draw(self, words: np.ndarray, out: np.ndarray) -> None:
        """Box-Muller on 31 bits for the length (tails to 6.6 sigma) and 32 for the angle."""
        half = (out.size + 1) // 2
        turn = np.float32(math.pi) * _STEP
        for start in range(0, half, _PIECE):
            end = min(start + _PIECE, half)
            length = _unit_interval(words[start:end])
            np.log(length, out=length)
            length *= np.float32(-2 * self.sigma**2)
            np.sqrt(length, out=length)
            angle = words[half + start : half + end].astype(np.float32)
            angle *= turn
            np.cos(angle, out=out[start:end])
            out[start:end] *= length
            second = out[half + start : half + end]  # an odd `out` ends one short
            np.sin(angle[: second.size], out=second)
            second *= length[: second.size]

    def numbers(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Box-Muller on 40 bits for the length (tails to 7.5 sigma) and 24 for the angle."""
        bits = ((first << 8) | (second >> 24)) * 2 + 1
        length = ((bits.float() * 2.0**-41).log() * (-2 * self.sigma**2)).sqrt()
        angle = (second & 0xFFFFFF).float() * (2 * math.pi * 2.0**-24)
        return length * angle.cos(), length * angle.sin()

    def radius(self, p_lower: radii.Radius | float) -> radii.Radius:
        return radii.gaussian_l2_radius(p_lower, self.sigma)

    def probability_for_radius(self, radius: float) -> float:
        return float(radii.gaussian_probability_for_radius(radius, self.sigma))


@dataclass(frozen=True)
class Laplace:
    """Laplace noise of scale sigma / sqrt(2): L1 radius (Teng et al. 2019)."""

    sigma: float
    name: ClassVar[str] = "laplace"
    norm: ClassVar[str] = "l1"

    @property
    def scale(self) -> float:
        return self.sigma / math.sqrt(2)

    def draw(self, words: np.ndarray, out: np.ndarray) -> None:
        for start in range(0, out.size, _PIECE):
            part = out[start : start + _PIECE]
            own = words[start : start + part.size]
            sign = np.where(own < 0, np.float32(1), np.float32(-1))
            np.log(_unit_interval(own), out=part)
            part *= sign
            part *= np.float32(self.scale)

    def numbers(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self._number(first), self._number(second)

    def _number(self, word: Tensor) -> Tensor:
        magnitude = (((word & 0x7FFFFFFF) * 2 + 1).float() * 2.0**-32).log()
        return magnitude * ((word >> 31) * 2 - 1) * self.scale

    def radius(self, p_lower: radii.Radius | float) -> radii.Radius:
        return radii.laplace_l1_radius(p_lower, self.scale)

    def probability_for_radius(self, radius: float) -> float:
        return 1 - math.exp(-radius / self.scale) / 2


@dataclass(frozen=True)
class Uniform:
    """Uniform noise on +- sigma * sqrt(3): L1 radius (Yang et al., ICML 2020)."""

    sigma: float
    name: ClassVar[str] = "uniform"
    norm: ClassVar[str] = "l1"

    @property
    def half_width(self) -> float:
        return self.sigma * math.sqrt(3)

    def draw(self, words: np.ndarray, out: np.ndarray) -> None:
        scale = np.float32(self.half_width) * _STEP
        np.multiply(words[: out.size], scale, out=out, dtype=np.float32, casting="unsafe")

    def numbers(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self._number(first), self._number(second)

    def _number(self, word: Tensor) -> Tensor:
        return (word * 2 + (1 - (1 << 32))).float() * (self.half_width * 2.0**-32)

    def radius(self, p_lower: radii.Radius | float) -> radii.Radius:
        return radii.uniform_l1_radius(p_lower, self.half_width)

    def probability_for_radius(self, radius: float) -> float:
        return min(0.5 + radius / (2 * self.half_width), 1.0)


NOISES: dict[str, type[Gaussian] | type[Laplace] | type[Uniform]] = {
    noise.name: noise for noise in (Gaussian, Laplace, Uniform)
}


def _unit_interval(words: np.ndarray) -> np.ndarray:
    """Uniform float32 in (0, 1], from the low 31 bits of each word; small values keep all bits."""
    np.bitwise_and(words, np.int32(0x7FFFFFFF), out=words)
    values = words.astype(np.float32)
    values *= _STEP
    values += _HALF_STEP
    return values
