"""The audit of many runs: trained anew again and again, with a canary and without.

Independent trainings give Clopper-Pearson bounds without any assumption, as the residual
perturbation paper measures its empirical epsilon (Jagielski, Ullman and Oprea 2020). Those bounds
test the plan's own trade-off curve; epsilon is that of the plan with as much more noise as is still
rejected, beside the one that counts alone give. Trainings are vectorised
(`dpdist.audits.vectorised` says what of a run that is) and done in chunks on the actor pool,
journalled: an interrupted audit continues.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpdist.audits.noise_family import ASSUMED, noise_rejected
from dpdist.audits.target import Target
from dpdist.base.storage import private_folder
from dpdist.privacy.audit_bounds import ManyRuns, Trials, log_likelihood_ratio, shared_alpha
from dpdist.privacy.audited import Audited
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.trade_off import of_group, of_plan
from dpdist.sections.audit import ManyRunsAudit

Show = Callable[[int, int], None]
_PILOT = 20_000  # expected scores of either kind


def audit_many_runs(options: ManyRunsAudit, target: Target, output: Path, show: Show) -> Audited:
    """Raises UserError for a method whose step is more than clipped gradients and noise."""
    from dpdist.audits.retraining import Retraining
    from dpdist.base import vision
    from dpdist.bulk.job import run
    from dpdist.cluster.session import connect

    work = Retraining(options, target)
    private = private_folder(output)  # wherever it was asked for: models of private records
    with connect(private / "ray.log", worker_setup=vision.install):
        table = run(work, private, progress=lambda done, total, rate: show(done, total))
    trial, present, score = (table[name].to_numpy() for name in work.columns)
    return judge(options, target, Trials(trial, present == 1, score))


def judge(options: ManyRunsAudit, target: Target, trials: Trials) -> Audited:
    """What such trainings say. Two statements, which share alpha: by counts alone, and by the
    plan's trade-off curve, whose threshold is another one.

    Where the adversary sees every step the plan says what scores to expect, and fixes thresholds
    before the first training; else half of the trainings do.
    """
    plan, size = target.plan, options.copies
    alpha = shared_alpha(options.alpha, options.audits)
    curve = of_plan(plan)
    promised = None if curve is None else of_group(curve, size)
    pilot = expected(plan, size) if options.every_step and promised is not None else None
    counted = ManyRuns.of(trials, alpha / 2, delta=plan.delta, pilot=pilot)
    runs = ManyRuns.of(trials, alpha / 2, curve=promised, pilot=pilot)
    by_counting = counted.epsilon(plan.delta, size)
    found = by_counting if promised is None else noise_rejected(runs, plan, size)
    most = ManyRuns(counted.inside, counted.inside, 0, counted.outside, alpha / 2)
    return target.audited(
        options,
        alpha,
        method="Clopper-Pearson bounds of independent trainings, "
        + ("by counting" if promised is None else "by trade-off curves"),
        epsilon=found,
        trials=runs.inside + runs.outside,
        rule=f"score above {runs.threshold:.6g}, fixed by "
        + ("the first half of the trainings" if pilot is None else "what the plan leads to expect"),
        curve_rejected=promised is not None and runs.rejects(promised),
        assumptions=(*(() if promised is None else (ASSUMED,)), *target.removal),
        details={
            "copies": size,
            "canary": options.canary,
            "hits": f"{runs.hits} of {runs.inside} with, {runs.false} of {runs.outside} without",
            "epsilon_by_counting": by_counting,
            "counting_at_most": most.epsilon(plan.delta, size),
            "if_gaussian": runs.gaussian_epsilon(plan.delta, size),
            "not_the_real_code": "per-example gradients by torch.func, in place of the engine",
        },
    )


def expected(plan: PrivacyPlan, copies: int) -> Trials:
    """Scores of many trainings with so many copies of a gradient canary, and as many without it, if
    every sum is what the plan says: public, and the same for everybody."""
    rng, present = np.random.default_rng(0), np.arange(2 * _PILOT) % 2 == 1
    scores = np.zeros(len(present))
    for step in range(plan.steps):
        todo = plan.step(step)
        joined = rng.binomial(copies * present, todo.sample_rate)
        sums = joined + todo.noise_multiplier * rng.standard_normal(len(present))
        scores += log_likelihood_ratio(sums, todo.noise_multiplier, todo.sample_rate)
    return Trials(np.arange(len(present)), present, scores)
