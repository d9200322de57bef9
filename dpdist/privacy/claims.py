"""Define the types of a published privacy claim, shown next to the proved guarantee.

A claim is a theorem's formula evaluated at its hyper-parameters, with its assumptions, a verdict
and the reason. A claim that is not sound is never a guarantee: its proved epsilon is infinite
unless something else (DP-SGD, for instance) protects the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpdist.privacy.guarantee import Guarantee, Neighbors, format_delta, format_epsilon

Verdict = Literal["sound", "sound if", "not sound"]


@dataclass(frozen=True)
class Claim:
    """One published claim.

    printed: the epsilon the paper prints, if it prints one. claimed: its theorem's value at
    `setting`; None if the paper gives no formula. proved: what holds for the mechanism as
    published.
    """

    system: str
    setting: str
    printed: float | None
    claimed: Guarantee | None
    proved: Guarantee
    verdict: Verdict
    reason: str

    @property
    def claimed_text(self) -> str:
        """Return the theorem's value, and the printed one where it differs by more than 1 %."""
        if self.claimed is None:
            return "no formula" if self.printed is None else f"prints {self.printed:.4g}"
        text = format_epsilon(self.claimed.epsilon)
        if self.printed is None or math.isclose(self.printed, self.claimed.epsilon, rel_tol=0.01):
            return text
        return f"{text} (prints {self.printed:.4g})"

    @property
    def summary_line(self) -> str:
        """Return the claim and its verdict in one line."""
        if self.claimed is None:
            return f"{self.claimed_text}: {self.verdict}: {self.reason}"
        return (
            f"epsilon = {format_epsilon(self.claimed.epsilon)} at delta = "
            f"{format_delta(self.claimed.delta)} ({self.claimed.source}): {self.verdict}: "
            f"{self.reason}"
        )

    @property
    def proved_text(self) -> str:
        """Return the proved epsilon."""
        return format_epsilon(self.proved.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return the claim as plain JSON types."""
        return {
            "system": self.system,
            "setting": self.setting,
            "printed_epsilon": self.printed,
            "claimed": None if self.claimed is None else self.claimed.to_dict(),
            "proved": self.proved.to_dict(),
            "verdict": self.verdict,
            "reason": self.reason,
        }


def unproved_guarantee(
    delta: float, reason: str, adjacency: Neighbors = "add-or-remove-one"
) -> Guarantee:
    """Return a guarantee with epsilon infinity: nothing is proved, with the reason."""
    return Guarantee(math.inf, delta, adjacency, "proved", f"none: {reason}")


def claimed_guarantee(
    epsilon: float, delta: float, adjacency: Neighbors, source: str, assumptions: Sequence[str]
) -> Guarantee:
    """Return what a theorem claims; no run is charged by it."""
    return Guarantee(epsilon, delta, adjacency, "claimed", source, tuple(assumptions))
