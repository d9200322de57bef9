"""Estimates of a training before it begins, of a script or a recipe: epsilon, memory and time.

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
from dpdist.config.training import CANONICAL_SHARDS
from dpdist.core.errors import UserError
from dpdist.data import Dataset
from dpdist.data.adapters import as_records
from dpdist.data.protocol import Records, check_one_class_each
from dpdist.gradients.engine import GradientEngine, TrainingObjective
from dpdist.gradients.hooks import Inputs, Objective, each_tensor, take
from dpdist.gradients.noise import add_noise
from dpdist.gradients.objective import checked_losses, objective_of
from dpdist.gradients.passes import rows_per_batch
from dpdist.gradients.perturbations import ParameterPerturbation
from dpdist.gradients.sampling import Blocks
from dpdist.methods.base import MethodState
from dpdist.privacy.guarantee import FIXED_KEY, Guarantee, format_delta, format_epsilon
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe, parse_recipe, resolve_plan
from dpdist.training.collectives import FlatOptimizer, memory_bytes
from dpdist.training.model_setup import build_engine, initial_model, model_spec, script_engine
from dpdist.training.records import data_source, load_test_records, records_with_canaries
from dpdist.training.script_state import kept_buffers

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_ENTRIES = 97  # of the parameter by which an optimizer's state is counted


@dataclass(frozen=True)
class Estimate:
    """Hold the guarantee, time and memory of a private training, as `dpdist.estimate` returns them.

    Guarantee: nothing here is computed from a private record, so it may be published.

    Attributes:
        guarantee: `Guarantee` of the whole training, by the accountant that the run would use.
        noise_multiplier: float, noise of a step, in units of the clip norm.
        steps: int, number of steps.
        sample_rate: float, probability with which a record joins a step; with rates by class, the
            largest.
        seconds_per_step: float, time of an expected batch and its noise on this machine; None if
            there are no examples of the shapes.
        memory_bytes: int, memory that the process needs, about; None if there are no examples of
            the shapes.

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
        """Return epsilon of the whole training, a float; infinite if nothing is proved."""
        return self.guarantee.epsilon

    @property
    def seconds(self) -> float | None:
        """Return the time of all steps in seconds, a float; None if it was not measured."""
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
    vmap: bool = False,
    micro_batch: int | None = None,
    rounding: str = "standard",
    class_sampling: Mapping[Any, float] | None = None,
    class_counts: Mapping[Any, int] | None = None,
) -> Estimate:
    """Estimate epsilon (or the noise for it), memory and seconds of a training, before any step.

    Guarantee: it releases nothing and writes nothing. Time and memory are measured on examples
    invented of the records' shapes and types, never on records; epsilon follows from their number,
    which is public.

    Args:
        model: the module, on its device; it is left as it is.
        data: the data of `PrivateTraining`, of which only the number and the shapes are used; or
            the number of records.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        batch_size: expected number of records in a step.
        steps: number of steps; give this or epochs.
        epochs: passes over the data, in expectation; give this or steps.
        loss: a name, or a callable that returns one value per record.
        optimizer: "sgd", "adam" or "adamw", or a callable of (parameters, lr=...): its state takes
            memory.
        examples: with a number of records, a few public or invented `(X, y)` of their shapes;
            without them time and memory are not estimated.
        vmap: as in `PrivateTraining`.
        micro_batch: as in `PrivateTraining`'s resources.
        rounding: as in `PrivateTraining`'s resources.
        class_sampling: relative sampling rates by class, as in `PrivateTraining`; the largest
            determines epsilon.
        class_counts: the PUBLIC number of records of each class. Required with rates.

    Returns:
        An `Estimate`: `guarantee` (a `Guarantee`), `epsilon`, `noise_multiplier` and `sample_rate`
        (floats), `steps` (int), `seconds_per_step` (float) and `memory_bytes` (int). The last two
        are None for a number of records without `examples`. It prints as one line.

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
    if isinstance(data, int):
        count, shaped = data, None if examples is None else as_records(examples)
    else:
        shaped = as_records(data)
        count = len(shaped)
    if class_sampling and shaped is not None:
        check_one_class_each(shaped)
    sampling = {"class_sampling": class_sampling or {}, "class_counts": class_counts or {}}
    recipe = parse_recipe(
        {
            "name": "estimate",
            "data": {"name": "data", "classes": max(2, len(class_sampling or ())), **sampling},
            "model": {"name": "linear", "vmap": vmap},
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
    cost = _measured(model, shaped, recipe, plan, objective)
    size = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return replace(found, seconds_per_step=cost.seconds(), memory_bytes=cost.memory(size, slots))


# --- the probe --------------------------------------------------------------------------------


PROBE_EXAMPLES = 64
_KEY = bytes(32)  # of noise and draws that are timed and thrown away


@dataclass(frozen=True)
class StepCost:
    """Hold measurements of one step on one worker.

    rate: examples clipped and summed per second. rows: of a pass. executed: rows of all passes.
    noise_seconds: time to add the noise. pass_bytes: memory of a pass, in addition to that of
    `memory_bytes`.
    """

    rate: float
    rows: int
    executed: float
    noise_seconds: float
    pass_bytes: int

    def seconds(self, workers: int = 1, records_per_unit: int = 1) -> float:
        """Return the seconds of a step whose batch is divided over workers."""
        return self.executed * records_per_unit / self.rate / workers + self.noise_seconds

    def memory(self, size: int, slots: int, sums: int = 1) -> int:
        """Return bytes of a worker. size: trained parameters. slots, sums: as `memory_bytes`."""
        return self.pass_bytes + memory_bytes(size, slots, sums) + WORKER_MIB * 2**20


def measure_step(
    engine: GradientEngine,
    task: TrainingObjective,
    examples: tuple[Inputs, Tensor],
    plan: PrivacyPlan,
    bytes_each: int,
    shards: int = 1,
) -> StepCost:
    """Return the cost of a step of an unscreened engine, measured on invented examples.

    Args:
        engine: with the settings of the training.
        task: the training objective.
        examples: invented inputs and targets.
        plan: its first step is measured.
        bytes_each: of one example's activations (`bytes_per_example`).
        shards: number of parts in which a batch is summed.
    """
    step, records = plan.step(0), -(-plan.records // shards)
    blocks = Blocks.for_batches(records, step.mean_rate, step.batch_cap)
    rate = examples_per_second(engine, task, *examples, blocks)
    rows = engine.rows_per_pass(blocks)
    members = min(records * step.mean_rate, step.batch_cap or records)
    began = time.perf_counter()
    add_noise(np.zeros(engine.size), _KEY, step.noise_std)
    noise_seconds = time.perf_counter() - began
    return StepCost(
        rate,
        rows,
        shards * rows_per_batch(blocks, members, rows, engine.rounding),
        noise_seconds,
        _extra_bytes(engine) + rows * bytes_each,
    )


def examples_per_second(
    engine: GradientEngine, task: TrainingObjective, inputs: Inputs, labels: Tensor, blocks: Blocks
) -> float:
    """Return how many of these invented examples an unscreened engine clips and sums per second.

    It executes two passes, of as many rows as passes over the blocks have, at most all examples.
    """
    targets = task.target_function(engine, inputs, labels, _KEY, torch.arange(len(labels)))
    engine.prepare(inputs, targets)
    rows = min(engine.rows_per_pass(blocks), len(labels))
    ids, some = torch.arange(rows), take(inputs, slice(rows))

    def seconds() -> float:
        began = time.perf_counter()
        summed = engine.clipped_sum(some, targets[:rows], draw_key=_KEY, record_ids=ids)
        summed.flat[:1].tolist()  # a device has then computed it
        return time.perf_counter() - began

    seconds()  # warms up
    return rows / seconds()


def bytes_per_example(module: nn.Module, one_pass: Callable[[], object]) -> int:
    """Return the bytes of one example's activations and their gradients, from one forward pass.

    Outputs of a frozen layer count once, since its gradient needs nothing but its weights. An
    output that is its input does not count, such as that of Identity.
    """
    total = 0

    def count(layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        nonlocal total
        if not isinstance(output, Tensor):
            return
        if output.data_ptr() in [each.data_ptr() for each in args if isinstance(each, Tensor)]:
            return
        trained = [each.requires_grad for each in layer.parameters()]
        total += output.nbytes * (1 if trained and not any(trained) else 4)

    hooks = [m.register_forward_hook(count) for m in module.modules() if not list(m.children())]
    with torch.no_grad():
        one_pass()
    for hook in hooks:
        hook.remove()
    return total


def _extra_bytes(engine: GradientEngine) -> int:
    """Return the bytes of frozen parameters, of perturbed ones, and of the self-check.

    The self-check needs a gradient of one parameter in float64.
    """
    held = sum(each.nbytes for each in engine.model.parameters() if not each.requires_grad)
    if isinstance(engine.perturbation, ParameterPerturbation):
        held += 4 * engine.size
    largest = max(parameter.numel() for parameter in engine.parameters)
    return held if engine.vmap else held + 8 * largest


# --- of a script ------------------------------------------------------------------------------


def _measured(
    model: nn.Module, records: Records, recipe: Recipe, plan: PrivacyPlan, objective: Objective
) -> StepCost:
    """Return the cost of a step of a script, measured on invented examples."""
    engine = script_engine(model, objective, recipe)
    engine.records_per_example = 1  # records are timed
    device = engine.parameters[0].device
    inputs, targets = records.examples(PROBE_EXAMPLES)
    inputs, targets = each_tensor(lambda each: each.to(device), inputs), targets.to(device)
    one = take(inputs, slice(1)), targets[:1]
    with kept_buffers(model):
        each = bytes_per_example(model, lambda: checked_losses(model, objective, *one))
        return measure_step(engine, TrainingObjective(), (inputs, targets), plan, each)


def optimizer_of(optimizer: str | Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return a factory of optimizers, (parameters, lr=...). Raises UserError if it is unknown."""
    made = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if not callable(made):
        raise UserError(
            f"optimizer: must be one of {', '.join(OPTIMIZERS)}, or a callable of parameters and "
            f"lr, such as the class torch.optim.SGD, got {optimizer!r}"
        )
    return made


