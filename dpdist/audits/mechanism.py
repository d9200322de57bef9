"""The audit of the mechanism: scenes played with the real pieces of a training step.

* `canaries`: a record for each coordinate, each in or out by a fair coin, full batches. Too little
  noise, a wrong clip or a record that counts twice moves its coordinate too far.
* `neighbours`: four records, with a fifth or without. The fifth may move its own coordinate only:
  not the others (a statistic of the batch), not the size of the noise (a divisor).
* `witness`: at a rate of a half, beside a record at the same place of another worker's share,
  which must not tell whether the canary joined.
* `alone`: the same without any other record: an empty batch is a step like any other.

`canaries` has the run's own noise, with as many copies of each record as it takes to be seen under
it (a group: their bound is divided). The other scenes are about structure and have little noise.

Coordinates of one release of `canaries` are taken as trials of their own. Under the plan their
noise and coins are independent; that the pieces execute the plan is what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpdist.audits.step import Step, StepAudit, audit_step, judged
from dpdist.audits.target import Target
from dpdist.base.errors import UserError
from dpdist.privacy import trade_off
from dpdist.privacy.audit_bounds import log_likelihood_ratio, shared_alpha
from dpdist.privacy.audited import Audited
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.sections.audit import MechanismAudit

if TYPE_CHECKING:
    from dpdist.audits.driving import Driven

Show = Callable[[int, int], None]
Pieces = Callable[[StepPlan], "Driven"]
SCENES = ("canaries", "neighbours", "witness", "alone")
_RATE = 0.5
_OTHERS = 4
_MOST_NOISE = 0.5  # of the scenes about structure
_MOST_COPIES = 64
_PER_PAIR = 50  # releases of `canaries` for each of the other scenes


@dataclass(frozen=True)
class Played:
    """What each scene found. Only `canaries` measures the noise."""

    found: dict[str, StepAudit]
    copies: int

    @property
    def rejected(self) -> list[str]:
        """The scenes in which the pieces broke the plan."""
        return [name for name, audit in self.found.items() if audit.rejected]

    @property
    def mu(self) -> float:
        """Of Gaussian DP, of one release."""
        return self.found["canaries"].counts.mu(self.copies)


def play(
    pieces: Pieces, noise: float, releases: int, alpha: float, seed: int = 0,
    clip_norm: float = 1.0, show: Show = lambda done, total: None,
) -> Played:  # fmt: skip
    """All scenes, which share alpha. pieces: makes them for a step. releases: of canaries with, and
    as many without."""
    from dpdist.audits.driving import WIDTH

    each = shared_alpha(alpha, len(SCENES))
    few, rounds = max(100, releases // _PER_PAIR), -(-2 * releases // WIDTH)
    total, begun = rounds + 3 * 2 * few, 0

    def shown(done: int, _: int) -> None:
        show(begun + done, total)

    def step(noise: float, rate: float, records: int) -> StepPlan:
        return StepPlan(noise, rate, rate * records, clip_norm, None)

    copies = min(_MOST_COPIES, max(1, round(2 * noise)))
    crowd = pieces(step(noise, 1.0, WIDTH * copies))
    found = {"canaries": _canaries(crowd, copies, rounds, each, seed, shown)}
    begun, little = rounds, min(noise, _MOST_NOISE)

    def pair(todo: StepPlan, others: int, features: Callable[[np.ndarray], np.ndarray]) -> None:
        nonlocal begun
        driven = pieces(todo)
        scene = Step(
            lambda included, key: driven.seen(np.arange(others + included), key),
            lambda seen: features(_along(seen, others)),
            one_step_curve(little, todo.sample_rate),
        )
        found[SCENES[len(found)]] = audit_step(scene, few, each, seed, shown)
        begun += 2 * few

    def sampled(along: np.ndarray) -> np.ndarray:
        own = along[0]
        return np.array([log_likelihood_ratio(own, little, _RATE), own * along[1]])

    pair(step(little, 1.0, _OTHERS), _OTHERS, _neighbour)
    pair(step(little, _RATE, 2), 1, sampled)
    pair(step(little, _RATE, 1), 0, sampled)
    return Played(found, copies)


def _canaries(
    driven: Driven, copies: int, rounds: int, alpha: float, seed: int, show: Show
) -> StepAudit:
    from dpdist.audits.driving import WIDTH

    coins = np.random.default_rng(seed).random((rounds, WIDTH)) < 0.5
    along = np.zeros(coins.shape)
    for place, present in enumerate(coins):
        seen = driven.seen(np.repeat(np.flatnonzero(present), copies), place)
        if seen is not None:
            along[place] = seen.sum(0) / math.sqrt(2)
        show(place + 1, rounds)
    curve = trade_off.gaussian(copies / driven.todo.noise_multiplier)
    return judged(along[coins][:, None], along[~coins][:, None], curve, alpha)


def _along(seen: np.ndarray, canary: int) -> np.ndarray:
    """A release along each record's gradient, the canary's first: in units of the clip."""
    return np.roll(seen.sum(0) / math.sqrt(2), -canary)


def _neighbour(along: np.ndarray) -> np.ndarray:
    """The canary's coordinate, the others', and the size of the noise where there is nothing."""
    quiet = along[1 : len(along) - _OTHERS]
    return np.array([along[0], along[-_OTHERS:].mean(), np.log(np.mean(quiet**2) + 1e-30) / 2])


@cache
def one_step_curve(noise: float, rate: float) -> trade_off.Curve:
    """What one release promises to a record that may come or go."""
    if rate == 1:
        return trade_off.gaussian(1 / noise)
    plan = PrivacyPlan.dp_sgd(
        records=1000, batch_size=round(1000 * rate), noise_multiplier=noise, steps=1, delta=1e-5
    )
    curve = trade_off.of_plan(plan)
    assert curve is not None
    return curve


def audit_mechanism(options: MechanismAudit, target: Target, output: Path, show: Show) -> Audited:
    """The mechanism of a recipe or a run. Raises UserError where it adds no noise."""
    from dpdist.audits.driving import Driven
    from dpdist.gradients.clipping import clipping_for
    from dpdist.randomness.keys import derive_key
    from dpdist.training.planning import plan_at

    plan, privacy = target.plan, target.recipe.privacy
    noise = plan.step(0).noise_multiplier if plan.steps else 0.0
    if not noise:
        raise UserError(
            f"{target.recipe.name}: its steps add no noise, so their mechanism promises nothing "
            "that releases could break"
        )
    alpha = shared_alpha(options.alpha, options.audits)
    key = derive_key(bytes(32), "audit", options.seed)

    def pieces(todo: StepPlan) -> Driven:
        clipping = clipping_for(privacy.clipping, todo.clip_norm)
        return Driven(todo, clipping, options.workers, derive_key(key, repr(todo)))

    seed = int.from_bytes(derive_key(key, "coins")[:8], "big")
    findings = play(pieces, noise, options.releases, alpha, seed, plan.clip_norm, show)
    counts, mu = findings.found["canaries"].counts, findings.mu
    measured = plan_at(target.recipe, plan.records, 1 / mu).guarantee() if mu > 1e-3 else None
    return Audited(
        kind=options.kind,
        method="Gaussian DP of one release, composed as the plan composes it",
        epsilon=0.0 if measured is None else measured.epsilon,
        delta=plan.delta,
        alpha=alpha,
        view=options.view,
        neighbours=target.proved.relation,
        trials=counts.inside + counts.outside,
        rule=f"score above {counts.threshold:.6g}, fixed by other releases",
        proved=target.proved.epsilon,
        claimed=target.claimed,
        curve_rejected=bool(findings.rejected),
        exploratory=options.exploratory,
        assumptions=(
            "every step of the run is made of these pieces",
            "noise and coins of a release's coordinates are independent",
        ),
        model=target.model,
        details={
            "noise_multiplier": noise,
            "noise_multiplier_at_most": 1 / mu if mu else None,
            "copies": findings.copies,
            "rejected": findings.rejected,
            "scenes": {
                name: {"hits": c.hits, "inside": c.inside, "false": c.false, "outside": c.outside}
                for name, c in ((name, one.counts) for name, one in findings.found.items())
            },
        },
    )
