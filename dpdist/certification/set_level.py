"""Do at least so many inputs of a set pass? Decided from some of them, in random order.

Input i passes if its label has probability above Phi(r / sigma) under the noise: then the smoothed
classifier is right there, and says so at every distance below r. Asked is whether at least m of N
inputs pass. Each input has a sequential test of its own (a confidence sequence, valid however long
one draws) that may show that it passes, or that it does not, or leave it open.

Why an answer is wrong with probability at most the error. Say fewer than m pass, and the answer is
yes. (1) Each of the others is shown to pass with probability at most `each`, by draws of its own,
so at most `most` = m - 1 + a binomial quantile are *ever* shown to, but for a part of the error.
(2) How many are shown in a first round, M, is fixed by all noise before the order is: the order
reveals M ones among N without replacement. Averaged over M' > most, the likelihood of what was seen
so far over the one at `most` is a test martingale there; it increases with each further one, and
fewer than `most` show fewer, so whatever M <= most is, it ever exceeds 1 / error' with probability
at most error' (Ville; Waudby-Smith and Ramdas, NeurIPS 2020). (3) In later rounds, when all inputs
were seen, more draws go to the open ones until more than `most` are shown to pass: (1) is all that
is needed there. The same holds of no, with passing and failing exchanged; only one of the two
answers can be wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import scipy

from dpdist.certification.noises import Noise
from dpdist.certification.sequential import beta_mixture_rejects

PASSES, OPEN, FAILS = 1, 0, -1
ANSWERS = {PASSES: "yes", OPEN: "undecided", FAILS: "no"}
_OF_ALLOWANCE = 0.2  # of the error: that more inputs are shown wrongly than allowed for
_SHOWN_WRONGLY = 0.001  # of all inputs, about: what that allowance may cost
_FEW = 10  # inputs of which none may be shown wrongly
_LARGEST_ERROR = 0.02  # of one input's test
_LOOKS = 256  # at the evidence, while the order goes on: any number would do
_NEAR = 1e-9  # tests are made a hair beyond their own probability


@dataclass(frozen=True)
class Side:
    """What one answer needs. each: error of an input's test. most: inputs that are ever shown so if
    the other answer is true, but for a part of the error."""

    each: float
    most: int


def side(inputs: int, truly: int, error: float) -> Side:
    """truly: how many inputs are so at most, if the other answer is true."""
    others, allowed = inputs - truly, _OF_ALLOWANCE * error
    if others <= _FEW:
        return Side(allowed / others, truly)  # union bound
    each = min(_LARGEST_ERROR, _SHOWN_WRONGLY * inputs / others)
    return Side(each, truly + int(scipy.stats.binom.isf(allowed, others, each)))


def log_evidence(inputs: int, most: int, seen: int, shown: int) -> float:
    """ln of the likelihood of `shown` among `seen`, drawn without replacement from `inputs` of
    which more than `most` are (all numbers alike), over the one where `most` are."""
    if shown > most:
        return math.inf  # impossible where `most` are

    def log_likelihood(there: np.ndarray) -> np.ndarray:
        left = there - shown
        with np.errstate(invalid="ignore"):
            found = _log_choose(inputs - seen, left) - _log_choose(inputs, there)
        return np.where(left <= inputs - seen, found, -np.inf)

    null = float(log_likelihood(np.array(most)))
    if null == -math.inf or most >= inputs:
        return -math.inf
    others = log_likelihood(np.arange(most + 1, inputs + 1))
    return float(np.logaddexp.reduce(others)) - math.log(inputs - most) - null


def _log_choose(of: int, chosen: np.ndarray) -> np.ndarray:
    gammaln = scipy.special.gammaln
    return gammaln(of + 1) - gammaln(chosen + 1) - gammaln(of - chosen + 1)


@dataclass
class Judge:
    """Takes outcomes in their order; `answer` is OPEN until there is one, and then stays."""

    inputs: int
    share: Fraction
    error: float
    answer: int = OPEN
    seen: int = 0
    shown: dict[int, int] = field(default_factory=lambda: {PASSES: 0, OPEN: 0, FAILS: 0})

    def __post_init__(self) -> None:
        needed = math.ceil(self.share * self.inputs)
        truly = {PASSES: needed - 1, FAILS: self.inputs - needed}
        self.sides = {what: side(self.inputs, most, self.error) for what, most in truly.items()}
        self._every = max(1, self.inputs // _LOOKS)

    def first(self, outcome: int) -> None:
        """Of the next input in the random order."""
        self.seen += 1
        self.shown[outcome] += 1
        if self.seen % self._every == 0 or self.seen == self.inputs:
            limit = -math.log((1 - _OF_ALLOWANCE) * self.error)
            for what, needs in self.sides.items():
                found = log_evidence(self.inputs, needs.most, self.seen, self.shown[what])
                self._say(what, found >= limit + _NEAR)

    def later(self, outcome: int) -> None:
        """Of an open input after more draws, once all inputs were seen."""
        self.shown[OPEN] -= 1
        self.shown[outcome] += 1
        for what, needs in self.sides.items():
            self._say(what, self.shown[what] > needs.most)

    def _say(self, what: int, sure: bool) -> None:
        if sure and self.answer == OPEN:
            self.answer = what


class LabelTest:
    """Whether the label's probability exceeds what a radius needs, after any number of draws."""

    def __init__(self, noise: Noise, radius: float, sides: dict[int, Side]) -> None:
        exact = noise.probability_for_radius(radius)
        # A hair on the safe side of each.
        self._above = exact + (1 - exact) * _NEAR
        self._below = exact * (1 - _NEAR)
        self._each = {what: needs.each for what, needs in sides.items()}
        self._needed: dict[tuple[int, int], int] = {}

    def outcome(self, hits: int, draws: int) -> int:
        """PASSES or FAILS where it is shown, by this many draws that said the label."""
        if hits >= self._least(PASSES, draws):
            return PASSES
        return FAILS if draws - hits >= self._least(FAILS, draws) else OPEN

    def _least(self, what: int, draws: int) -> int:
        """How many draws must say so: draws + 1 where no number is enough."""
        key = what, draws
        if key not in self._needed:
            p = self._above if what == PASSES else 1 - self._below
            low, high = 0, draws + 1
            while low < high:  # the evidence increases with their number
                middle = (low + high) // 2
                enough = bool(beta_mixture_rejects(middle, draws, p, self._each[what]))
                low, high = (low, middle) if enough else (middle + 1, high)
            self._needed[key] = low
        return self._needed[key]
