"""Audit the mechanism: scenarios with the real pieces of a training step, or with any other step.

* `canaries`: a record for each coordinate, each in or out by a fair coin, full batches. Too little
  noise, a wrong clip or a record that counts twice moves its coordinate too far.
* `neighbor`: a record next to a second one, `crowd`: next to many equal ones. It may only move its
  own coordinate, not the others' (a statistic of the batch), nor the size of the noise (a divisor).
* `witness`: canaries in one worker's shard, at a rate of a half. Witnesses at the same positions of
  a second worker's shard must not reveal whether a canary joined.
* `alone`: a canary without any other record: an empty batch is a step like any other.

`canaries` has the run's own noise, with enough copies of each record to be detected under it (by
group privacy their bound is divided). The other scenarios test the structure of a step, each with
the noise under which its faults are detected soonest. If a user is the unit, every record above is
a user, with one record more than count in a step. Coordinates of one release count as separate
trials in `canaries` and `witness`: under the plan their noise and coins are independent, and the
tested hypothesis is that the step executes the plan.

Any training step, your own or a different library's, is audited through three functions:

    step = AuditedStep(release, score, curve)
    found = audit_step(step, releases=1000, alpha=0.05)

`release(included, key)` does one step on one of two neighboring data sets, with the canary or
without, and returns the adversary's view: an array, or None if nothing was released. All its
randomness must follow from `key`. `score(seen)` is one number or several, which are combined by a
likelihood ratio that is fitted on other releases. `curve` is the promised trade-off curve, from
``dpdist.privacy.audit_bounds``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from dpdist.audits.target import ProgressCallback, Target
from dpdist.config.sections import MechanismAudit
from dpdist.core.errors import UserError
from dpdist.privacy import audit_bounds
from dpdist.privacy.audit_bounds import (
    Array,
    CanaryScores,
    ThresholdCounts,
    TradeoffCurve,
    bonferroni_alpha,
    log_likelihood_ratio,
)
from dpdist.privacy.card import AuditFinding
from dpdist.privacy.plan import PrivacyPlan, StepPlan

if TYPE_CHECKING:
    from dpdist.audits.step_harness import StepHarness


# --- any other step ---------------------------------------------------------------------------


_FITTED = 0.5  # fraction of the releases that fixes a score of several numbers and its threshold
_FIXED = 0.1  # fraction that fixes the threshold of a score of one number
_NOTHING = -1e3  # the score of no release


@dataclass(frozen=True)
class AuditedStep:
    """A step to be audited; the module's docstring describes its three functions."""

    release: Callable[[bool, int], Any]
    score: Callable[[Any], ArrayLike]
    curve: TradeoffCurve


@dataclass(frozen=True)
class StepAuditResult:
    """The result of an audit of a step.

    counts: of the releases that did not fix score or threshold. rejected: whether the step breaks
    its promise, at confidence 1 - alpha.
    """

    counts: ThresholdCounts
    rejected: bool


def audit_step(
    step: AuditedStep, releases: int, alpha: float = 0.05, seed: int = 0,
    report_progress: ProgressCallback = lambda done, total: None,
) -> StepAuditResult:  # fmt: skip
    """Return the audit of a step, from a number of releases with the canary and as many without.

    Each release has its own key. A valid promise is rejected with probability at most alpha,
    whatever the score is.
    """
    keys = np.random.default_rng([seed, releases]).permutation(2 * releases).tolist()
    seen = []
    for place in range(2 * releases):
        released = step.release(place % 2 == 0, keys[place])
        seen.append(None if released is None else np.atleast_1d(step.score(released)))
        report_progress(place + 1, 2 * releases)
    return evaluate_step(_filled(seen[::2]), _filled(seen[1::2]), step.curve, alpha)


