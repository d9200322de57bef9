"""Audits of trainings with canaries: many canaries in one run, or many runs with one.

One training: the coins are independent of everything else, and each affects the run by no more
than one record does. So the number of correct guesses bounds the guarantees that the run can
satisfy: by counting, without any assumption, and by trade-off curves
(`dpdist.privacy.audit_bounds`). The plan's own curve is tested; epsilon is that of the plan with
the most noise that is still rejected.

Many runs: trainings with a canary and without. Independent trainings give Clopper-Pearson bounds
without any assumption, as the residual perturbation paper measures its empirical epsilon
(Jagielski, Ullman and Oprea 2020). Those bounds test the plan's own trade-off curve; epsilon is
that of the plan with the most noise that is still rejected. The epsilon by counts only is reported
too. Trainings are vectorized (`dpdist.audits.trainings` lists the parts that they share with a run)
and run in journaled chunks on the actor pool: an interrupted audit continues.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpdist.audits.target import ProgressCallback, Target, target_of_recipe
from dpdist.config.sections import AuditOptions, CanaryAudit, ManyRunsAudit
from dpdist.core.errors import UserError
from dpdist.core.files import make_private_folder
from dpdist.privacy import audit_bounds
from dpdist.privacy.audit_bounds import (
    NOISE_SCALE_ASSUMPTION,
    CanaryScores,
    OneRunGuesses,
    ThresholdCounts,
    bonferroni_alpha,
    group_tradeoff,
    largest_rejected_epsilon,
    log_likelihood_ratio,
    plan_tradeoff,
)
from dpdist.privacy.card import AuditFinding
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe, parse_recipe

if TYPE_CHECKING:
    from torch import Tensor, nn


# --- one training with many canaries ----------------------------------------------------------


_RIDGE = 1e-3  # of a mean square: below it gradients differ by rounding
_BATCH = 1000
_DRAWS, _SEED = 16, "canaries"  # of the noise that a model carries
_LATER = {"view", "exploratory"}  # options that may be chosen after the training


def audit_canaries(
    options: CanaryAudit, target: Target, output: Path, report_progress: ProgressCallback
) -> AuditFinding:
    """Return the audit of a run that was trained with canaries.

    Raises UserError for other runs, and for options that had to be fixed before the training.
    """
    folder = _check_planted_canaries(options, target)
    from dpdist.training.canaries import draw_coins

    released = read_verified_ledger(folder)
    plan = replace(released.plan, phases=released.ledger.released_phases(released.plan))
    seen = (
        _scores_of_every_step(folder)
        if options.sees_every_step
        else _scores_of_final_model(options, target.recipe, folder)
    )
    alpha = bonferroni_alpha(options.alpha, options.audits)
    run = OneRunGuesses.from_scores(
        seen, draw_coins(folder.read_run_key(), options.canaries), options.num_guesses, alpha
    )
    curve = audit_bounds.plan_tradeoff(plan)
    counted = run.epsilon(plan.delta)
    found = None if curve is None else largest_rejected_epsilon(run, plan)
    report_progress(1, 1)
    return target.build_result(
        options,
        alpha,
        method="one run, by counting" if found is None else "one run, by trade-off curves",
        epsilon=counted if found is None else found,
        trials=run.guesses,
        rule=f"{run.guesses // 2} highest scores in, as many lowest out, fixed before the training",
        curve_rejected=curve is not None and run.rejects(curve),
        assumptions=(
            *(() if found is None else (NOISE_SCALE_ASSUMPTION,)),
            *(() if options.replaces_record else target.removal_assumptions),
        ),
        details={
            "canaries": run.canaries, "canary": options.canary, "guesses": run.guesses,
            "right": run.correct, "epsilon_by_counting": counted,
        },
    )  # fmt: skip


def audited_recipe(recipe: Recipe, options: AuditOptions, context: str) -> Recipe:
    """Return the recipe of the run that is trained for this audit.

    It has a different run's name, unless the recipe itself asks for the audit. Raises UserError if
    it cannot be audited.
    """
    raw = recipe.model_dump(mode="json")
    if recipe.audit != options:
        raw["name"] = f"{recipe.name}-{options.kind}"
        raw["resources"] |= {"archive": None, "archive_private": False}  # those of another run
    planted = parse_recipe({**raw, "audit": options.model_dump(mode="json")}, context)
    target_of_recipe(planted, context)
    return planted


def _check_planted_canaries(options: CanaryAudit, target: Target) -> RunFolder:
    fixed = target.recipe.canary_audit
    if target.folder is None or fixed is None:
        recipe = "RECIPE" if target.folder is None else target.folder.recipe_file
        raise UserError(
            f"{target.recipe.name}: was trained without canaries; `dpdist audit {recipe} --kind "
            f"{options.kind}` trains it again with them, as {target.recipe.name}-{options.kind}",
            see="how-to/canaries.md#audit-one-training-by-canaries",
        )
    changed = [
        name
        for name in type(options).model_fields
        if name not in _LATER and getattr(options, name) != getattr(fixed, name)
    ]
    if changed:
        raise UserError(
            f"audit.{changed[0]}: was fixed before the training as {getattr(fixed, changed[0])}, "
            f"got {getattr(options, changed[0])}"
        )
    if (
        options.sees_every_step != fixed.sees_every_step
        and fixed.audits < 2
        and not options.exploratory
    ):
        raise UserError(
            "audit.view: must be the recipe's, since a second view is a second audit of the run: "
            "set audits: 2 before the training, or exploratory: true"
        )
    return target.folder


# --- scores (m,) of the adversary, larger if a canary seems to be in


def _scores_of_every_step(folder: RunFolder) -> np.ndarray:
    """Return the scores that the training's workers computed from every noisy sum."""
    from dpdist.training import checkpoint
    from dpdist.training.canaries import SLOT

    state = checkpoint.load_latest(folder.checkpoints)
    if state is None or SLOT not in state.slots or state.step != folder.read_plan().steps:
        raise UserError(f"{folder.checkpoints}: the last checkpoint, with the scores, is missing")
    return state.slots[SLOT].numpy()


