"""Find the noise, steps or batch size that meet a target epsilon: never above it, within 0.1 %.

Every search ends on a value at which `PrivacyPlan.guarantee` itself was evaluated, so the result
meets the target by the same accountant on the same grid. Renyi bounds only supply the starting
point. The price of choosing the best of several runs is here as well, for a secret number of runs
and for a public one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from dpdist.privacy.guarantee import Guarantee, Neighbors
from dpdist.privacy.phases import (
    GaussianCounts,
    GaussianScores,
    ParallelParts,
    Phase,
    RepeatAndSelect,
)
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.selection import TrialDistribution

# --- calibration ------------------------------------------------------------------------------


_TOLERANCE = 1e-3  # relative, on epsilon; an integer answer may be further off by one unit
_NOISE_LIMITS = (1e-2, 1e6)
_ROUNDS = 60


class UnreachableTargetError(ValueError):
    """No value of the searched parameter meets the target."""


def _check_target(epsilon: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"the target epsilon must be > 0 and finite, got {epsilon}")


Point = tuple[float, float]


def _largest_within_target(
    cost: Callable[[float], float],
    target: float,
    start: float,
    limits: tuple[float, float],
    whole: bool,
    stride: float = 1.2,
) -> float | None:
    """Return the largest x in `limits` (up to tolerance) with cost(x) <= target.

    None if there is none.

    cost must not decrease. Brackets from `start` in growing strides, then interpolates in
    logarithms. whole: search whole numbers only.
    """

    def snap(x: float) -> float:
        x = min(max(x, limits[0]), limits[1])
        return float(round(x)) if whole else x

    inside, outside = _bracket(cost, target, start, limits, snap, stride)
    if inside is None or outside is None:
        return None if inside is None else inside[0]
    for trial in range(_ROUNDS):
        if whole and outside[0] - inside[0] <= 1:
            break
        if not whole and outside[0] / inside[0] - 1 < 1e-12:
            break
        x = snap(_interpolate(inside, outside, None if trial % 3 == 2 else target))
        if x <= inside[0] or x >= outside[0]:
            x = snap((inside[0] + outside[0]) / 2)
            if x <= inside[0] or x >= outside[0]:
                break
        value = cost(x)
        if value > target:
            outside = (x, value)
            continue
        inside = (x, value)
        if value >= (1 - _TOLERANCE) * target:
            break
    return inside[0]


def _bracket(
    cost: Callable[[float], float],
    target: float,
    start: float,
    limits: tuple[float, float],
    snap: Callable[[float], float],
    stride: float,
) -> tuple[Point | None, Point | None]:
    """Return (x, cost(x)) at most and above the target, from `start` in growing strides.

    The first is None if no x within the limits costs at most the target; the second is None if the
    first is the largest x.
    """
    x = snap(start)
    inside: Point | None = None
    outside: Point | None = None
    while inside is None or outside is None:
        value = cost(x)
        if value <= target:
            inside = (x, value)
            if x >= limits[1] or value >= (1 - _TOLERANCE) * target:
                return inside, None
        else:
            outside = (x, value)
            if x <= limits[0]:
                return None, outside
        step = stride if value <= target else 1 / stride
        further = snap(x * step)
        x = further if further != x else snap(x + (1 if value <= target else -1))
        stride = min(stride**2, 1e3)
    return inside, outside


def _interpolate(
    inside: tuple[float, float], outside: tuple[float, float], target: float | None
) -> float:
    """Return an estimate of the value that costs the target, by a line through logarithms.

    None means the middle.
    """
    low, high = math.log(inside[0]), math.log(outside[0])
    fraction = 0.5
    if target is not None and inside[1] > 0 and math.isfinite(outside[1]):
        goal = math.log(target * (1 - _TOLERANCE / 2) / inside[1])
        fraction = min(max(goal / math.log(outside[1] / inside[1]), 0.02), 0.98)
    return math.exp(low + fraction * (high - low))


def _two_grids(
    make_plan: Callable[[float], PrivacyPlan],
    target: float,
    start: float,
    limits: tuple[float, float],
    whole: bool,
) -> float | None:
    """Return `_largest_within_target` on the plan's guarantee, mostly on a coarser grid."""
    from dpdist.privacy import accounting

    @cache
    def fine(x: float) -> float:
        return make_plan(x).guarantee().epsilon

    def coarse(x: float) -> float:
        plan = make_plan(x)
        paths = plan.path_events(plan.phases)
        return accounting.coarse_epsilon(paths, plan.delta, plan.adjacency)

    try:
        near = _largest_within_target(coarse, target, start, limits, whole)
    except accounting.UnsupportedMechanismError:  # no PLD: RDP is fast as it is
        return _largest_within_target(fine, target, start, limits, whole)
    if near is None:
        return _largest_within_target(fine, target, limits[0], limits, whole)
    value = fine(near)
    if near < limits[1] and 0 < value < (1 - _TOLERANCE) * target:
        # The coarse grid overstates by about the same factor a little further on.
        corrected = target * coarse(near) / value
        near = _largest_within_target(coarse, corrected, near, limits, whole, stride=1.003) or near
    miss = max(target / fine(near), fine(near) / target) if fine(near) > 0 else 1.0
    return _largest_within_target(fine, target, near, limits, whole, stride=min(1.2, 1.001 * miss))


