"""Certificates against poisoned training records, from votes of many models.

If a differentially private trainer produces a set S of outcomes with probability x, it produces S
with probability at least B_k(x) on any data set that differs in k records: B_k is a lower bound of
the trade-off curve of k changes. So an answer that a freshly trained model gives with probability x
is still given with more than 1/2 if B_k(x) > 1/2, whatever the k records are and however they were
chosen (without knowledge of the secret keys). Ma, Zhu and Hsu 2019 bound the same by k epsilon.

k counts insertions and removals together. Any other data set is reached by removing a records, then
inserting b. Let R_a and I_b be the curves of each direction, exact for groups if a phase has them
(mixtures of Gaussians). The answer keeps at least I_b(R_a(x)), so B_k = min over a + b = k of
I_b(R_a(x)). The group curve of one direction is not enough, since it does not cover mixed changes.
The curve of one record in either order, applied k times, is valid as well; the larger of both is
used, and large k are composed of exact groups of 16. Under replace-one k counts replaced records,
and only the curve of one is known.

Models on few records drawn at random: each model is trained on s of the n records, a uniformly
random subset by a secret key, and training depends only on the subset. Let a records be removed and
b inserted. With m = n - a records in common and n' = m + b, a subset of common ones has probability
C(m, s) / C(n, s) before, and each such subset is C(n, s) / C(n', s) times as likely after; no other
subset is possible both before and after. So an answer of probability p keeps, by the Neyman-Pearson
lemma, at least

    (p - 1 + C(m, s) / C(n, s)) C(n, s) / C(n', s),

and for some training exactly that. Jia, Cao and Gong (AAAI 2021, Theorem 1) draw with replacement:
there (m / n)^s replaces C(m, s) / C(n, s).

From votes to certificates: each vote of a private model is one run of a differentially private
mechanism from training data (and input) to a class. The certified class is the one that fresh
models of the recipe answer most often, not the answer of these models. Some models choose the
class, the others bound p (Clopper-Pearson), so each certificate errs with probability at most
alpha. The same models answer all inputs, so false certificates occur together: for a whole set only
the union bound is valid. With noise N(0, sigma^2 I) on each vote's input, an additional L2 change
below r leaves Phi(Phi^-1(q) - r / sigma) of the probability q that the changed data leave: more
than 1/2 if q > Phi(r / sigma).

Plain models on disjoint shards: one record is in one shard, so one change moves one vote, and the
counts of two classes closer by at most two. Exact, without probability (Levine and Feizi, ICLR
2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dpdist.cluster import job_folder
from dpdist.core.binomial import clopper_pearson_lower
from dpdist.core.errors import UserError
from dpdist.core.files import ColumnSpec
from dpdist.privacy import audit_bounds
from dpdist.privacy.audit_bounds import TradeoffCurve
from dpdist.privacy.plan import PrivacyPlan, group_pld
from dpdist.randomness.keys import stream_words

# --- the cost of changed records --------------------------------------------------------------


_POINTS, _ROUNDS = 1025, 6  # of a search in [0, 1]: 60 bits
_LARGEST = 16  # group whose exact loss is computed; the time is proportional to it
_MOST_CHANGES = 1000  # the most changes that are certified


class PrivatePoisoningBound:
    """The trade-off curve of one training by a plan, for changed records.

    Raises ValueError if no trade-off curve is proved for it.
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        one = audit_bounds.plan_tradeoff(plan)
        if one is None:
            raise ValueError(
                "no trade-off curve is proved for its training, so poisoning cannot be bounded"
            )
        self._plan, self._one = plan, one
        self._exact = plan.adjacency == "add-or-remove-one"
        self._groups: dict[int, tuple[TradeoffCurve, TradeoffCurve] | None] = {}
        self._needed: dict[float, list[float]] = {}

    def required_probability(self, changes: int, target: float = 0.5) -> float:
        """Return the probability above which more than `target` is left after that many changes.

        It is rounded up; infinity if no probability is enough.
        """
        found = self._needed.setdefault(target, [target])
        while len(found) <= changes:
            found.append(max(found[-1], self._required_after(len(found), found)))
        return found[changes]

    def max_changes(self, probability: float, target: float = 0.5) -> int:
        """Return the most changes, up to 1,000, after which an answer keeps more than `target`.

        probability: lower bound of the answer's probability. -1 if it is at most `target`.
        """
        if probability <= target:
            return -1
        most = 0
        while most < _MOST_CHANGES and self.required_probability(most + 1, target) <= probability:
            most += 1
        return most

    def _required_after(self, changes: int, fewer: list[float]) -> float:
        """Return the probability that is required for a number of changes.

        fewer: those for 0 to changes - 1. One change, or a group, must keep what the others
        require.
        """
        stepwise, group = _inverse(self._one, fewer[-1]), min(changes, _LARGEST)
        if self._find_group_curves(group) is None:
            return stepwise
        worst = 0.0
        for removed in range(group + 1):
            kept = fewer[changes - group]
            if inserted := group - removed:
                kept = _inverse(self._group_curves(inserted)[1], kept)
            if removed:
                kept = _inverse(self._group_curves(removed)[0], kept)
            worst = max(worst, kept)
        return min(stepwise, worst)

    def _group_curves(self, size: int) -> tuple[TradeoffCurve, TradeoffCurve]:
        found = self._find_group_curves(size)
        assert found is not None  # a phase has exact groups of all sizes, or of none
        return found

    def _find_group_curves(self, size: int) -> tuple[TradeoffCurve, TradeoffCurve] | None:
        """Return the curves of a number of removed records and of inserted ones.

        None if no exact ones are known.
        """
        if size not in self._groups:
            found = group_pld(self._plan, size) if self._exact else None
            self._groups[size] = None if found is None else audit_bounds.directed_tradeoffs(*found)
        return self._groups[size]


