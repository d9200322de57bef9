"""The certificate of one input."""

from __future__ import annotations

from dataclasses import dataclass

ABSTAIN = -1


@dataclass(frozen=True)
class Verdict:
    """The certificate of one input. prediction is -1 and radius 0 when nothing is certified.

    k of n draws returned ``selected``. looks: how many times a decision could be made.
    target: the radius that a test decided on (the smallest one when it failed). histogram: counts
    of all classes, at fixed n. p_upper: of a bounded runner-up. hits: counts at each look.
    """

    prediction: int
    selected: int
    k: int
    n: int
    p_lower: float
    radius: float
    looks: int = 1
    target: float | None = None
    histogram: tuple[int, ...] | None = None
    p_upper: float | None = None
    hits: tuple[int, ...] | None = None
