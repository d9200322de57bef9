"""Every recipe that comes along executes the sampler, rate and noise that it accounts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.privacy.phases import FixedBatches, GaussianAnswers, GaussianSteps, UpfrontPhase
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.runs.recipe import built_in_recipes, load_recipe, make_plan, paper_recipes
from dpdist.training.private_step import PrivateStep
from dpdist.tuning.preview import KNOWN_SIZES

RECIPES = [*built_in_recipes(), *paper_recipes()]
RECORDS = 4000  # of the stand-in that samplers choose from
STEPS = 40
UNLIKELY = 1e-9


def plan_of(path: Path) -> PrivacyPlan:
    """Return the plan of a recipe that comes along. A target epsilon becomes a fixed noise: rates
    and counts do not depend on it, and calibrating takes a second for each recipe."""
    recipe = load_recipe(path)
    changes = {"privacy.delta": 1e-7}
    if recipe.privacy.epsilon is not None:
        changes |= {"privacy.epsilon": None, "privacy.noise_multiplier": 1.25}
    records = KNOWN_SIZES.get(recipe.data.name, 50_000)
    return make_plan(load_recipe(path, changes), records, path.stem)


def accounted_steps(event: dpa.DpEvent, count: int = 1) -> Iterator[tuple[int, float, float]]:
    """Yield (how often, rate, noise multiplier) of every Gaussian in what the accountant reads."""
    if isinstance(event, dpa.ComposedDpEvent):
        for each in event.events:
            yield from accounted_steps(each, count)
    elif isinstance(event, dpa.SelfComposedDpEvent):
        yield from accounted_steps(event.event, count * event.count)
    elif isinstance(event, dpa.PoissonSampledDpEvent):
        for often, rate, noise in accounted_steps(event.event, count):
            yield often, rate * event.sampling_probability, noise
    elif isinstance(event, dpa.GaussianDpEvent):
        yield count, 1.0, event.noise_multiplier
    else:
        assert isinstance(event, dpa.NonPrivateDpEvent | dpa.RandomizedResponseDpEvent), event


class StandIn:
    """Records that are counted and never read."""

    def __len__(self) -> int:
        return RECORDS


def drawn(step_plan: StepPlan) -> np.ndarray:
    """Return which records join each step, bool (STEPS, RECORDS), by the step's own sampler."""
    engine = GradientEngine(torch.nn.Linear(2, 2), cross_entropy, clipping=FlatClipping(1.0))
    step = PrivateStep(engine, StandIn(), key=bytes(32))  # type: ignore[arg-type]
    joins = np.zeros((STEPS, RECORDS), dtype=bool)
    for t in range(STEPS):
        joins[t, step.members(t.to_bytes(32, "big"), 0, RECORDS, step_plan)] = True
    return joins


def is_poisson(joins: np.ndarray, rate: float) -> bool:
    """Whether the sizes of these batches scatter about rate * records as independent records do.

    Mean and spread each fail falsely with probability 2e-9, by the normal approximation.
    """
    if rate == 1.0:
        return bool(joins.all())
    mean, variance = rate * joins.shape[1], rate * (1 - rate) * joins.shape[1]
    sizes = joins.sum(1)
    off = (sizes.mean() - mean) ** 2 * len(sizes) / variance
    spread = float(((sizes - mean) ** 2).sum() / variance)
    low, high = chi2.ppf(UNLIKELY, len(sizes)), chi2.isf(UNLIKELY, len(sizes))
    return bool(off < chi2.isf(UNLIKELY, 1) and low < spread < high)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_executes_the_sampler_that_it_accounts(path):
    """Rate, noise and number of the steps in the accountant's event are those of the steps that
    run, and what draws their records is Poisson at that rate. Recipes without such steps pay before
    the first one, for votes, answers or noisy records."""
    plan = plan_of(path)
    if any(isinstance(phase, FixedBatches) for phase in plan.phases):
        assert plan.guarantee().epsilon == math.inf  # as published, and nothing is proved of it
        return
    accounted = Counter[tuple[float, float]]()
    for often, rate, noise in accounted_steps(plan.event()):
        accounted[rate, noise] += often
    executed = Counter[tuple[float, float]]()
    for phase in plan.phases:
        if isinstance(phase, GaussianSteps):
            executed[phase.sample_rate, phase.noise_multiplier] += phase.steps
    ends = np.cumsum(plan.step_counts()).tolist()
    planned = {plan.step(t) for end in ends for t in (end - 1, end % plan.steps)}  # last and first
    for (rate, noise), steps in executed.items():
        assert accounted[rate, noise] == steps
        (taken,) = {
            each for each in planned
            if (each.sample_rate, each.noise_multiplier) == (rate, noise)
        }  # fmt: skip
        assert taken.noise_std == (noise * plan.clip_norm if noise else 0)
        assert taken.expected_batch == pytest.approx(rate * plan.records, rel=1e-12)
        assert is_poisson(drawn(taken), rate)
    assert executed or all(isinstance(p, GaussianAnswers | UpfrontPhase) for p in plan.phases)