def _approximate_epsilon(plan: PrivacyPlan) -> float:
    from dpdist.privacy import accounting

    paths = plan.path_events(plan.phases)
    return accounting.approximate_epsilon(paths, plan.delta, plan.adjacency)


def calibrate_noise(make_plan: Callable[[float], PrivacyPlan], epsilon: float) -> float:
    """Return the smallest noise multiplier with which a plan costs at most `epsilon`, a float.

    Guarantee: the plan with the returned noise was accounted for itself, and costs at most
    `epsilon` by `PrivacyPlan.guarantee`; if the target can be met, it costs at least 99.9 % of it
    (the rest lets the search end).

    Args:
        make_plan: function of a noise multiplier that returns the plan with it. Its cost must not
            rise with the noise; it may have several phases, a private search, scores, or anything
            else that a plan contains.
        epsilon: the target, at the plan's own delta and relation.

    Returns:
        The noise multiplier, a float in units of the clip norm.

    Raises:
        UnreachableTargetError: a ValueError; the parts of the plan without this noise cost more.
        ValueError: the target is not positive and finite, or `make_plan` does not accept a value.

    Example:
        >>> import dpdist
        >>> def plan_with(noise):
        ...     return dpdist.PrivacyPlan.dp_sgd(
        ...         records=1_000, batch_size=100, noise_multiplier=noise, steps=50, delta=1e-4
        ...     )
        >>> noise = dpdist.calibrate_noise(plan_with, epsilon=2.0)
        >>> 1.998 < plan_with(noise).guarantee().epsilon <= 2.0
        True
    """
    _check_target(epsilon)
    low, high = 0.1, 1e4
    for _ in range(9):  # to within 5 % in noise: the start only has to be near
        middle = math.sqrt(low * high)
        if _approximate_epsilon(make_plan(middle)) > epsilon:
            low = middle
        else:
            high = middle
    start = high if high < 1e4 else 1.0
    low, high = _NOISE_LIMITS
    limits = (1 / high, 1 / low)
    inverse = _two_grids(lambda x: make_plan(1 / x), epsilon, 1 / start, limits, whole=False)
    if inverse is None:
        raise UnreachableTargetError(
            f"no noise up to {high:g} reaches epsilon {epsilon:g}: the fixed parts of the plan "
            "alone cost more (or the accountant's resolution is exhausted)"
        )
    return 1 / inverse


def score_noise_for(epsilon: float, *, scores: GaussianScores, delta: float) -> float:
    """Return the smallest noise at which these scores cost a held-out record at most `epsilon`.

    Raises UnreachableTargetError.
    """

    def plan_with(noise: float) -> PrivacyPlan:
        return PrivacyPlan(scores.records, (replace(scores, noise_multiplier=noise),), delta)

    return calibrate_noise(plan_with, epsilon)


@cache
def counts_noise_for(epsilon: float, delta: float, adjacency: Neighbors) -> float:
    """Return the smallest noise multiplier at which counts of columns cost at most `epsilon`.

    It is in units of what a record adds to all counts, whatever the number of columns
    (`GaussianCounts.of_columns`). Raises UnreachableTargetError.
    """

    def plan_with(noise: float) -> PrivacyPlan:
        return PrivacyPlan(2, (GaussianCounts(noise),), delta, adjacency=adjacency)

    return calibrate_noise(plan_with, epsilon)


def noise_multiplier_for(epsilon: float, **setting: Any) -> float:
    """Return the smallest noise multiplier at which these DP-SGD steps cost at most `epsilon`.

    setting: the other arguments of `PrivacyPlan.dp_sgd`. Raises UnreachableTargetError, or
    ValueError for arguments that it refuses.
    """
    return calibrate_noise(
        lambda noise: PrivacyPlan.dp_sgd(noise_multiplier=noise, **setting), epsilon
    )


