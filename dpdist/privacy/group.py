"""Guarantees for a person or institution that contributes up to k records.

Training clips records one by one, so the unit of its guarantee is one record. Two ways lead to k:
exact accounting of k records that join each step independently and all pull in one direction
(add-or-remove; Ganesh 2024, mixtures of Gaussians), or the general group-privacy lemma (Dwork and
Roth 2014, Theorem 2.2). Clipping per group instead needs no conversion: make the group the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_GROUP_GRID = 1e-3  # the library builds mixtures point by point


def lemma_delta(epsilon: float, delta: float, size: int) -> float:
    """delta of k-record groups at k * epsilon: delta (e^(k epsilon) - 1) / (e^epsilon - 1)."""
    if epsilon == 0:
        return size * delta
    exponent = (size - 1) * epsilon
    if exponent > 700:
        return 1.0
    ratio = math.exp(exponent) * -math.expm1(-size * epsilon) / -math.expm1(-epsilon)
    return min(1.0, delta * ratio)


def lemma_epsilon(record_delta: Callable[[float], float], delta: float, size: int) -> float:
    """k * epsilon for the smallest record-level epsilon whose group delta is at most `delta`.

    record_delta: epsilon -> delta of one record. Infinity if no epsilon up to 50 will do (the
    accountant's resolution in delta ends the search: the lemma multiplies delta by e^((k-1)
    epsilon)).
    """
    # The group's delta need not be monotone in epsilon: walk up, then refine the first hit.
    low, step = 0.0, 0.01
    while low <= 50:
        high = low + step
        if lemma_delta(high, record_delta(high), size) <= delta:
            for _ in range(20):
                middle = (low + high) / 2
                hit = lemma_delta(middle, record_delta(middle), size) <= delta
                low, high = (low, middle) if hit else (middle, high)
            return size * high
        low, step = high, max(step, 0.01 * high)
    return math.inf


@lru_cache(maxsize=100)  # facts, card and whoever verifies the card ask for it
def group_guarantee(plan: PrivacyPlan, size: int, delta: float | None = None) -> Guarantee:
    """The plan's guarantee for groups of up to `size` records; one record gives plan.guarantee().

    Exact for Poisson-sampled and full-batch Gaussian steps and full Laplace releases under
    add-or-remove, where the k records join or leave together. By the lemma otherwise.
    Raises ValueError for size < 1.
    """
    if size < 1:
        raise ValueError(f"a group has at least one record, got {size}")
    delta = plan.delta if delta is None else delta
    if size == 1:
        return plan.guarantee(delta=delta)
    from dpdist.privacy.losses import Loss

    unit = f"the unit is a group of up to {size} records"
    value, source = None, "PLD of mixtures of Gaussians"
    if plan.neighbours == "add-or-remove-one":
        found = group_pld(plan, size)
        value = None if found is None else Loss(*found).epsilon(delta)
    if value is None or math.isinf(value):
        from dpdist.privacy import accounting

        paths = plan.alternatives(plan.phases)
        value = lemma_epsilon(accounting.delta_profile(paths, plan.neighbours), delta, size)
        source = "group-privacy lemma on the record's profile"
    assumptions = (*plan.assumptions, unit)
    return Guarantee(value, delta, plan.neighbours, "proved", source, assumptions, not plan.nominal)


def group_pld(plan: PrivacyPlan, size: int) -> tuple[PrivacyLossDistribution, float] | None:
    """The exact loss of `size` records that come or go together, in both directions, and what
    rounding may have lost in delta. None where a phase has none, or nothing is private."""
    from dp_accounting.pld import privacy_loss_distribution as library

    from dpdist.privacy.losses import rounding

    total, releases = library.identity(value_discretization_interval=_GROUP_GRID), 0
    for phase in plan.phases:
        if (found := phase.group_loss(size, _GROUP_GRID)) is None:
            return None
        loss, count = found
        total, releases = total.compose(loss), releases + count
    return total, rounding(releases)