def evaluate_step(
    inside: Array, outside: Array, curve: TradeoffCurve, alpha: float
) -> StepAuditResult:
    """Return the audit of features (n, k) of independent releases with and without the canary."""
    scores, fix = (inside, outside), _FIXED
    if inside.shape[1] > 1:
        fix = _FITTED
        ratio = _fit_likelihood_ratio(*(side[: round(fix * len(side))] for side in scores))
        scores = ratio(inside), ratio(outside)
    counts = ThresholdCounts.from_scores(
        CanaryScores.from_scores(*(side.reshape(-1) for side in scores)),
        alpha,
        threshold_fraction=fix,
        curve=curve,
    )
    return StepAuditResult(counts, counts.rejects(curve))


def _filled(scores: list[Array | None]) -> Array:
    width = next((len(one) for one in scores if one is not None), 1)
    return np.array([np.full(width, _NOTHING) if one is None else one for one in scores])


def _fit_likelihood_ratio(inside: Array, outside: Array) -> Callable[[Array], Array]:
    """Return the log likelihood ratio of two Gaussians fitted to features (n, k)."""
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
        result: Array = logs[0] - logs[1]
        return result

    return ratio


# --- scenarios of dpdist's own step -----------------------------------------------------------


HarnessFactory = Callable[[StepPlan], "StepHarness"]
SCENARIOS = ("canaries", "neighbor", "crowd", "witness", "alone")
_BY_COIN = ("canaries", "witness")  # many canaries a release, each by its own coin
_RATE = 0.5
_CROWD = 32
_STRUCTURE, _SAMPLING = 1.0, 0.25  # noise of the scenarios
_PER_PAIR = 50  # releases of `canaries` for each release of the scenarios with one canary
_MOST_COPIES = 64
_MOST_MEMBERS = 4  # records of a canary user that count: each takes a separate pass


@dataclass(frozen=True)
class ScenarioResults:
    """The audits of all scenarios. Only `canaries` measures the noise."""

    audits: dict[str, StepAuditResult]
    copies: int

    @property
    def rejected_scenarios(self) -> list[str]:
        """Return the scenarios in which the step broke the plan."""
        return [name for name, audit in self.audits.items() if audit.rejected]

    @property
    def mu(self) -> float:
        """Return mu of Gaussian DP of one release."""
        return self.audits["canaries"].counts.mu(self.copies)


