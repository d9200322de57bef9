"""In which numbers clipped sums travel between the workers, and what the clip gives up for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDED = 2.0**-23  # twice float32's unit roundoff: two sums are rounded
_UNLIKELY = 70.0  # exp(-70) = 4e-31
MOST_ROOM = 2.0**-7  # of the clip; what needs more stays float64


@dataclass(frozen=True)
class Wire:
    """Numbers of one kind for sums of at most `most` records each.

    Guarantee: where one record moves an executed sum by at most C' = C / (1 + room) in L2 norm, it
    moves what arrives by at most C.

    Proof for float32. Taking its n <= most records away one by one shows that a sum has a norm of
    at most n C'. A number s arrives as s (1 + d), |d| <= 2^-24, so a sum arrives off by at most
    2^-24 n C', whatever the number of parameters, and two that differ in one record are together
    off by at most 2^-23 most C'. Their difference is then at most C' (1 + 2^-23 most), and
    room = 2^-23 (most + 1). The one more is for numbers below 2^-126, which may arrive as zero:
    2^-125 sqrt(size) is far below 2^-23 C' for a recipe's clip norms, 1e-9 at least. A record is in
    one sum only, and those that arrived are added up in float64, as they are without rounding.

    More records than `most` release nothing (`check`). By Bernstein's inequality Poisson sampling
    passes that bound, in which no record has a say, with a probability below 4e-31 for each sum and
    step: what delta would pay for it in a million steps of a thousand sums is 10^-21.
    """

    name: str = "float64"
    most: float = math.inf

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.name == "float32" else torch.float64

    @property
    def room(self) -> float:
        """By how much the clip is lowered, relative."""
        return _ROUNDED * (self.most + 1) if self.name == "float32" else 0.0

    def check(self, records: int) -> None:
        """Raise ValueError for a sum of more records than there is room for."""
        if records > self.most:
            raise ValueError(f"a sum of more than {self.most:g} records; nothing is released")

    def sent(self, sums: Tensor) -> Tensor:
        """Sums (...), float64, as they travel."""
        return sums.to(self.dtype)

    @classmethod
    def of(cls, name: str, expected: float, parts: int, cap: int | None = None) -> Wire:
        """For batches of `expected` records, at most `cap`, summed in at least `parts` parts."""
        if name == "float64":
            return cls()
        mean = expected / parts + 1  # a part may have one record more than others to draw from
        most = math.ceil(mean + math.sqrt(2 * _UNLIKELY * mean) + _UNLIKELY * 2 / 3)
        return cls(name, float(most if cap is None else min(most, cap)))

    @property
    def refused(self) -> str:
        """Why so large sums do not travel so; nothing if they do."""
        if self.room <= MOST_ROOM:
            return ""
        return (
            f"{self.name} has room for sums of {MOST_ROOM / _ROUNDED:,.0f} records, here a worker "
            f"may have {self.most:,.0f}: take more workers, or float64"
        )

    def words(self) -> str:
        """What a dry run says of float32."""
        return (
            f"{self.name}, 4 bytes a parameter; the clip is {100 * self.room:.2g} % lower, for "
            f"sums of up to {self.most:,.0f} records"
        )
