"""Estimates of a script's private training before it begins: epsilon, memory and time.

They come from the plan that the training would execute, and from a probe on this machine with
examples invented of the records' shapes: no private record is looked at, and nothing is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer

from dpdist.cluster.session import WORKER_MIB
from dpdist.config.sections import PrivacyRecipe
from dpdist.core.errors import UserError
from dpdist.data.adapters import as_records, check_one_class_each
from dpdist.data.protocol import Records
from dpdist.gradients.clipping import make_clipping
from dpdist.gradients.engine import GradientEngine, TrainingObjective
from dpdist.gradients.hooks import Objective, each_tensor, take
from dpdist.gradients.noise import add_noise
from dpdist.gradients.objective import checked_losses, objective_of
from dpdist.gradients.passes import rows_per_batch
from dpdist.gradients.sampling import Blocks
from dpdist.privacy.guarantee import FIXED_KEY, Guarantee, format_delta, format_epsilon
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe, parse_recipe, resolve_plan
from dpdist.training.collectives import memory_bytes
from dpdist.training.model_setup import (
    PROBE_EXAMPLES,
    bytes_per_example,
    examples_per_second,
    extra_bytes,
)
from dpdist.training.script_state import kept_buffers

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
_ENTRIES = 97  # of the parameter by which an optimizer's state is counted
_NOISE_KEY = bytes(32)  # of noise that is timed and thrown away


@dataclass(frozen=True)
class Estimate:
    """Hold what a private training would guarantee, take and need: `dpdist.estimate` makes it.

    Guarantee: nothing here is computed from a private record, so it may be shown to anybody.

    Attributes:
        guarantee: of the whole training, by the accountant that the run itself would use.
        noise_multiplier: noise of a step, in units of the clip norm.
        steps: number of steps.
        sample_rate: probability with which a record joins a step; of rates by class the largest.
        seconds_per_step: time of an expected batch and its noise on this machine; None where no
            examples told the shapes.
        memory_bytes: memory that the process needs, about; None where no examples told the shapes.

    Example:
        >>> import torch, dpdist
        >>> found = dpdist.estimate(
        ...     torch.nn.Linear(4, 2), 60_000, batch_size=600, steps=1_000,
        ...     privacy=dpdist.Privacy(noise_multiplier=1.1, delta=1e-5),
        ... )
        >>> print(found)
        epsilon 1.516 at delta 1e-05: noise multiplier 1.1, 1,000 steps, sampling rate 0.01
    """

    guarantee: Guarantee
    noise_multiplier: float
    steps: int
    sample_rate: float
    seconds_per_step: float | None = None
    memory_bytes: int | None = None

    @property
    def epsilon(self) -> float:
        """Return epsilon of the whole training, a float; infinite where nothing is proved."""
        return self.guarantee.epsilon

    @property
    def seconds(self) -> float | None:
        """Return the time of all steps in seconds, a float; None where it was not measured."""
        return None if self.seconds_per_step is None else self.steps * self.seconds_per_step

    def __str__(self) -> str:
        at = f"at delta {format_delta(self.guarantee.delta)}"
        fixed = f"{FIXED_KEY}; " if self.guarantee.fixed_key else ""
        said = (
            f"{fixed}epsilon {format_epsilon(self.epsilon)} {at}: noise multiplier "
            f"{self.noise_multiplier:.4g}, {self.steps:,} steps, sampling rate "
            f"{self.sample_rate:.4g}"
        )
        if self.seconds_per_step is None or self.memory_bytes is None:
            return said
        took = f"{self.seconds_per_step:.2g} s a step, {self.seconds:,.0f} s in all"
        return f"{said}; about {took}, and {self.memory_bytes / 2**20:,.0f} MiB"


def estimate(
    model: nn.Module,
    data: Any,
    *,
    privacy: PrivacyRecipe | Mapping[str, Any],
    batch_size: int,
    steps: int | None = None,
    epochs: int | None = None,
    loss: Any = "cross-entropy",
    optimizer: str | Callable[..., Optimizer] = "sgd",
    examples: tuple[Any, Tensor] | None = None,
    isolate: bool = False,
    micro_batch: int | None = None,
    rounding: str = "standard",
    rates: Mapping[Any, float] | None = None,
    class_counts: Mapping[Any, int] | None = None,
) -> Estimate:
    """Estimate epsilon (or the noise for it), memory and seconds of a training, before any step.

    Guarantee: nothing is released and nothing written. Time and memory are measured on examples
    invented of the records' shapes and types, never on records; epsilon follows from their number,
    which is public.

    Args:
        model: the module, on its device; it is left as it is.
        data: what `PrivateTraining` would get, of which the number and the shapes are used; or the
            number of records.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        batch_size: expected number of records in a step.
        steps: number of steps; give this or epochs.
        epochs: passes over the data, in expectation; give this or steps.
        loss: a name, or a callable that returns one value a record.
        optimizer: "sgd", "adam" or "adamw", or a callable of (parameters, lr=...): its state takes
            memory.
        examples: with a number of records, a few public or invented `(X, y)` of their shapes;
            without them time and memory are not estimated.
        isolate: as in `PrivateTraining`.
        micro_batch: as in `PrivateTraining`'s resources.
        rounding: as there, too.
        rates: relative sampling rates by class, as in `PrivateTraining`; the largest is priced.
        class_counts: the PUBLIC number of records of each class. Required with rates.

    Returns:
        An `Estimate`: guarantee, noise_multiplier, steps, sample_rate, and seconds_per_step and
        memory_bytes, which are None for a number of records without `examples`. Prints as one line.

    Raises:
        UserError: the settings make no plan, or the model cannot be trained so.

    Source:
        Abadi et al., CCS 2016 (DP-SGD).

    Example:
        >>> import torch, dpdist
        >>> found = dpdist.estimate(
        ...     torch.nn.Linear(4, 2), (torch.randn(200, 4), torch.randint(2, (200,))),
        ...     privacy=dpdist.Privacy(epsilon=3, delta=1e-3), batch_size=20, epochs=5,
        ... )
        >>> found.epsilon <= 3, found.steps, found.seconds_per_step > 0
        (True, 50, True)
    """
    shaped: Records | None = None
    if isinstance(data, int):
        if isinstance(data, bool) or data < 2:
            raise UserError(f"data: must be records, or their number of at least 2, got {data}")
        count, shaped = data, None if examples is None else as_records(examples)
    else:
        shaped = as_records(data)
        count = len(shaped)
    if rates and shaped is not None:
        check_one_class_each(shaped)
    classes = {"classes": max(2, len(rates))} if rates and isinstance(rates, Mapping) else {}
    sampling = {"rates": rates or {}, "class_counts": class_counts or {}}
    recipe = parse_recipe(
        {
            "name": "estimate",
            "data": {"name": "data", **classes, **sampling},
            "model": {"name": "linear", "isolate": isolate},
            "privacy": privacy.model_dump() if isinstance(privacy, BaseModel) else dict(privacy),
            "training": {"batch_size": batch_size, "steps": steps, "epochs": epochs},
            "resources": {"micro_batch": micro_batch, "rounding": rounding},
            "script": {"model": "model", "optimizer": "optimizer", "loss": "loss"},
        },
        "estimate",
    )
    noise, plan = resolve_plan(recipe, count, "estimate")
    guarantee = recipe.guarantee_of(plan, plan.phases)
    found = Estimate(guarantee, noise, plan.steps, plan.step(0).sample_rate)
    if shaped is None:
        return found
    slots, objective = _slots(optimizer), objective_of(loss)
    seconds, size = _measured(model, shaped, recipe, plan, objective)
    size += memory_bytes(_trained(model), slots, 1) + WORKER_MIB * 2**20
    return replace(found, seconds_per_step=seconds, memory_bytes=size)


def _measured(
    model: nn.Module, records: Records, recipe: Recipe, plan: PrivacyPlan, objective: Objective
) -> tuple[float, int]:
    """Measure the seconds of a step, and the bytes of its passes, on invented examples."""
    privacy, step, most = recipe.privacy, plan.step(0), recipe.resources.micro_batch
    engine = GradientEngine(
        model,
        objective,
        clipping=make_clipping(privacy.clipping, privacy.clip_norm),
        micro_batch=most,
        isolate=recipe.model.isolate,
    )
    engine.rounding = recipe.resources.rounding
    device = engine.parameters[0].device
    inputs, targets = records.examples(PROBE_EXAMPLES)
    inputs, targets = each_tensor(lambda each: each.to(device), inputs), targets.to(device)
    one = take(inputs, slice(1)), targets[:1]
    with kept_buffers(model):
        each = bytes_per_example(model, lambda: checked_losses(model, objective, *one))
        blocks = Blocks.for_batches(plan.records, step.mean_rate, step.batch_cap)
        rate = examples_per_second(engine, TrainingObjective(), inputs, targets, blocks)
    rows = engine.rows_per_pass(blocks)
    held = extra_bytes(engine) + rows * each
    members = min(plan.records * step.mean_rate, step.batch_cap or plan.records)
    executed = rows_per_batch(blocks, members, rows, engine.rounding)
    return executed / rate + _noise_seconds(engine.size, step.noise_std), held


def _trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def optimizer_of(optimizer: str | Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return what makes an optimizer of parameters and lr. Raises UserError for an unknown name."""
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise UserError(
            f"optimizer: must be one of {', '.join(OPTIMIZERS)}, or a callable of parameters and "
            f"lr, got {optimizer!r}"
        )
    if not (isinstance(optimizer, str) or callable(optimizer)):
        raise UserError(
            "optimizer: must be a name or a callable of parameters and lr, got a "
            f"{type(optimizer).__name__} itself: give its class, such as torch.optim.SGD"
        )
    return OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer


def _slots(optimizer: str | Callable[..., Optimizer]) -> int:
    """Return how many numbers an optimizer keeps for each parameter, from a step of its own."""
    parameter = nn.Parameter(torch.zeros(_ENTRIES))
    made = optimizer_of(optimizer)([parameter], lr=0.0)
    parameter.grad = torch.zeros(_ENTRIES)
    made.step()
    kept = made.state.get(parameter, {}).values()
    return sum(isinstance(each, Tensor) and each.numel() == _ENTRIES for each in kept)


def _noise_seconds(size: int, noise_std: float) -> float:
    """Measure how long it takes to add noise to a sum of this size."""
    began = time.perf_counter()
    add_noise(np.zeros(size), _NOISE_KEY, noise_std)
    return time.perf_counter() - began
