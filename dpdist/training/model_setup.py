"""Build a recipe's model and gradient engine, and check both on public data.

Every observer sees that a run stops or raises an error. So checks use only public examples, test
records and examples invented from them, and divergence is detected from the parameters, which the
ledger counts, and from the model's outputs for public test inputs: stopping is post-processing.
Losses and gradients of private records are never used for it; records whose gradient is not finite
add nothing to the sum.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm

from dpdist import data, models
from dpdist.config.training import TrainingRecipe
from dpdist.core.errors import UserError
from dpdist.data import Dataset, next_tokens
from dpdist.gradients.clipping import make_clipping
from dpdist.gradients.engine import GradientEngine, TrainingObjective, input_targets
from dpdist.gradients.hooks import Inputs, Objective, example_losses, weighted_by_class
from dpdist.gradients.objective import checked_losses, objective_of
from dpdist.gradients.perturbations import CropAndFlip, Perturbation
from dpdist.gradients.sampling import Blocks
from dpdist.gradients.validation import NUM_EXAMPLES
from dpdist.models import ModelSpec
from dpdist.models.factory_code import record_digests, source_digests
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe
from dpdist.training import checkpoint
from dpdist.training.canaries import check_canary_coordinates
from dpdist.training.provenance import load_frozen_weights, with_frozen_part
from dpdist.training.records import data_source

# --- the start on public inputs ----------------------------------------------------------------


_PROBE = 8  # test inputs


def public_probe(test: Dataset) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of the first few test records."""
    rows = slice(0, _PROBE)
    return test.batch(rows), test.targets(rows)


