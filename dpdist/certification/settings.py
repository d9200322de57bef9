"""What is to be certified, and how: the part of a certification that its results depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dpdist.certification.noises import NOISES, Noise
from dpdist.errors import UserError

Mode = Literal["fixed", "target", "anytime"]
MODES: tuple[Mode, ...] = ("fixed", "target", "anytime")

# Executed batches: the first runs fastest on the CPUs tried, the second wastes fewer draws after
# an early decision. Larger inputs get smaller batches so that one stays within 64 MiB.
_FIXED_BATCH, _SEQUENTIAL_BATCH = 1000, 500
_MAX_BATCH_NUMBERS = 16 * 2**20


@dataclass(frozen=True)
class CertifySettings:
    """One certification of a data set.

    sigma: standard deviation of the smoothing noise, in input units.
    n0, n: draws for choosing the class and for estimating its probability; in the sequential modes
    n is the cap.
    alpha: error probability of each input's certificate.
    mode: "fixed" (Cohen et al. 2019: exactly n draws), "target" (stops as soon as the radii are
    decided; certifies those radii only) or "anytime" (confidence sequence; may be re-bounded).
    radii: the target radii, ascending; needed by "target", in "anytime" the largest one stops.
    start, every, max_inputs: the first input, each how-manieth from there, at most how many.
    batch: rows of the executed batch, which is also the canonical block of draws.
    seed: None draws a secret one when the certification starts, and stores it with the results.
    noise_bank: one noise stream for all inputs; each certificate stays valid, errors can coincide.
    form: inference form of the executed classifier ("frozen", "compiled", "channels-last",
    "eager"); None chooses the fastest by a short probe.

    Raises UserError for a value that cannot be used.
    """

    sigma: float
    n0: int = 100
    n: int = 100_000
    alpha: float = 0.001
    mode: Mode = "fixed"
    radii: tuple[float, ...] = ()
    noise: str = "gaussian"
    start: int = 0
    every: int = 1
    max_inputs: int | None = None
    batch: int | None = None
    seed: str | None = None
    noise_bank: bool = False
    form: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "radii", tuple(float(radius) for radius in self.radii))
        if self.seed is not None:
            object.__setattr__(self, "seed", str(self.seed))
        self._require(0 < self.sigma < math.inf, "sigma", "a positive number")
        self._require(0 < self.alpha < 1, "alpha", "between 0 and 1")
        for name in ("n0", "n", "every"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.start >= 0, "start", "at least 0")
        for name in ("max_inputs", "batch"):
            self._require(getattr(self, name) is None or getattr(self, name) >= 1, name, ">= 1")
        self._require(self.mode in MODES, "mode", f"one of {', '.join(MODES)}")
        self._require(self.noise in NOISES, "noise", f"one of {', '.join(NOISES)}")
        ascending = all(a < b for a, b in zip(self.radii[:-1], self.radii[1:], strict=True))
        self._require(
            ascending and all(0 <= r < math.inf for r in self.radii), "radii", "ascending and >= 0"
        )
        if self.mode == "target":
            self._require(bool(self.radii), "radii", "given when mode is target")
        if self.mode == "anytime":
            self._require(self.alpha < 0.25, "alpha", "below 1/4 when mode is anytime")
        reachable = all(self.smoothing.probability_for_radius(r) < 1 - 1e-12 for r in self.radii)
        self._require(reachable, "radii", f"reachable with {self.noise} noise, sigma {self.sigma}")

    @property
    def folder_name(self) -> str:
        """Where its table goes by default: what tells two certifications of one model apart."""
        parts = [f"sigma-{self.sigma:g}", self.mode]
        if self.mode == "target":
            parts.append("r-" + "-".join(f"{radius:g}" for radius in self.radii))
        parts.append(f"n-{self.n}")
        if self.noise != "gaussian":
            parts.append(self.noise)
        if self.every > 1:
            parts.append(f"every-{self.every}")
        if self.start:
            parts.append(f"from-{self.start}")
        return "-".join(parts)

    def _require(self, condition: bool, name: str, right: str) -> None:
        if not condition:
            raise UserError(f"certify.{name}: must be {right}, got {getattr(self, name)!r}")

    @property
    def smoothing(self) -> Noise:
        return NOISES[self.noise](self.sigma)

    def executed_batch(self, numbers_per_input: int) -> int:
        """Rows of the executed batch for inputs of that many numbers."""
        if self.batch is not None:
            return min(self.batch, self.n)
        usual = _FIXED_BATCH if self.mode == "fixed" else _SEQUENTIAL_BATCH
        return max(1, min(usual, self.n, _MAX_BATCH_NUMBERS // numbers_per_input))

    def indices(self, count: int) -> range:
        """Which inputs of a data set of ``count`` are certified."""
        chosen = range(self.start, count, self.every)
        return chosen if self.max_inputs is None else chosen[: self.max_inputs]
