"""What is to be certified by expected scores under a model's own hidden noise, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dpdist.errors import UserError

ScoreBound = Literal["hoeffding", "bernstein", "counts"]
SCORE_BOUNDS: tuple[ScoreBound, ...] = ("hoeffding", "bernstein", "counts")
ScoreNorm = Literal["l2", "linf"]

_BATCH = 500
_MAX_BATCH_NUMBERS = 16 * 2**20


@dataclass(frozen=True)
class ScoreSettings:
    """One certification of a data set by expected scores (PixelDP, HGM-PixelDP, Secure-SGD).

    n: draws of the hidden noise for each input. alpha = 1 - eta: error probability of each input's
    bounds, all classes and both sides together.
    bound: "hoeffding", "bernstein" (empirical) or "counts" (Clopper-Pearson on argmax counts).
    n0: draws that choose the class of the Cohen-style certificate, used for nothing else.
    norm: whose exact Gaussian size is the table's radius; sizes in both norms are stored.
    radii: sizes to show. start, every, max_inputs, batch, seed, form: as in ``CertifySettings``.

    Raises UserError for a value that cannot be used.
    """

    n: int = 1000
    n0: int = 100
    alpha: float = 0.05
    bound: ScoreBound = "hoeffding"
    norm: ScoreNorm = "l2"
    radii: tuple[float, ...] = ()
    start: int = 0
    every: int = 1
    max_inputs: int | None = None
    batch: int | None = None
    seed: str | None = None
    form: str | None = None

    mode: ClassVar[str] = "scores"
    noise: ClassVar[str] = "hidden-gaussian"
    noise_bank: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "radii", tuple(float(radius) for radius in self.radii))
        if self.seed is not None:
            object.__setattr__(self, "seed", str(self.seed))
        self._require(0 < self.alpha < 1, "alpha", "between 0 and 1")
        self._require(self.n >= 2, "n", "at least 2")
        for name in ("n0", "every"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.start >= 0, "start", "at least 0")
        for name in ("max_inputs", "batch"):
            self._require(getattr(self, name) is None or getattr(self, name) >= 1, name, ">= 1")
        self._require(self.bound in SCORE_BOUNDS, "bound", f"one of {', '.join(SCORE_BOUNDS)}")
        self._require(self.norm in ("l2", "linf"), "norm", "l2 or linf")
        self._require(all(radius >= 0 for radius in self.radii), "radii", ">= 0")

    @property
    def folder_name(self) -> str:
        """Where its table goes by default: what tells two certifications of one model apart."""
        parts = [self.mode, self.bound, self.norm, f"n-{self.n}", f"eta-{1 - self.alpha:g}"]
        if self.every > 1:
            parts.append(f"every-{self.every}")
        if self.start:
            parts.append(f"from-{self.start}")
        return "-".join(parts)

    def executed_batch(self, numbers_per_input: int) -> int:
        """Rows of the executed batch for hidden layers of that many numbers."""
        if self.batch is not None:
            return min(self.batch, self.n)
        return max(1, min(_BATCH, self.n, _MAX_BATCH_NUMBERS // numbers_per_input))

    def indices(self, count: int) -> range:
        """Which inputs of a data set of ``count`` are certified."""
        chosen = range(self.start, count, self.every)
        return chosen if self.max_inputs is None else chosen[: self.max_inputs]

    def _require(self, condition: bool, name: str, right: str) -> None:
        if not condition:
            raise UserError(f"certify.{name}: must be {right}, got {getattr(self, name)!r}")
