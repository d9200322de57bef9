"""What a training will cost, before it starts: epsilon, steps, memory and time."""

from __future__ import annotations

import time

import torch

from dpdist import data
from dpdist.gradients.blocks import Blocks
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.perturbations import ParameterDraws
from dpdist.gradients.task import Task
from dpdist.methods.base import Fixed
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe
from dpdist.sections.training import CANONICAL_SHARDS
from dpdist.training.building import build_engine, initial_model, model_spec, wire_of
from dpdist.training.optimizer import FlatOptimizer
from dpdist.training.records import evaluation_data, source_of, training_data
from dpdist.training.sharding import RELEASES, Whole

_PROBE_EXAMPLES = 64
_PROBE_KEY = bytes(32)
_BASE = 400  # MiB: Python, its libraries and what Ray keeps in a worker


def describe(recipe: Recipe, plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Name and value of what a dry run prints of a training that was checked, and its plan. The
    time is extrapolated from a probe on this machine with made-up inputs: no record is touched."""
    source = source_of(recipe)
    dataset = training_data(recipe, source)
    test = evaluation_data(recipe, source)
    counted = ("records", f"{len(dataset):,} to train, {len(test):,} to test")
    if not (plan.steps and recipe.method.stepwise):
        return [("training", recipe.method.words(plan)), counted]
    step, resources = plan.step(0), recipe.resources
    module = initial_model(recipe, model_spec(recipe, dataset))
    engine = build_engine(recipe, module)
    method, rate = recipe.method, recipe.training.learning_rate
    tensors = method.stand_in(module, dataset.input_shape)
    engine.draws = method.perturbation(step, rate, Fixed(module, tensors, _PROBE_KEY))
    torch.set_num_threads(max(1, int(resources.cpus_per_worker)))
    rate = _examples_per_second(engine, method.task(), dataset, recipe.data.following)
    alone = plan.steps * step.expected_batch / rate
    seconds = " to ".join(f"{alone / count:,.0f}" for count in _counts(recipe)[::-1])
    rows = Blocks.for_batches(plan.records, step.sample_rate, step.batch_cap).capacity
    rows = min(rows, engine.micro_batch or _PROBE_EXAMPLES)
    activations = rows * _bytes_per_example(module, dataset)
    return [
        ("noise multiplier", f"{step.noise_multiplier:.4g}"),
        (
            "sampling rate",
            f"{step.sample_rate:.4g} (Poisson; expected batch {step.expected_batch:g})",
        ),
        ("steps", f"{plan.steps:,}"),
        counted,
        *([("audited run", recipe.planted.words(plan.records))] if recipe.planted else []),
        ("model", f"{recipe.model.name}, {engine.size:,} trainable parameters"),
        ("layers without a rule", ", ".join(engine.fallback_layers) or "none"),
        ("workers", f"{resources.span}, {resources.cpus_per_worker:g} CPUs each"),
        ("physical micro-batch", f"{engine.micro_batch or 'chosen at the start'}"),
        *_memory(recipe, plan, engine, activations + _besides(engine)),
        ("training time", f"about {seconds} s at {rate:,.0f} examples/s per worker"),
    ]


def _counts(recipe: Recipe) -> list[int]:
    """Of workers, for which something is stated: the fewest and the most."""
    return sorted({recipe.resources.least, recipe.resources.most})


def _besides(engine: GradientEngine) -> int:
    """Bytes of the frozen parameters, of a draw's perturbed ones, and of the engine's self-check: a
    copy of the model in float64, and a gradient of one parameter."""
    every = list(engine.model.parameters())
    frozen = [parameter for parameter in every if not parameter.requires_grad]
    largest = max(parameter.numel() for parameter in engine.parameters)
    held = sum(p.nbytes for p in frozen)
    if isinstance(engine.draws, ParameterDraws):
        held += 4 * engine.size
    return held if engine.isolate else held + 8 * (sum(p.numel() for p in every) + largest)


def _memory(
    recipe: Recipe, plan: PrivacyPlan, engine: GradientEngine, more: int
) -> list[tuple[str, str]]:
    """Of a worker, by the release that is asked for and by the others; and of all on one host.
    more: bytes of all releases alike."""
    training, resources = recipe.training, recipe.resources
    slots = len(FlatOptimizer(training, plan.steps, torch.zeros(1)).slots)
    rows = CANONICAL_SHARDS if training.reproducible else 1

    wire = wire_of(recipe, plan)
    releases = {name: release(wire) for name, release in RELEASES.items()}

    def mebibytes(release: Whole, count: int) -> float:
        return (more + release.memory(engine.size, slots, rows, count)) / 2**20 + _BASE

    def stated(release: Whole) -> str:
        found = [f"{mebibytes(release, count):,.0f} MiB" for count in _counts(recipe)]
        if len(set(found)) == 1:
            return f"about {found[0]}"
        of = zip(_counts(recipe), found, strict=True)
        return "about " + ", ".join(f"{most} with {count}" for count, most in of)

    words = {name: stated(release) for name, release in releases.items()}
    own = words.pop(resources.release)
    others = ", ".join(f"{name}: {found}" for name, found in words.items())
    each = [("memory per worker", f"{own} (release: {resources.release}; {others})")]
    if resources.wire != "float64":
        each.append(("wire", wire.words()))
    if resources.noise == "device":
        each.append(("noise", "of each release drawn on the workers' devices"))
    if resources.most == 1:
        return each
    whole = resources.most * mebibytes(releases[resources.release], resources.most)
    return [*each, ("memory of a host", f"about {whole:,.0f} MiB with {resources.most} on it")]


def _examples_per_second(
    engine: GradientEngine, task: Task, dataset: data.Dataset, following: bool
) -> float:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(_PROBE_EXAMPLES, *dataset.input_shape, generator=generator)
    shape = dataset.input_shape if following else ()
    labels = torch.randint(dataset.classes, (_PROBE_EXAMPLES, *shape), generator=generator)
    ids = torch.arange(_PROBE_EXAMPLES)
    best = float("inf")
    for _ in range(4):  # the first pass warms up
        began = time.perf_counter()
        targets = task.targets(engine, inputs, labels, _PROBE_KEY, ids)
        engine.clipped_sum(inputs, targets, draw_key=_PROBE_KEY, record_ids=ids)
        best = min(best, time.perf_counter() - began)
    return _PROBE_EXAMPLES / best


def _bytes_per_example(module: torch.nn.Module, dataset: data.Dataset) -> int:
    """Activations and their gradients of one example, from one forward pass."""
    total = 0

    def count(layer: torch.nn.Module, args: object, output: object) -> None:
        nonlocal total
        if isinstance(output, torch.Tensor):
            total += output.numel() * output.element_size()

    hooks = [m.register_forward_hook(count) for m in module.modules() if not list(m.children())]
    with torch.no_grad():
        module(torch.zeros(1, *dataset.input_shape))
    for hook in hooks:
        hook.remove()
    return 4 * total
