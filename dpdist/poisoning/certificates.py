"""From votes to certificates against poisoned training records, and changed inputs besides.

Private models: each vote is one run of a differentially private mechanism from training data (and
input) to a class. A class that a fresh model says with probability p, by secret keys, is still what
it says most often after k changes of the training data if `dpdist.privacy.poisoning` leaves more
than 1/2 of p. Models without number agree on that class: what is certified is the answer of the
recipe, not of these models. The class is chosen by some models, p is bounded by the others
(Clopper-Pearson), so each certificate errs with probability at most alpha. All inputs are asked of
the same models, so false certificates come together: of a whole set the union bound alone holds.

With noise N(0, sigma^2 I) on each vote's input an L2 change below r besides leaves
Phi(Phi^-1(q) - r / sigma) of what the changed data leave, q: more than 1/2 where q > Phi(r /
sigma).

Models on few records drawn at random: the same, by what `dpdist.poisoning.bagging` leaves of p.

Plain models on disjoint shards: one record is in one shard, so one change moves one vote, and no
two classes closer than by two. Exact, without probability (Levine and Feizi, ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dpdist.base.binomial import clopper_pearson_lower
from dpdist.base.errors import UserError
from dpdist.poisoning.votes import NONE, Votes

_UP = 1 + 1e-12  # a target is rounded up
Sizes = NDArray[np.int64]


class UnderPoison(Protocol):
    """What changed records leave of an answer of one random training."""

    def changes(self, probability: float, target: float = 0.5) -> int:
        """The most after which an answer of at least this probability keeps more than `target`; -1
        where it has no more to begin with."""
        ...


@dataclass(frozen=True, eq=False)
class Withstands:
    """What the answers on N inputs withstand.

    answer (N,): the class, NONE where no model named one. changes: for each radius, the largest
    number of changed records with which the answer stays at every L2 change of the input below that
    radius, int64 (N,); -1 where nothing is certified. models: by how many each was certified.
    alpha: of each; 0 where exact.
    """

    answer: Sizes
    changes: dict[float, Sizes]
    models: int
    alpha: float

    def accuracy(self, label: Sizes, changes: int, radius: float = 0.0) -> float:
        """Share of inputs that are right and certified so far."""
        return float(np.mean((self.answer == label) & (self.changes[radius] >= changes)))

    @property
    def most(self) -> int:
        """The largest number of changes that any input withstands."""
        return int(max(found.max() for found in self.changes.values()))


def check(models: int, select: int, radii: Sequence[float], sigma: float | None) -> None:
    """Raise UserError without models for both, or for a radius without noise."""
    if not 0 < select < models:
        raise UserError(f"--select: must leave some of the {models} models to count, got {select}")
    if any(radii) and sigma is None:
        raise UserError("--radii: need --sigma, noise on the inputs of the votes")


def by_keys(
    votes: Votes,
    poisoned: UnderPoison,
    *,
    select: int,
    alpha: float,
    radii: Sequence[float] = (0.0,),
    sigma: float | None = None,
) -> Withstands:
    """Of models trained alike, by secret keys. poisoned: what changed records leave of one.
    select: how many of the models choose the class. Raises as `check`."""
    total = len(votes.vote)
    check(total, select, radii, sigma)
    chosen, counted = votes.counts(slice(0, select)), votes.counts(slice(select, total))
    answer = _most_named(chosen)
    hits = np.where(answer == NONE, 0, np.take_along_axis(counted, answer[:, None], 1)[:, 0])
    sure = {int(k): float(clopper_pearson_lower(k, total - select, alpha)) for k in np.unique(hits)}
    found = {}
    for radius in dict.fromkeys(radii):
        target = 0.5 if radius == 0 else min(1.0, float(ndtr(radius / (sigma or 1.0))) * _UP)
        withstood = {k: poisoned.changes(p, target) for k, p in sure.items()}
        found[radius] = np.array([withstood[int(k)] for k in hits], dtype=np.int64)
    return Withstands(answer, found, total - select, alpha)


def by_partitions(votes: Votes) -> Withstands:
    """Of models on disjoint shards: the class most vote for, the smaller one of equals."""
    counts = votes.counts(slice(None))
    inputs, classes = counts.shape
    answer = _most_named(counts)
    rows, names = np.arange(inputs), np.arange(classes)
    rival = counts + (names < answer[:, None])  # which of equals wins
    rival[rows, answer] = -1
    lead = counts[rows, answer] - rival.max(1, initial=0)  # a class that nobody named may win too
    changes = np.where(answer == NONE, -1, lead // 2).astype(np.int64)
    return Withstands(answer, {0.0: changes}, len(votes.vote), 0.0)


def _most_named(counts: Sizes) -> Sizes:
    """The class with the most votes, the first of equals, NONE where there are none: (N,), of
    counts (N, classes)."""
    return np.where(counts.max(1) > 0, counts.argmax(1), NONE)