def check_initial_model(
    model: nn.Module, inputs: Tensor, labels: Tensor, name: str, learned: Objective
) -> None:
    """Raise UserError unless the untrained model has finite logits for public test inputs.

    The gradient of the objective must also be finite for at least one of them.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    finite = False
    for row in range(len(labels)):
        try:
            with torch.enable_grad():
                some = slice(row, row + 1)
                outputs = model(inputs[some])
                loss = example_losses(model, learned, {}, inputs[some], labels[some])[0]
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:  # whatever a user's module does
            said = (str(error).splitlines() or [""])[0]
            raise UserError(f"model {name!r} fails on the first test inputs: {said}") from error
        if not torch.isfinite(outputs).all():
            raise UserError(
                f"model {name!r} gives logits that are not finite for test input {row}, before any "
                "training: fix the model, its model.mean and model.std, or its initial weights"
            )
        finite = finite or all(g is None or bool(torch.isfinite(g).all()) for g in gradients)
    if not finite:
        raise UserError(
            f"model {name!r} has gradients that are not finite for each of the first {len(labels)} "
            "test inputs, before any training: no record could train it"
        )


# --- examples without private records ---------------------------------------------------------


_KEY = bytes(32)
MEASURED = 64  # examples on which rounding is measured


def public_examples(source: data.DataSource, count: int = NUM_EXAMPLES) -> tuple[Tensor, Tensor]:
    """Return inputs (count, ...) and labels: the first test records, then invented ones.

    Each number of an invented input is that of a test record at the same position, so it is in the
    declared range; the last few are far outside it, where a model may behave differently. Tokens
    are any of the vocabulary. Labels are any of the classes, or the next tokens. They are the same
    each time.
    """
    test = data.load(source, "test")
    known = min(len(test), (count + 1) // 2)
    inputs, labels = test.batch(slice(0, known)), test.targets(slice(0, known))
    generator = torch.Generator().manual_seed(0)
    shape = (count - known, *test.input_shape)
    if source.columns.text is None:
        chosen = torch.randint(known, shape, generator=generator)
        more = inputs.gather(0, chosen)
        more[-(count // 4) :] = 10 * more[-(count // 4) :] + 3
    else:
        more = torch.randint(source.columns.text.vocabulary_size, shape, generator=generator)
    more = more.to(inputs)
    if test.predicts_next_token:
        other = torch.from_numpy(next_tokens(more.numpy()))
    elif test.target_kind != "class":
        other = labels[torch.randint(known, (len(more),), generator=generator)]
    else:
        other = torch.randint(test.classes, (len(more),), generator=generator)
    return torch.cat([inputs, more]), torch.cat([labels, other.to(labels)])


def public_examples_of_task(
    engine: GradientEngine,
    task: TrainingObjective,
    source: data.DataSource,
    count: int = NUM_EXAMPLES,
) -> tuple[Tensor, Tensor]:
    """Return public examples with the targets of the task.

    They get no random augmentation: keys are for records. A denoiser's examples get fixed noise,
    since a denoiser that starts as the identity learns nothing from an input that is its target.
    """
    device = engine.parameters[0].device
    inputs, labels = (each.to(device) for each in public_examples(source, count))
    draws, augmentation = engine.perturbation, engine.augmentation
    engine.perturbation, engine.augmentation = Perturbation(), None
    try:
        targets = task.target_function(engine, inputs, labels, _KEY, torch.arange(len(inputs)))
    finally:
        engine.perturbation, engine.augmentation = draws, augmentation
    if targets.shape == inputs.shape and torch.equal(targets, inputs):
        noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
        inputs = inputs + 0.1 * noise.to(inputs)
    return inputs, targets


def validate_on_public_examples(
    engine: GradientEngine, task: TrainingObjective, source: data.DataSource, screened: bool = False
) -> None:
    """Screen the engine's model on public and invented examples (`GradientEngine.validate`).

    screened: whether the driver did; the engine is then only prepared.
    """
    examples = public_examples_of_task(engine, task, source)
    (engine.prepare if screened else engine.validate)(*examples)


def measured_rounding(
    engine: GradientEngine,
    make_examples: Callable[[], tuple[Inputs, Tensor]],
    plan: PrivacyPlan,
    largest: int,
) -> dict[str, Any]:
    """Return the precision of a model, and by how much rounding moves clipped gradients.

    Args:
        engine: as it trained.
        make_examples: returns inputs and targets without private records.
        plan: the executed plan.
        largest: records of the largest shard.

    Returns:
        `precision`, `draws` if the model draws random numbers, and `moves` in units of the clip
        norm; without `moves` if no record of a noisy step moves, or the examples fail.
    """
    step, found = plan.step(0), {"precision": str(engine.precision).removeprefix("torch.")}
    if engine.draws.any:
        found["draws"] = "by record"
    if not step.noise_multiplier or engine.rounding != "standard" or engine.micro_batch == 1:
        return found
    blocks = Blocks.for_batches(largest, step.mean_rate, step.batch_cap)
    try:
        return {**found, "moves": engine.measure_moves(*make_examples(), blocks)}
    except (RuntimeError, UserError):  # a finished training must not fail by it
        return found


# --- model and gradient engine ----------------------------------------------------------------


def model_spec(recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """Return the description of the model for these inputs."""
    section, options = recipe.model, recipe.model.options
    if section.initial is not None:
        options = models.with_base_config(options, section.initial.folder)
    spec = ModelSpec(
        name=section.name,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        options=options,
        mean=tuple(section.mean),
        std=tuple(section.std),
        following=recipe.data.predicts_next_token,
        shifts=section.shifts,
        mirrored=section.mirrored,
    )
    models.check_views(spec)
    whole = with_frozen_part(spec, recipe, dataset)
    denoised = whole.averages_views and whole.denoiser is not None
    return dataclasses.replace(whole, denoised_shifts=denoised)


def screening_digest(recipe: Recipe, model: nn.Module) -> str:
    """Return a digest of a model's first weights and of the settings that affect its screening.

    Workers compare it with the driver's: they do not screen again what the driver screened.
    """
    settings = [recipe.model.model_dump(mode="json"), recipe.training.loss, recipe.method.name]
    return f"{checkpoint.tensors_digest(model.state_dict())} {json.dumps(settings)}"


def check_model(recipe: Recipe, dataset: data.Dataset) -> str:
    """Return the `screening_digest` of the model.

    Raises UserError for one that cannot be trained privately on these inputs.
    """
    spec = model_spec(recipe, dataset)
    if recipe.training.has_augmentation:
        _check_augmented(recipe, spec)
    module = initial_model(recipe, spec)
    text = recipe.data.text
    if text is not None and text.has_prompts and recipe.model.name != "transformer":
        raise UserError(
            f"{recipe.name}: model.name: must be transformer with data.text.prompt or messages, "
            f"got {recipe.model.name!r}: others do not support tokens that are only read"
        )
    engine = build_engine(recipe, module)
    if recipe.canary_audit is not None:
        check_canary_coordinates(recipe.canary_audit, engine.size)
    may_draw = recipe.method.capabilities.plain_steps
    models.check_outputs(module, spec, may_draw=may_draw)
    probe = public_probe(data.load(data_source(recipe), "test"))
    learned = objective(recipe.training)
    if recipe.training.own_loss:
        with torch.no_grad():
            checked_losses(models.fresh_copy(module), learned, probe[0][:1], probe[1][:1])
    check_initial_model(module, *probe, spec.name, learned)
    execution = recipe.method.execution()
    if recipe.method.capabilities.takes_gradient_steps:
        validate_on_public_examples(engine, execution.task(), data_source(recipe))
    screened = screening_digest(recipe, module)
    execution.project_parameters(module)  # refuses a model that it cannot be applied to
    return screened


def _check_augmented(recipe: Recipe, spec: ModelSpec) -> None:
    """Raise UserError for records or a task that crop and flip do not fit."""
    where = f"{recipe.name}: training.crop and flip"
    if len(spec.input_shape) != 3:
        raise UserError(f"{where}: need images, got records of shape {spec.input_shape}")
    if recipe.method.execution().task().target_function is input_targets:
        raise UserError(f"{where}: what this method learns is the record as it is; leave them out")


def initial_model(recipe: Recipe, spec: ModelSpec) -> torch.nn.Module:
    """Return the model before the first step: by its seed, or from a public pre-training."""
    module = models.initialize(spec, recipe.training.init_seed)
    if recipe.model.frozen_part is not None:
        load_frozen_weights(module, recipe)
    if recipe.model.initial is not None:
        models.load_weights(module, recipe.model.initial.folder)
    if recipe.model.trained:
        _train_only(module, recipe.model.trained, spec)
    return module


def _train_only(module: torch.nn.Module, names: list[str], spec: ModelSpec) -> None:
    """Freeze everything except these modules. Raises UserError for one that does not exist."""
    module.requires_grad_(False)
    if spec.denoiser is not None:
        module = module.get_submodule(models.CLASSIFIER)
    known = dict(getattr(module, "network", module).named_modules())  # behind a normalization
    for name in names:
        if name not in known:
            among = ", ".join(each for each in known if each and "." not in each)
            raise UserError(f"model.trained: the model has no module {name!r}; it has {among}")
    for name in names:
        known[name].requires_grad_(True)


def build_engine(
    recipe: Recipe, model: torch.nn.Module, plan: PrivacyPlan | None = None
) -> GradientEngine:
    """Return the gradient engine of a recipe. Raises UserError for a model that mixes examples.

    plan: of the run; without it the engine is for a check or a probe.
    """
    steps, expected_batch = 1, float(recipe.training.batch_size)
    if plan is not None and plan.steps:
        steps, expected_batch = plan.steps, plan.step(0).expected_batch
    clipping = make_clipping(recipe.privacy.clipping, recipe.privacy.clip_norm)
    execution = recipe.method.execution()
    engine = execution.engine(
        model,
        clipping,
        expected_batch=expected_batch,
        steps=steps,
        micro_batch=recipe.resources.micro_batch,
        vmap=recipe.model.vmap,
    )
    if any(isinstance(each, _SpectralNorm) for each in model.modules()):
        raise UserError(
            "model: must have no spectral_norm in a recipe, whose steps do not update its vectors: "
            "train it by dpdist.PrivateTraining"
        )
    engine.augmentation = augmentation(recipe.training)
    engine.records_per_example = recipe.privacy.max_records_per_user or 1
    engine.rounding = recipe.resources.rounding
    if recipe.training.loss != "cross-entropy":
        engine.objective = objective(recipe.training)
    records = None if plan is None else plan.records
    engine.objective = importance_weighted(engine.objective, recipe, records)
    return engine


def script_engine(model: nn.Module, learned: Objective, recipe: Recipe) -> GradientEngine:
    """Return the gradient engine of a script's model, by the recipe of its training."""
    engine = GradientEngine(
        model,
        learned,
        clipping=make_clipping(recipe.privacy.clipping, recipe.privacy.clip_norm),
        micro_batch=recipe.resources.micro_batch,
        vmap=recipe.model.vmap,
    )
    engine.records_per_example = recipe.privacy.max_records_per_user or 1
    engine.rounding = recipe.resources.rounding
    return engine


