"""Membership games, scores of records (LiRA, RMIA), ROC curves, and ceilings of guarantees.

A game draws the records that each model of a bank is trained with, by keyed randomness. A bank of
shadow models is trained in bulk, scored once and attacked many times:

    models/0007/    weights and description of model 7, and its scores
    scores.parquet  scores of every record under every model, written last
    settings.json, journal.jsonl: as for every bulk job

Scores: phi (S, N) float64 is the log-odds of the label of record i under model s, ln p_y - ln (1 -
p_y). member (S, N) bool is whether model s was trained with record i. target is the attacked
model's row. All others are the references, whose members the adversary knows (it trained them).
Results are (N,), larger if the record is more likely a member.

Intervals of a ROC curve have confidence 95 % and describe the one model that was attacked: they are
over the choice of records, not over training. So they say nothing about a guarantee. A guarantee
applies to a game: if a record's membership is its own secret fair coin, in a run that satisfies a
guarantee under add-or-remove, no test of the outcome is better than the guarantee's trade-off curve
allows, on average over runs. If a random exact half is in, one record is in *instead of* a second
one: replace-one. If the adversary knows the split in advance, there is no bound. One model's ROC
varies around that average, and its records share the model: a point above the ceiling is a reason
to audit, not a refutation. A refutation needs the one-run test
(`dpdist.privacy.audit_bounds.OneRunGuesses`), or many models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import scipy
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logsumexp, ndtr

from dpdist.cluster import job_folder
from dpdist.core.binomial import clopper_pearson_interval
from dpdist.core.console import format_bound, format_significant
from dpdist.core.errors import UserError
from dpdist.core.files import ColumnSpec
from dpdist.privacy.audit_bounds import (
    TradeoffCurve,
    approximate_dp_tradeoff,
    group_tradeoff,
    max_true_positive_rate,
    plan_tradeoff,
)
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee, Neighbors, format_epsilon
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, stream_words

# --- games ------------------------------------------------------------------------------------


Bits = NDArray[np.bool_]


@dataclass(frozen=True)
class Game:
    """The assignment of records to models.

    models: of the bank. key: secret until the attack is over. relation: the adjacency under which a
    guarantee bounds an adversary who does not know the key.
    """

    models: int
    name: ClassVar[str]
    description: ClassVar[str]
    relation: ClassVar[Neighbors]
    has_random_size: ClassVar[bool] = False  # the number of members is drawn too

    def members(self, key: bytes, model: int, records: int) -> Bits:
        """Return the members of all records in the training of model 0 <= model < models."""
        raise NotImplementedError

    def expected_members(self, records: int) -> int:
        """Return the expected number of members of a model."""
        return records // 2

    @property
    def targets(self) -> range:
        """Return the models that are attacked."""
        return range(self.models)

    def is_plain(self, model: int) -> bool:
        """Return whether a model is trained by ordinary SGD, without the recipe's method."""
        return False

    def guessed_records(self, key: bytes, model: int, records: int) -> Bits:
        """Return the records whose membership in a model the adversary guesses."""
        return np.ones(records, dtype=bool)


@dataclass(frozen=True)
class Coins(Game):
    """Each record is in each model by a fair coin of its own (Carlini et al. 2022)."""

    name = "coins"
    description = "each record in each model by its own fair coin"
    relation = "add-or-remove-one"
    has_random_size = True

    def members(self, key: bytes, model: int, records: int) -> Bits:
        result: Bits = (
            stream_words(derive_key(key, "coins", model), 0, records) >> np.uint64(63) == 1
        )
        return result


@dataclass(frozen=True)
class Halves(Game):
    """Each model has a random half, exact but for one record of an odd number."""

    name = "halves"
    description = "each model with a random exact half"
    relation = "replace-one"

    def members(self, key: bytes, model: int, records: int) -> Bits:
        return _random_subset(
            derive_key(key, "halves", model), records, 0, self.expected_members(records)
        )


@dataclass(frozen=True)
class Quarters(Game):
    """The residual perturbation paper's protocol, with a target and one shadow.

    Each has a random half of the records, half of which are in its model. Model 0 is the target,
    trained by the recipe; model 1 is the shadow, trained by ordinary SGD.
    """

    models: int = 2
    name = "quarters"
    description = "target and shadow with a random quarter each, another quarter out"
    relation = "replace-one"

    def __post_init__(self) -> None:
        if self.models != 2:
            raise UserError(f"membership: quarters has a target and a shadow, got {self.models}")

    def members(self, key: bytes, model: int, records: int) -> Bits:
        quarter = self.expected_members(records)
        return _random_subset(derive_key(key, "quarters"), records, 2 * model * quarter, quarter)

    def expected_members(self, records: int) -> int:
        return records // 4

    @property
    def targets(self) -> range:
        return range(1)

    def is_plain(self, model: int) -> bool:
        return model == 1

    def guessed_records(self, key: bytes, model: int, records: int) -> Bits:
        quarter = self.expected_members(records)
        return _random_subset(
            derive_key(key, "quarters"), records, 2 * model * quarter, 2 * quarter
        )


