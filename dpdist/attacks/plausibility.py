"""How many contradicted certificates chance allows.

Certificates are wrong with probability alpha each, so some contradictions are allowed. Let A points
be tried for each input. An input's contradiction needs a wrong first certificate (at most alpha)
or, where the first is right, a wrong one at one of the points (at most alpha each, by noise drawn
after the point was fixed): at most (1 + A) alpha by the union bound, for every input that was
*submitted* to certification. Among the certified ones alone the share of wrong certificates may be
larger, so the count is compared with all of them.
"""

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
    from scipy import stats

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