MAX_STEPS = 1_000_000  # ten times as many take minutes to account for


def steps_for(epsilon: float, *, max_steps: int = MAX_STEPS, **setting: Any) -> int:
    """Return the largest number of steps <= `max_steps` that cost at most `epsilon` (up to 0.1 %).

    setting: the other arguments of `PrivacyPlan.dp_sgd`. Raises UnreachableTargetError when one
    step already costs more.
    """
    what = "one step already costs epsilon {:.3g}, more than {:g}"
    return _largest_whole(
        lambda steps: PrivacyPlan.dp_sgd(steps=int(steps), **setting), epsilon, max_steps, what
    )


def batch_size_for(epsilon: float, *, records: int, **setting: Any) -> int:
    """Return the largest expected batch size, at most `records`, that costs at most `epsilon`.

    setting: the other arguments of `PrivacyPlan.dp_sgd`. Raises UnreachableTargetError when batches
    of one record already cost more.
    """

    def plan_with(size: float) -> PrivacyPlan:
        return PrivacyPlan.dp_sgd(records=records, batch_size=int(size), **setting)

    what = "an expected batch of one record already costs epsilon {:.3g}, above {:g}"
    return _largest_whole(plan_with, epsilon, records, what)


def _largest_whole(
    make_plan: Callable[[float], PrivacyPlan], epsilon: float, limit: int, what: str
) -> int:
    """Return the largest whole number, at most `limit`, whose plan costs at most `epsilon`.

    what: complaint where that of 1 costs more, with places for its epsilon and the target.
    """
    _check_target(epsilon)
    start = 1.0
    while 2 * start <= limit and _approximate_epsilon(make_plan(2 * start)) <= epsilon:
        start *= 2
    answer = _two_grids(make_plan, epsilon, start, (1, limit), whole=True)
    if answer is None:
        raise UnreachableTargetError(what.format(make_plan(1).guarantee().epsilon, epsilon))
    return int(answer)


# --- the best of several runs -----------------------------------------------------------------


def repeat_phases(
    phases: Sequence[Phase], distribution: TrialDistribution | None, runs: int | None
) -> tuple[Phase, ...]:
    """Return the phases of a search over trials that each execute the given ones.

    Args:
        phases: of one trial.
        distribution: of a secret number of trials; None if the number is public.
        runs: the public number of trials, of which all may be shown.
    """
    if distribution is not None:
        return (RepeatAndSelect(tuple(phases), distribution.mean, distribution.shape),)
    if runs is None:
        raise ValueError("a search has a distribution of its number of trials, or the number")
    return tuple(again for phase in phases for again in phase.repeat(runs))


def combine_training_and_scoring(
    training: Sequence[Phase],
    scoring: Sequence[Phase],
    distribution: TrialDistribution | None,
    runs: int | None,
) -> tuple[Phase, ...]:
    """Return the phases of training and search together.

    Args:
        training: phases that cover the training of every trial.
        scoring: of a trial's scores on records that no trial trains on; empty for public records.
        distribution: of a secret number of trials; None if the number is public.
        runs: the public number of trials.
    """
    if not scoring:
        return repeat_phases(training, distribution, runs)
    if distribution is None:
        parts = (
            repeat_phases(training, distribution, runs),
            repeat_phases(scoring, distribution, runs),
        )
        return (ParallelParts(parts),)
    return repeat_phases((ParallelParts((tuple(training), tuple(scoring))),), distribution, runs)


def search_guarantee(
    phases: Sequence[Phase],
    distribution: TrialDistribution | None,
    runs: int | None = None,
    *,
    records: int,
    delta: float,
    adjacency: Neighbors = "add-or-remove-one",
) -> Guarantee:
    """Return the guarantee of a search over trials, each of these phases (`repeat_phases`).

    With a secret number of trials it is the smaller of two bounds. One is from the loss
    distribution of one run (`dpdist.privacy.pld`), the other by Renyi DP (Papernot and Steinke
    2022, Theorems 2 and 6); the result's source says which. With a public number it is plain
    composition.

    Raises dpdist.privacy.accounting.UnsupportedMechanismError when a run has neither.
    """
    search = repeat_phases(phases, distribution, runs)
    return PrivacyPlan(records, search, delta, adjacency=adjacency).guarantee()
