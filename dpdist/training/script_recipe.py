"""The recipe that states a script's training, and the description of its model."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer

from dpdist import models
from dpdist.config.sections import Privacy
from dpdist.config.training import Stage
from dpdist.core.errors import UserError
from dpdist.core.script_errors import warn
from dpdist.data.documents import (
    LEARNED_FROM,
    REFERENCE,
    UNNAMED_REFERENCE,
    PreferenceRecords,
    check_not_packed,
)
from dpdist.data.protocol import Records, check_one_class_each, fields_of
from dpdist.gradients.criterion import CriterionLoss
from dpdist.gradients.hooks import take, tensors_of
from dpdist.gradients.independence import SYNTHETIC_KEY
from dpdist.gradients.objective import checked_losses, objective_of, own_loss_example
from dpdist.gradients.random_passes import keyed_draws
from dpdist.models import ModelSpec
from dpdist.models.signature import record_call
from dpdist.models.spec import SCRIPT, give
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training.collectives import Workers
from dpdist.training.script_checks import EVAL_DATA, refuse_budget_of_features
from dpdist.training.script_state import kept_buffers

# --- the model's description ------------------------------------------------------------------


def spec_of(
    model: nn.Module, factory: str | None, examples: tuple[Any, Tensor], loss: Any
) -> ModelSpec:
    """Return the description of the trained model, by which it is built again.

    `factory` builds it, or in this process a copy of it.

    Raises:
        UserError: the factory builds a different model, or a class has no output of its own.
    """
    inputs = take(examples[0], slice(2))
    signature, outputs = _call_of(model, loss, inputs, examples[1][:2])
    shape = _shape_of(inputs)
    classes = 1
    if isinstance(outputs, Tensor) and outputs.dim() > 1:
        classes = int(outputs.shape[-1])
    if loss == "cross-entropy" and classes == 1:
        got = "1 output" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise UserError(
            "model: must return a tensor with one output per class for the loss cross-entropy, got "
            f"{got}: give it 2, use the loss bce, or give a loss function"
        )
    structure = _structure(model)
    if factory is None:
        name = f"{SCRIPT}:{type(model).__qualname__.replace('<locals>.', '')}"
        first = copy.deepcopy(model).cpu()
        give(name, structure, lambda: copy.deepcopy(first))
        return ModelSpec(name, shape, classes, {"structure": structure}, signature=signature)
    spec = ModelSpec(factory, shape, classes, signature=signature)
    models.check_name(factory)
    if _structure(models.initialize(spec, 0)) != structure:
        raise UserError(
            f"factory: must build this model, got another from {factory}({shape}, {classes}): its "
            "tensors have other names or shapes"
        )
    return spec


def _call_of(
    model: nn.Module, loss: Any, inputs: Any, targets: Tensor
) -> tuple[dict[str, Any], Any]:
    """Return the signature of a model, empty for one tensor of numbers, and its outputs.

    The outputs are None if only the script's own loss can call it.
    """
    simple = isinstance(inputs, Tensor) and inputs.is_floating_point()
    with torch.no_grad(), kept_buffers(model):
        try:
            outputs = model(inputs)
        except Exception as error:  # the script's own loss may call it differently
            if isinstance(loss, str):
                raise UserError(_call_fails(model, inputs, error)) from error
            outputs = None
        documents = isinstance(inputs, dict) and _TOKENS in inputs  # released with a tokenizer
        if (simple and outputs is not None) or documents:
            return {}, outputs
        device = targets.device
        with keyed_draws(SYNTHETIC_KEY, device):
            objective = objective_of(loss)
            found = record_call(
                model, lambda: checked_losses(model, objective, inputs, targets), fields_of(inputs)
            )
    if found is None:
        if not simple:
            warn(
                "model: can be trained, but not released for predictions, as its loss does not "
                "call it once with fields of the records: move what the loss computes before the "
                "call into the module"
            )
        return {}, outputs
    return found[0].to_dict, found[1]


def _call_fails(model: nn.Module, inputs: Any, error: Exception) -> str:
    """Return the message for a model that fails under a named loss."""
    own = ""
    if not isinstance(inputs, Tensor):
        own = (
            f"; under a named loss it gets one argument, a {type(inputs).__name__} of all: give "
            f"a loss function, such as {own_loss_example(model, inputs)}"
        )
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"model: must take inputs as the records have them, it fails on invented ones: {said}{own}"
    )


def _shape_of(inputs: Any) -> tuple[int, ...]:
    """Return the shape of one input: of a pair, that of one answer with its prompt."""
    if are_pairs(inputs):
        return (inputs[_TOKENS].shape[1] // 2,)
    return tuple(tensors_of(inputs)[0].shape[1:]) or (1,)


def are_pairs(inputs: Any) -> bool:
    """Return whether inputs are pairs of answers."""
    return isinstance(inputs, dict) and inputs.keys() >= {REFERENCE, _TOKENS}


def _structure(model: nn.Module) -> str:
    """Return a digest of the names and shapes of a module's tensors."""
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


