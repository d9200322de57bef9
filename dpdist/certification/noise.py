"""Smoothing noises and the radii that they certify, from bounds on class probabilities.

Each noise has a class that draws it and returns the radius that a probability under it certifies.
``sigma`` is the standard deviation per coordinate for every noise. Radii are pure, vectorized
functions in float64 that never round up. A radius is in the units of the model's input ([0, 1]
pixels); 0 certifies nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import scipy
from numpy.typing import ArrayLike

from dpdist.core.console import format_bound

if TYPE_CHECKING:
    from torch import Tensor


# --- radii ------------------------------------------------------------------------------------


# ndtri, log and products are good to a few units in the last place; this margin covers them.
_MARGIN = 1e-14

Radius = np.ndarray | np.float64


def norm_name(norm: str) -> str:
    """Return the name of a norm for texts, such as "L2"."""
    return {"l1": "L1", "l2": "L2", "linf": "L-infinity"}.get(norm, norm)


def gaussian_l2_radius(p_lower: ArrayLike, sigma: ArrayLike) -> Radius:
    """Return the L2 radius sigma * Phi^-1(p_lower) of Gaussian smoothing; 0 if p_lower <= 1/2.

    ``p_lower`` is a lower bound of the probability of the predicted class under N(0, sigma^2 I).
    Source: Cohen et al., ICML 2019, Theorem 1 with p_B = 1 - p_A.
    """
    p, s = _probability(p_lower, "p_lower"), _positive(sigma, "sigma")
    return _down(s * scipy.special.ndtri(p))


def gaussian_l2_radius_two_class(
    p_lower: ArrayLike, runner_up_upper: ArrayLike, sigma: ArrayLike
) -> Radius:
    """Return the L2 radius sigma / 2 * (Phi^-1(p_a) - Phi^-1(p_b)), exact by Neyman-Pearson.

    ``runner_up_upper`` bounds every other class from above; both bounds must be valid together at
    the stated confidence. Source: Cohen et al., ICML 2019, Theorem 1.
    """
    p, s = _probability(p_lower, "p_lower"), _positive(sigma, "sigma")
    other = _probability(runner_up_upper, "runner_up_upper")
    # The runner-up cannot have more than what the winner leaves.
    other = np.minimum(other, np.nextafter(1 - p, 2))
    with np.errstate(invalid="ignore"):
        gap = scipy.special.ndtri(p) - scipy.special.ndtri(other)
    return _down(s / 2 * gap)


def gaussian_probability_for_radius(radius: ArrayLike, sigma: ArrayLike) -> Radius:
    """Return Phi(radius / sigma), the class probability above which ``radius`` is certified."""
    r = np.asarray(radius, dtype=np.float64)
    if not np.all(r >= 0):
        raise ValueError(f"radius must not be negative, got {radius!r}")
    result: Radius = scipy.special.ndtr(r / _positive(sigma, "sigma"))
    return result


def laplace_l1_radius(p_lower: ArrayLike, scale: ArrayLike) -> Radius:
    """Return the L1 radius -scale * ln(2 (1 - p_lower)) of Laplace(scale) noise per coordinate.

    Source: Teng et al., "l1 adversarial robustness certificates" (2019), Theorem 1; tight for
    the two-class bound p_B = 1 - p_A.
    """
    p, b = _probability(p_lower, "p_lower"), _positive(scale, "scale")
    with np.errstate(divide="ignore"):
        return _down(-b * np.log(2 * (1 - p)))


def uniform_l1_radius(p_lower: ArrayLike, half_width: ArrayLike) -> Radius:
    """Return the L1 radius 2 * half_width * (p_lower - 1/2) of noise on [-half_width, half_width].

    Source: Yang et al., ICML 2020, Table 1 (uniform noise, L1).
    """
    p, w = _probability(p_lower, "p_lower"), _positive(half_width, "half_width")
    return _down(2 * w * (p - 0.5))


def norm_equivalence_factor(certified_norm: str, attacked_norm: str, dimension: int) -> float:
    """Return the radius of the smallest certified ball that contains the attacked ball of size 1.

    Raises ValueError for an unknown norm.
    """
    order = {"l1": 1.0, "l2": 2.0, "linf": math.inf}
    if certified_norm not in order or attacked_norm not in order:
        raise ValueError(
            f"norms must be l1, l2 or linf, got {certified_norm!r} and {attacked_norm!r}"
        )
    p, q = order[certified_norm], order[attacked_norm]
    # ||x||_p <= n^(1/p - 1/q) ||x||_q for p <= q, and ||x||_p <= ||x||_q otherwise.
    return dimension ** (1 / p - 1 / q) if p < q else 1.0


def format_radius(radius: float, digits: int = 3) -> str:
    """Return a radius with a number of decimals, rounded down so as not to enlarge a guarantee."""
    return format_bound(radius, digits)


def _down(radius: ArrayLike) -> Radius:
    r = np.asarray(radius, dtype=np.float64)
    return np.where(r > 0, r * (1 - _MARGIN), 0.0)[()]


def _probability(value: ArrayLike, name: str) -> np.ndarray:
    p = np.asarray(value, dtype=np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    return p


def _positive(value: ArrayLike, name: str) -> np.ndarray:
    v = np.asarray(value, dtype=np.float64)
    if not np.all((v > 0) & np.isfinite(v)):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return v


# --- noises -----------------------------------------------------------------------------------


_HALF_STEP = np.float32(2.0**-32)
_STEP = np.float32(2.0**-31)
# Numbers generated at a time, so that they stay in a core's cache. 784,000 at once take twice as
# long.
_PIECE = 1 << 14


class Noise(Protocol):
    """A noise distribution per coordinate.

    draw: fills flat ``out`` from at least as many uniform int32 ``words``, which it may overwrite;
    a Gaussian takes them in pairs, so an odd ``out`` needs one word more. words_to_noise: the same
    for tensors on any device: float32 (n,) twice, from two words each, int64 (n,) of 32 bits.
    """

    name: ClassVar[str]
    norm: ClassVar[str]

    @property
    def sigma(self) -> float: ...

    def draw(self, words: np.ndarray, out: np.ndarray) -> None: ...

    def words_to_noise(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]: ...

    def radius(self, p_lower: Radius | float) -> Radius: ...

    def probability_for_radius(self, radius: float) -> float:
        """Return the class probability above which ``radius`` is certified."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """N(0, sigma^2) per coordinate: L2 radius (Cohen et al., ICML 2019, Theorem 1)."""

    sigma: float
    name: ClassVar[str] = "gaussian"
    norm: ClassVar[str] = "l2"

    def draw(self, words: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` by Box-Muller: 31 bits of length (tails to 6.6 sigma), 32 bits of angle."""
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

    def words_to_noise(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return noise by Box-Muller: 40 bits of length (tails to 7.5 sigma), 24 bits of angle."""
        bits = ((first << 8) | (second >> 24)) * 2 + 1
        length = ((bits.float() * 2.0**-41).log() * (-2 * self.sigma**2)).sqrt()
        angle = (second & 0xFFFFFF).float() * (2 * math.pi * 2.0**-24)
        return length * angle.cos(), length * angle.sin()

    def radius(self, p_lower: Radius | float) -> Radius:
        return gaussian_l2_radius(p_lower, self.sigma)

    def probability_for_radius(self, radius: float) -> float:
        return float(gaussian_probability_for_radius(radius, self.sigma))


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

    def words_to_noise(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self._word_to_noise(first), self._word_to_noise(second)

    def _word_to_noise(self, word: Tensor) -> Tensor:
        magnitude = (((word & 0x7FFFFFFF) * 2 + 1).float() * 2.0**-32).log()
        return magnitude * ((word >> 31) * 2 - 1) * self.scale

    def radius(self, p_lower: Radius | float) -> Radius:
        return laplace_l1_radius(p_lower, self.scale)

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

    def words_to_noise(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self._word_to_noise(first), self._word_to_noise(second)

    def _word_to_noise(self, word: Tensor) -> Tensor:
        return (word * 2 + (1 - (1 << 32))).float() * (self.half_width * 2.0**-32)

    def radius(self, p_lower: Radius | float) -> Radius:
        return uniform_l1_radius(p_lower, self.half_width)

    def probability_for_radius(self, radius: float) -> float:
        return min(0.5 + radius / (2 * self.half_width), 1.0)


NOISES: dict[str, type[Gaussian] | type[Laplace] | type[Uniform]] = {
    noise.name: noise for noise in (Gaussian, Laplace, Uniform)
}


def _unit_interval(words: np.ndarray) -> np.ndarray:
    """Return uniform float32 in (0, 1] from the low 31 bits of each word, precise near 0."""
    np.bitwise_and(words, np.int32(0x7FFFFFFF), out=words)
    values = words.astype(np.float32)
    values *= _STEP
    values += _HALF_STEP
    return values
