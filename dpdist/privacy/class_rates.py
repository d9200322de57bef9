"""Sampling rates by a record's own class, from public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")


@dataclass(frozen=True)
class ClassRates:
    """Sampling rates by a record's own class, with the public class counts they are computed from.

    A step costs what one of the largest rate costs: a record of a smaller rate is one that joined
    at the largest and was then kept with probability rate / largest, independently of everything
    else. So the rates must follow from public numbers: were they computed from the private
    records, one record would move all of them.

    rates: of each class, in (0, 1]. counts: the public number of records of each class, or numbers
    in their proportion.
    """

    rates: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rates or len(self.rates) != len(self.counts):
            raise ValueError(
                f"class rates need a count for each, got {len(self.rates)} rates and "
                f"{len(self.counts)} counts"
            )
        for rate in self.rates:
            if not 0 < rate <= 1:
                raise ValueError(f"class rates must be in (0, 1], got {rate}")
        for count in self.counts:
            check_count("class_counts", count)

    @classmethod
    def for_batch(
        cls, weights: Sequence[float], counts: Sequence[int], mean_rate: float
    ) -> ClassRates:
        """Return rates in proportion to `weights`, capped at 1, of which the mean is `mean_rate`.

        Where a class reaches 1, the others rise in proportion, so that the expected batch stays.
        The mean is over the public counts. Everything is a function of public numbers.

        Args:
            weights: relative rates, one a class, positive.
            counts: public numbers of records, one a class, at least 1.
            mean_rate: expected batch over number of records, in (0, 1].
        """
        if not 0 < mean_rate <= 1:
            raise ValueError(f"mean_rate must be in (0, 1], got {mean_rate}")
        left, capped = mean_rate * sum(counts), set[int]()
        while True:
            free = [place for place in range(len(counts)) if place not in capped]
            scale = left / sum(counts[place] * weights[place] for place in free) if free else 0.0
            over = [place for place in free if scale * weights[place] >= 1]
            if not over:
                break
            capped.update(over)
            left -= sum(counts[place] for place in over)
        if any(scale * weights[place] <= 0 for place in free):  # others at 1 make all of the batch
            raise ValueError("rates leave a class no chance to join")
        rates = (1.0 if p in capped else scale * weights[p] for p in range(len(counts)))
        return cls(tuple(rates), tuple(counts))

    @property
    def largest(self) -> float:
        """Return the largest rate, which is the one that is paid for."""
        return max(self.rates)

    @property
    def mean(self) -> float:
        """Return the mean rate over the public counts."""
        pairs = zip(self.rates, self.counts, strict=True)
        return math.fsum(rate * count for rate, count in pairs) / sum(self.counts)

    def scaled(self, largest: float) -> ClassRates:
        """Return rates in the same proportions, of which the largest is `largest`."""
        rates = (
            largest if rate == self.largest else largest * rate / self.largest
            for rate in self.rates
        )
        return ClassRates(tuple(rates), self.counts)

    @property
    def importance_weights(self) -> tuple[float, ...]:
        """Return the mean rate over each class's own: the weights that undo the rates in a mean."""
        return tuple(self.mean / rate for rate in self.rates)

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as plain JSON types."""
        return {"rates": list(self.rates), "counts": list(self.counts)}

    @property
    def description(self) -> str:
        """Return the rates in words, by the numbers of the classes."""
        listed = [f"{place}: {rate:.6g}" for place, rate in enumerate(self.rates)]
        listed[8:] = [f"{len(listed) - 8:,} more"] if len(listed) > 9 else listed[8:]
        return "by class " + ", ".join(listed)