def _random_subset(key: bytes, records: int, first: int, count: int) -> Bits:
    """Return `count` records of a random order, from position `first`."""
    order = np.argsort(stream_words(key, 0, records), kind="stable")
    chosen = np.zeros(records, dtype=bool)
    chosen[order[first : first + count]] = True
    return chosen


GAMES: dict[str, type[Game]] = {kind.name: kind for kind in (Coins, Halves, Quarters)}


# --- the table of scores ----------------------------------------------------------------------


TABLE = "scores.parquet"
KEY = b"dpdist.bank"
TOP = 3
_TOPS = tuple(f"top{place}" for place in range(1, TOP + 1))
# member: -1 for a test record, which is in no model
COLUMNS: dict[str, ColumnSpec] = {
    "model": (int, 0), "passes": (int, 1), "index": (int, 0), "member": (int, -1),
    "phi": (float, None), **dict.fromkeys(_TOPS, (float, 0)),
}  # fmt: skip
SCHEMA = job_folder.schema_of(COLUMNS, pa.field("member", pa.int8(), nullable=False))


def build_model_table(model: int, scores: Mapping[str, np.ndarray]) -> pa.Table:
    """Return one model's scores, of all records and then of the population, by passes."""
    member = scores["member"].astype(np.int8)
    tables = []
    for passes in sorted(int(name.split("/")[1]) for name in scores if name.startswith("phi/")):
        phi, top = scores[f"phi/{passes}"], scores[f"top/{passes}"]
        outside = len(phi) - len(member)
        columns: dict[str, np.ndarray] = {
            "model": np.full(len(phi), model),
            "passes": np.full(len(phi), passes),
            "index": np.concatenate([np.arange(len(member)), np.arange(outside)]),
            "member": np.concatenate([member, np.full(outside, -1, np.int8)]),
            "phi": phi,
            **dict(zip(_TOPS, top.T, strict=True)),
        }
        tables.append(pa.table(columns, schema=SCHEMA))
    return pa.concat_tables(tables)


@dataclass(frozen=True, eq=False)
class BankScores:
    """The scores of a bank's models, at one number of passes.

    member (S, N) bool, phi (S, N), top (S, N, 3): of the records. population (S, Z): phi of points
    that are in no model.
    """

    member: NDArray[np.bool_]
    phi: NDArray[np.float64]
    top: NDArray[np.float64]
    population: NDArray[np.float64]

    @property
    def models(self) -> int:
        return len(self.phi)


def read_scores(path: Path) -> tuple[dict[str, Any], dict[int, BankScores]]:
    """Return the executed settings, and the scores of a bank by number of passes.

    Raises UserError.
    """
    table = job_folder.read_table(path, COLUMNS, KEY)
    about = job_folder.read_job_record(table, KEY, str(path))
    number, passes, member = (table[name].to_numpy() for name in ("model", "passes", "member"))
    models = int(number.max()) + 1
    found = {}
    for each in np.unique(passes).tolist():
        own, outside = (passes == each) & (member >= 0), (passes == each) & (member < 0)
        found[each] = BankScores(
            member[own].reshape(models, -1) == 1,
            table["phi"].to_numpy()[own].reshape(models, -1),
            np.stack([table[n].to_numpy()[own].reshape(models, -1) for n in _TOPS], axis=-1),
            table["phi"].to_numpy()[outside].reshape(models, -1),
        )
    return about, found


# --- LiRA and RMIA ----------------------------------------------------------------------------


Array = NDArray[np.float64]

# With at least this many models, a record's own variance is better than a common one.
MIN_MODELS_FOR_OWN_VARIANCE = 64


def log_odds(logits: ArrayLike, labels: ArrayLike) -> Array:
    """Return ln p_y - ln (1 - p_y) in float64: (N,).

    1 - p_y is the logsumexp of the others, so the result is exact even if p_y rounds to 1. logits:
    (N, classes), or log probabilities. labels: (N,).
    """
    values, y = np.array(logits, dtype=np.float64), np.asarray(labels)[:, None]
    own = np.take_along_axis(values, y, 1)[:, 0]
    np.put_along_axis(values, y, -np.inf, 1)
    return np.asarray(own - logsumexp(values, axis=1), np.float64)