def _scores_of_final_model(options: CanaryAudit, recipe: Recipe, folder: RunFolder) -> np.ndarray:
    """Return the scores of the trained model compared with the public one before the first step.

    A score is how far the model moved along a canary's gradient, how much more likely it finds a
    canary's label, or toward which of its two labels hidden layers moved.
    """
    import torch

    from dpdist import models
    from dpdist.training.canaries import canary_coordinates
    from dpdist.training.model_setup import initial_model, model_spec
    from dpdist.training.records import data_source, records_with_canaries

    dataset = records_with_canaries(recipe, data_source(recipe))
    before = initial_model(recipe, model_spec(recipe, dataset))
    after = models.load_network(folder.model_folder, trusted_factory=recipe.model.name)
    if options.inserts_gradients:
        moved = (_flat_parameters(recipe, before) - _flat_parameters(recipe, after)).numpy()
        result: np.ndarray = moved[canary_coordinates(options.canaries, len(moved))]
        return result
    inputs, labels = dataset.canary_records  # type: ignore[attr-defined]
    if options.replaces_record:
        recipe.method.execution().project_parameters(before)()
        own, labels = dataset.batch(slice(0, dataset.num_records)), dataset.labels  # type: ignore[attr-defined]
        others = [own[torch.from_numpy(labels == label)] for label in range(dataset.classes)]
        return _movement_toward_first_label(before, after, inputs, others)
    return (
        _log_likelihood(after, inputs, labels) - _log_likelihood(before, inputs, labels)
    ).numpy()


def _flat_parameters(recipe: Recipe, model: nn.Module) -> Tensor:
    """Return the trained parameters in the order of the gradient's coordinates: float64 (size,)."""
    import torch

    from dpdist.training.model_setup import build_engine

    parts = [p.detach().reshape(-1) for p in build_engine(recipe, model).parameters]
    return torch.cat(parts).double()


def _movement_toward_first_label(
    before: nn.Module, after: nn.Module, inputs: Tensor, others: Sequence[Tensor]
) -> np.ndarray:
    """Return how much hidden weights moved toward label 0 of each input, and not 1: (m,).

    By least squares on the gradients of the difference of the two logits. others: the records by
    their labels, which the adversary knows; the directions in which their mean logits change are
    projected out. Methods put their own noise on the first layer and on the last one's labels, but
    a label also affects the layers between them.
    """
    import torch

    weighted = [n for n, p in before.named_parameters() if p.requires_grad and p.dim() > 1]
    names = weighted[1:-1] or weighted
    model = copy.deepcopy(after)  # with what it carries besides, at the weights it began with
    model.load_state_dict({**after.state_dict(), **dict(before.named_parameters())})
    chosen = [dict(model.named_parameters())[name].requires_grad_() for name in names]
    ends = [dict(after.named_parameters())[name].detach() for name in names]

    def slope(value: Tensor) -> Tensor:
        parts = torch.autograd.grad(value, chosen)
        return torch.cat([part.flatten() for part in parts]).double()

    known = [
        slope(model(part)[:, label].mean())
        for part in (inputs, *others)
        for label in range(model(part[:1]).shape[1])
        if len(part)
    ]
    basis = torch.linalg.qr(torch.stack(known, 1))[0]
    moved = torch.cat([(e - p.detach()).flatten() for e, p in zip(ends, chosen, strict=True)])
    toward = torch.stack([slope(a - b) for a, b in (model(row)[0, :2] for row in inputs.split(1))])
    toward -= (toward @ basis) @ basis.T
    gram = toward @ toward.T
    gram += torch.eye(len(gram)).to(gram) * gram.diagonal().mean().clamp(min=1e-300) * _RIDGE
    result: np.ndarray = torch.linalg.solve(gram, toward @ moved.double()).numpy()
    return result


