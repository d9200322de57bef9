"""The model of a recipe before its first step, and the gradient engine that trains it."""

from __future__ import annotations

import torch

from dpdist import data, models
from dpdist.gradients.clipping import clipping_for
from dpdist.gradients.engine import GradientEngine
from dpdist.models import ModelSpec
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe
from dpdist.training.canaries import check_places
from dpdist.training.finite import check_start, probe
from dpdist.training.provenance import load_frozen, with_frozen
from dpdist.training.records import source_of


def model_spec(recipe: Recipe, dataset: data.Dataset) -> ModelSpec:
    """The description of the model for these inputs."""
    section = recipe.model
    spec = ModelSpec(
        name=section.name,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        options=section.options,
        mean=tuple(section.mean),
        std=tuple(section.std),
    )
    return with_frozen(spec, recipe, dataset)


def check_model(recipe: Recipe, dataset: data.Dataset) -> None:
    """Raise UserError for a model that cannot be trained privately on these inputs."""
    spec = model_spec(recipe, dataset)
    module = initial_model(recipe, spec)
    engine = build_engine(recipe, module)
    if recipe.planted is not None:
        check_places(recipe.planted, engine.size)
    models.check_outputs(module, spec)
    check_start(module, *probe(data.load(source_of(recipe), "test")), spec.name)
    recipe.method.constraint(module)  # refuses a model that it cannot be applied to


def initial_model(recipe: Recipe, spec: ModelSpec) -> torch.nn.Module:
    """The model before the first step: by its seed, or from a public pre-training."""
    module = models.initialise(spec, recipe.training.init_seed)
    if recipe.model.frozen is not None:
        load_frozen(module, recipe)
    if recipe.model.initial is not None:
        models.load_weights(module, recipe.model.initial.folder)
    return module


def build_engine(
    recipe: Recipe, model: torch.nn.Module, plan: PrivacyPlan | None = None
) -> GradientEngine:
    """The gradient engine of a recipe. Raises UserError for a model that mixes examples.

    plan: of the run; without it the engine is for a check or a probe.
    """
    steps, expected_batch = 1, float(recipe.training.batch_size)
    if plan is not None and plan.steps:
        steps, expected_batch = plan.steps, plan.step(0).expected_batch
    return recipe.method.engine(
        model,
        clipping_for(recipe.privacy.clipping, recipe.privacy.clip_norm),
        expected_batch=expected_batch,
        steps=steps,
        micro_batch=recipe.resources.micro_batch,
        isolate=recipe.model.isolate,
    )