# --- the recipe -------------------------------------------------------------------------------


_TOKENS = "input_ids"  # the field of a document's tokens in transformers and `documents`
_DOCUMENT = "one document, a row of the data"
_PAIR = "one pair of answers, a row of the data"
_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_ASSUMED = (
    "no private record is among what the script's initial weights, loss and settings were made of",
    "between two steps the script uses nothing of the records but the released fields of what "
    "`step` returned",
)
_KINDS = {"mse": "number", "huber": "number", "bce": "labels", "multi-label-bce": "labels"}
_ONLY = {
    "gpus_per_worker": 0,
    "noise": "host",
    "archive": None,
    "archive_private": False,
}


@dataclass(frozen=True)
class Script:
    """Hold the parts of a script's training that its recipe names.

    Args:
        model: the module.
        spec: its description.
        optimizer: the optimizer.
        loss: a name, or a function.
        records: the private ones.
        folder: of the run.
        has_public: whether there are public records for evaluation.
        stages: the runs that it starts with, by their cards.
        unused: names of parameters that the loss does not depend on.
        autocast: whether passes run in bfloat16.
    """

    model: nn.Module
    spec: ModelSpec
    optimizer: Optimizer
    loss: Any
    records: Records
    folder: RunFolder
    has_public: bool
    stages: Sequence[Stage]
    unused: Sequence[str]
    autocast: bool

    @property
    def kind(self) -> str:
        """Return the kind of the targets: "class", "number" or "labels"."""
        if isinstance(self.loss, str):
            return _KINDS.get(self.loss, "class")
        if isinstance(self.loss, nn.BCEWithLogitsLoss):
            return "labels"
        return "number" if self.records.examples(2)[1].is_floating_point() else "class"

    @property
    def threshold(self) -> float:
        """Return the output above which a label is 1: 0 for logits."""
        near_labels = (nn.BCELoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
        return 0.5 if isinstance(self.loss, near_labels) or self.loss in ("mse", "huber") else 0.0

    def recipe(
        self,
        workers: Workers,
        privacy: Any,
        resources: Any,
        training: Mapping[str, Any],
        sampling: Mapping[str, Any],
        *,
        vmap: bool,
        certify: Mapping[str, Any] | None,
    ) -> Recipe:
        """Return the recipe of this training, for its run folder. Raises UserError.

        Args:
            workers: the processes, whose number the recipe states.
            privacy: the section, or a dict.
            resources: the section, a dict or None.
            training: fields of the section, without the loss.
            sampling: class_sampling, class_counts and importance_weights of the section data.
            vmap: run every record through the model separately.
            certify: the section, or None.
        """
        records, class_sampling = self.records, sampling["class_sampling"]
        known = isinstance(class_sampling, Mapping) and class_sampling and self.spec.classes == 1
        recipe = parse_recipe(
            {
                "name": _NAME.sub("-", self.folder.name).strip("-._") or "run",
                "data": {
                    "name": _NAME.sub("-", records.name).strip("-._") or "records",
                    "root": str(self.folder.path / EVAL_DATA) if self.has_public else None,
                    # With a loss of the script's own, those of the rates.
                    "classes": max(2, len(class_sampling)) if known else self.spec.classes,
                    "targets": self.kind,
                    **sampling,
                },
                "model": {
                    "name": self.spec.name,
                    "options": self.spec.options,
                    "vmap": vmap,
                },
                "privacy": _plain("privacy", privacy),
                "training": {**training, "loss": self._loss_name()},
                "resources": workers.resources(
                    _plain("resources", resources or {}), bool(training["reproducible"])
                ),
                "certify": certify,
                "script": {
                    "model": _name_of(type(self.model)),
                    "optimizer": _name_of(type(self.optimizer)),
                    "loss": self._described_loss()
                    + (", under torch.autocast to bfloat16" if self.autocast else ""),
                    "replaced": list(records.replaced),
                    "unused": list(self.unused),
                    "assumed": [*self._assumed(), *records.assumed],
                    "began_with": [each.model_dump(mode="json") for each in self.stages],
                },
            },
            "PrivateTraining",
        )
        self._check(recipe)
        return with_unit(recipe, records, self.folder)

    def _check(self, recipe: Recipe) -> None:
        """Raise UserError for settings that this training does not support."""
        for key, usual in _ONLY.items():
            if (found := getattr(recipe.resources, key)) != usual:
                raise UserError(
                    f"resources.{key}: must be {usual} in PrivateTraining, got {found}; leave it "
                    "out, or train by a recipe"
                )
        if any(self.folder.path == Path(place) for each in self.stages for place in each.places):
            raise UserError("began_with: must not be the run of folder")
        refuse_budget_of_features(recipe.privacy, self.records)
        if recipe.data.class_sampling:
            check_one_class_each(self.records, recipe.data.classes)

    def _assumed(self) -> tuple[str, ...]:
        """Return the assumptions of the guarantee about the script that are not checked."""
        if not self.stages:
            return _ASSUMED
        names = " and ".join(each.name for each in self.stages)
        return f"{_ASSUMED[0]}, but for what the card of {names} states", *_ASSUMED[1:]

    def _described_loss(self) -> str:
        """Return a description of the loss, with the settings of an object."""
        if isinstance(self.loss, nn.Module):
            return CriterionLoss(self.loss).describe()
        return self.loss if isinstance(self.loss, str) else _name_of(self.loss)

    def _loss_name(self) -> str:
        """Return the recipe's name of the loss; for the script's own it cannot be called."""
        if isinstance(self.loss, str):
            return self.loss
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return "script:" + re.sub("[^A-Za-z0-9]", "_", name)


def _name_of(thing: Any) -> str:
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", None)
    return f"{module}.{name or type(thing).__name__}".replace("<locals>.", "")


def _plain(name: str, section: Any) -> dict[str, Any]:
    """Return a section of a recipe as plain data."""
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json")
    if name == "privacy":
        Privacy(**{str(key): value for key, value in section.items()})  # explains names of Opacus
    return dict(section)


def with_unit(recipe: Recipe, records: Records, folder: RunFolder) -> Recipe:
    """Return a recipe with the protected unit, and assumptions about documents and a tokenizer.

    Raises UserError for rows of several documents.
    """
    script, user = recipe.by_script, recipe.user_unit
    assert script is not None
    inputs = records.examples(2)[0]
    tokens = isinstance(inputs, dict) and _TOKENS in inputs
    if tokens and "position_ids" in inputs:
        check_not_packed(records)
    pairs = are_pairs(inputs)
    unit = (_PAIR if pairs else _DOCUMENT) if tokens else None
    if user is not None:
        unit = replace(user, column=records.unit_name or user.column).description
        word = "pairs of answers" if pairs else "documents"
        unit = unit.replace("records", word) if tokens else unit
    said: dict[str, Any] = {"unit": None if unit == recipe.privacy_unit else unit}
    unsaid = [LEARNED_FROM] if tokens and LEARNED_FROM not in script.assumed else []
    if pairs and not isinstance(records, PreferenceRecords):
        unsaid.append(UNNAMED_REFERENCE)
    said["assumed"] = [*script.assumed, *unsaid]
    if folder.recipe_file.exists() and (begun := folder.read_recipe().by_script) is not None:
        before, now = ([each.places[0] for each in s.began_with] for s in (begun, script))
        if before == now:  # with their cards of that time
            said["began_with"] = begun.began_with
    return recipe.model_copy(update={"script": script.model_copy(update=said)})
