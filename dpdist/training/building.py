"""The model of a recipe before its first step, and the gradient engine that trains it."""

from __future__ import annotations

import dataclasses

import torch

from dpdist import data, models
from dpdist.base.errors import UserError
from dpdist.gradients.augmentation import CropAndFlip
from dpdist.gradients.clipping import clipping_for
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.task import the_inputs
from dpdist.models import ModelSpec
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe
from dpdist.sections.training import CANONICAL_SHARDS, TrainingRecipe
from dpdist.training.canaries import check_places
from dpdist.training.finite import check_start, probe
from dpdist.training.provenance import load_frozen, with_frozen
from dpdist.training.public_examples import screen
from dpdist.training.records import source_of
from dpdist.training.wire import Wire


def model_spec(recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """The description of the model for these inputs."""
    section, options = recipe.model, recipe.model.options
    if section.initial is not None:
        options = models.with_config(options, section.initial.folder)
    spec = ModelSpec(
        name=section.name,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        options=options,
        mean=tuple(section.mean),
        std=tuple(section.std),
        following=recipe.data.following,
        shifts=section.shifts,
        mirrored=section.mirrored,
    )
    models.check_views(spec)
    whole = with_frozen(spec, recipe, dataset)
    denoised = whole.averages and whole.denoiser is not None
    return dataclasses.replace(whole, denoised_shifts=denoised)


def check_model(recipe: Recipe, dataset: data.Dataset) -> None:
    """Raise UserError for a model that cannot be trained privately on these inputs."""
    spec = model_spec(recipe, dataset)
    if recipe.training.augmented:
        _check_augmented(recipe, spec)
    module = initial_model(recipe, spec)
    if recipe.data.text is not None:
        _check_tokens(recipe, module)
    engine = build_engine(recipe, module)
    if why := wire_of(recipe).refused:
        raise UserError(f"{recipe.name}: resources.wire: {why}")
    if recipe.planted is not None:
        check_places(recipe.planted, engine.size)
    models.check_outputs(module, spec)
    check_start(module, *probe(data.load(source_of(recipe), "test")), spec.name)
    if recipe.method.stepwise:
        screen(engine, recipe.method.task(), source_of(recipe))
    recipe.method.constraint(module)  # refuses a model that it cannot be applied to


def _check_tokens(recipe: Recipe, module: torch.nn.Module) -> None:
    """Raise UserError for a model that does not read the recipe's tokens."""
    text = source_of(recipe).columns.text
    assert text is not None
    known = getattr(module, "vocabulary", None)
    if known is None:
        raise UserError(
            f"{recipe.name}: data.text: model {recipe.model.name!r} reads no tokens; take "
            "transformer, or next-word-lstm and next-word-mlp for the next one, without model.mean "
            "and std"
        )
    if known < text.vocabulary:
        raise UserError(
            f"{recipe.name}: model.options.config.vocab_size: must be >= the {text.vocabulary:,} "
            f"tokens of the tokenizer, got {known:,}"
        )


def _check_augmented(recipe: Recipe, spec: ModelSpec) -> None:
    """Raise UserError for records or a task that crop and flip do not fit."""
    where = f"{recipe.name}: training.crop and flip"
    if len(spec.input_shape) != 3:
        raise UserError(f"{where}: need images, got records of shape {spec.input_shape}")
    if recipe.method.task().targets is the_inputs:
        raise UserError(f"{where}: what this method learns is the record as it is; leave them out")


def initial_model(recipe: Recipe, spec: ModelSpec) -> torch.nn.Module:
    """The model before the first step: by its seed, or from a public pre-training."""
    module = models.initialise(spec, recipe.training.init_seed)
    if recipe.model.frozen is not None:
        load_frozen(module, recipe)
    if recipe.model.initial is not None:
        models.load_weights(module, recipe.model.initial.folder)
    if recipe.model.trained:
        _train_only(module, recipe.model.trained, spec)
    return module


def _train_only(module: torch.nn.Module, names: list[str], spec: ModelSpec) -> None:
    """Leave everything but these modules as it is. Raises UserError for one that is not there."""
    module.requires_grad_(False)
    if spec.denoiser is not None:
        module = module.get_submodule(models.CLASSIFIER)
    known = dict(getattr(module, "network", module).named_modules())  # behind a normalisation
    for name in names:
        if name not in known:
            among = ", ".join(each for each in known if each and "." not in each)
            raise UserError(f"model.trained: the model has no module {name!r}; it has {among}")
    for name in names:
        known[name].requires_grad_(True)


def build_engine(
    recipe: Recipe, model: torch.nn.Module, plan: PrivacyPlan | None = None
) -> GradientEngine:
    """The gradient engine of a recipe. Raises UserError for a model that mixes examples.

    plan: of the run; without it the engine is for a check or a probe.
    """
    steps, expected_batch = 1, float(recipe.training.batch_size)
    if plan is not None and plan.steps:
        steps, expected_batch = plan.steps, plan.step(0).expected_batch
    clip_norm = recipe.privacy.clip_norm / (1 + wire_of(recipe, plan).room)
    engine = recipe.method.engine(
        model,
        clipping_for(recipe.privacy.clipping, clip_norm),
        expected_batch=expected_batch,
        steps=steps,
        micro_batch=recipe.resources.micro_batch,
        isolate=recipe.model.isolate,
    )
    engine.augmentation = augmentation(recipe.training)
    return engine


def wire_of(recipe: Recipe, plan: PrivacyPlan | None = None) -> Wire:
    """In what a run's sums travel. plan: as for `build_engine`."""
    expected = float(recipe.training.batch_size)
    if plan is not None and plan.steps:
        expected = plan.largest_batch
    parts = CANONICAL_SHARDS if recipe.training.reproducible else recipe.resources.least
    return Wire.of(recipe.resources.wire, expected, parts, recipe.privacy.batch_cap)


def augmentation(training: TrainingRecipe) -> CropAndFlip | None:
    """What every draw of a record does to its image, by the recipe."""
    return CropAndFlip(training.crop, training.flip) if training.augmented else None