def importance_weighted(learned: Objective, recipe: Recipe, records: int | None) -> Objective:
    """Return the objective; with data.importance_weights weighted by 1/rate of a record's class.

    The weights are public, and their mean over a step's records is 1. records: of the plan; for a
    check or a probe None, which means the sum of the class counts.
    """
    if not recipe.data.importance_weights:
        return learned
    count = records or sum(recipe.data.class_counts.values())
    rates = recipe.class_rates(min(1.0, recipe.training.batch_size / count))
    assert rates is not None
    return weighted_by_class(learned, rates.importance_weights)


def objective(training: TrainingRecipe) -> Objective:
    """Return the recipe's objective. Raises UserError for a function that does not exist."""
    if not training.own_loss:
        return objective_of(training.loss)
    module, _, name = training.loss.partition(":")
    if module.partition(".")[0] == "torch":  # not supported, so this raises
        given: Any = getattr(importlib.import_module(module), name, None)
        return objective_of(given)
    code = source_digests(training.loss)
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's module raises when it is imported
        raise UserError(
            f"training.loss: cannot import {training.loss!r}: {type(error).__name__}: {error}"
        ) from error
    record_digests(training.loss, code or source_digests(training.loss))
    return objective_of(found)


def augmentation(training: TrainingRecipe) -> CropAndFlip | None:
    """Return the recipe's augmentation of images, or None."""
    return CropAndFlip(training.crop, training.flip) if training.has_augmentation else None