def run_scenarios(
    build_harness: HarnessFactory, noise: float, releases: int, alpha: float, seed: int = 0,
    clip_norm: float = 1.0, report_progress: ProgressCallback = lambda done, total: None,
    scenarios: Sequence[str] = SCENARIOS,
) -> ScenarioResults:  # fmt: skip
    """Return the audits of all scenarios, which share alpha.

    build_harness: returns the harness of a step. releases: number of releases with canaries, and as
    many without. scenarios: run only these.
    """
    from dpdist.audits.step_harness import WIDTH

    each = bonferroni_alpha(alpha, len(SCENARIOS))
    few, rounds = max(100, releases // _PER_PAIR), max(10, -(-2 * releases // WIDTH))
    copies = min(_MOST_COPIES, max(1, round(2 * noise)))
    begun, total = 0, sum(rounds if name in _BY_COIN else 2 * few for name in scenarios)
    found: dict[str, StepAuditResult] = {}

    def shown(done: int, _: int) -> None:
        report_progress(begun + done, total)

    def driven(noise: float, rate: float, records: int) -> StepHarness:
        return build_harness(StepPlan(noise, rate, rate * records, clip_norm, None))

    def canaries() -> StepAuditResult:
        return _canaries(driven(noise, 1.0, WIDTH * copies), copies, rounds, each, seed, shown)

    def witness() -> StepAuditResult:
        return _witness(driven(_SAMPLING, _RATE, WIDTH), rounds, each, seed, shown)

    def pair(
        rate: float, others: int, features: Callable[[np.ndarray], np.ndarray]
    ) -> StepAuditResult:
        step, quiet = driven(_STRUCTURE, rate, max(1, others)), [0] * others
        scene = AuditedStep(
            lambda included, key: step.run_step(np.array(quiet + [1] * included, int), key),
            features,
            one_step_curve(_STRUCTURE, rate),
        )
        return audit_step(scene, few, each, seed, shown)

    plays: dict[str, Callable[[], StepAuditResult]] = {
        "canaries": canaries,
        "neighbor": lambda: pair(1.0, 1, _influence),
        "crowd": lambda: pair(1.0, _CROWD, _influence),
        "witness": witness,
        "alone": lambda: pair(_RATE, 0, _own),
    }
    for name in scenarios:
        found[name] = plays[name]()
        begun += rounds if name in _BY_COIN else 2 * few
    return ScenarioResults(found, copies)


def _along(release: np.ndarray) -> np.ndarray:
    """Return a release along each record's gradient, in units of the clip."""
    result: np.ndarray = release.sum(0) / math.sqrt(2)
    return result


def _canaries(
    harness: StepHarness,
    copies: int,
    rounds: int,
    alpha: float,
    seed: int,
    report_progress: ProgressCallback,
) -> StepAuditResult:
    from dpdist.audits.step_harness import WIDTH

    coins = np.random.default_rng(seed).random((rounds, WIDTH)) < 0.5
    along = np.zeros(coins.shape)
    for place, present in enumerate(coins):
        seen = harness.run_step(np.repeat(np.flatnonzero(present), copies), place)
        if seen is not None:
            along[place] = _along(seen)
        report_progress(place + 1, rounds)
    curve = audit_bounds.gaussian_tradeoff(copies / harness.step_plan.noise_multiplier)
    # Half way: under the plan this threshold is best, so no release is needed to find one.
    middle, inside, outside = copies / 2, along[coins], along[~coins]
    hits, false = int((inside > middle).sum()), int((outside > middle).sum())
    counts = ThresholdCounts(hits, len(inside), false, len(outside), alpha, middle)
    return StepAuditResult(counts, counts.rejects(curve))


def _influence(release: np.ndarray) -> np.ndarray:
    """Return the canary's coordinate, the others', and the size of the noise elsewhere."""
    along = _along(release)
    return np.array([along[1], along[0], np.log(np.mean(release[:, 2:] ** 2) + 1e-30) / 2])


def _own(release: np.ndarray) -> np.ndarray:
    return log_likelihood_ratio(_along(release)[1:2], _STRUCTURE, _RATE)


def _witness(
    harness: StepHarness, rounds: int, alpha: float, seed: int, report_progress: ProgressCallback
) -> StepAuditResult:
    """Return the audit of canaries in one worker's shard, with witnesses in a second shard.

    Record i is the witness of record i + WIDTH / 2, which has the same position in the second
    shard. A canary that is out is replaced by a record without gradient, so that positions stay.
    """
    from dpdist.audits.step_harness import WIDTH

    half = WIDTH // 2
    coins = np.random.default_rng([seed, 1]).random((rounds, half)) < 0.5
    ratios = np.zeros(coins.shape)
    for place, present in enumerate(coins):
        canaries = np.where(present, np.arange(half, WIDTH), -1)
        seen = harness.run_step(np.concatenate([np.arange(half), canaries]), place)
        if seen is not None:
            along = _along(seen)
            ratios[place] = _shared_coin_ratio(along[half:], along[:half])
        report_progress(place + 1, rounds)
    curve = one_step_curve(_SAMPLING, _RATE)
    return evaluate_step(ratios[coins][:, None], ratios[~coins][:, None], curve, alpha)


def _shared_coin_ratio(canary: np.ndarray, witness: np.ndarray) -> np.ndarray:
    """Return the log likelihood ratio of canary and witness joining by one coin."""

    def log_density(a: float, b: float) -> np.ndarray:
        return -((canary - a) ** 2 + (witness - b) ** 2) / (2 * _SAMPLING**2)

    none = log_density(0, 0)
    result: np.ndarray = np.logaddexp(log_density(1, 1), none) - np.logaddexp(
        log_density(0, 1), none
    )
    return result


@cache
def one_step_curve(noise: float, rate: float) -> audit_bounds.TradeoffCurve:
    """Return the trade-off curve of one release: with a record against without it."""
    if rate == 1:
        return audit_bounds.gaussian_tradeoff(1 / noise)
    plan = PrivacyPlan.dp_sgd(
        records=1000, batch_size=round(1000 * rate), noise_multiplier=noise, steps=1, delta=1e-5
    )
    curve = audit_bounds.plan_tradeoff(plan, one_direction=True)
    assert curve is not None
    return curve


def failed_replays(build_harness: HarnessFactory) -> dict[str, bool]:
    """Return whether repeated steps show each fault, by its name."""
    from dpdist.audits.step_harness import forgets_releases, reuses_noise

    step = build_harness(StepPlan(_STRUCTURE, 1.0, 1.0, 1.0, None))
    return {"replay of keys": reuses_noise(step), "replay of a restart": forgets_releases()}


def _noise(target: Target) -> float:
    """Return the noise multiplier of a step. Raises UserError if there is nothing to audit."""
    noise = target.plan.step(0).noise_multiplier if target.plan.steps else 0.0
    if not noise:
        raise UserError(
            f"{target.recipe.name}: nothing to audit: its steps add no noise, so their mechanism "
            "has no guarantee"
        )
    if not target.recipe.method.capabilities.takes_gradient_steps:
        raise UserError(
            f"{target.recipe.name}: method {target.recipe.method.name} is not supported: this "
            "audit is of sums of clipped gradients, which it does not release"
        )
    return noise


def _describe_counts(counts: audit_bounds.ThresholdCounts) -> dict[str, int]:
    """Return the counts under the names that audits on disk have."""
    return {
        "hits": counts.true_positives, "inside": counts.num_with_canary,
        "false": counts.false_positives, "outside": counts.num_without_canary,
    }  # fmt: skip


def audit_mechanism(
    options: MechanismAudit, target: Target, output: Path, report_progress: ProgressCallback
) -> AuditFinding:
    """Return the audit of a recipe's or run's mechanism. Raises UserError if it adds no noise."""
    from dpdist.audits.step_harness import StepHarness
    from dpdist.gradients.clipping import make_clipping
    from dpdist.randomness.keys import derive_key
    from dpdist.runs.recipe import plan_with_noise

    plan, privacy = target.plan, target.recipe.privacy
    noise = _noise(target)
    alpha = bonferroni_alpha(options.alpha, options.audits)
    key = derive_key(bytes(32), "audit", options.seed)
    members = None if plan.user is None else min(plan.user.max_records, _MOST_MEMBERS)

    def pieces(step_plan: StepPlan) -> StepHarness:
        step_plan = step_plan.sampled_like(plan.step(0))  # a probe is of the class of the largest
        clipping = make_clipping(privacy.clipping, step_plan.clip_norm)
        own_key = derive_key(key, repr(step_plan))
        driven = StepHarness(step_plan, clipping, options.workers, own_key, members)
        driven.step.noise_on_device = target.recipe.resources.noise == "device"
        return driven

    seed = int.from_bytes(derive_key(key, "coins")[:8], "big")
    findings = run_scenarios(
        pieces, noise, options.releases, alpha, seed, plan.clip_norm, report_progress
    )
    counts, mu = findings.audits["canaries"].counts, findings.mu
    broken = findings.rejected_scenarios + [
        name for name, found in failed_replays(pieces).items() if found
    ]
    measured = plan_with_noise(target.recipe, plan.records, 1 / mu) if mu > 1e-3 else None
    return target.build_result(
        options,
        alpha,
        method="Gaussian DP of one release, composed as the plan composes it",
        epsilon=0.0 if measured is None else measured.guarantee().epsilon,
        trials=counts.num_with_canary + counts.num_without_canary,
        rule=f"above {counts.threshold:g} clips, fixed by the plan",
        curve_rejected=bool(broken),
        assumptions=(
            "every step of the run is made of these pieces",
            "noise and coins of a release's coordinates are independent",
            *target.removal_assumptions,
        ),
        details={
            "noise_multiplier": noise,
            "noise_multiplier_at_most": 1 / mu if mu else None,
            "copies": findings.copies,
            **({} if members is None else {"records_of_a_user": members}),
            "rejected": broken,
            "scenes": {name: _describe_counts(one.counts) for name, one in findings.audits.items()},
        },
    )
