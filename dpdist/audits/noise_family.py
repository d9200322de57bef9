"""What trials refute of a plan with another size of noise: from counts to epsilon.

The plan's own trade-off curve needs no assumption: a mechanism whose trials reject it breaks the
plan. An epsilon below the proved one does: it is that of the plan with as much more noise as is
still rejected, a bound where the run is the plan but for the size of its noise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from dpdist.privacy import trade_off
from dpdist.privacy.audit_bounds import ManyRuns, OneRun
from dpdist.privacy.plan import PrivacyPlan

ASSUMED = "the run is the plan, but for the size of its noise"
_RATIO = 1.01  # of neighbouring noises of the family
_MOST, _LEAST = 350, -140  # powers of it: 32 times the noise, a quarter of it


def noise_rejected(run: OneRun | ManyRuns, plan: PrivacyPlan, size: int = 1) -> float:
    """The largest epsilon of the plan with another noise whose trade-off curve the run rejects (in
    steps of 1 % of the noise); 0 for none. size: copies of the canary."""

    def rejects(power: int) -> bool:
        curve = _curve(plan, power)
        return curve is not None and run.rejects(trade_off.of_group(curve, size))

    if not rejects(_MOST):
        return 0.0
    low, high = -1, _MOST  # less noise is harder to reject
    if rejects(0):
        low, high, width = -10, 0, 10
        while rejects(low) and low > _LEAST:
            low, high, width = max(low - 2 * width, _LEAST), low, 2 * width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return _epsilon(plan, high)


@lru_cache(maxsize=512)
def _curve(plan: PrivacyPlan, power: int) -> trade_off.Curve | None:
    return trade_off.of_plan(_with_noise(plan, power))


@lru_cache(maxsize=512)
def _epsilon(plan: PrivacyPlan, power: int) -> float:
    """As the plan's own is computed: rounded otherwise, less than the plan would exceed it."""
    return _with_noise(plan, power).guarantee().epsilon


def _with_noise(plan: PrivacyPlan, power: int) -> PrivacyPlan:
    """With _RATIO^power of the noise on its steps."""
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
