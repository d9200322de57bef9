"""Audits of trainings with canaries: many canaries in one run, or many runs with one.

One training: the coins are independent of everything else, and each moves the run by no more than
one record does. So the number of right guesses bounds the guarantees that the run can satisfy: by
counting, without any assumption, and by trade-off curves (`dpdist.privacy.audit_bounds`). The
plan's own curve is tested as it stands; epsilon is that of the plan with as much more noise as is
still rejected.

Many runs: trained anew again and again, with a canary and without. Independent trainings give
Clopper-Pearson bounds without any assumption, as the residual perturbation paper measures its
empirical epsilon (Jagielski, Ullman and Oprea 2020). Those bounds test the plan's own trade-off
curve; epsilon is that of the plan with as much more noise as is still rejected, beside the one
that counts alone give. Trainings are vectorised (`dpdist.audits.trainings` says which parts of a
run they share) and done in chunks on the actor pool, journalled: an interrupted audit continues.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpdist.audits.target import Target, of_recipe
from dpdist.config.sections import AuditOptions, CanaryAudit, ManyRunsAudit
from dpdist.core.errors import UserError
from dpdist.core.files import private_folder
from dpdist.privacy import audit_bounds
from dpdist.privacy.audit_bounds import (
    ASSUMED,
    ManyRuns,
    OneRun,
    Trials,
    log_likelihood_ratio,
    noise_rejected,
    of_group,
    of_plan,
    shared_alpha,
)
from dpdist.privacy.card import Audited
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder, read_released
from dpdist.runs.recipe import Recipe, parse

if TYPE_CHECKING:
    from torch import Tensor, nn


# --- one training with many canaries ----------------------------------------------------------


_RIDGE = 1e-3  # of a mean square: below it gradients differ by rounding
_BATCH = 1000
_DRAWS, _SEED = 16, "canaries"  # of the noise that a model carries
_LATER = {"view", "exploratory"}  # what may be chosen after the training


def audit_canaries(
    options: CanaryAudit, target: Target, output: Path, show: Callable[[int, int], None]
) -> Audited:
    """Of a run trained with canaries. Raises UserError for another one, and where something is
    asked that had to be fixed before the training."""
    folder = _check(options, target)
    from dpdist.training.canaries import coins

    released = read_released(folder)
    plan = replace(released.plan, phases=released.ledger.phases(released.plan))
    seen = _every_step(folder) if options.every_step else _final(options, target.recipe, folder)
    alpha = shared_alpha(options.alpha, options.audits)
    run = OneRun.of(seen, coins(folder.read_key(), options.canaries), options.guessed, alpha)
    curve = audit_bounds.of_plan(plan)
    counted = run.epsilon(plan.delta)
    found = None if curve is None else noise_rejected(run, plan)
    show(1, 1)
    return target.audited(
        options,
        alpha,
        method="one run, by counting" if found is None else "one run, by trade-off curves",
        epsilon=counted if found is None else found,
        trials=run.guesses,
        rule=f"{run.guesses // 2} highest scores in, as many lowest out, fixed before the training",
        curve_rejected=curve is not None and run.rejects(curve),
        assumptions=(
            *(() if found is None else (ASSUMED,)),
            *(() if options.replaces else target.removal),
        ),
        details={
            "canaries": run.canaries,
            "canary": options.canary,
            "guesses": run.guesses,
            "right": run.right,
            "epsilon_by_counting": counted,
        },
    )


def audited_recipe(recipe: Recipe, options: AuditOptions, where: str) -> Recipe:
    """The recipe of the run that is trained for this audit: another run's name, unless the recipe
    itself asks for the audit. Raises UserError where it would have no target."""
    raw = recipe.model_dump(mode="json")
    if recipe.audit != options:
        raw["name"] = f"{recipe.name}-{options.kind}"
        raw["resources"] |= {"archive": None, "archive_private": False}  # those of another run
    planted = parse({**raw, "audit": options.model_dump(mode="json")}, where)
    of_recipe(planted, where)
    return planted


def _check(options: CanaryAudit, target: Target) -> RunFolder:
    fixed = target.recipe.planted
    if target.folder is None or fixed is None:
        recipe = "RECIPE" if target.folder is None else target.folder.recipe_file
        raise UserError(
            f"{target.recipe.name}: was trained without canaries; `dpdist audit {recipe} --kind "
            f"{options.kind}` trains it anew with them, as {target.recipe.name}-{options.kind}"
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
    if options.every_step != fixed.every_step and fixed.audits < 2 and not options.exploratory:
        raise UserError(
            "audit.view: another than the recipe's makes two audits of one run; audits: 2 had to "
            "be said before the training, else the second one is exploratory"
        )
    return target.folder


# --- what the adversary saw: scores (m,), larger where a canary seems to be in


def _every_step(folder: RunFolder) -> np.ndarray:
    """What the training's workers made of every noisy sum."""
    from dpdist.training import checkpoint
    from dpdist.training.canaries import SLOT

    state = checkpoint.latest(folder.checkpoints)
    if state is None or SLOT not in state.slots or state.step != folder.read_plan().steps:
        raise UserError(f"{folder.checkpoints}: the last checkpoint, with the scores, is missing")
    return state.slots[SLOT].numpy()