def _log_likelihood(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return log probabilities of labels, averaged over the model's own noise if any: (m,)."""
    import torch

    from dpdist.certification.worker import expected_log_scores
    from dpdist.randomness.noise_location import find_noise_location

    noisy, found = find_noise_location(model).is_random, []
    with torch.inference_mode():
        for start in range(0, len(inputs), _BATCH):
            rows, wanted = (part[start : start + _BATCH] for part in (inputs, labels))
            # The same noise whenever it is asked: guesses are not made until one pleases.
            scores = (
                expected_log_scores(model, rows, _DRAWS, _SEED, start)
                if noisy
                else model(rows).double()
            )
            found.append(scores.log_softmax(1).gather(1, wanted[:, None])[:, 0])
    return torch.cat(found)


# --- many trainings with one canary -----------------------------------------------------------


_PILOT = 20_000  # expected scores of either kind


def audit_many_runs(
    options: ManyRunsAudit, target: Target, output: Path, report_progress: ProgressCallback
) -> AuditFinding:
    """Return the audit of many trainings with and without one canary.

    Raises UserError for a method whose step is more than clipped gradients and noise.
    """
    from dpdist.audits.trainings import ManyRunsJob
    from dpdist.cluster.executor import open_executor
    from dpdist.cluster.resumable_job import run_job

    work = ManyRunsJob(options, target)
    private = make_private_folder(output)  # wherever it was asked for: models of private records
    with open_executor(log_file=private / "ray.log"):
        table = run_job(work, private, progress=lambda done, total, _: report_progress(done, total))
    trial, present, score = (table[name].to_numpy() for name in work.columns)
    return evaluate_trials(options, target, CanaryScores(trial, present == 1, score))


def evaluate_trials(options: ManyRunsAudit, target: Target, trials: CanaryScores) -> AuditFinding:
    """Return the audit of finished trainings.

    Two statements share alpha: one by counts only, one by the plan's trade-off curve, with a
    different threshold. If the adversary sees every step, the expected scores under the plan fix
    the thresholds before the first training; otherwise half of the trainings do.
    """
    plan, size = target.plan, options.copies
    alpha = bonferroni_alpha(options.alpha, options.audits)
    curve = plan_tradeoff(plan)
    promised = None if curve is None else group_tradeoff(curve, size)
    pilot = (
        simulate_trials(plan, size) if options.sees_every_step and promised is not None else None
    )
    counted = ThresholdCounts.from_scores(trials, alpha / 2, delta=plan.delta, pilot=pilot)
    runs = ThresholdCounts.from_scores(trials, alpha / 2, curve=promised, pilot=pilot)
    by_counting = counted.epsilon(plan.delta, size)
    found = by_counting if promised is None else largest_rejected_epsilon(runs, plan, size)
    most = ThresholdCounts(
        counted.num_with_canary, counted.num_with_canary, 0, counted.num_without_canary, alpha / 2
    )
    return target.build_result(
        options,
        alpha,
        method="Clopper-Pearson bounds of independent trainings, "
        + ("by counting" if promised is None else "by trade-off curves"),
        epsilon=found,
        trials=runs.num_with_canary + runs.num_without_canary,
        rule=f"score above {runs.threshold:.6g}, fixed by "
        + ("the first half of the trainings" if pilot is None else "what the plan leads to expect"),
        curve_rejected=promised is not None and runs.rejects(promised),
        assumptions=(
            *(() if promised is None else (NOISE_SCALE_ASSUMPTION,)),
            *target.removal_assumptions,
        ),
        details={
            "copies": size,
            "canary": options.canary,
            "hits": (
                f"{runs.true_positives} of {runs.num_with_canary} with, "
                f"{runs.false_positives} of {runs.num_without_canary} without"
            ),
            "epsilon_by_counting": by_counting,
            "counting_at_most": most.epsilon(plan.delta, size),
            "if_gaussian": runs.gaussian_epsilon(plan.delta, size),
            "not_the_real_code": "per-example gradients by torch.func, in place of the engine",
        },
    )


def simulate_trials(plan: PrivacyPlan, copies: int) -> CanaryScores:
    """Return scores of simulated trainings, half of them with copies of a gradient canary.

    Every sum is distributed as the plan says. The simulation is public, and the same each time.
    """
    rng, present = np.random.default_rng(0), np.arange(2 * _PILOT) % 2 == 1
    scores = np.zeros(len(present))
    for step in range(plan.steps):
        step_plan = plan.step(step)
        joined = rng.binomial(copies * present, step_plan.sample_rate)
        sums = joined + step_plan.noise_multiplier * rng.standard_normal(len(present))
        scores += log_likelihood_ratio(sums, step_plan.noise_multiplier, step_plan.sample_rate)
    return CanaryScores(np.arange(len(present)), present, scores)
