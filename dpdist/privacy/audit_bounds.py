"""Lower bounds of epsilon from an adversary's guesses: trade-off curves and tests of them.

A trade-off curve is B(x) = the least Q(S) over sets S of outcomes with P(S) >= x, for every pair
of neighbors P, Q in either order: convex, non-decreasing, B(x) <= x. In the words of f-DP (Dong,
Roth and Su 2022) B(x) = f(1 - x): a test with true positive rate x has a false positive rate of at
least B(x). A lower curve says less, so rounding goes down.

An audit tests the hypothesis that a mechanism satisfies a guarantee; a rejection is wrong with
probability at most alpha. Two experiments, which must not be mixed:

* `ThresholdCounts`: the mechanism runs once per trial, with the canary or without. Trials are
  independent, so counts give Clopper-Pearson bounds (Jagielski, Ullman and Oprea 2020).
* `OneRunGuesses`: many canaries in one run, each in or out by its own fair coin, and guesses of
coins.
  Guesses in one run depend on each other: counts of them are no binomials, and only theorems about
  one run hold (Steinke, Nasr and Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2025).

(epsilon, delta)-DP needs no assumption about the mechanism. mu-Gaussian DP, or another family of
trade-off curves, gives much more, but its epsilon is the mechanism's only if the mechanism is in
that family. A mechanism whose trials reject the plan's own curve breaks the plan, without any
assumption; an epsilon below the proved one is that of the plan with as much more noise as is still
rejected, a bound where the run is the plan but for the size of its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, expit, ndtr, ndtri

from dpdist.core.binomial import check_alpha, clopper_pearson_lower, clopper_pearson_upper
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.plan import PrivacyPlan, group_delta_by_lemma
from dpdist.privacy.profiles import LossPmf, loss_directions

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


# --- trade-off curves -------------------------------------------------------------------------


Array = NDArray[np.float64]
TradeoffCurve = Callable[[Array], Array]

_LARGEST = 600.0  # losses beyond say nothing that a float64 could hold


def gaussian_tradeoff(mu: ArrayLike) -> TradeoffCurve:
    """Return the trade-off curve of mu-Gaussian DP: Phi(Phi^-1(x) - mu).

    mu >= 0, broadcast with x.
    """
    shift = np.asarray(mu, float)
    return lambda x: ndtr(ndtri(np.clip(x, 0.0, 1.0)) - shift)


def approximate_dp_tradeoff(epsilon: ArrayLike, delta: ArrayLike = 0.0) -> TradeoffCurve:
    """Return the trade-off curve of (epsilon, delta)-DP.

    It is the larger of e^-epsilon (x - delta) and 1 - delta - e^epsilon (1 - x), and at least
    0. Broadcast with x.
    """
    grown, lost = np.exp(np.minimum(epsilon, _LARGEST)), np.asarray(delta, float)

    def curve(x: Array) -> Array:
        x = np.clip(x, 0.0, 1.0)
        level: Array = np.maximum(0.0, np.maximum((x - lost) / grown, 1 - lost - grown * (1 - x)))
        return level

    return curve


def pld_tradeoff(
    losses: Sequence[PrivacyLossDistribution], slack: float = 0.0, one_direction: bool = False
) -> TradeoffCurve:
    """Return the trade-off curve of a mechanism with one of these privacy losses.

    It holds in both directions. one_direction: with the record for P and without for Q only, which
    says more when it is known which is which.

    P(S) <= e^l Q(S) + delta(l) for every loss l, so B(x) is the largest of e^-l (x - delta(l)).
    With the maximum of all profiles for delta it is the greatest convex function below the curves
    of all alternatives and directions (conjugates turn maxima into hulls of minima). slack:
    added to every delta, what rounding may have lost. Raises ValueError for several grids.
    """
    found = [one for loss in losses for one in loss_directions(loss)[: 1 if one_direction else 2]]
    return _convex_minorant(found, slack)


def directed_tradeoffs(
    loss: PrivacyLossDistribution, slack: float = 0.0
) -> tuple[TradeoffCurve, TradeoffCurve]:
    """Return the two trade-off curves of a loss, one for each direction.

    The first is from data with the record (or group) to data without, the second the reverse.
    slack: as in `pld_tradeoff`.
    """
    found = loss_directions(loss)
    return _convex_minorant(found[:1], slack), _convex_minorant(found[-1:], slack)


def _convex_minorant(losses: Sequence[LossPmf], slack: float) -> TradeoffCurve:
    """Return the greatest convex curve below all these. Raises ValueError for several grids."""
    grid = losses[0].grid
    if any(one.grid != grid for one in losses):
        raise ValueError("losses on one grid are needed")
    steps = _steps(losses, grid)
    deltas = np.minimum(np.max([one.profile_at(steps) for one in losses], axis=0) + slack, 1.0)
    slopes = np.exp(-steps * grid)
    # Tangents with falling slopes: where x grows, those of smaller losses are the highest ones.
    falls = -np.diff(slopes)
    meets = np.minimum.accumulate(-np.diff(slopes * deltas) / falls)  # with the next larger loss

    def curve(x: Array) -> Array:
        x = np.clip(x, 0.0, 1.0)
        above = len(meets) - np.searchsorted(meets[::-1], x, side="right")
        level: Array = np.clip(slopes[above] * (x - deltas[above]), 0.0, x)
        return level

    return curve


def plan_tradeoff(plan: PrivacyPlan, one_direction: bool = False) -> TradeoffCurve | None:
    """Return the trade-off curve that the plan proves.

    None if its loss has no distribution (no noise, or Renyi DP alone): an audit then has no curve
    to refute.
    """
    from dpdist.privacy import accounting
    from dpdist.privacy.pld import UnsupportedMechanismError, compute_privacy_loss

    paths = plan.path_events(plan.phases)
    try:
        # Ten times coarser than the price: still below the true curve, by 1e-3 of epsilon at most.
        grid = 10 * max(accounting.choose_grid(path, plan.adjacency) for path in paths)
        found = [compute_privacy_loss(path, plan.adjacency, grid) for path in paths]
    except UnsupportedMechanismError:
        return None
    known = [loss.pld for loss in found if loss.pld is not None]
    if len(known) < len(found):
        return None
    return pld_tradeoff(known, max(loss.rounding for loss in found), one_direction)


def _steps(losses: Sequence[LossPmf], grid: float) -> NDArray[np.int64]:
    """Return all losses that occur, in steps of the grid, and their opposites."""
    ends = [
        abs(end)
        for one in losses
        for end in (one.lower_loss, one.lower_loss + len(one.probabilities))
    ]
    most = min(max(1, *ends), math.floor(_LARGEST / grid))
    return np.arange(-most, most + 1)


def group_tradeoff(curve: TradeoffCurve, group_size: int) -> TradeoffCurve:
    """Return the trade-off curve of data sets that differ in up to `group_size` records.

    It is the curve, composed `group_size` times.
    """
    if group_size < 1:
        raise ValueError(f"a group has at least one record, got {group_size}")

    def grouped(x: Array) -> Array:
        for _ in range(group_size):
            x = curve(x)
        return x

    return grouped


def max_true_positive_rate(curve: TradeoffCurve, false_positive_rates: ArrayLike) -> Array:
    """Return the largest true positive rate of any attack at these false positive rates."""
    return 1 - curve(1 - np.asarray(false_positive_rates, float))


# --- tests of many runs and of one run --------------------------------------------------------


_MAX_EPSILON = 64.0  # no count refutes a larger epsilon or mu


def bonferroni_alpha(alpha: float, audits: int) -> float:
    """Return the error of each of several audits of one run (Bonferroni).

    All together then err with probability alpha. An audit beyond those counted beforehand is
    exploratory: no statement.
    """
    if audits < 1:
        raise ValueError(f"at least one audit is made, got {audits}")
    return float(check_alpha(alpha)) / audits


# --- many runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CanaryScores:
    """Scores of many runs, one score a run.

    runs (n,): the runs' ids, all different; present (n,): whether the canary was in; scores
    (n,): larger where it seems to be in.

    Raises ValueError for scores of one run: its canaries share noise and model, so pooling them
    into binomial bounds accuses correct code far more often than alpha.
    """

    run_ids: np.ndarray
    has_canary: np.ndarray
    scores: np.ndarray

    def __post_init__(self) -> None:
        shapes = {np.shape(self.run_ids), np.shape(self.has_canary), np.shape(self.scores)}
        if len(shapes) != 1 or np.ndim(self.scores) != 1:
            raise ValueError(f"runs, present and scores are vectors of one length, got {shapes}")
        if len(np.unique(self.run_ids)) != len(self.run_ids):
            raise ValueError(
                "several scores of one run: canaries of one run are not independent trials; "
                "audit them by the one-run bounds"
            )
        if not np.isfinite(self.scores).all():
            raise ValueError("scores must be finite")
        if min(np.sum(self.has_canary), np.sum(~np.asarray(self.has_canary, bool))) < 2:
            raise ValueError("at least two runs with and two without the canary are needed")

    @property
    def scores_by_canary(self) -> tuple[Array, Array]:
        """Return the scores with the canary, and those without."""
        present = np.asarray(self.has_canary, bool)
        return self.scores[present], self.scores[~present]

    @classmethod
    def from_scores(cls, with_canary: ArrayLike, without_canary: ArrayLike) -> CanaryScores:
        """Return the trials of runs that each made one score: with the canary, and without."""
        scores = np.concatenate([np.asarray(with_canary, float), np.asarray(without_canary, float)])
        present = np.arange(len(scores)) < np.size(with_canary)
        return cls(np.arange(len(scores)), present, scores)


@dataclass(frozen=True)
class ThresholdCounts:
    """Counts beyond a threshold that other runs had fixed.

    hits of `num_with_canary` runs with the canary, false of `num_without_canary` runs without.
    Exact for independent runs; the true rates are outside of the bounds with probability at most
    alpha in all.
    """

    true_positives: int
    num_with_canary: int
    false_positives: int
    num_without_canary: int
    alpha: float = 0.05
    threshold: float | None = None

    @classmethod
    def from_scores(
        cls,
        scores: CanaryScores,
        alpha: float = 0.05,
        delta: float | None = None,
        threshold_fraction: float = 0.5,
        curve: TradeoffCurve | None = None,
        pilot: CanaryScores | None = None,
    ) -> ThresholdCounts:
        """Return the counts, with a threshold that is fixed by runs that do not count.

        These are the first `threshold_fraction` of the runs of either kind; or a `pilot`, trials
        that are none of these, and then all runs count.

        It is the one that promises the largest epsilon at `delta`, to go farthest beyond a `curve`,
        or, without either, the largest mu. The order of the runs decides, which must not depend on
        their scores.
        """
        inside, outside = scores.scores_by_canary
        if pilot is None:
            first_in, inside = _split(inside, threshold_fraction)
            first_out, outside = _split(outside, threshold_fraction)
            sizes = len(first_in), len(first_out)
        else:
            first_in, first_out = pilot.scores_by_canary
            sizes = len(inside), len(outside)
        threshold = _choose_threshold(first_in, first_out, sizes, alpha, delta, curve)
        hits, false = int((inside > threshold).sum()), int((outside > threshold).sum())
        return cls(hits, len(inside), false, len(outside), alpha, threshold)

    @cached_property
    def rate_bounds(self) -> tuple[float, float]:
        """Return a lower bound of the true positive rate and an upper bound of the false one."""
        half = self.alpha / 2
        return (
            float(clopper_pearson_lower(self.true_positives, self.num_with_canary, half)),
            float(clopper_pearson_upper(self.false_positives, self.num_without_canary, half)),
        )

    def rejects(self, curve: TradeoffCurve) -> bool:
        """Return whether the rates are impossible for a mechanism with this trade-off curve."""
        low, high = self.rate_bounds
        return bool(curve(np.asarray(low)) > high)

    def epsilon(self, delta: float = 0.0, copies: int = 1) -> float:
        """Return the largest epsilon that is rejected with this delta.

        copies: copies of the canary. For one copy max(ln((TPR - delta) / FPR), ln((1 - FPR - delta)
        / (1 - TPR))).
        """
        rejects = lambda x: self.rejects(group_tradeoff(approximate_dp_tradeoff(x, delta), copies))  # noqa: E731
        return float(_bisect_largest(rejects, 0.0, _MAX_EPSILON))

    def mu(self, copies: int = 1) -> float:
        """Return the largest rejected mu of Gaussian DP: (Phi^-1(TPR) - Phi^-1(FPR)) / size."""
        low, high = self.rate_bounds
        return max(0.0, float(ndtri(low) - ndtri(high)) / copies) if low > 0 and high < 1 else 0.0

    def gaussian_epsilon(self, delta: float, copies: int = 1) -> float:
        """Return epsilon at delta of the largest rejected mu; a bound for Gaussian mechanisms."""
        return mu_to_epsilon(self.mu(copies), delta)


def _split(scores: Array, fix: float) -> tuple[Array, Array]:
    first = min(max(1, round(fix * len(scores))), len(scores) - 1)
    return scores[:first], scores[first:]


def _choose_threshold(
    with_canary: Array,
    without_canary: Array,
    sizes: tuple[int, int],
    alpha: float,
    delta: float | None,
    curve: TradeoffCurve | None,
) -> float:
    """Return the threshold for counts. sizes: number of runs of either kind in the bounds."""
    pooled = np.concatenate([with_canary, without_canary])
    candidates = np.unique(np.quantile(pooled, np.linspace(0, 1, 257), method="lower"))
    shares = [
        1 - np.searchsorted(np.sort(s), candidates, "right") / len(s)
        for s in (with_canary, without_canary)
    ]
    hits = [np.rint(share * size) for share, size in zip(shares, sizes, strict=True)]
    low = np.asarray(clopper_pearson_lower(hits[0], sizes[0], alpha / 2))
    high = np.asarray(clopper_pearson_upper(hits[1], sizes[1], alpha / 2))
    if delta is None:
        promised = ndtri(low if curve is None else curve(low)) - ndtri(high)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            above = np.log(np.maximum(low - delta, 0) / high)
            below = np.log(np.maximum(1 - high - delta, 0) / (1 - low))
        promised = np.fmax(above, below)
    best = candidates[int(np.argmax(np.nan_to_num(promised, nan=-np.inf)))]
    # In the middle of the gap: just above the others' largest score the next one may lie higher.
    higher = pooled[pooled > best]
    return float((best + higher.min()) / 2 if len(higher) else best)


# --- one run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneRunGuesses:
    """Guesses in one run.

    canaries m, each in or out by its own fair coin (or, of each of m pairs, one by its own fair
    coin); guesses r <= m, made without the coins; correct: the number of right guesses.

    The number of guesses is fixed before anything is seen. Under add-or-remove a coin says in or
    out; under replace-one which of a pair.
    """

    canaries: int
    guesses: int
    correct: int
    alpha: float = 0.05

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        if not 0 <= self.correct <= self.guesses <= self.canaries or self.guesses < 1:
            raise ValueError(
                f"0 <= right <= guesses <= canaries is needed, got {self.correct}, {self.guesses} "
                f"and {self.canaries}"
            )

    @classmethod
    def from_scores(
        cls, scores: ArrayLike, has_canary: ArrayLike, guesses: int, alpha: float = 0.05
    ) -> OneRunGuesses:
        """Guess "in" for the guesses // 2 highest scores and "out" for the same number of lowest.

        scores, present (m,). Ties are broken by position, which must not depend on the coins.
        """
        scores, has_canary = np.asarray(scores, float), np.asarray(has_canary, bool)
        if scores.shape != has_canary.shape or scores.ndim != 1 or not np.isfinite(scores).all():
            raise ValueError("scores and coins are vectors of one length, scores finite")
        each = guesses // 2
        if not 1 <= each <= len(scores) // 2:
            raise ValueError(f"guesses must be 2 to {len(scores)}, got {guesses}")
        order = np.argsort(scores, kind="stable")
        right = int((~has_canary[order[:each]]).sum() + has_canary[order[-each:]].sum())
        return cls(len(scores), 2 * each, right, alpha)

    def epsilon(self, delta: float = 0.0, copies: int = 1) -> float:
        """Return the largest epsilon below which all are rejected by counting.

        No assumption about the mechanism is made. copies: copies of each canary. Source:
        Steinke et al. 2023, Theorem 5.2.
        """
        low, step = 0.0, 0.05  # the p value need not rise everywhere: walk, then refine
        while low < _MAX_EPSILON:
            grid = low + step * np.arange(33)
            kept = np.flatnonzero(self.p_values(grid, delta, copies) > self.alpha)
            if len(kept):
                break
            low = float(grid[-1])
        first = float(grid[kept[0]]) if len(kept) else _MAX_EPSILON
        rejects = lambda x: self.p_values(x, delta, copies)[0] <= self.alpha  # noqa: E731
        return float(_bisect_largest(rejects, max(first - step, 0.0), first))

    def p_values(self, epsilon: ArrayLike, delta: float = 0.0, copies: int = 1) -> Array:
        """Return the largest probability of this many right guesses, for each epsilon (n,).

        Under (epsilon, delta)-DP it is Pr[X >= v] + 2 m delta max_i Pr[v - i <= X < v] / i,
        X ~ Bin(r, e^epsilon / (1 + e^epsilon)).
        """
        each, v = np.ravel(epsilon), self.correct
        right = expit(copies * each)
        values = bdtrc(v - 1, self.guesses, right) if v else np.ones(len(each))
        if delta and v:
            i = np.arange(1, v + 1)
            between = np.cumsum(scipy.stats.binom.pmf(v - i, self.guesses, right[:, None]), axis=1)
            lost = np.array([group_delta_by_lemma(one, delta, copies) for one in each])
            values = values + 2 * self.canaries * lost * np.max(between / i, axis=1)
        return np.minimum(1.0, values)

    def rejects(self, curve: TradeoffCurve) -> bool:
        """Return whether this many right guesses refute a mechanism with this trade-off curve.

        The confidence is 1 - alpha. Convex curves only: all of
        ``dpdist.privacy.audit_bounds``. Source: Mahloujifar et al. 2025, Algorithm 3.
        """
        return bool(is_improbable(self.canaries, self.guesses, self.correct, self.alpha, curve))

    def mu(self, copies: int = 1) -> float:
        """Return the largest rejected mu of Gaussian DP."""
        return float(one_run_mu(self.canaries, self.guesses, self.correct, self.alpha)) / copies

    def gaussian_epsilon(self, delta: float, copies: int = 1) -> float:
        """Return epsilon at delta of the largest rejected mu; a bound for Gaussian mechanisms."""
        return mu_to_epsilon(self.mu(copies), delta)


def one_run_mu(canaries: int, guesses: int, correct: ArrayLike, alpha: float = 0.05) -> Array:
    """Return `OneRunGuesses.mu` of many runs at once: right (n,) to (n,)."""
    correct = np.asarray(correct)
    rejects = lambda mu: is_improbable(canaries, guesses, correct, alpha, gaussian_tradeoff(mu))  # noqa: E731
    return _bisect_largest(rejects, np.zeros(correct.shape), np.full(correct.shape, _MAX_EPSILON))


def is_improbable(
    canaries: int, guesses: int, correct: ArrayLike, alpha: ArrayLike, curve: TradeoffCurve
) -> np.ndarray:
    """Return whether `correct` or more right guesses have probability below alpha.

    This is for every mechanism with this curve: bool, element by element of `correct` (the
    curve's own parameters broadcast with it).

    From above: r is the share of canaries guessed right, h of those guessed wrong, in runs with at
    least i right ones, if alpha is the probability of `correct` or more. The curve bounds h from
    below by B(r), and counts bound how r grows with h; it is impossible when both exceed 1.
    """
    correct = np.asarray(correct)
    a = np.asarray(alpha, float)
    r, h = a * correct / canaries, a * (guesses - correct) / canaries
    for i in range(int(np.max(correct)) - 1, -1, -1):
        most = np.where(i < correct, np.maximum(h, curve(r)), h)
        if i < np.min(correct) and np.array_equal(most, h):
            break  # nor do the next ones change anything
        r, h = r + i / (guesses - i) * (most - h), most
    rejected: np.ndarray = r + h > guesses / canaries
    return rejected


# --- from hypotheses to epsilon ---------------------------------------------------------------


def log_likelihood_ratio(sums: ArrayLike, sigma: float, rate: float) -> Array:
    """Return the evidence of noisy sums for the canary: ln(1 - q + q e^((x - 1/2) / sigma^2)).

    The terms are added up over releases.

    sums: in units of the clip along the canary. For q < 1 adding up the sums themselves would keep
    only a part of mu (0.43 to 0.76 at usual settings).
    """
    exponent = (np.asarray(sums, float) - 0.5) / sigma**2
    if rate == 1:
        return exponent
    exponents: Array = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
    return exponents


def mu_to_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at delta of mu-Gaussian DP; 0 for mu 0."""
    return float(gaussian_epsilon(delta, 1.0, mu)) if mu > 0 else 0.0


def _bisect_largest(
    rejects: Callable[[Array], ArrayLike], low: ArrayLike, high: ArrayLike
) -> Array:
    """Return the largest rejected value where all below it are rejected, by bisection.

    Element by element; 0 where `low` is not rejected.
    """
    low, high = np.asarray(low, float), np.asarray(high, float)
    none = ~np.asarray(rejects(low))
    for _ in range(40):
        middle = (low + high) / 2
        hit = np.asarray(rejects(middle))
        low, high = np.where(hit, middle, low), np.where(hit, high, middle)
    return np.where(none, 0.0, low)


# --- the plan with another size of noise ------------------------------------------------------


NOISE_SCALE_ASSUMPTION = "the run is the plan, but for the size of its noise"
_RATIO = 1.01  # of neighboring noises of the family
_MAX_POWER, _MIN_POWER = 350, -140  # powers of it: 32 times the noise, a quarter of it


def largest_rejected_epsilon(
    run: OneRunGuesses | ThresholdCounts, plan: PrivacyPlan, copies: int = 1
) -> float:
    """Return the largest epsilon of the plan with another noise that the run rejects.

    The run rejects its trade-off curve; the noise varies in steps of 1 %. 0 for none. size:
    copies of the canary.
    """

    def rejects(power: int) -> bool:
        curve = _curve(plan, power)
        return curve is not None and run.rejects(group_tradeoff(curve, copies))

    if not rejects(_MAX_POWER):
        return 0.0
    low, high = -1, _MAX_POWER  # less noise is harder to reject
    if rejects(0):
        low, high, width = -10, 0, 10
        while rejects(low) and low > _MIN_POWER:
            low, high, width = max(low - 2 * width, _MIN_POWER), low, 2 * width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return _epsilon(plan, high)


@lru_cache(maxsize=512)
def _curve(plan: PrivacyPlan, power: int) -> TradeoffCurve | None:
    return plan_tradeoff(_scale_plan_noise(plan, power))


@lru_cache(maxsize=512)
def _epsilon(plan: PrivacyPlan, power: int) -> float:
    """Return epsilon of the plan with this noise, rounded as the plan's own guarantee is."""
    return _scale_plan_noise(plan, power).guarantee().epsilon


def _scale_plan_noise(plan: PrivacyPlan, power: int) -> PrivacyPlan:
    """Return the plan with _RATIO^power of the noise on its steps."""
    factor = math.pow(_RATIO, power)
    return replace(
        plan,
        phases=tuple(
            phase
            if (loop := phase.training_steps) is None
            else replace(loop, noise_multiplier=loop.noise_multiplier * factor)
            for phase in plan.phases
        ),
    )
