"""The audit of many runs: trained anew again and again, with a canary and without.

Independent trainings give Clopper-Pearson bounds without any assumption, as the residual
perturbation paper measures its empirical epsilon (Jagielski, Ullman and Oprea 2020). Trainings are
vectorised (`dpdist.audits.vectorised` says what of a run that is) and done in chunks on the actor
pool, journalled: an interrupted audit continues.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpdist.audits.target import Target
from dpdist.base.storage import private_folder
from dpdist.privacy.audit_bounds import ManyRuns, Trials, shared_alpha
from dpdist.privacy.audited import Audited
from dpdist.privacy.trade_off import of_group, of_plan
from dpdist.sections.audit import ManyRunsAudit

Show = Callable[[int, int], None]


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
    alpha = shared_alpha(options.alpha, options.audits)
    plan, trials = target.plan, Trials(trial, present == 1, score)
    # Two statements on the same counts: a bound of epsilon, and one on the whole curve.
    runs = ManyRuns.of(trials, alpha / 2, delta=plan.delta)
    along_curve, curve = ManyRuns.of(trials, alpha / 2), of_plan(plan)
    rejected = curve is not None and along_curve.rejects(of_group(curve, options.copies))
    most = ManyRuns(runs.inside, runs.inside, 0, runs.outside, alpha / 2)
    return target.audited(
        options,
        alpha,
        method="Clopper-Pearson bounds of independent trainings",
        epsilon=runs.epsilon(plan.delta, options.copies),
        trials=runs.inside + runs.outside,
        rule=f"score above {runs.threshold:.6g}, fixed by the first half of the trainings",
        curve_rejected=rejected,
        assumptions=target.removal,
        details={
            "copies": options.copies,
            "canary": options.canary,
            "hits": f"{runs.hits} of {runs.inside} with, {runs.false} of {runs.outside} without",
            "at_most": most.epsilon(plan.delta, options.copies),
            "if_gaussian": along_curve.gaussian_epsilon(plan.delta, options.copies),
            "not_the_real_code": "per-example gradients by torch.func, in place of the engine",
        },
    )