def top_probabilities(logits: ArrayLike) -> Array:
    """Return the largest class probabilities of each row, sorted: (N, TOP), padded with 0."""
    values = np.asarray(logits, dtype=np.float64)
    values = np.exp(values - logsumexp(values, axis=1, keepdims=True))
    top = -np.sort(-values, axis=1)[:, :TOP]
    return np.pad(top, ((0, 0), (0, TOP - top.shape[1])))


def lira_online(phi: Array, member: Bits, target: int) -> Array:
    """Return ln N(phi; in) - ln N(phi; out) with Gaussians fitted to the references: (N,).

    The variance is the record's own from 64 models on, else one in common (Carlini et al. 2022,
    Algorithm 1).
    """
    seen, (inside, outside) = phi[target], _fit_in_and_out(phi, member, target)
    return np.asarray(_log_density(seen, *inside) - _log_density(seen, *outside))


def lira_offline(phi: Array, member: Bits, target: int) -> Array:
    """Return Phi((phi - mean) / deviation) of the references without the record: (N,).

    No model with the record is needed (Carlini et al. 2022, Section VI-C).
    """
    mean, deviation = _fit_in_and_out(phi, member, target)[1]
    return np.asarray(ndtr((phi[target] - mean) / deviation))


_GAMMA, _SHIFT = 2.0, 0.3  # gamma and a of the paper


def rmia(phi: Array, member: Bits, target: int, population: Array, *, online: bool = True) -> Array:
    """Return the fraction of population points z that the record beats: (N,).

    It beats z if ratio(x) >= gamma ratio(z), ratio = p_target(y | x) / p(x) (Zarifzadeh, Liu and
    Shokri 2024, equation 4). population (S, Z): phi of points that no model was trained with.
    online: p is the mean over all references; otherwise over those without the record, moved to ((1
    + a) p + 1 - a) / 2.
    """
    others = np.arange(len(phi)) != target
    p, p_z = expit(phi), expit(population)
    if online:
        usual, usual_z = p[others].mean(0), p_z[others].mean(0)
    else:
        usual, _ = _mean(p, ~member & others[:, None])
        usual, usual_z = (((1 + _SHIFT) * q + 1 - _SHIFT) / 2 for q in (usual, p_z[others].mean(0)))
    least = np.finfo(float).tiny
    ratio = p[target] / np.maximum(usual, least)
    ratio_z = np.sort(p_z[target] / np.maximum(usual_z, least))
    result: Array = np.searchsorted(ratio_z, ratio / _GAMMA, side="right") / len(ratio_z)
    return result


def _fit_in_and_out(
    phi: Array, member: Bits, target: int
) -> tuple[tuple[Array, Array | float], tuple[Array, Array | float]]:
    """Return mean (N,) and deviation of the references with each record, and without it."""
    others = (np.arange(len(phi)) != target)[:, None]
    inside, outside = (
        _gaussian(phi, chosen & others, len(phi) >= MIN_MODELS_FOR_OWN_VARIANCE)
        for chosen in (member, ~member)
    )
    return inside, outside


def _gaussian(phi: Array, chosen: Bits, own: bool) -> tuple[Array, Array | float]:
    mean, count = _mean(phi, chosen)
    squares = np.where(chosen, (phi - mean) ** 2, 0.0).sum(0)
    freedom = np.maximum(count - 1, 0)
    common = np.sqrt(squares.sum() / max(1, freedom.sum()))
    floor = 1e-6 * max(1.0, float(np.abs(mean).max()))  # references that agree to the last bit
    if not own:
        return mean, max(float(common), floor)
    deviation = np.sqrt(squares / np.maximum(freedom, 1))
    return mean, np.maximum(np.where(freedom > 0, deviation, common), floor)


def _mean(values: Array, chosen: Bits) -> tuple[Array, NDArray[np.int64]]:
    """Return the mean over the chosen models for each record, and the number of models.

    Without a chosen model it is the mean of all chosen values.
    """
    count = chosen.sum(0)
    total = np.where(chosen, values, 0.0).sum(0)
    overall = total.sum() / max(1, count.sum())
    return np.where(count > 0, total / np.maximum(count, 1), overall), count


def _log_density(x: Array, mean: Array, deviation: Array | float) -> Array:
    return -np.log(deviation) - ((x - mean) / deviation) ** 2 / 2