def _final(options: CanaryAudit, recipe: Recipe, folder: RunFolder) -> np.ndarray:
    """Of the trained model beside the one before the first step, which is public: how far it moved
    along a canary's gradient, how much likelier it finds a canary's label, or towards which of
    its two labels hidden layers moved."""
    import torch

    from dpdist import models
    from dpdist.training.canaries import places
    from dpdist.training.model_setup import initial_model, model_spec
    from dpdist.training.records import source_of, training_data

    dataset = training_data(recipe, source_of(recipe))
    before = initial_model(recipe, model_spec(recipe, dataset))
    after = models.load_network(folder.model, trusted_factory=recipe.model.name)
    if options.in_sums:
        moved = (_flat(recipe, before) - _flat(recipe, after)).numpy()
        result: np.ndarray = moved[places(options.canaries, len(moved))]
        return result
    inputs, labels = dataset.planted_rows  # type: ignore[attr-defined]
    if options.replaces:
        recipe.method.constraint(before)()
        own, labels = dataset.batch(slice(0, dataset.own)), dataset.labels  # type: ignore[attr-defined]
        others = [own[torch.from_numpy(labels == label)] for label in range(dataset.classes)]
        return _towards_first(before, after, inputs, others)
    return (_likelihood(after, inputs, labels) - _likelihood(before, inputs, labels)).numpy()


def _flat(recipe: Recipe, model: nn.Module) -> Tensor:
    """The trained parameters, in the order of the gradient's coordinates: float64 (size,)."""
    import torch

    from dpdist.training.model_setup import build_engine

    parts = [p.detach().reshape(-1) for p in build_engine(recipe, model).parameters]
    return torch.cat(parts).double()


def _towards_first(
    before: nn.Module, after: nn.Module, inputs: Tensor, others: Sequence[Tensor]
) -> np.ndarray:
    """By how much hidden weights moved as label 0 of each input, and not 1, moves them: least
    squares on the gradients of the difference of the two logits, (m,). others: the records by their
    labels, which the adversary knows; what their means move any logit by is left out.

    Methods put noise of their own on the first layer and on the last one's labels, but a label
    reaches what is between them as well.
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
    towards = torch.stack([slope(a - b) for a, b in (model(row)[0, :2] for row in inputs.split(1))])
    towards -= (towards @ basis) @ basis.T
    gram = towards @ towards.T
    gram += torch.eye(len(gram)).to(gram) * gram.diagonal().mean().clamp(min=1e-300) * _RIDGE
    result: np.ndarray = torch.linalg.solve(gram, towards @ moved.double()).numpy()
    return result


def _likelihood(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Log probability of the labels, the mean over the model's own noise if it has any: (m,)."""
    import torch

    from dpdist.certification.worker import expected_log_scores
    from dpdist.randomness.noise_location import place_of

    noisy, found = place_of(model).random, []
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


Show = Callable[[int, int], None]
_PILOT = 20_000  # expected scores of either kind


def audit_many_runs(options: ManyRunsAudit, target: Target, output: Path, show: Show) -> Audited:
    """Raises UserError for a method whose step is more than clipped gradients and noise."""
    from dpdist.audits.trainings import Retraining
    from dpdist.cluster.resumable_job import run
    from dpdist.cluster.session import connect
    from dpdist.core import optional_imports

    work = Retraining(options, target)
    private = private_folder(output)  # wherever it was asked for: models of private records
    with connect(private / "ray.log", worker_setup=optional_imports.install_torchvision_hook):
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