def _inverse(curve: TradeoffCurve, target: float) -> float:
    """Return an x with curve(x) > target, rounded up; infinity if there is none.

    Curves do not decrease, so every larger x keeps more than the target too.
    """
    low, high = target, 1.0  # curve(x) <= x
    if not low < high or not curve(np.array(high)) > target:
        return math.inf
    for _ in range(_ROUNDS):
        x = np.linspace(low, high, _POINTS)
        first = int(np.argmax(curve(x) > target))
        low, high = float(x[max(first - 1, 0)]), float(x[first])
    return high


def compose_vote_plans(plan: PrivacyPlan, models: int) -> PrivacyPlan:
    """Return the plan of all votes of a number of trainings together, queried or not."""
    return replace(plan, phases=tuple(p for each in plan.phases for p in each.repeat(models)))


# --- models on few records --------------------------------------------------------------------


_LOG_SUM_UP = 1 + 1e-10  # rounds up sums of many logarithms


def draw_subset(key: bytes, records: int, size: int) -> np.ndarray:
    """Return a random subset of the records, every one equally likely by the key: bool (N,)."""
    members = np.zeros(records, dtype=bool)
    members[np.argsort(stream_words(key, 0, records), kind="stable")[:size]] = True
    return members


class BaggingPoisoningBound:
    """The trade-off of one training on `size` of `records` records."""

    def __init__(self, records: int, size: int) -> None:
        self._records, self._size = records, size
        self._changes = lru_cache(maxsize=None)(self._search_max_changes)

    def required_probability(self, changes: int, target: float = 0.5) -> float:
        """Return the probability above which more than `target` is left after that many changes.

        It is rounded up; infinity if no probability is enough.
        """
        if self._records - changes < self._size:  # nothing can be drawn
            return math.inf
        removed = np.arange(changes + 1)
        left, share = changes - removed, self._subset_ratios(changes)
        found = 1 - share[left] / _LOG_SUM_UP + target * share[2 * left] * _LOG_SUM_UP
        most = float(found.max()) * _LOG_SUM_UP
        return most if most < 1 else math.inf

    def max_changes(self, probability: float, target: float = 0.5) -> int:
        """Return the most changes after which an answer keeps more than `target`.

        probability: lower bound of the answer's probability. -1 if it is at most `target`.
        """
        return self._changes(probability, target)

    def _search_max_changes(self, probability: float, target: float) -> int:
        if probability <= target:
            return -1
        low, high = 0, self._records + 1  # `required_probability` increases with the changes
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.required_probability(middle, target) <= probability
            low, high = (middle, high) if enough else (low, middle)
        return low

    def _subset_ratios(self, changes: int) -> np.ndarray:
        """Return C(n + i, s) / C(n, s) for i from -changes to changes: float64.

        They are products of `changes` factors, not of s, since bags may be large.
        """
        i = np.arange(changes)
        fewer = np.log1p(-self._size / (self._records - i)).cumsum()
        more = -np.log1p(-self._size / (self._records + 1 + i)).cumsum()
        with np.errstate(over="ignore"):  # at infinity nothing is left of an answer
            result: np.ndarray = np.exp(np.concatenate([fewer[::-1], [0.0], more]))
        return result


