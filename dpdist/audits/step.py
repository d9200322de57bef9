"""Audit any training step, one's own or another library's, through three functions.

    step = Step(release, score, curve)
    found = audit_step(step, releases=1000, alpha=0.05)

`release(included, key)` does one step on one of two neighbouring data sets, with the canary or
without, and returns what the adversary sees: an array, or None where nothing was released. All its
randomness must follow from `key`. `score(seen)` is one number or several: several are weighed by a
likelihood ratio that is fitted on other releases. `curve` is what the step promises, from
``dpdist.privacy.trade_off``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dpdist.privacy.audit_bounds import ManyRuns, Trials
from dpdist.privacy.trade_off import Array, Curve

_FITTED = 0.5  # the share of the releases that fixes a score of several numbers, and its threshold
_FIXED = 0.1  # and the threshold alone
_NOTHING = -1e3  # the score of no release


@dataclass(frozen=True)
class Step:
    """A step to be audited; see above."""

    release: Callable[[bool, int], Any]
    score: Callable[[Any], ArrayLike]
    curve: Curve


@dataclass(frozen=True)
class StepAudit:
    """counts: of the releases that fixed nothing. rejected: whether the step breaks its promise,
    at confidence 1 - alpha."""

    counts: ManyRuns
    rejected: bool


def audit_step(
    step: Step, releases: int, alpha: float = 0.05, seed: int = 0,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> StepAudit:  # fmt: skip
    """So many releases with the canary and as many without, all under keys of their own.

    The promise is wrongly found broken with probability at most alpha, whatever the score is.
    """
    keys = np.random.default_rng([seed, releases]).permutation(2 * releases).tolist()
    seen = []
    for place in range(2 * releases):
        released = step.release(place % 2 == 0, keys[place])
        seen.append(None if released is None else np.atleast_1d(step.score(released)))
        show(place + 1, 2 * releases)
    return judged(_filled(seen[::2]), _filled(seen[1::2]), step.curve, alpha)


def judged(inside: Array, outside: Array, curve: Curve, alpha: float) -> StepAudit:
    """Of features (n, k) of independent releases with and without the canary."""
    scores, fix = (inside, outside), _FIXED
    if inside.shape[1] > 1:
        fix = _FITTED
        ratio = _fitted_ratio(*(side[: round(fix * len(side))] for side in scores))
        scores = ratio(inside), ratio(outside)
    counts = ManyRuns.of(
        Trials.of(*(side.reshape(-1) for side in scores)), alpha, fix=fix, curve=curve
    )
    return StepAudit(counts, counts.rejects(curve))


def _filled(seen: list[Array | None]) -> Array:
    width = next((len(one) for one in seen if one is not None), 1)
    return np.array([np.full(width, _NOTHING) if one is None else one for one in seen])


def _fitted_ratio(inside: Array, outside: Array) -> Callable[[Array], Array]:
    """The log likelihood ratio of two Gaussians fitted to features (n, k)."""
    pooled = np.concatenate([inside, outside])
    middle, scale = pooled.mean(0), pooled.std(0) + 1e-9
    fitted = []
    for side in (inside, outside):
        units = (side - middle) / scale
        spread = np.cov(units, rowvar=False) + 1e-3 * np.eye(units.shape[1])
        fitted.append((units.mean(0), np.linalg.inv(spread), np.linalg.slogdet(spread)[1]))

    def ratio(features: Array) -> Array:
        units = (features - middle) / scale
        logs = [
            -0.5 * (np.einsum("ni,ij,nj->n", units - m, inverse, units - m) + size)
            for m, inverse, size in fitted
        ]
        return logs[0] - logs[1]

    return ratio
