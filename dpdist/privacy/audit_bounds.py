"""Lower bounds of epsilon from an adversary's guesses: trade-off curves and tests of them.

A trade-off curve is B(x) = the least Q(S) over sets S of outcomes with P(S) >= x, for every pair
of neighbours P, Q in either order: convex, non-decreasing, B(x) <= x. In the words of f-DP (Dong,
Roth and Su 2022) B(x) = f(1 - x): a test with true positive rate x has a false positive rate of at
least B(x). A lower curve says less, so rounding goes down.

An audit tests the hypothesis that a mechanism satisfies a guarantee; a rejection is wrong with
probability at most alpha. Two experiments, which must not be mixed:

* `ManyRuns`: the mechanism runs anew for every trial, with the canary or without. Trials are
  independent, so counts give Clopper-Pearson bounds (Jagielski, Ullman and Oprea 2020).
* `OneRun`: many canaries in one run, each in or out by its own fair coin, and guesses of coins.
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
from dpdist.privacy.plan import PrivacyPlan, lemma_delta
from dpdist.privacy.profiles import Losses, directions

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


# --- trade-off curves -------------------------------------------------------------------------


Array = NDArray[np.float64]
Curve = Callable[[Array], Array]

_LARGEST = 600.0  # losses beyond say nothing that a float64 could hold


def gaussian_curve(mu: ArrayLike) -> Curve:
    """Return the trade-off curve of mu-Gaussian DP: Phi(Phi^-1(x) - mu).

    mu >= 0, broadcast with x.
    """
    shift = np.asarray(mu, float)
    return lambda x: ndtr(ndtri(np.clip(x, 0.0, 1.0)) - shift)


def approximate_dp_curve(epsilon: ArrayLike, delta: ArrayLike = 0.0) -> Curve:
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


def of_losses(
    alternatives: Sequence[PrivacyLossDistribution], slack: float = 0.0, directed: bool = False
) -> Curve:
    """Return the trade-off curve of a mechanism with one of these privacy losses.

    It holds in both directions. directed: with the record for P and without for Q only, which
    says more when it is known which is which.

    P(S) <= e^l Q(S) + delta(l) for every loss l, so B(x) is the largest of e^-l (x - delta(l)).
    With the maximum of all profiles for delta it is the greatest convex function below the curves
    of all alternatives and directions (conjugates turn maxima into hulls of minima). slack:
    added to every delta, what rounding may have lost. Raises ValueError for several grids.
    """
    found = [one for loss in alternatives for one in directions(loss)[: 1 if directed else 2]]
    return _below(found, slack)


def by_direction(loss: PrivacyLossDistribution, slack: float = 0.0) -> tuple[Curve, Curve]:
    """Return the two trade-off curves of a loss, one for each direction.

    The first is from data with the record (or group) to data without, the second the reverse.
    slack: as in `of_losses`.
    """
    found = directions(loss)
    return _below(found[:1], slack), _below(found[-1:], slack)


def _below(found: Sequence[Losses], slack: float) -> Curve:
    """Return the greatest convex curve below all these. Raises ValueError for several grids."""
    grid = found[0].grid
    if any(one.grid != grid for one in found):
        raise ValueError("losses on one grid are needed")
    steps = _steps(found, grid)
    deltas = np.minimum(np.max([one.at(steps) for one in found], axis=0) + slack, 1.0)
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


def of_plan(plan: PrivacyPlan, directed: bool = False) -> Curve | None:
    """Return the trade-off curve that the plan proves, or None.

    None where its loss has no distribution (no noise, or Renyi DP alone): there is no curve
    that an audit could refute.
    """
    from dpdist.privacy import accounting
    from dpdist.privacy.pld import Unsupported, loss_of

    paths = plan.alternatives(plan.phases)
    try:
        # Ten times coarser than the price: still below the true curve, by 1e-3 of epsilon at most.
        grid = 10 * max(accounting.grid_for(path, plan.neighbours) for path in paths)
        found = [loss_of(path, plan.neighbours, grid) for path in paths]
    except Unsupported:
        return None
    known = [loss.pld for loss in found if loss.pld is not None]
    if len(known) < len(found):
        return None
    return of_losses(known, max(loss.rounding for loss in found), directed)


def _steps(found: Sequence[Losses], grid: float) -> NDArray[np.int64]:
    """Return all losses that occur, in steps of the grid, and their opposites."""
    ends = [abs(end) for one in found for end in (one.first, one.first + len(one.probabilities))]
    most = min(max(1, *ends), math.floor(_LARGEST / grid))
    return np.arange(-most, most + 1)


def of_group(curve: Curve, size: int) -> Curve:
    """Return the trade-off curve of data sets that differ in up to `size` records.

    It is the curve, composed `size` times.
    """
    if size < 1:
        raise ValueError(f"a group has at least one record, got {size}")

    def grouped(x: Array) -> Array:
        for _ in range(size):
            x = curve(x)
        return x

    return grouped


def curve_ceiling(curve: Curve, false_positives: ArrayLike) -> Array:
    """Return the largest true positive rate of any attack at these false positive rates."""
    return 1 - curve(1 - np.asarray(false_positives, float))


# --- tests of many runs and of one run --------------------------------------------------------


_MOST = 64.0  # no count refutes a larger epsilon or mu


def shared_alpha(alpha: float, audits: int) -> float:
    """Return the error of each of several audits of one run (Bonferroni).

    All together then err with probability alpha. An audit beyond those counted beforehand is
    exploratory: no statement.
    """
    if audits < 1:
        raise ValueError(f"at least one audit is made, got {audits}")
    return float(check_alpha(alpha)) / audits


# --- many runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """Scores of many runs, one score a run.

    runs (n,): the runs' ids, all different; present (n,): whether the canary was in; scores
    (n,): larger where it seems to be in.

    Raises ValueError for scores of one run: its canaries share noise and model, so pooling them
    into binomial bounds accuses correct code far more often than alpha.
    """

    runs: np.ndarray
    present: np.ndarray
    scores: np.ndarray

    def __post_init__(self) -> None:
        shapes = {np.shape(self.runs), np.shape(self.present), np.shape(self.scores)}
        if len(shapes) != 1 or np.ndim(self.scores) != 1:
            raise ValueError(f"runs, present and scores are vectors of one length, got {shapes}")
        if len(np.unique(self.runs)) != len(self.runs):
            raise ValueError(
                "several scores of one run: canaries of one run are not independent trials; "
                "audit them by the one-run bounds"
            )
        if not np.isfinite(self.scores).all():
            raise ValueError("scores must be finite")
        if min(np.sum(self.present), np.sum(~np.asarray(self.present, bool))) < 2:
            raise ValueError("at least two runs with and two without the canary are needed")

    @property
    def sides(self) -> tuple[Array, Array]:
        """Return the scores with the canary, and those without."""
        present = np.asarray(self.present, bool)
        return self.scores[present], self.scores[~present]

    @classmethod
    def of(cls, inside: ArrayLike, outside: ArrayLike) -> Trials:
        """Return the trials of runs that each made one score: with the canary, and without."""
        scores = np.concatenate([np.asarray(inside, float), np.asarray(outside, float)])
        present = np.arange(len(scores)) < np.size(inside)
        return cls(np.arange(len(scores)), present, scores)


@dataclass(frozen=True)
class ManyRuns:
    """Counts beyond a threshold that other runs had fixed.

    hits of `inside` runs with the canary, false of `outside` runs without. Exact for independent
    runs; the true rates are outside of the bounds with probability at most alpha in all.
    """

    hits: int
    inside: int
    false: int
    outside: int
    alpha: float = 0.05
    threshold: float | None = None

    @classmethod
    def of(
        cls,
        trials: Trials,
        alpha: float = 0.05,
        delta: float | None = None,
        fix: float = 0.5,
        curve: Curve | None = None,
        pilot: Trials | None = None,
    ) -> ManyRuns:
        """Return the counts, with a threshold that is fixed by runs that do not count.

        These are the first `fix` of the runs of either kind; or a `pilot`, trials that are
        none of these, and then all runs count.

        It is the one that promises the largest epsilon at `delta`, to go farthest beyond a `curve`,
        or, without either, the largest mu. The order of the runs decides, which must not depend on
        their scores.
        """
        inside, outside = trials.sides
        if pilot is None:
            first_in, inside = _split(inside, fix)
            first_out, outside = _split(outside, fix)
            sizes = len(first_in), len(first_out)
        else:
            first_in, first_out = pilot.sides
            sizes = len(inside), len(outside)
        threshold = _threshold(first_in, first_out, sizes, alpha, delta, curve)
        hits, false = int((inside > threshold).sum()), int((outside > threshold).sum())
        return cls(hits, len(inside), false, len(outside), alpha, threshold)

    @cached_property
    def rates(self) -> tuple[float, float]:
        """Return a lower bound of the true positive rate and an upper bound of the false one."""
        half = self.alpha / 2
        return (
            float(clopper_pearson_lower(self.hits, self.inside, half)),
            float(clopper_pearson_upper(self.false, self.outside, half)),
        )

    def rejects(self, curve: Curve) -> bool:
        """Return whether the rates are impossible for a mechanism with this trade-off curve."""
        low, high = self.rates
        return bool(curve(np.asarray(low)) > high)

    def epsilon(self, delta: float = 0.0, size: int = 1) -> float:
        """Return the largest epsilon that is rejected with this delta; size: copies of the canary.

        For one copy max(ln((TPR - delta) / FPR), ln((1 - FPR - delta) / (1 - TPR))).
        """
        rejects = lambda x: self.rejects(of_group(approximate_dp_curve(x, delta), size))  # noqa: E731
        return float(_largest(rejects, 0.0, _MOST))

    def mu(self, size: int = 1) -> float:
        """Return the largest rejected mu of Gaussian DP: (Phi^-1(TPR) - Phi^-1(FPR)) / size."""
        low, high = self.rates
        return max(0.0, float(ndtri(low) - ndtri(high)) / size) if low > 0 and high < 1 else 0.0

    def gaussian_epsilon(self, delta: float, size: int = 1) -> float:
        """Return epsilon at delta of the largest rejected mu; a bound for Gaussian mechanisms."""
        return epsilon_of_mu(self.mu(size), delta)


def _split(scores: Array, fix: float) -> tuple[Array, Array]:
    first = min(max(1, round(fix * len(scores))), len(scores) - 1)
    return scores[:first], scores[first:]


def _threshold(
    inside: Array,
    outside: Array,
    sizes: tuple[int, int],
    alpha: float,
    delta: float | None,
    curve: Curve | None,
) -> float:
    """Return the threshold for counts. sizes: number of runs of either kind behind the bounds."""
    pooled = np.concatenate([inside, outside])
    candidates = np.unique(np.quantile(pooled, np.linspace(0, 1, 257), method="lower"))
    shares = [
        1 - np.searchsorted(np.sort(s), candidates, "right") / len(s) for s in (inside, outside)
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
class OneRun:
    """Guesses in one run.

    canaries m, each in or out by its own fair coin (or, of each of m pairs, one by its own fair
    coin); guesses r <= m, made without the coins; right: the number of right guesses.

    The number of guesses is fixed before anything is seen. Under add-or-remove a coin says in or
    out; under replace-one which of a pair.
    """

    canaries: int
    guesses: int
    right: int
    alpha: float = 0.05

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        if not 0 <= self.right <= self.guesses <= self.canaries or self.guesses < 1:
            raise ValueError(
                f"0 <= right <= guesses <= canaries is needed, got {self.right}, {self.guesses} "
                f"and {self.canaries}"
            )

    @classmethod
    def of(cls, scores: ArrayLike, present: ArrayLike, guesses: int, alpha: float = 0.05) -> OneRun:
        """Guess "in" for the guesses // 2 highest scores and "out" for as many of the lowest.

        scores, present (m,). Ties are broken by position, which must not depend on the coins.
        """
        scores, present = np.asarray(scores, float), np.asarray(present, bool)
        if scores.shape != present.shape or scores.ndim != 1 or not np.isfinite(scores).all():
            raise ValueError("scores and coins are vectors of one length, scores finite")
        each = guesses // 2
        if not 1 <= each <= len(scores) // 2:
            raise ValueError(f"guesses must be 2 to {len(scores)}, got {guesses}")
        order = np.argsort(scores, kind="stable")
        right = int((~present[order[:each]]).sum() + present[order[-each:]].sum())
        return cls(len(scores), 2 * each, right, alpha)

    def epsilon(self, delta: float = 0.0, size: int = 1) -> float:
        """Return the largest epsilon below which all are rejected by counting.

        No assumption about the mechanism is made. size: copies of each canary. Source:
        Steinke et al. 2023, Theorem 5.2.
        """
        low, step = 0.0, 0.05  # the p value need not rise everywhere: walk, then refine
        while low < _MOST:
            grid = low + step * np.arange(33)
            kept = np.flatnonzero(self.p_values(grid, delta, size) > self.alpha)
            if len(kept):
                break
            low = float(grid[-1])
        first = float(grid[kept[0]]) if len(kept) else _MOST
        rejects = lambda x: self.p_values(x, delta, size)[0] <= self.alpha  # noqa: E731
        return float(_largest(rejects, max(first - step, 0.0), first))

    def p_values(self, epsilon: ArrayLike, delta: float = 0.0, size: int = 1) -> Array:
        """Return the largest probability of so many right guesses, for each epsilon (n,).

        Under (epsilon, delta)-DP it is Pr[X >= v] + 2 m delta max_i Pr[v - i <= X < v] / i,
        X ~ Bin(r, e^epsilon / (1 + e^epsilon)).
        """
        each, v = np.ravel(epsilon), self.right
        right = expit(size * each)
        values = bdtrc(v - 1, self.guesses, right) if v else np.ones(len(each))
        if delta and v:
            i = np.arange(1, v + 1)
            between = np.cumsum(scipy.stats.binom.pmf(v - i, self.guesses, right[:, None]), axis=1)
            lost = np.array([lemma_delta(one, delta, size) for one in each])
            values = values + 2 * self.canaries * lost * np.max(between / i, axis=1)
        return np.minimum(1.0, values)

    def rejects(self, curve: Curve) -> bool:
        """Return whether so many right guesses refute a mechanism with this trade-off curve.

        The confidence is 1 - alpha. Convex curves only: all of
        ``dpdist.privacy.audit_bounds``. Source: Mahloujifar et al. 2025, Algorithm 3.
        """
        return bool(improbable(self.canaries, self.guesses, self.right, self.alpha, curve))

    def mu(self, size: int = 1) -> float:
        """Return the largest rejected mu of Gaussian DP."""
        return float(one_run_mu(self.canaries, self.guesses, self.right, self.alpha)) / size

    def gaussian_epsilon(self, delta: float, size: int = 1) -> float:
        """Return epsilon at delta of the largest rejected mu; a bound for Gaussian mechanisms."""
        return epsilon_of_mu(self.mu(size), delta)


def one_run_mu(canaries: int, guesses: int, right: ArrayLike, alpha: float = 0.05) -> Array:
    """Return `OneRun.mu` of many runs at once: right (n,) to (n,)."""
    right = np.asarray(right)
    rejects = lambda mu: improbable(canaries, guesses, right, alpha, gaussian_curve(mu))  # noqa: E731
    return _largest(rejects, np.zeros(right.shape), np.full(right.shape, _MOST))


def improbable(
    canaries: int, guesses: int, right: ArrayLike, alpha: ArrayLike, curve: Curve
) -> np.ndarray:
    """Return whether `right` or more right guesses have probability below alpha.

    This is for every mechanism with this curve: bool, element by element of `right` (the
    curve's own parameters broadcast with it).

    From above: r is the share of canaries guessed right, h of those guessed wrong, in runs with at
    least i right ones, if alpha is the probability of `right` or more. The curve bounds h from
    below by B(r), and counts bound how r grows with h; it is impossible when both exceed 1.
    """
    right = np.asarray(right)
    a = np.asarray(alpha, float)
    r, h = a * right / canaries, a * (guesses - right) / canaries
    for i in range(int(np.max(right)) - 1, -1, -1):
        most = np.where(i < right, np.maximum(h, curve(r)), h)
        if i < np.min(right) and np.array_equal(most, h):
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


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return epsilon at delta of mu-Gaussian DP; 0 for mu 0."""
    return float(gaussian_epsilon(delta, 1.0, mu)) if mu > 0 else 0.0


def _largest(rejects: Callable[[Array], ArrayLike], low: ArrayLike, high: ArrayLike) -> Array:
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


ASSUMED = "the run is the plan, but for the size of its noise"
_RATIO = 1.01  # of neighbouring noises of the family
_MOST_POWER, _LEAST_POWER = 350, -140  # powers of it: 32 times the noise, a quarter of it


def noise_rejected(run: OneRun | ManyRuns, plan: PrivacyPlan, size: int = 1) -> float:
    """Return the largest epsilon of the plan with another noise that the run rejects.

    The run rejects its trade-off curve; the noise varies in steps of 1 %. 0 for none. size:
    copies of the canary.
    """

    def rejects(power: int) -> bool:
        curve = _curve(plan, power)
        return curve is not None and run.rejects(of_group(curve, size))

    if not rejects(_MOST_POWER):
        return 0.0
    low, high = -1, _MOST_POWER  # less noise is harder to reject
    if rejects(0):
        low, high, width = -10, 0, 10
        while rejects(low) and low > _LEAST_POWER:
            low, high, width = max(low - 2 * width, _LEAST_POWER), low, 2 * width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return _epsilon(plan, high)


@lru_cache(maxsize=512)
def _curve(plan: PrivacyPlan, power: int) -> Curve | None:
    return of_plan(_with_noise(plan, power))


@lru_cache(maxsize=512)
def _epsilon(plan: PrivacyPlan, power: int) -> float:
    """Return epsilon of the plan with this noise, rounded as the plan's own guarantee is."""
    return _with_noise(plan, power).guarantee().epsilon


def _with_noise(plan: PrivacyPlan, power: int) -> PrivacyPlan:
    """Return the plan with _RATIO^power of the noise on its steps."""
    factor = math.pow(_RATIO, power)
    return replace(
        plan,
        phases=tuple(
            phase
            if (loop := phase.loop) is None
            else replace(loop, noise_multiplier=loop.noise_multiplier * factor)
            for phase in plan.phases
        ),
    )