# --- ROC curves -------------------------------------------------------------------------------


ALPHA = 0.05  # of every interval


@dataclass(frozen=True)
class Estimate:
    """A number and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value = "-" if math.isnan(self.value) else f"{self.value:.3f}"
        return f"{value} [{format_bound(self.low)}, {format_bound(self.high, round_up=True)}]"

    @classmethod
    def from_counts(cls, hits: int, trials: int, alpha: float = ALPHA) -> Estimate:
        """Return a fraction with its Clopper-Pearson interval; [0, 1] if there are no trials."""
        if trials == 0:
            return cls(math.nan, 0.0, 1.0)
        low, high = clopper_pearson_interval(hits, trials, alpha)
        return cls(hits / trials, float(low), float(high))

    @classmethod
    def from_values(cls, values: ArrayLike, alpha: float = ALPHA) -> Estimate:
        """Return the mean of independent values, one for each model, with Student's interval."""
        each = np.asarray(values, float)
        if len(each) < 2:
            return cls(float(each.mean()), -math.inf, math.inf)
        error = each.std(ddof=1) / math.sqrt(len(each))
        reach = float(scipy.special.stdtrit(len(each) - 1, 1 - alpha / 2)) * error
        return cls(float(each.mean()), float(each.mean() - reach), float(each.mean() + reach))


@dataclass(frozen=True, eq=False)
class Roc:
    """Scores of members and of others; larger: more likely a member.

    Raises ValueError if there are no members or no others, or a score is not a number.
    """

    members: NDArray[np.float64]
    others: NDArray[np.float64]

    @classmethod
    def from_scores(cls, scores: ArrayLike, member: ArrayLike) -> Roc:
        """Return the ROC of scores (n,), with member (n,) bool."""
        values, inside = np.asarray(scores, float), np.asarray(member, bool)
        return cls(np.sort(values[inside]), np.sort(values[~inside]))

    def __post_init__(self) -> None:
        if not (len(self.members) and len(self.others)):
            raise ValueError("members and others are needed, at least one of each")
        if np.isnan(self.members).any() or np.isnan(self.others).any():
            raise ValueError("a score is not a number")

    @cached_property
    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return false and true positive rates of all thresholds, (0, 0) to (1, 1): (k,) each."""
        values = np.unique(np.concatenate([self.members, self.others]))[::-1]
        false, true = (
            1 - np.searchsorted(scores, values, side="left") / len(scores)
            for scores in (self.others, self.members)
        )
        return np.append(0.0, false), np.append(0.0, true)

    def interpolate(self, false_positives: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return true positive rates, between two thresholds those of a random choice of one."""
        return np.interp(false_positives, *self.curve)

    @cached_property
    def auc(self) -> Estimate:
        """Return the probability that a member scores higher than a different record, ties by half.

        The interval is DeLong's (DeLong, DeLong and Clarke-Pearson 1988). If members and others do
        not overlap, its variance is 0. Then the largest possible variance is used, A (1 - A) /
        min(m, n) (Birnbaum and Klose 1957), inverted as by Wilson.
        """
        m, n = len(self.members), len(self.others)
        ranks = scipy.stats.rankdata(np.concatenate([self.members, self.others]))
        above = (ranks[:m] - scipy.stats.rankdata(self.members)) / n  # of others, for each member
        below = 1 - (ranks[m:] - scipy.stats.rankdata(self.others)) / m
        area, z = float(above.mean()), float(scipy.stats.norm.isf(ALPHA / 2))
        variance = sum(x.var(ddof=1) / len(x) if len(x) > 1 else math.inf for x in (above, below))
        if 0 < variance < math.inf:
            reach = z * math.sqrt(variance)
            return Estimate(area, max(0.0, area - reach), min(1.0, area + reach))
        count = min(m, n)
        middle, shrink = (area + z * z / (2 * count)), 1 + z * z / count
        reach = z * math.sqrt(area * (1 - area) / count + z * z / (4 * count * count))
        low, high = (middle - reach) / shrink, (middle + reach) / shrink
        return Estimate(area, max(0.0, min(low, area)), min(1.0, max(high, area)))

    @property
    def advantage(self) -> float:
        """Return the largest difference of true and false positive rate."""
        false, true = self.curve
        return float(np.max(true - false))

    def threshold_at(self, false_positives: float) -> float:
        """Return the lowest score that at most this fraction of the others exceeds."""
        allowed = math.floor(false_positives * len(self.others) + 1e-9)
        return float(self.others[-1 - allowed]) if allowed < len(self.others) else -math.inf

    def counts_above(self, threshold: float) -> tuple[int, int]:
        """Return the numbers of members and of others with a score above the threshold."""
        true, false = (
            len(scores) - int(np.searchsorted(scores, threshold, side="right"))
            for scores in (self.members, self.others)
        )
        return true, false

    def rates_at(self, false_positives: float, alpha: float = ALPHA) -> tuple[Estimate, Estimate]:
        """Return true and realized false positive rate at a limit of the false positive rate."""
        true, false = self.counts_above(self.threshold_at(false_positives))
        return (
            Estimate.from_counts(true, len(self.members), alpha),
            Estimate.from_counts(false, len(self.others), alpha),
        )

    def precision_recall(self, threshold: float) -> tuple[Estimate, Estimate]:
        """Return precision and recall of the rule that scores above a threshold are members."""
        true, false = self.counts_above(threshold)
        return Estimate.from_counts(true, true + false), Estimate.from_counts(
            true, len(self.members)
        )

    @property
    def median(self) -> float:
        """Return the median of all scores."""
        return float(np.median(np.concatenate([self.members, self.others])))


