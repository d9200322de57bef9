"""Models on few records drawn at random: what changed training records leave of an answer.

Each model is trained on s of the n records, every subset alike, by a secret key; training depends
on the subset alone. Change the records: a go, b come. With m = n - a records in common and
n' = m + b, a subset of common ones has probability C(m, s) / C(n, s) before, and each of them is
C(n, s) / C(n', s) times as likely after; no other subset is possible both before and after. So an
answer of probability p keeps, by the Neyman-Pearson lemma, at least

    (p - 1 + C(m, s) / C(n, s)) C(n, s) / C(n', s),

which some training reaches. Jia, Cao and Gong (AAAI 2021, Theorem 1) draw with replacement: there
(m / n)^s takes the place of C(m, s) / C(n, s).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpdist.randomness.keys import words

_UP = 1 + 1e-10  # sums of as many logarithms as there are changes, rounded up


def drawn(key: bytes, records: int, size: int) -> np.ndarray:
    """A subset of so many of the records, every one alike by the key: bool (N,)."""
    members = np.zeros(records, dtype=bool)
    members[np.argsort(words(key, 0, records), kind="stable")[:size]] = True
    return members


class Bagged:
    """Of one training on `size` of `records` records."""

    def __init__(self, records: int, size: int) -> None:
        self._records, self._size = records, size
        self._changes = lru_cache(maxsize=None)(self._most)

    def needed(self, changes: int, target: float = 0.5) -> float:
        """The probability from which on more than `target` is left after so many changes, or fewer;
        infinity where none is enough. Rounded up."""
        if self._records - changes < self._size:  # nothing can be drawn
            return math.inf
        removed = np.arange(changes + 1)
        left, share = changes - removed, self._shares(changes)
        found = 1 - share[left] / _UP + target * share[2 * left] * _UP
        most = float(found.max()) * _UP
        return most if most < 1 else math.inf

    def changes(self, probability: float, target: float = 0.5) -> int:
        """The largest number of changes after which an answer of at least this probability keeps
        more than `target`; -1 where it has no more than that to begin with."""
        return self._changes(probability, target)

    def _most(self, probability: float, target: float) -> int:
        if probability <= target:
            return -1
        low, high = 0, self._records + 1  # `needed` increases with the changes
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.needed(middle, target) <= probability
            low, high = (middle, high) if enough else (low, middle)
        return low

    def _shares(self, changes: int) -> np.ndarray:
        """C(n + i, s) / C(n, s), i from -changes to changes. Of as many products, not of s each:
        bags may be large."""
        i = np.arange(changes)
        fewer = np.log1p(-self._size / (self._records - i)).cumsum()
        more = -np.log1p(-self._size / (self._records + 1 + i)).cumsum()
        with np.errstate(over="ignore"):  # infinitely many: nothing is left of an answer
            return np.exp(np.concatenate([fewer[::-1], [0.0], more]))