# --- the table of votes -----------------------------------------------------------------------


TABLE = "votes.parquet"
KEY = b"dpdist.votes"
FILE = "votes.safetensors"  # of one model: "votes", int64 (N,)
NONE = -1  # the vote of a training, or an answer, without finite logits
MOST_VOTES = 2**26  # of a table: readers accept no more
COLUMNS: dict[str, ColumnSpec] = {
    "model": (int, 0), "index": (int, 0), "label": (int, 0), "vote": (int, NONE)
}  # fmt: skip
SCHEMA = job_folder.schema_of(COLUMNS)


@dataclass(frozen=True, eq=False)
class Votes:
    """The votes of M models on N inputs.

    job_record: what was executed. index, label (N,): of the inputs. vote (M, N): classes, or NONE.
    """

    job_record: dict[str, Any]
    index: NDArray[np.int64]
    label: NDArray[np.int64]
    vote: NDArray[np.int64]

    @property
    def settings(self) -> dict[str, Any]:
        result: dict[str, Any] = self.job_record.get("settings", {})
        return result

    def counts(self, models: slice) -> NDArray[np.int64]:
        """Return the number of votes of these models for each class: int64 (N, classes)."""
        classes = int(max(self.vote.max(), self.label.max())) + 1
        return np.stack([(self.vote[models] == c).sum(0) for c in range(classes)], axis=1)


def read_votes(path: Path) -> Votes:
    """Return the votes of a table. Raises UserError where it is not of its settings."""
    table = job_folder.read_table(path, COLUMNS, KEY)
    about = job_folder.read_job_record(table, KEY, str(path))
    _, index, label, vote = (table[name].to_numpy() for name in COLUMNS)
    models = about["settings"]["models"]
    inputs = len(vote) // models
    return Votes(about, index[:inputs], label[:inputs], vote.reshape(models, inputs))


# --- from votes to certificates ---------------------------------------------------------------


_TARGET_UP = 1 + 1e-12  # rounds a target up
Sizes = NDArray[np.int64]


class PoisoningBound(Protocol):
    """The effect of changed records on the answer of one random training."""

    def required_probability(self, changes: int, target: float = 0.5) -> float:
        """Return the probability above which more than `target` is left after that many changes.

        It is rounded up; infinity if no probability is enough.
        """
        ...

    def max_changes(self, probability: float, target: float = 0.5) -> int:
        """Return the most changes after which an answer keeps more than `target`.

        probability: lower bound of the answer's probability. -1 if it is at most `target`.
        """
        ...


