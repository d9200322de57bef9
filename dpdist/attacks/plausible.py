"""Whether contradictions of certificates (`dpdist.attacks.check`) can be chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 0.001


@dataclass(frozen=True)
class Plausibility:
    """Whether so many contradictions can be chance.

    allowed: the largest count that is plausible. p_value: probability of so many or more among
    ``inputs`` if every certificate holds its alpha; ``error`` bounds the probability of each.
    """

    contradictions: int
    inputs: int
    error: float
    allowed: int
    p_value: float
    level: float
    method: str

    @property
    def plausible(self) -> bool:
        return self.p_value >= self.level


def plausibility(
    contradictions: int,
    inputs: int,
    alpha: float,
    points: int,
    *,
    independent: bool = True,
    level: float = LEVEL,
) -> Plausibility:
    """Compare a count of contradictions with what the certificates' own error allows.

    inputs: submitted to certification, certified or not. points: attacked points certified again
    per input. independent: noise of its own for each input: the count is then at most binomial,
    stochastically; with a shared noise bank errors can coincide and only Markov's inequality holds.
    """
    from scipy import stats  # which a report without checks does not wait for

    error = min(1.0, (1 + points) * alpha)
    counts = np.arange(inputs + 1)
    if independent:
        tails = stats.binom.sf(counts - 1, inputs, error)
        method = f"exact tail of Binomial({inputs}, {error:g})"
    else:
        tails = np.minimum(1.0, inputs * error / np.maximum(counts, 1))
        tails[0] = 1.0
        method = "Markov's inequality (one noise bank for all inputs)"
    allowed = int(counts[tails >= level].max())
    return Plausibility(
        contradictions, inputs, error, allowed, float(tails[contradictions]), level, method
    )