# --- ceilings of a guarantee ------------------------------------------------------------------


# False positive rates at which a ROC is compared with a ceiling.
CHECKED_RATES = (0.001, 0.01, 0.1, 0.25, 0.5)
_POINTS = 5_001


@dataclass(frozen=True)
class Ceiling:
    """The highest ROC under a guarantee. description: of the guarantee, for tables and figures."""

    description: str
    curve: TradeoffCurve

    def max_true_positive_rates(self, false_positives: ArrayLike) -> NDArray[np.float64]:
        """Return the largest true positive rates at these false positive rates."""
        return max_true_positive_rate(self.curve, false_positives)

    @property
    def auc(self) -> float:
        """Return the area under the ceiling, rounded up: no attack's AUC is larger on average.

        The curve rises by 1 in total, so the trapezoidal rule misses at most half a step.
        """
        grid = np.linspace(0.0, 1.0, _POINTS)
        return min(
            1.0, float(np.trapezoid(self.max_true_positive_rates(grid), grid)) + 0.5 / (_POINTS - 1)
        )

    def exceeded_rates(self, roc: Roc) -> list[float]:
        """Return the entries of `CHECKED_RATES` at which the ROC is above the ceiling.

        There its Clopper-Pearson rectangle is above, all rectangles together at 95 %. For one model
        this is not a refutation.
        """
        found = []
        for rate in CHECKED_RATES:
            true, false = roc.rates_at(rate, ALPHA / len(CHECKED_RATES) / 2)
            if true.low > float(self.max_true_positive_rates(false.high)):
                found.append(rate)
        return found


def proved_ceiling(plan: PrivacyPlan, game: Neighbors, description: str) -> Ceiling | None:
    """Return the ceiling by the plan's privacy loss, or None if none is proved for the game."""
    curve = plan_curve(plan, game)
    return None if curve is None else Ceiling(f"proved ({description}, {game})", curve)


def plan_curve(plan: PrivacyPlan, game: Neighbors) -> TradeoffCurve | None:
    """Return the trade-off curve of a plan, or None.

    A replacement counts as an addition and a removal if no loss is known for it.
    """
    try:
        curve = plan_tradeoff(replace(plan, adjacency=game))
    except ValueError:  # a phase that is not accounted under that relation
        curve = None
    if curve is None and (game, plan.adjacency) == ("replace-one", "add-or-remove-one"):
        own = plan_tradeoff(plan)
        return None if own is None else group_tradeoff(own, 2)
    return curve


def claimed_ceiling(claim: Claim | None, game: Neighbors) -> Ceiling | None:
    """Return the ceiling by the claimed epsilon and delta, or None if none is for the game."""
    if claim is None or claim.claimed is None:
        return None
    curve, own = (
        approximate_dp_tradeoff(claim.claimed.epsilon, claim.claimed.delta),
        claim.claimed.adjacency,
    )
    if own != game:
        if game != "replace-one":
            return None
        curve = group_tradeoff(curve, 2)
    return Ceiling(f"claimed ({format_guarantee(claim.claimed)}, {claim.verdict})", curve)


def format_guarantee(guarantee: Guarantee) -> str:
    """Return epsilon and delta, for the description of a ceiling."""
    return (
        f"epsilon {format_epsilon(guarantee.epsilon)} at delta "
        f"{format_significant(guarantee.delta, 3)}"
    )
