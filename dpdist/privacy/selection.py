"""Distributions of the number of runs of a private search (Papernot and Steinke 2022).

A search runs the base mechanism K times with K secret and random, and releases the best run only.
A distribution is named by its mean and its shape, as in `RepeatAndSelect`: shape infinity is
Poisson (K may be 0), every finite shape eta > -1 a truncated negative binomial (K >= 1; 1 is
geometric, 0 logarithmic), and a whole shape -n <= -1 binomial: n chances, so that K is never larger
(K may be 0; with mean n, K is always n).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def truncated_nb_mean(shape: float, log_gamma: float) -> float:
    """Return E[K] of the truncated negative binomial with ln(gamma) < 0 (Definition 1 there)."""
    if shape == 0:
        return math.expm1(-log_gamma) / -log_gamma
    return shape * math.expm1(-log_gamma) / -math.expm1(shape * log_gamma)


@dataclass(frozen=True)
class TrialDistribution:
    """The distribution of K. mean: E[K] >= 1. shape: infinity (Poisson), eta > -1, or -n."""

    mean: float
    shape: float

    def __post_init__(self) -> None:
        if not (self.shape > -1 or (math.isfinite(self.shape) and self.shape == int(self.shape))):
            raise ValueError(
                "shape must be > -1 (infinity: Poisson) or a whole number -n (binomial of n "
                f"chances), got {self.shape}"
            )
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise ValueError(f"mean number of runs must be >= 1 and finite, got {self.mean}")
        if self.max_runs is not None and self.mean > self.max_runs:
            raise ValueError(f"{self.max_runs} chances cannot have the mean {self.mean}")

    @property
    def max_runs(self) -> int | None:
        """Return the largest K of a binomial distribution; None for the others."""
        return int(-self.shape) if self.shape <= -1 else None

    @property
    def zero_probability(self) -> float:
        """Return P(K = 0)."""
        if self.max_runs is not None:
            return (1 - self.mean / self.max_runs) ** self.max_runs
        return math.exp(-self.mean) if math.isinf(self.shape) else 0.0

    @cached_property
    def log_gamma(self) -> float:
        """Return ln of the parameter gamma that gives this mean; 0 for mean 1 (K is 1).

        Shapes eta > -1 only.
        """
        if math.isinf(self.shape) or self.max_runs is not None:
            raise ValueError("only truncated negative binomial distributions have a gamma")
        if self.mean == 1:
            return 0.0
        if self.shape == 1:
            return -math.log(self.mean)
        from scipy.optimize import brentq

        def excess(log_gamma: float) -> float:
            return math.log(truncated_nb_mean(self.shape, log_gamma) / self.mean)

        # E[K] falls from infinity to 1 as gamma rises from 0 to 1; at 1 - 1e-17 it rounds to 1.
        low = math.log(1e-300) if self.shape >= 0 else math.log(1e-100)
        return float(brentq(excess, low, -1e-17, xtol=1e-300))

    @property
    def gamma(self) -> float:
        """Return the parameter gamma, rounded: 1 - gamma is exact only by `log_gamma`."""
        return math.exp(self.log_gamma)

    def pgf_derivative(self, t: np.ndarray) -> np.ndarray:
        """Return phi'(1 - t) at 0 <= t <= 1, phi the generating function of K: falls from the mean.

        The density of the best of K runs is that of one run times the tilt at the probability of
        a better one.
        """
        import numpy as np

        if math.isinf(self.shape):
            return self.mean * np.exp(-self.mean * t)
        if self.max_runs is not None:
            missed = np.maximum(1 - self.mean / self.max_runs * t, 0.0)
            return self.mean * missed ** (self.max_runs - 1)
        return self.mean * (1 + math.expm1(-self.log_gamma) * t) ** -(1 + self.shape)

    def tail_probability(self, runs: int) -> float:
        """Return P(K >= runs)."""
        if self.max_runs is not None:
            from scipy.stats import binom

            return float(binom.sf(runs - 1, self.max_runs, self.mean / self.max_runs))
        if math.isinf(self.shape):
            from scipy.special import pdtrc

            return 1.0 if runs <= 0 else float(pdtrc(runs - 1, self.mean))
        if runs <= 1:
            return 1.0
        if self.mean == 1:
            return 0.0
        if self.shape < 0:  # tails so long that only the head can be added up
            return max(0.0, 1 - self._head(runs))
        if self.shape == 0:
            import numpy as np

            k = np.arange(runs, runs + math.ceil(45 / self.gamma))
            terms = np.exp(k * math.log(-math.expm1(self.log_gamma))) / k
            return float(terms.sum()) / -self.log_gamma
        from scipy.special import nbdtrc

        untruncated = -math.expm1(self.shape * self.log_gamma)
        if self.shape == int(self.shape):
            return float(nbdtrc(runs - 1, int(self.shape), self.gamma)) / untruncated
        from scipy.special import betainc

        return float(betainc(runs, self.shape, -math.expm1(self.log_gamma))) / untruncated

    def _head(self, runs: int) -> float:
        """Return P(1 <= K < runs) for a negative shape, by ratios of neighboring probabilities."""
        import numpy as np
        from scipy.special import gammaln

        # Both gamma(shape) and gamma^-shape - 1 are negative: gammaln and abs take the sign out.
        ways = gammaln(1 + self.shape) - gammaln(self.shape)
        log_norm = math.log(abs(math.expm1(-self.shape * self.log_gamma)))
        one = math.exp(math.log(-math.expm1(self.log_gamma)) + ways - log_norm)
        k = np.arange(1, runs - 1)
        ratios = -math.expm1(self.log_gamma) * (k + self.shape) / (k + 1)
        return float(one * (1 + np.cumprod(ratios).sum()))

    def quantile(self, probability: float) -> int:
        """Return the smallest k with P(K <= k) >= probability, 0 <= probability < 1.

        Drawing the probability uniformly (from secret randomness) draws K.
        """
        if not 0 <= probability < 1:
            raise ValueError(f"probability must be in [0, 1), got {probability}")
        high = 1
        while 1 - self.tail_probability(high + 1) < probability:
            high *= 2
        low = -1 if self.zero_probability else 0  # P(K <= low) = 0
        while high - low > 1:
            middle = (low + high) // 2
            if 1 - self.tail_probability(middle + 1) >= probability:
                high = middle
            else:
                low = middle
        return high

    def describe(self) -> str:
        """Return the distribution in words."""
        if self.mean == self.max_runs:
            return f"fixed, unshown, {self.max_runs}"
        among = "" if self.max_runs is None else f" of {self.max_runs} chances"
        return f"{self.family}{among}, mean {self.mean:g}"

    @property
    def family(self) -> str:
        """Return the name of all distributions of this shape."""
        if self.max_runs is not None:
            return "binomial"
        names = {math.inf: "Poisson", 1.0: "geometric", 0.0: "logarithmic"}
        return names.get(self.shape, f"truncated negative binomial (shape {self.shape:g})")