@dataclass(frozen=True, eq=False)
class PoisoningCertificates:
    """The numbers of changed records that the answers on N inputs withstand.

    prediction (N,): the class, NONE if no model answered one. max_changes: for each radius, the
    largest number of changed records with which the answer stays at every L2 change of the input
    below that radius, int64 (N,); -1 if nothing is certified. num_models: number of models that
    certified each. alpha: error of each; 0 if exact.
    """

    prediction: Sizes
    max_changes: dict[float, Sizes]
    num_models: int
    alpha: float

    def certified_accuracy(self, label: Sizes, changes: int, radius: float = 0.0) -> float:
        """Return the fraction of inputs that are correct and certified for a number of changes."""
        return float(np.mean((self.prediction == label) & (self.max_changes[radius] >= changes)))

    @property
    def largest_changes(self) -> int:
        """Return the largest number of changes that any input withstands."""
        return int(max(found.max() for found in self.max_changes.values()))


def check_options(models: int, select: int, radii: Sequence[float], sigma: float | None) -> None:
    """Raise UserError if no models are left to count, or for a radius without noise."""
    if not 0 < select < models:
        raise UserError(
            f"--set select: must leave some of the {models} models to count, got {select}"
        )
    if any(radii) and sigma is None:
        raise UserError("--set radii: needs sigma, noise on the inputs of the votes")


def min_votes(poisoning_bound: PoisoningBound, alpha: float) -> float:
    """Return the number of votes that certify one changed record if all of them are equal.

    Infinity if no number of votes does. alpha: error of the certificate.
    """
    needed = poisoning_bound.required_probability(1)
    return math.inf if needed >= 1 else math.floor(math.log(alpha) / math.log(needed)) + 1


def certify_random_models(
    votes: Votes,
    poisoning_bound: PoisoningBound,
    *,
    select: int,
    alpha: float,
    radii: Sequence[float] = (0.0,),
    sigma: float | None = None,
) -> PoisoningCertificates:
    """Return the certificates of models that are trained alike, by secret keys.

    poisoning_bound: the effect of changed records on one model. select: number of the models that
    choose the class. Raises as `check_options`.
    """
    total = len(votes.vote)
    check_options(total, select, radii, sigma)
    chosen, counted = votes.counts(slice(0, select)), votes.counts(slice(select, total))
    answer = _majority_class(chosen)
    hits = np.where(answer == NONE, 0, np.take_along_axis(counted, answer[:, None], 1)[:, 0])
    sure = {int(k): float(clopper_pearson_lower(k, total - select, alpha)) for k in np.unique(hits)}
    found = {}
    for radius in dict.fromkeys(radii):
        target = 0.5 if radius == 0 else min(1.0, float(ndtr(radius / (sigma or 1.0))) * _TARGET_UP)
        withstood = {k: poisoning_bound.max_changes(p, target) for k, p in sure.items()}
        found[radius] = np.array([withstood[int(k)] for k in hits], dtype=np.int64)
    return PoisoningCertificates(answer, found, total - select, alpha)


def certify_partitioned_models(votes: Votes) -> PoisoningCertificates:
    """Return the certificates of models on disjoint shards.

    The answer is the class with the most votes, the smaller one of equals.
    """
    counts = votes.counts(slice(None))
    inputs, classes = counts.shape
    answer = _majority_class(counts)
    rows, names = np.arange(inputs), np.arange(classes)
    rival = counts + (names < answer[:, None])  # which of equals wins
    rival[rows, answer] = -1
    lead = counts[rows, answer] - rival.max(1, initial=0)  # a class that nobody named may win too
    changes = np.where(answer == NONE, -1, lead // 2).astype(np.int64)
    return PoisoningCertificates(answer, {0.0: changes}, len(votes.vote), 0.0)


def _majority_class(counts: Sizes) -> Sizes:
    """Return the class with the most votes, the first of equals, NONE without votes: (N,)."""
    return np.where(counts.max(1) > 0, counts.argmax(1), NONE)