def _slots(optimizer: str | Callable[..., Optimizer]) -> int:
    """Return how many numbers an optimizer keeps per parameter, measured by one step."""
    parameter = nn.Parameter(torch.zeros(_ENTRIES))
    made = optimizer_of(optimizer)([parameter], lr=0.0)
    parameter.grad = torch.zeros(_ENTRIES)
    made.step()
    kept = made.state.get(parameter, {}).values()
    return sum(isinstance(each, Tensor) and each.numel() == _ENTRIES for each in kept)


# --- of a recipe ------------------------------------------------------------------------------


def describe_cost(recipe: Recipe, plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Return names and values that a dry run prints about a checked training and its plan.

    The time is extrapolated from a probe on this machine with invented inputs, without records.
    """
    dataset = records_with_canaries(recipe, data_source(recipe))
    test = load_test_records(recipe, data_source(recipe))
    counted = (
        plan.counted,
        f"{len(dataset):,} to train, protected; {len(test):,} records to test, not protected",
    )
    if not (plan.steps and recipe.method.capabilities.takes_gradient_steps):
        return [("training", recipe.method.describe(plan)), counted]
    step, resources = plan.step(0), recipe.resources
    engine, cost = _measured_recipe(recipe, plan, dataset)
    seconds = " to ".join(
        f"{plan.steps * cost.seconds(count, recipe.privacy.max_records_per_user or 1):,.0f}"
        for count in sorted({resources.max_workers, resources.min_workers}, reverse=True)
    )
    rows = [
        ("noise multiplier", f"{step.noise_multiplier:.4g}"),
        ("clipping", recipe.privacy.clipping_description),
        (
            "sampling rate",
            f"{step.sample_rate:.4g} (Poisson; expected batch {step.expected_batch:g})",
        ),
        ("class_sampling", step.class_rates and step.class_rates.description),
        ("steps", f"{plan.steps:,}"),
        counted,
        (
            "audited run",
            recipe.canary_audit and recipe.canary_audit.report_note(plan.records, plan.counted),
        ),
        ("model", f"{recipe.model.name}, {engine.size:,} trainable parameters"),
        ("layers without a rule", ", ".join(engine.fallback_layers) or "none"),
        ("workers", f"{resources.worker_count_text}, {resources.cpus_per_worker:g} CPUs each"),
        ("rows of a pass", f"at most {cost.rows}"),
        *_memory(recipe, plan, engine.size, cost),
        ("training time", f"about {seconds} s at {cost.rate:,.0f} examples/s per worker"),
    ]
    return [(name, value) for name, value in rows if value]


def _measured_recipe(
    recipe: Recipe, plan: PrivacyPlan, dataset: Dataset
) -> tuple[GradientEngine, StepCost]:
    """Return the engine of a recipe and the cost of a step, with its number of CPUs per worker."""
    module = initial_model(recipe, model_spec(recipe, dataset))
    engine, execution = build_engine(recipe, module), recipe.method.execution()
    tensors = execution.placeholder_state(module, dataset.input_shape)
    engine.perturbation = execution.perturbation(
        plan.step(0), recipe.training.learning_rate, MethodState(module, tensors, _KEY)
    )
    engine.records_per_example = 1  # records are timed
    torch.set_num_threads(max(1, int(recipe.resources.cpus_per_worker)))
    one, shards = torch.zeros(1, *dataset.input_shape), _sums(recipe)
    each = bytes_per_example(module, lambda: module(one))
    examples = _made_up(dataset, recipe.data.predicts_next_token)
    return engine, measure_step(engine, execution.task(), examples, plan, each, shards)


def _sums(recipe: Recipe) -> int:
    """Return the number of parts in which a batch is summed."""
    return CANONICAL_SHARDS if recipe.training.reproducible else 1


def _memory(recipe: Recipe, plan: PrivacyPlan, size: int, cost: StepCost) -> list[tuple[str, str]]:
    """Return rows with the memory of a worker, and of all workers on one host."""
    slots = len(FlatOptimizer(recipe.training, plan.steps, torch.zeros(1)).slots)
    worker, most = cost.memory(size, slots, _sums(recipe)) / 2**20, recipe.resources.max_workers
    rows = [("memory per worker", f"about {worker:,.0f} MiB")]
    if recipe.resources.noise == "device":
        rows.append(("noise", "of each release drawn on the workers' devices"))
    if most > 1:
        rows.append(("memory of a host", f"about {most * worker:,.0f} MiB with {most} on it"))
    return rows


def _made_up(dataset: Dataset, following: bool) -> tuple[Tensor, Tensor]:
    """Return invented inputs and labels of the data's shapes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(PROBE_EXAMPLES, *dataset.input_shape, generator=generator)
    shape = dataset.input_shape if following else ()
    labels = torch.randint(dataset.classes, (PROBE_EXAMPLES, *shape), generator=generator)
    if dataset.target_kind != "class":
        labels = torch.rand(PROBE_EXAMPLES, dataset.classes, generator=generator)
    return inputs, labels
