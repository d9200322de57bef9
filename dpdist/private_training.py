"""Private training of a script's own model, by its own optimizer, in its own loop.

It is a run like any other: the plan of a recipe, its ledger, the same `PrivateStep`, checkpoints
and a run folder. The script gives the module, the optimizer, the records and the loss, and its loop
stands around the steps. What the script does between two steps is post-processing as long as it
uses nothing but released fields of what `step` returned; what can be seen of the rest is on the
card.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import inspect
import json
import os
import re
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpdist import models
from dpdist.config.sections import Privacy, PrivacyRecipe
from dpdist.config.training import ResourcesRecipe, Stage
from dpdist.core.errors import UserError
from dpdist.data.adapters import (
    LEARNED_FROM,
    REFERENCE,
    UNNAMED_REFERENCE,
    DocumentRecords,
    PreferenceRecords,
    as_records,
    check_classes,
    check_not_packed,
    check_one_class_each,
    check_targets,
    check_tokens,
    preference_records,
)
from dpdist.data.overlap import count_common, single_records
from dpdist.data.protocol import TARGETS, GroupedRecords, Groups, Records
from dpdist.data.record_hashes import hash_inputs, names_nobody
from dpdist.data.registry import store_split
from dpdist.evaluation import evaluate_stage
from dpdist.gradients.clipping import make_clipping
from dpdist.gradients.criterion import CriterionLoss
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import each_tensor, take, tensors_of
from dpdist.gradients.independence import SYNTHETIC_KEY
from dpdist.gradients.objective import (
    check_takes_pairs,
    checked_losses,
    keeps_documents_apart,
    language_model_loss,
    objective_of,
    pair_log_probabilities,
    token_limits,
    without_wrapper,
)
from dpdist.gradients.random_passes import keyed_draws
from dpdist.methods.base import MethodState
from dpdist.models import ModelSpec
from dpdist.models.spec import SCRIPT, give
from dpdist.privacy.guarantee import FIXED_KEY, Guarantee, format_epsilon
from dpdist.privacy.ledger import JournalBusy, Ledger, ReplayConflict
from dpdist.randomness.keys import derive_key
from dpdist.reports.facts import read_stage, stage_of_card
from dpdist.runs.charging import begin_charge, check_charge, end_charge
from dpdist.runs.folder import DifferentRecipeError, RunFolder, complete_checkpoints, open_run
from dpdist.runs.recipe import (
    Recipe,
    field_error,
    iter_differences,
    parse_recipe,
    resolve_plan,
)
from dpdist.training import checkpoint, monitoring
from dpdist.training.collectives import Workers, refused_by_all
from dpdist.training.estimate import optimizer_of
from dpdist.training.job import (
    CheckedTraining,
    check_kept,
    check_same_data,
    choose_run_key,
    ensure_run_key,
    read_run_key,
)
from dpdist.training.loop import TrainingDiverged
from dpdist.training.model_setup import (
    MEASURED,
    importance_weighted,
    measured_rounding,
)
from dpdist.training.monitoring import Monitor, StepMetrics
from dpdist.training.private_score import (
    PrivateScore,
    Value,
    check_apart,
    declare,
    with_kept_score,
    with_score,
)
from dpdist.training.private_step import PrivateStep, build_shards, charge_rest, check_clip
from dpdist.training.provenance import card_of_release
from dpdist.training.script_state import (
    ModelParts,
    Watch,
    code_digest_of,
    form_of,
    given_settings,
    kept_buffers,
    module_record,
    pack,
    refuse_differences,
    setting_differences,
    unpack,
)
from dpdist.training.trained_weights import mark_trained, origins, trained_by, write_trained
from dpdist.training.worker import (
    Attempt,
    method_state_digest,
    replay_fingerprint,
)

# --- what is refused --------------------------------------------------------------------------


_WRAPPED = {
    "DistributedDataParallel": "module", "DataParallel": "module", "FSDPModule": "module",
    "FullyShardedDataParallel": "module", "GradSampleModule": "_module",
}  # fmt: skip


def _check_model(model: nn.Module) -> None:
    """Raise UserError for anything but a module of its own."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model: must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if inside := _WRAPPED.get(kind.__name__):
                raise UserError(
                    f"model: must be the module itself, got {type(module).__name__} at "
                    f"{name or 'the top'}: pass what it wraps (model.{inside})",
                    see="how-to/own-loop.md#what-is-refused",
                )
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"model: must be a module in Python, got TorchScript at {name or 'the top'}: train "
                "the module that was scripted or traced, and script it afterwards",
                see="how-to/own-loop.md#what-is-refused",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise UserError(
                f"model: must have all of its parameters, {name} of a lazy layer is not there yet: "
                "call the model once on an invented input before its optimizer is made"
            )
        if tensor.is_meta:
            raise UserError(
                f"model: must have numbers, {name} is on the device meta: give it some with "
                "model.to_empty(device=...) and its initialisation"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: must have parameters to train, all of them are frozen")


def _check_no_search(folder: RunFolder) -> None:
    """Raise UserError for a search's folder, and for a trial's outside of its search."""
    whole = None if _watching else folder.parent_run
    if folder.search_recipe_file.exists():
        whole = folder
    if whole is not None:
        raise UserError(
            f"folder: {folder.path}: belongs to a search, which is paid for as a whole: one of its "
            "trainings is not stated or continued alone; run the search again to continue it, or "
            "give another folder"
        )


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise UserError for an optimizer that needs more than `.grad`, or other parameters."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        then = ": leave the scaler out, sums are float64" if _is_scaler(optimizer) else ""
        if isinstance(optimizer, type | str):
            then = ": make one, such as torch.optim.SGD(model.parameters(), lr=0.1)"
        raise UserError(f"optimizer: must be a torch.optim.Optimizer, got {kind}{then}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optimizer: must take its step from .grad alone, got {kind}, which evaluates a "
            "closure on the records again: take SGD, Adam or AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError("optimizer: must take dense gradients, got SparseAdam: take Adam")
    on_cpu = any(p.device.type == "cpu" for p in model.parameters() if p.requires_grad)
    if on_cpu and any(group.get("capturable") for group in optimizer.param_groups):
        raise UserError(
            "optimizer: must not be capturable, got a model on the CPU: leave capturable=True out"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise UserError(
                f"optimizer: must hold every trained parameter, lacks {name}: add it, or freeze it "
                "with requires_grad_(False) before PrivateTraining is made"
            )
    if others := held - {id(p) for p in model.parameters()}:
        raise UserError(
            f"optimizer: must hold parameters of the model alone, got {len(others)} besides: no "
            "private gradient is made for them"
        )


def _run_folder(folder: Any) -> RunFolder:
    """Return the folder of a run, absolute. Raises UserError where no run is and none can be."""
    if not isinstance(folder, str | PathLike) or not str(folder):
        raise UserError(
            f"folder: must be the path of a run, new or begun, got {folder!r}: such as 'runs/mine'"
        )
    path = Path(folder).resolve()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"folder: must be a folder, got {path}: {there} is a file")
    if there != path and not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"folder: must be where this user can write, got {path}: not in {there}")
    if there == path and any(path.iterdir()) and not (path / "run.json").exists():
        raise UserError(
            f"folder: must be new, empty or a run's, got {path}, which holds other files: name a "
            "folder of its own, such as 'runs/mine'"
        )
    return RunFolder(path)


def _is_scaler(value: Any) -> bool:
    return any(kind.__name__ == "GradScaler" for kind in type(value).__mro__)


def _check_state(state: Sequence[Any]) -> None:
    """Raise UserError for objects that a checkpoint cannot keep, or must not."""
    if not isinstance(state, Sequence):
        raise UserError(f"state: must be a list of objects, got {type(state).__name__}")
    for place, each in enumerate(state):
        if _is_scaler(each):
            raise UserError(
                f"state[{place}]: must not be a GradScaler: sums are float64, and a scale that "
                "follows overflows would tell of private records; leave it out"
            )
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise UserError(
                f"state[{place}]: must have state_dict and load_state_dict, got "
                f"{type(each).__name__}"
            )


def _check_schedulers(optimizer: Optimizer, state: Sequence[Any]) -> None:
    """Raise UserError for a scheduler of this optimizer that no checkpoint would keep."""
    inner = [each for whole in state for each in getattr(whole, "_schedulers", ())]
    known = {id(each) for each in (*state, *inner)}
    for each in gc.get_objects():
        # Not isinstance, which asks an object for its class: some answer by importing themselves.
        if not issubclass(type(each), LRScheduler) or id(each) in known:
            continue
        if getattr(each, "optimizer", None) is optimizer:
            raise UserError(
                f"state: must hold the {type(each).__name__} of this optimizer, or a run that was "
                "killed would go on with another learning rate: give state=[scheduler]",
                see="how-to/own-loop.md#what-your-loop-may-look-at",
            )


class HashedRecords:
    """Recognise records on a budget: by their inputs, and by items before random transforms."""

    def __init__(self, records: Records) -> None:
        self._records = records

    @cached_property
    def hashes(self) -> np.ndarray:
        """Return hashes of 16 bytes, one or more for each record.

        Of records with one tensor each, those by which a recipe knows the same inputs. They are
        kept nowhere: a budget keeps them under a key of its own.
        """
        records, found, single = self._records, list[bytes](), True
        for start in range(0, len(records), _AT_ONCE):
            some = records.batch(np.arange(start, min(start + _AT_ONCE, len(records))))
            if not isinstance(some, Tensor):
                single = False
                break
            rows = some.cpu() if some.dtype == torch.uint8 else some.float().cpu()
            found += hash_inputs(np.ascontiguousarray(rows.numpy())).tolist()
        if not single or type(records).input_macs is not Records.input_macs:
            found += [mac for macs in records.input_macs(_BUDGET_LABEL) for mac in macs]
        return np.array(found, dtype="S16")


def _check_groups(recipe: Recipe, *given: Records) -> None:
    """Raise UserError where a unit has several records, for a guarantee of single records."""
    grouped = [each for each in given if type(each).unit_id is not Records.unit_id]
    counts = Counter(_unit_of(each, index) for each in grouped for index in range(len(each)))
    largest = max(counts.values(), default=0)
    if recipe.group_unit is None and largest > 1:
        rule = (
            f"must be group, for the largest unit has {largest} records (or give records without "
            "units, to protect single ones)"
        )
        raise field_error("PrivateTraining", "privacy.unit", rule, recipe.privacy.unit)


def _check_arguments(records: Records, loss: Any, **by_class: Any) -> None:
    """Raise UserError for a named loss of documents, or rates or counts that are not by class."""
    if isinstance(loss, str) and isinstance(records, DocumentRecords):
        own = "preference_loss" if isinstance(records, PreferenceRecords) else "language_model_loss"
        raise UserError(f"loss: must be dpdist.{own} for {records.name}, got {loss!r}")
    for key, given in by_class.items():
        if not isinstance(given, Mapping | None):
            raise UserError(f"{key}: must be by class, such as {{0: 1, 1: 4}}, got {given!r}")


def _check_what_is_learned(records: Records, loss: Any, model: nn.Module, classes: int) -> None:
    """Raise UserError for targets or tokens that do not fit the loss or the model."""
    if isinstance(loss, str):
        check_targets(records, loss, classes)
    elif isinstance(loss, nn.Module) and CriterionLoss(loss).takes_classes(records.examples(1)[1]):
        check_targets(records, "cross-entropy", classes)
    tokens = loss is language_model_loss or isinstance(records, PreferenceRecords)
    if tokens and (limits := token_limits(model)) is not None:
        check_tokens(records, *limits)


def _classes_of(spec: ModelSpec, rates: Any) -> int:
    """Return the number of classes; with a loss of the script's own, that of the rates."""
    known = isinstance(rates, Mapping) and rates and spec.classes == 1
    return max(2, len(rates)) if known else spec.classes


def _by_unit(recipe: Recipe, records: Records, argument: str = "data") -> Records:
    """Return the records, by group where a group is the unit. Raises UserError for no groups."""
    if recipe.group_unit is None:
        return records
    units = [_unit_of(records, index) for index in range(len(records))]
    if units == list(range(len(units))):
        raise UserError(
            f"{argument}: must say whom each record belongs to with privacy unit: group, has each "
            "as its own unit: give dpdist.as_records(data, unit=...), or a class with unit_id",
            see="explanation/privacy.md#a-person-as-the-unit",
        )
    if len({isinstance(unit, str) for unit in units}) > 1:
        raise UserError(
            f"{argument}: must have numbers or texts as units, got both: 7 and '7' would be 2"
        )
    return GroupedRecords(records, Groups.from_values(units, recipe.group_unit.max_records))


def check_scored_groups(recipe: Recipe, records: Records, held_out: Records) -> None:
    """Raise UserError where a unit has too many records in both sets together.

    Also where the training's records say whose they are, and the held-out ones do not.
    """
    if not _names_units(records):
        _check_groups(recipe, held_out)
    elif _names_units(held_out):
        _check_groups(recipe, records, held_out)
    else:
        raise UserError(
            "score: held-out records must say whose they are, as those of data do; give them as "
            "dpdist.as_records(..., unit=...)"
        )


def scored_by_unit(recipe: Recipe, records: Records, held_out: Records) -> Records:
    """Return held-out records by group. Raises UserError where a group has records on both sides.

    The units of both must be of one kind, numbers or texts, or equal ones would be missed.
    """
    given = _by_unit(recipe, held_out, "score: held-out records")
    units = [
        {_unit_of(each, index) for index in range(len(each))}
        for each in map(single_records, (records, given))
    ]
    if len({isinstance(unit, str) for both in units for unit in both}) > 1:
        raise UserError(
            "score: held-out records must have units of the same kind as data, got numbers and "
            "texts: 7 and '7' would be 2"
        )
    if common := len(units[0] & units[1]):
        raise UserError(
            f"score: held-out records must share no unit with data, got {common:,} in common; a "
            "unit pays for the steps or for the scores"
        )
    return given


def _names_units(records: Records) -> bool:
    """Return whether a record's unit is another than its position anywhere."""
    return any(_unit_of(records, index) != index for index in range(len(records)))


def _unit_of(records: Records, index: int) -> Hashable:
    """Return whom a record belongs to; equal ones are the same unit, which tensors would not be."""
    unit = records.unit_id(index)
    unit = unit.item() if isinstance(unit, Tensor | np.generic) and unit.ndim == 0 else unit
    if isinstance(unit, Tensor) or names_nobody(unit):
        got = "an empty text" if isinstance(unit, str) else type(unit).__name__
        raise UserError(
            f"{records.name}: unit_id must return a number or a text for each record, got {got} at "
            f"{index:,}; let it return int(...) or str(...), and drop records of nobody"
        )
    return unit


# --- public records and descriptions ----------------------------------------------------------


HELD_OUT = "held-out"  # folder of public records in a run folder
_AT_ONCE = 1024  # records compared at once
_BUDGET_LABEL = b"records of a budget"  # no secret: the budget's own key is one


def _arrays(records: Records, rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs float32 (B, ...) of public records, and their targets.

    Targets are classes int64 (B,), or numbers or labels float32 (B, K).

    Raises:
        UserError: the records are not of such types.
    """
    inputs, targets = records.batch(rows), records.targets(rows)
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        raise UserError("held_out: must have one tensor of numbers for each record as its input")
    if kind != "class":
        return inputs.float().cpu().numpy(), targets.float().reshape(len(targets), -1).cpu().numpy()
    if targets.is_floating_point() or targets.dim() != 1:
        raise UserError("held_out: must have one class for each record as its target")
    return inputs.float().cpu().numpy(), targets.long().cpu().numpy()


def _store_public(public: Records, folder: RunFolder, recipe: Recipe) -> None:
    """Keep public records in the run folder."""
    kind = recipe.data.targets
    inputs, labels = _arrays(public, np.arange(len(public)), kind)
    folder.create_or_open(recipe)
    root, data = folder.path / HELD_OUT, recipe.data
    store_split(root, data.name, inputs, labels, data.classes, kind)


def _check_public(public: Records, private: Records, kind: str, classes: int) -> None:
    """Raise UserError where a private record, or one of its group, is among the public ones.

    Also where they are no records of the same kind.
    """
    if not public.has_targets:
        raise UserError("held_out: must have targets, got inputs alone: give (X, y)")
    forms = [_forms(each.examples(1)[0]).partition(")")[0] for each in (public, private)]
    if forms[0] != forms[1]:
        raise UserError(
            f"held_out: must have inputs of the shape of those of data, {forms[1]}), got "
            f"{forms[0]})"
        )
    if kind == "class" and not public.examples(1)[1].is_floating_point():
        check_classes(public, classes)
    if isinstance(private, GroupedRecords):
        private = private.records
        check_units_apart(public, private)
    _arrays(public, np.arange(len(public)), kind)
    if common := count_common(public, private):
        raise UserError(
            f"held_out: must share no record with data, got {common:,} in common: scores on them "
            "would be published"
        )


def check_units_apart(public: Records, private: Records) -> None:
    """Raise UserError where a public record belongs to a private unit, if any says so."""
    said = [_unit_of(public, index) for index in range(len(public))]
    if said == list(range(len(said))):  # each its own: nothing was said
        return
    units = {_unit_of(private, index) for index in range(len(private))}
    if common := len(units & set(said)):
        raise UserError(
            f"held_out: must share no unit with data, got {common:,} in common: scores on private "
            "groups would be published"
        )


def _cure_of_call(inputs: Any, error: Exception) -> str:
    """Return how a module of several arguments is called; "" where that is not the fault."""
    if isinstance(inputs, Tensor) or not isinstance(error, TypeError):
        return ""
    call = "module(*batch[:-1]), batch[-1]"
    if isinstance(inputs, Mapping):
        own = ", ".join(f"batch[{name!r}]" for name in inputs if name != TARGETS)
        call = f"module({own}), batch[{TARGETS!r}]"
    return (
        f". Under a named loss it gets ONE argument, a {type(inputs).__name__} of all: take that "
        "apart in forward, or give a loss of your own, such as lambda module, batch: "
        f"torch.nn.functional.cross_entropy({call}, reduction='none')"
    )


def _spec_of(model: nn.Module, factory: str | None, inputs: Any, loss: Any) -> ModelSpec:
    """Return how the trained model is described, and built again.

    It is built by `factory`, or in this process by a copy of it.

    Raises:
        UserError: the factory makes another model, or the model fails where the loss is a name.
    """
    with torch.no_grad(), kept_buffers(model):
        try:
            outputs = model(take(inputs, slice(2)))
        except Exception as error:  # a loss of the script's own may call it in another way
            if isinstance(loss, str):
                raise UserError(
                    f"model: must take inputs as the records have them, {_forms(inputs)}; it fails "
                    f"on invented ones: {' '.join(str(error).split()) or type(error).__name__}"
                    f"{_cure_of_call(inputs, error)}"
                ) from error
            outputs = None
    if isinstance(loss, str) and not isinstance(outputs, Tensor):
        raise UserError(
            f"model: must return one tensor for the loss {loss}, got a {type(outputs).__name__}: "
            "return the part that is learned, or give a loss of your own that takes it"
        )
    several = isinstance(outputs, Tensor) and outputs.dim() > 1
    shape = _shape_of(inputs)
    classes = int(outputs.shape[-1]) if several and isinstance(outputs, Tensor) else 1
    if loss == "cross-entropy" and classes == 1:
        raise UserError(
            "model: must have one output a class for the loss cross-entropy, got 1 output: give it "
            "2, or take the loss bce"
        )
    structure = _structure(model)
    if factory is None:
        name = f"{SCRIPT}:{type(model).__qualname__.replace('<locals>.', '')}"
        first = copy.deepcopy(model).cpu()
        give(name, structure, lambda: copy.deepcopy(first))
        return ModelSpec(name, shape, classes, {"structure": structure})
    if not isinstance(factory, str) or not (":" in factory or factory in models.named_networks()):
        got = repr(factory) if isinstance(factory, str) else f"a {type(factory).__name__}"
        raise UserError(
            f"factory: must be 'package.module:function', the name of a function, got {got}"
        )
    spec = ModelSpec(factory, shape, classes)
    models.check_name(factory)
    if _structure(models.initialise(spec, 0)) != structure:
        raise UserError(
            f"factory: must build this model, got another from {factory}({shape}, {classes}): its "
            "tensors have other names or shapes"
        )
    return spec


def _shape_of(inputs: Any) -> tuple[int, ...]:
    """Return the shape of what the model reads at a time: of a pair, one answer with its prompt."""
    if _are_pairs(inputs):
        return (inputs[_TOKENS].shape[1] // 2,)
    return tuple(tensors_of(inputs)[0].shape[1:]) or (1,)


def _are_pairs(inputs: Any) -> bool:
    """Return whether inputs are pairs of answers, whoever made them."""
    return isinstance(inputs, dict) and inputs.keys() >= {REFERENCE, _TOKENS}


def _forms(inputs: Any) -> str:
    """Return shapes and types of a record's inputs in words, with B for the batch."""
    return " and ".join(
        f"({', '.join(['B', *map(str, each.shape[1:])])}) {str(each.dtype).removeprefix('torch.')}"
        for each in tensors_of(inputs)
    )


def _structure(model: nn.Module) -> str:
    """Return a digest of the names and shapes of a module's tensors."""
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


def _name_of(thing: Any) -> str:
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", None)
    return f"{module}.{name or type(thing).__name__}".replace("<locals>.", "")


def _plain(name: str, section: Any) -> dict[str, Any]:
    """Return a section of a recipe as plain data."""
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json")
    if name == "privacy" and isinstance(section, Mapping):
        Privacy(**{str(key): value for key, value in section.items()})  # tells names of Opacus
    if not isinstance(section, Mapping):
        raise UserError(
            f"{name}: must be a section or a dict of its fields, got {type(section).__name__}"
        )
    return dict(section)


_TOKENS = "input_ids"  # the field of a document's tokens, as transformers and `documents` have it
_DOCUMENT = "one document, a row of the data"
_PAIR = "one pair of answers, a row of the data"


def _with_unit(recipe: Recipe, records: Records, folder: RunFolder) -> Recipe:
    """Return a recipe that says what is protected, and what documents assume of a tokenizer.

    A run that was begun before recipes said so goes on without. Raises UserError for rows of
    several documents.
    """
    script, group = recipe.by_script, recipe.group_unit
    assert script is not None
    inputs = records.examples(2)[0]
    tokens = isinstance(inputs, dict) and _TOKENS in inputs
    if tokens and "position_ids" in inputs:
        check_not_packed(records)
    pairs = _are_pairs(inputs)
    unit = (_PAIR if pairs else _DOCUMENT) if tokens else None
    if group is not None:
        unit = replace(group, column=records.unit_name or group.column).description
        word = "pairs of answers" if pairs else "documents"
        unit = unit.replace("records", word) if tokens else unit
    said: dict[str, Any] = {"unit": None if unit == recipe.privacy_unit else unit}
    unsaid = [LEARNED_FROM] if tokens and LEARNED_FROM not in script.assumed else []
    if pairs and not isinstance(records, PreferenceRecords):
        unsaid.append(UNNAMED_REFERENCE)
    if unsaid:
        said["assumed"] = [*script.assumed, *unsaid]
    if folder.recipe_file.exists() and (begun := folder.read_recipe().by_script) is not None:
        said["unit"] = begun.unit
        before, now = ([each.places[0] for each in s.began_with] for s in (begun, script))
        if before == now:  # as their cards stood then
            said["began_with"] = begun.began_with
        if unsaid:
            kept = [each for each in unsaid if each in begun.assumed]
            said["assumed"] = [*script.assumed, *kept]
    return recipe.model_copy(update={"script": script.model_copy(update=said)})


_PROBED_TOKENS = 4  # of documents whose logits are kept: a vocabulary may be large
_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_ARGUMENTS = {
    "training.": "", "script.": "", "data.root": "held_out", "data.rates": "rates",
    "data.class_counts": "class_counts", "data.importance_weights": "importance_weights",
}  # fmt: skip


def _recipe_differences(begun: Recipe, now: Recipe) -> list[str]:
    """Return in which arguments a run's recipe is another, in words (`setting_differences`)."""
    before, after = (each.model_dump(mode="json", exclude={"resources"}) for each in (begun, now))
    olds: dict[str, Any] = {}
    news: dict[str, Any] = {}
    for key, old, new in iter_differences(before, after):  # "script" first, which names defaults
        olds.setdefault(_argument(key), old)
        news.setdefault(_argument(key), new)
    return setting_differences(olds, news)


def _argument(key: str) -> str:
    """Return the argument of `PrivateTraining` behind a key of its recipe."""
    for begin, argument in _ARGUMENTS.items():
        if key.startswith(begin):
            return argument + key.removeprefix(begin)
    return key


# --- what a step tells ------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """Hold the public and released values of one step of `dpdist.PrivateTraining`.

    Guarantee: all fields but `private` follow from released values and public settings, so a loop
    may print them and depend on them at no further privacy cost.

    Attributes:
        step: number of the step, from 0 on.
        learning_rate: learning rate of the optimizer's first group in this step.
        noisy_norm: L2 norm of the noisy sum of clipped gradients, which was released; one record
            adds at most the clip norm.
        epsilon: epsilon of all that was released up to this step, at the delta of the plan;
            computed when it is asked for.
        private: losses and counts of private records, only with `private_metrics=True`: do not
            publish them, and do not let the loop depend on them.
        score: noisy score on held-out private records, after the steps that
            `PrivateTraining.score` declared, else None; around 0 to 1, and beyond by its noise.

    Example:
        >>> import tempfile, torch, dpdist
        >>> inputs, labels = torch.randn(200, 4), torch.randint(2, (200,))
        >>> model = torch.nn.Linear(4, 2)
        >>> training = dpdist.PrivateTraining(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), (inputs, labels),
        ...     loss="cross-entropy",
        ...     privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
        ...     batch_size=20, steps=2, folder=tempfile.mkdtemp() + "/run",
        ... )
        >>> first, second = training.step(), training.step()
        >>> first.step, second.learning_rate, second.private is None
        (0, 0.1, True)
        >>> 0 < first.epsilon < second.epsilon
        True
        >>> print(first)  # doctest: +ELLIPSIS
        step 0: epsilon ..., learning rate 0.1, noisy norm ...
    """

    step: int
    learning_rate: float
    noisy_norm: float
    private: Mapping[str, Any] | None = None
    score: float | None = None
    _so_far: Callable[[], Guarantee] = field(repr=False, kw_only=True)

    @property
    def epsilon(self) -> float:
        """Return epsilon of all that was released up to this step, a float at the plan's delta.

        It is computed when it is first asked for; infinite where nothing is proved.
        """
        return self._guarantee.epsilon

    @cached_property
    def _guarantee(self) -> Guarantee:
        return self._so_far()

    def __str__(self) -> str:
        """Return the released values in a line."""
        scored = "" if self.score is None else f", score {self.score:.4g}"
        fixed = f"{FIXED_KEY}, " if self._guarantee.fixed_key else ""
        return (
            f"step {self.step}: {fixed}epsilon {format_epsilon(self.epsilon)}, learning rate "
            f"{self.learning_rate:g}, noisy norm {self.noisy_norm:.4g}{scored}"
        )


# --- the training -----------------------------------------------------------------------------


_CONTEXT = "PrivateTraining"  # in complaints about its settings
_FINGERPRINT = "fingerprint of a script's records"  # purpose of its key
_EXAMPLES = 33  # invented, to screen the model with
_ASSUMED = (
    "no private record is among what the script's initial weights, loss and settings were made of",
    "between two steps the script uses nothing of the records but the released fields of what "
    "`step` returned",
)
_KINDS = {"mse": "number", "huber": "number", "bce": "labels", "multi-label-bce": "labels"}
_ONLY = {
    "gpus_per_worker": 0, "noise": "host",
    "archive": None, "archive_private": False,
}  # fmt: skip
_open: dict[Path, weakref.ref[PrivateTraining]] = {}  # of this process, which train


_watching: list[list[PrivateTraining]] = []


@contextmanager
def watch_made() -> Iterator[list[PrivateTraining]]:
    """Yield a list of the objects that the block makes, those that are refused included."""
    made: list[PrivateTraining] = []
    _watching.append(made)
    try:
        yield made
    finally:
        _watching[:] = [each for each in _watching if each is not made]


class RunBusyError(UserError):
    """Another process trains the run."""


@dataclass(frozen=True)
class _Known:
    """Records by name and fingerprint."""

    name: str
    fingerprint: str


class PrivateTraining:
    """Train a module of your own privately, by your own optimizer, in your own loop.

    Guarantee: the run is (epsilon, delta)-differentially private as `guarantee` states, for
    everything released so far. Each step takes a keyed Poisson sample, clips every record's
    gradient, adds up, puts the release on record, adds noise and divides by the expected batch: the
    same `PrivateStep` as in a recipe. The optimizer gets that noisy gradient alone.
    Assumptions that nobody checked stand on the run's card.

    The folder is an ordinary run folder, begun by the first step. The same script continues it
    after a crash, from the newest checkpoint: it must build the same objects.

    In several processes with a `torch.distributed` process group, as `torchrun` and Ray Train make
    them, the same script trains together: each step is the step of one process, and is on record
    before any of them draws its noise. Worker 0 alone writes. All must build the same.

    Args:
        model: the module itself, on its device; layers that normalise over the batch and modules
            wrapped for distributed training are refused.
        optimizer: any torch optimizer that needs no closure, of the model's parameters.
        data: the private records: `(X, y)`, or anything that `dpdist.as_records` takes.
        loss: a name, such as "cross-entropy"; a criterion object, such as
            `torch.nn.CrossEntropyLoss()`; or a callable that returns one value per record.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        batch_size: expected number of records in a step (of groups where privacy has unit: group);
            the real one is drawn.
        steps, epochs: length of the training; one of the two.
        folder: of the run, made where it is not there.
        resources: `micro_batch`, `rounding` and `checkpoint_seconds` of a recipe's section, as a
            dict.
        state: schedulers and other objects with `state_dict` that a checkpoint keeps. It is written
            when the next step begins, with what the loop's own lines did in between.
        held_out: PUBLIC records `(X, y)` for evaluation, certificates and attacks; kept in the run
            folder.
        factory: "package.module:function" that builds this model from (input_shape, classes). With
            it commands in other processes can load the trained model; without it, only this script.
        isolate: run every record through the model alone.
        certify: a recipe's section `certify`, for `dpdist certify` of the run.
        reproducible: add sums up in the same order on any number of workers, at most 8: the same
            bits, slower.
        private_metrics: let `step` return losses and counts of private records, too; with several
            workers, of this worker's. The ledger says so, and the guarantee's kind is then
            "assumed: post-processing".
        rates: relative sampling rates by class, such as {0: 1, 1: 4}: a record joins a step at the
            rate of its own target. The price is that of the largest rate.
        class_counts: the PUBLIC number of records of each class, from which rates follow; they are
            never counted in the data. Required with rates.
        importance_weights: multiply a record's loss by 1/rate, of mean 1, before the clip.
        began_with: run or release whose weights the model begins with, or a list of several: its
            folder, `RunFolder` or `Release`. The guarantee then is that of this run and of them
            together, wherever one can be stated. Weights that a run trained are refused without it.

    Raises:
        UserError: one line that names the wrong argument and its rule; nothing was released.

    Example:
        >>> import tempfile, torch, dpdist
        >>> inputs, labels = torch.randn(200, 4), torch.randint(2, (200,))
        >>> model = torch.nn.Linear(4, 2)
        >>> training = dpdist.PrivateTraining(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), (inputs, labels),
        ...     loss="cross-entropy",
        ...     privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
        ...     batch_size=20, steps=3, folder=tempfile.mkdtemp() + "/run",
        ... )
        >>> while training.steps_left:
        ...     report = training.step()
        >>> training.steps_left, training.guarantee.kind
        (0, 'proved')
    """

    _started = False  # the run's folder is there, and its ledger
    _scored: PrivateScore | None = None
    _parts: ModelParts | None = None  # of the model as it was checked
    _workers: Workers

    @refused_by_all
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Any,
        *,
        loss: Any,
        privacy: PrivacyRecipe | Mapping[str, Any],
        batch_size: int,
        steps: int | None = None,
        epochs: int | None = None,
        folder: str | Path,
        resources: ResourcesRecipe | Mapping[str, Any] | None = None,
        state: Sequence[Any] = (),
        held_out: Any = None,
        factory: str | None = None,
        isolate: bool = False,
        certify: Mapping[str, Any] | None = None,
        reproducible: bool = False,
        private_metrics: bool = False,
        rates: Mapping[Any, float] | None = None,
        class_counts: Mapping[Any, int] | None = None,
        importance_weights: bool = False,
        began_with: Any = None,
    ) -> None:
        for made in _watching:
            made.append(self)
        _check_model(model)
        self._form = form_of(model)
        _check_optimizer(optimizer, model)
        _check_state(state)
        self._objective = objective_of(loss)
        self.model, self.optimizer, self.state = model, optimizer, list(state)
        self._stages = [each.model_dump(mode="json") for each in _stages(began_with)]
        self._given: dict[str, Any] = given_settings(model, optimizer, state)
        self.run, self._private_metrics, self._loss = _run_folder(folder), private_metrics, loss
        _check_no_search(self.run)
        self._records = as_records(data)
        self._tokenization = self._records.tokenization
        self._device = next(model.parameters()).device
        self._public = None if held_out is None else as_records(held_out, name="held_out")
        examples = self._examples()
        _check_arguments(self._records, loss, rates=rates, class_counts=class_counts)
        self._spec = _spec_of(model, factory, examples[0], loss)
        _check_what_is_learned(self._records, loss, model, self._spec.classes)
        self._recipe = recipe = self._recipe_of(
            privacy, resources, isolate, certify,
            {"batch_size": batch_size, "steps": steps, "epochs": epochs,
             "reproducible": reproducible},
            (rates, class_counts, importance_weights),
        )  # fmt: skip
        self._set_up(recipe, examples)

    # --- start-up

    def _set_up(self, recipe: Recipe, examples: tuple[Any, Tensor]) -> None:
        """Make the engine and the plan; begin where a run goes on or several workers begin."""
        self._records = _by_unit(recipe, self._records)
        self._engine = self._engine_of(examples)
        self._check_form()
        self._done, self._stopped = 0, False  # steps taken; whether the script ended them early
        self._begun = self._inside = False
        self._step: PrivateStep | None = None
        self._monitor: Monitor | None = None
        self._stack = ExitStack()
        _warn_of_fixed_key(recipe)
        self._planned(with_kept_score(recipe, self.run))
        if any(each["goes on"] for each in self._workers.agree(**{"goes on": self._continued})):
            self._begin()
        else:
            self._check_same_start(len(self._records))

    def _examples(self, count: int = _EXAMPLES) -> tuple[Any, Tensor]:
        """Return invented inputs and targets, on the model's device."""
        inputs, targets = self._records.examples(count)
        there = each_tensor(lambda each: each.to(self._device), inputs)
        return there, targets.to(self._device)

    def _recipe_of(
        self,
        privacy: PrivacyRecipe | Mapping[str, Any],
        resources: ResourcesRecipe | Mapping[str, Any] | None,
        isolate: bool,
        certify: Mapping[str, Any] | None,
        training: dict[str, Any],
        sampling: tuple[Mapping[Any, float] | None, Mapping[Any, int] | None, bool],
    ) -> Recipe:
        """Return the statement of the run folder about this training. Raises UserError."""
        name = _NAME.sub("-", self.run.name).strip("-._") or "run"
        data = _NAME.sub("-", self._records.name).strip("-._") or "records"
        recipe = parse_recipe(
            {
                "name": name,
                "data": {
                    "name": data,
                    "root": None if self._public is None else str(self.run.path / HELD_OUT),
                    "classes": _classes_of(self._spec, sampling[0]),
                    "targets": self._kind(),
                    "rates": sampling[0] or {}, "class_counts": sampling[1] or {},
                    "importance_weights": sampling[2],
                },
                "model": {
                    "name": self._spec.name, "options": self._spec.options, "isolate": isolate,
                },
                "privacy": _plain("privacy", privacy),
                "training": {**training, "loss": self._loss_name()},
                "resources": self._workers.resources(
                    _plain("resources", resources or {}), training["reproducible"]
                ),
                "certify": certify,
                "script": {
                    "model": _name_of(type(self.model)),
                    "optimizer": _name_of(type(self.optimizer)),
                    "loss": self._described_loss,
                    "replaced": list(self._records.replaced),
                    "assumed": [*self._assumed, *self._records.assumed],
                    "began_with": self._stages,
                },
            },
            "PrivateTraining",
        )  # fmt: skip
        self._check_records(recipe)
        for key, usual in _ONLY.items():
            if (found := getattr(recipe.resources, key)) != usual:
                raise UserError(
                    f"resources.{key}: must be {usual} in PrivateTraining, got {found}; leave it "
                    "out, or train by a recipe"
                )
        return _with_unit(recipe, self._records, self.run)

    @property
    def _assumed(self) -> tuple[str, ...]:
        """Return what the guarantee rests on of the script, and nobody checked."""
        if not self._stages:
            return _ASSUMED
        names = " and ".join(each["name"] for each in self._stages)
        return f"{_ASSUMED[0]}, but for what the card of {names} states", *_ASSUMED[1:]

    def _check_records(self, recipe: Recipe) -> None:
        """Raise UserError for records that do not fit the model's weights or the rates by class."""
        if any(self.run.path == Path(place) for each in recipe.stages for place in each.places):
            raise UserError("began_with: must be another run than that of folder")
        _check_first_weights(self.model, self._records, self.run, recipe.stages)
        if recipe.privacy.budget is not None and getattr(self._records, "of_features", False):
            raise UserError(
                "privacy.budget: must be left out, as the records are features that a network "
                "made: whether the budget knows the same records in another form cannot be told"
            )
        if recipe.data.rates:
            check_one_class_each(self._records, recipe.data.classes)

    def _kind(self) -> str:
        """Return the kind of the targets: "class", "number" or "labels"."""
        if isinstance(self._loss, str):
            return _KINDS.get(self._loss, "class")
        if isinstance(self._loss, nn.BCEWithLogitsLoss):
            return "labels"
        return "number" if self._records.examples(2)[1].is_floating_point() else "class"

    @property
    def _described_loss(self) -> str:
        """Return the loss, with its settings where it is an object."""
        if isinstance(self._loss, nn.Module):
            return CriterionLoss(self._loss).describe()
        return self._loss if isinstance(self._loss, str) else _name_of(self._loss)

    def _loss_name(self) -> str:
        """Return how a recipe names the loss; none can call a script's own."""
        if isinstance(self._loss, str):
            return self._loss
        name = getattr(self._loss, "__name__", type(self._loss).__name__)
        return "script:" + re.sub("[^A-Za-z0-9]", "_", name)

    def _engine_of(self, examples: tuple[Any, Tensor]) -> GradientEngine:
        """Return the gradient engine, checked on invented examples. Raises UserError."""
        privacy, count = self._recipe.privacy, len(self._records)
        objective = importance_weighted(
            self._objective, self._recipe, privacy.nominal_records or count
        )
        engine = GradientEngine(
            self.model,
            objective,
            clipping=make_clipping(privacy.clipping, privacy.clip_norm),
            micro_batch=self._recipe.resources.micro_batch,
            isolate=self._recipe.model.isolate,
        )
        engine.records_per_example = privacy.max_records_per_group or 1
        engine.rounding = self._recipe.resources.rounding
        with kept_buffers(self.model):
            few = take(examples[0], slice(2)), examples[1][:2]
            with keyed_draws(SYNTHETIC_KEY, self._device), torch.no_grad():
                checked_losses(self.model, objective, *few)
            # Worker 0 screens for all: `_check_same_start` compares their models and settings.
            (engine.validate if self._workers.first else engine.prepare)(*examples)
        # As they were checked: they stay so from here on, also before the first step.
        self._trained_names = self._trained()
        self._modes = {name: module.training for name, module in self.model.named_modules()}
        return engine

    def _planned(self, recipe: Recipe) -> None:
        """Find the plan that a recipe makes, or that the run was begun with; write nothing."""
        folder, records = self.run, self._records
        noise: float | None = None
        try:
            continued = folder.check_same_recipe(recipe)
        except DifferentRecipeError:
            begun = folder.read_recipe()
            if begun.by_script is None:
                raise UserError(
                    f"folder: must hold a run of PrivateTraining or nothing, got {folder.path}, "
                    "the run of a recipe; give another folder"
                ) from None
            refuse_differences(_recipe_differences(begun, recipe), folder.path)
            raise  # the folder was changed in between
        check_kept(recipe, folder, None)
        if continued and folder.plan.exists():
            plan = folder.read_plan()
        else:
            noise, plan = resolve_plan(recipe, len(records), "PrivateTraining")
        if len(records) != plan.records and not plan.nominal:
            raise UserError(
                f"data: must be the {plan.records:,} {plan.counted} that the run was begun with, "
                f"got {len(records):,}"
            )
        _check_groups(recipe, records)
        self._hashed = None if recipe.privacy.budget is None else HashedRecords(records)
        if self._hashed is not None and not continued and self._workers.first:
            check_charge(recipe, plan, self._hashed, _CONTEXT)
        check_clip(self._engine, plan.clip_norm)
        if self._public is not None:
            _check_public(self._public, records, recipe.data.targets, self._spec.classes)
        self._recipe, self.plan, self._noise = recipe, plan, noise
        self._continued = continued and folder.plan.exists()

    def _begin(self) -> None:
        """Begin the run, or take over what it left; refuse before anything is written."""
        if self.run.plan.exists() != self._continued:  # another start of it was faster
            self._planned(self._recipe)
        folder = self.run
        run_key = self._begin_run()
        self._started = True
        plan = self.plan.fingerprint()
        key = derive_key(run_key, "run", plan, self._fingerprint, "trial", 0)
        if self._scored is not None:
            self._scored.open(folder, self.plan, self._workers)
        self._initial = checkpoint.tensors_digest(self.model.state_dict())
        self._restore()
        self._workers.check_same({"checkpoint": str(self._done), **self._digests("checkpoint")})
        if folder.training_summary.exists():
            if self._hashed is not None and self._workers.first:  # a crash may have left it open
                end_charge(self._recipe, folder, self._hashed, None, _CONTEXT)
            self._evaluate()
            return
        self._attempt(key)
        if not complete_checkpoints(folder.checkpoints):
            self._save()
        if not self.steps_left:  # it ended before it could say so
            self._finish()

    def _begin_run(self) -> bytes:
        """Write a new run down, on all workers the same, and return its key. Raises UserError."""
        recipe, folder, records = self._recipe, self.run, self._records
        self._check_same_start(len(records))
        chosen = choose_run_key(recipe, folder) if self._workers.first else None
        told_key = "" if chosen is None else _records_key(chosen).hex()
        records_key = bytes.fromhex(self._workers.of_first(told_key))
        told = _Known(records.name, records.keyed_fingerprint(records_key))
        self._workers.check_same({"data": told.fingerprint})
        check_same_data(folder, told)
        checked = CheckedTraining(recipe, folder, self.plan, told, None, self._noise)
        if chosen is not None:
            self._write_down(checked, chosen)
        self._workers.agree()  # worker 0 has written
        if not folder.run_key.exists() or _records_key(read_run_key(folder)) != records_key:
            raise UserError(
                f"folder: {folder.path}: holds another run than worker 0 began: give one on shared "
                "storage, and let no other process begin this run"
            )
        self.plan, self._fingerprint = folder.read_plan(), told.fingerprint
        self._job = replace(checked, plan=self.plan).job()
        return read_run_key(folder)

    def _check_same_start(self, count: int) -> None:
        """Raise UserError, on all workers, unless they begin with the same script."""
        if self._workers.count == 1:
            return
        sections = self._recipe.model_dump(mode="json", exclude={"resources"})
        told = {f"{name} settings": json.dumps(each) for name, each in sections.items()}
        self._workers.reducer_on(self._device)
        told |= {"data": str(count), "code": self._code(), **self._settings()}
        told["device"] = self._device.type
        self._workers.check_same({**told, **self._digests("model")})

    def _digests(self, name: str) -> dict[str, str]:
        """Return, where workers compare it, a digest of the model and of the optimizer's state."""
        if self._workers.count == 1:
            return {}
        optimizer = pack("optimizer", self.optimizer.state_dict())
        tensors = {**self.model.state_dict(), **optimizer}
        return {name: checkpoint.tensors_digest(tensors)}

    def _code(self) -> str:
        loss = type(self._loss) if isinstance(self._loss, nn.Module) else self._loss
        return code_digest_of(self.model, loss)

    def _write_down(self, checked: CheckedTraining, run_key: bytes) -> None:
        """Begin the run's folder, or open it; its public records, its key and its plan."""
        recipe, folder = checked.recipe, checked.folder
        if self._public is not None:
            _store_public(self._public, folder, recipe)
        folder.create_or_open(recipe)
        ensure_run_key(recipe, folder, run_key)
        checked.begin()

    def _attempt(self, key: bytes) -> None:
        """Begin an attempt in the ledger, and make the step of it."""
        job, plan, folder = self._job, self.plan, self.run
        reducer = self._workers.reducer_on(self._device)
        _take_over(folder.path, self)
        fixed = MethodState(self.model, {}, key)
        identity = {
            **replay_fingerprint(job, reducer, self._fingerprint, self._initial),
            "hidden noise": method_state_digest(fixed),
            "script": self._code(),
        }
        held = None
        try:
            if self._workers.first:
                self._charge_budget()
                held = Attempt.open_ledger(job, self._stack, identity, self._done)
        except JournalBusy:
            raise RunBusyError(
                f"folder: {folder.path}: another process trains this run; wait for it, or end it, "
                "and this script continues it"
            ) from None
        self._workers.agree()  # worker 0 holds the ledger
        attempt = Attempt.shared(job, reducer, held, self._done)
        ledger = held or Ledger.read(folder.ledger)
        assert ledger.epoch is not None
        self._epoch, self._before = ledger.epoch, ledger.released_steps(ledger.epoch)
        shards = build_shards(
            len(self._records), plan.records, reducer, self._recipe.training.reproducible,
            nominal=plan.nominal,
        )  # fmt: skip
        self._step = PrivateStep(
            self._engine, self._records, key, attempt.label, reducer=reducer, shards=shards,
            ledger=held, announced=attempt.announced, announcing=self._workers.announcing,
        )  # fmt: skip
        if held is not None:
            self._tell_group(held)
        self._watch = Watch(ModelParts(self.model), self.optimizer)
        self._saved = time.monotonic()

    def _charge_budget(self) -> None:
        """Charge what the plan may release before it is (worker 0), and what it did at the end."""
        if self._hashed is None:
            return
        recipe, folder = self._recipe, self.run
        mine = begin_charge(recipe, self.plan, folder, self._hashed, _CONTEXT)
        self._stack.callback(end_charge, recipe, folder, self._hashed, mine, _CONTEXT)

    def _tell_group(self, ledger: Ledger) -> None:
        """Write down who goes on from here, and how their passes keep records apart (worker 0)."""
        assert self._step is not None
        sure = self._engine.independence if self.plan.step(0).noise_multiplier else ""
        group = monitoring.WorkerGroup.current(self._step.reducer, ledger, self._done, sure)
        monitoring.append_group(self.run, group)
        if self._monitor is None:
            self._monitor = Monitor(self._job, self.plan.steps, self._done)

    def _restore(self) -> None:
        """Take over the newest checkpoint, or the finished model."""
        state = checkpoint.load_latest(self.run.checkpoints)
        if state is None:
            return
        found = unpack("script", state.slots)
        if found["kept"] != (given := [type(each).__name__ for each in self.state]):
            before = ", ".join(found["kept"]) or "none"
            raise UserError(
                f"state: must hold what the run was begun with ({before}), got "
                f"{', '.join(given) or 'none'}: give the same objects in the same order"
            )
        self._check_given(found)
        mark_trained(self.model, self.run.path)  # also where only some weights can be loaded
        self._done, self._initial = state.step, found["initial"]
        self._stopped = bool(found.get("stopped"))
        try:
            self.model.load_state_dict(unpack("model", state.slots))
            self.optimizer.load_state_dict(unpack("optimizer", state.slots))
            for place, each in enumerate(self.state):
                each.load_state_dict(unpack(f"state.{place}", state.slots))
        except (RuntimeError, ValueError, KeyError) as error:
            said = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"{self.run.checkpoints}: does not fit these objects ({said}); build them as when "
                "the run was begun"
            ) from error

    def _check_given(self, begun: Mapping[str, Any]) -> None:
        """Raise UserError for settings that the run did not begin with, and would not use.

        Weights that a script draws without a seed are others each time: those of the run hold.
        """
        before, now = dict(begun["given"]), self._given
        older = _open.get(self.run.path)
        trained = None if older is None else older()
        again = trained is not None and trained.model is self.model  # of a notebook's earlier cell
        if again or begun["initial"] == self._initial:  # no seed shows in these weights
            before.pop("seed", None)
        refuse_differences(setting_differences(before, now), self.run.path)
        if before.get("seed") is not None and "seed" in now:
            warnings.warn(
                "model: has other weights than the run began with, which are not used: those of "
                f"the newest checkpoint in {self.run.path} are. For a run of its own build the "
                "model anew, and give another folder",
                stacklevel=2,
            )
        self._given = begun["given"]

    def _save(self) -> None:
        """Write a checkpoint of everything as it is now, on all workers the same."""
        self._workers.check_same(self._digests("parameters"))
        self._saved = time.monotonic()
        if self._step is not None and self._step.ledger is not None:
            self._write_checkpoint(self._step.ledger)
        self._workers.agree()  # worker 0 has written

    def _write_checkpoint(self, ledger: Ledger) -> None:
        kept = {
            "initial": self._initial,
            "kept": [type(each).__name__ for each in self.state],
            "given": self._given,
            **({"stopped": True} if self._stopped else {}),
        }
        slots = {
            **pack("script", kept),
            **pack("model", dict(self.model.state_dict())),
            **pack("optimizer", self.optimizer.state_dict()),
        }
        for place, each in enumerate(self.state):
            slots |= pack(f"state.{place}", each.state_dict())
        given = not self._spec.name.startswith(f"{SCRIPT}:")
        if not self.steps_left and not (given and self._tokenization is None):  # for a factory
            slots |= pack("module", self._module_record())
        state = checkpoint.TrainState(self._done, torch.zeros(0), slots)
        checkpoint.save(self.run.checkpoints, state, ledger.anchor)

    def _module_record(self) -> dict[str, Any]:
        """Return the trained module's description; of a causal model, as it answers tokens."""
        inputs: Any = self._records.examples(_EXAMPLES)[0]
        answering = models.NextTokenLogits.around(self.model)
        if answering is not None:
            inputs = models.NextTokenLogits.rows(inputs, _PROBED_TOKENS)
        return module_record(self.model, inputs, answering, self._tokenization)

    # --- what a search looks at

    @property
    def recipe(self) -> Recipe:
        """Return the `Recipe` that the run folder keeps of this training, noise as given."""
        return self._recipe

    @property
    def records(self) -> Records:
        """Return the private data, `Records`; with a group as the unit, one entry is one group."""
        return self._records

    @property
    def is_untouched(self) -> bool:
        """Return whether the training is at its very start, a bool.

        True: no step was taken, no checkpoint restored, and the optimizer holds no state.
        """
        return not (self._started or self._begun or self._done or self.optimizer.state)

    def state_digest(self) -> str:
        """Return a hash of the current model, optimizer and `state`, a str of 32 hex digits.

        Plain attributes of the model's layers are covered, too.

        Raises:
            UserError: an object's state cannot be kept in a checkpoint.
        """
        form = {name: each for name, each in form_of(self.model).items() if isinstance(each, str)}
        parts = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}
        parts |= {f"state.{n}": each.state_dict() for n, each in enumerate(self.state)}
        parts["form"] = dict(sorted(form.items()))
        tensors = [pack(name, value) for name, value in parts.items()]
        return checkpoint.tensors_digest({k: v for each in tensors for k, v in each.items()})

    # --- the loop

    @property
    def steps_left(self) -> int:
        """Return the number of steps of the plan that are not done, an int; 0 at the end."""
        return 0 if self._stopped else self.plan.steps - self._done

    @property
    def steps_taken(self) -> int:
        """Return the number of steps that the model was made of, an int."""
        return self._done

    @property
    def guarantee(self) -> Guarantee:
        """Return the `Guarantee` of everything that was released so far, over all attempts.

        Its kind is "assumed: post-processing" where the script changed the model between steps, or
        was shown private metrics. With a fixed run key it says NOT PRIVATE.
        Before the first step it is that of 0 steps. After `finish` it is that of all planned steps,
        because where a loop stops may depend on what its steps returned.
        """
        plan = self.plan
        if not self._started:  # nothing was released: scores alone are charged
            return self._recipe.guarantee_of(plan, plan.executed_phases(plan.step_counts(0)))
        ledger = self._step.ledger if self._step is not None else None
        if ledger is None:
            ledger = Ledger.read(self.run.ledger)
        released = ledger.released_phases(plan)
        return self._recipe.guarantee_of(plan, released, ledger.post_processed)

    def step(self) -> StepReport:
        """Take the next step of the plan: noisy gradient, then one step of the optimizer.

        Several workers take it together: each calls it, in the same order.

        Returns:
            A `StepReport` of this step: its number, learning rate, noisy norm, epsilon so far, and
            the private metrics and score where they were asked for.

        Raises:
            UserError: nothing is left, parts of the model were frozen or exchanged since the last
                step, a scheduler is not in `state`, or the training diverged.
        """
        number = self._done
        with self._workers.sharing_errors():
            self._ready()
            if self._look_between(number):
                self._save()
        rate = float(self.optimizer.param_groups[0]["lr"])
        self._inside = True
        gradient, seen = self._gradient(number)
        norm = float(gradient.norm()) * self.plan.step(number).expected_batch
        self._update(gradient)
        self._check_finite(number)
        assert self._parts is not None
        self._watch.remember(self._parts)
        score = self._noisy_score(number)
        if self._monitor is not None:
            self._monitor.record_step(number, seen)
        self._done, self._inside = number + 1, False
        private = asdict(seen) if self._private_metrics else None
        report = StepReport(number, rate, norm, private, score, _so_far=self._so_far())
        if not self.steps_left:
            self._finish()
        return report

    def checkpoint(self) -> None:
        """Keep the training as it is between two steps, so that a restart repeats none of them.

        Checkpoints come by themselves every `resources.checkpoint_seconds`; this is for a script
        that hears of its end, as by SIGTERM: its handler sets a flag, since a call inside a step is
        refused. Several workers first agree on the flag (`torch.distributed.all_reduce`), as all
        must call it after the same step. Before the first step and after the last there is nothing
        to keep. Returns nothing.

        Raises:
            UserError: as `step` does, a step was not left as a whole, or other workers go on.

        Example:
            >>> import signal, torch
            >>> from dpdist import PrivateTraining
            >>> model = torch.nn.Linear(4, 2)
            >>> training = PrivateTraining(
            ...     model, torch.optim.SGD(model.parameters(), 0.1),
            ...     (torch.randn(200, 4), torch.randint(2, (200,))), loss="cross-entropy",
            ...     privacy={"epsilon": 3, "delta": 1e-4}, batch_size=20, steps=5,
            ...     folder="runs/kept",
            ... )
            >>> told = []
            >>> before = signal.signal(signal.SIGTERM, lambda *_: told.append("end"))
            >>> while training.steps_left and not told:
            ...     report = training.step()
            ...     if report.step == 1:
            ...         signal.raise_signal(signal.SIGTERM)
            >>> training.checkpoint()
            >>> training.steps_left
            3
            >>> training.close()
            >>> _ = signal.signal(signal.SIGTERM, before)
        """
        if self._inside:
            raise UserError(
                "checkpoint: must be called between two steps, got a call inside one or after an "
                "interrupted one: let a signal's handler set a flag, and call it after step()"
            )
        if not self._started or not self.steps_left:
            return
        with self._workers.sharing_errors():
            self._ready()
            self._look_between(self._done, "checkpoint")
            self._save()

    def finish(self) -> RunFolder:
        """End the training before its last step, at the price of all planned steps.

        Guarantee: that of the whole plan. Where a loop stops by scores or norms of its steps, the
        number of steps tells something of the records, and only the planned number does not. So the
        steps that are left are charged without being taken, and cannot be taken later.

        Several workers call it together. After the last step there is nothing to end. Parameters
        may have been put back to those of an earlier step; the guarantee then is *assumed:
        post-processing*.

        Returns:
            The `RunFolder` of the finished run, which reports, releases and certificates take.

        Raises:
            UserError: no step was taken, or as `step` does.

        Example:
            >>> import torch
            >>> from dpdist import PrivateTraining
            >>> model = torch.nn.Linear(4, 2)
            >>> training = PrivateTraining(
            ...     model, torch.optim.SGD(model.parameters(), 0.1),
            ...     (torch.randn(200, 4), torch.randint(2, (200,))), loss="cross-entropy",
            ...     privacy={"epsilon": 3, "delta": 1e-4}, batch_size=20, steps=50,
            ...     folder="runs/stopped",
            ... )
            >>> while training.steps_left:
            ...     if training.step().step == 4:
            ...         run = training.finish()
            >>> training.steps_taken, training.guarantee == training.plan.guarantee()
            (5, True)
        """
        if self._inside:
            raise UserError(
                "finish: must be called between two steps, got a call inside one or after an "
                "interrupted one"
            )
        if not self._done:
            raise UserError("finish: must be called after a step, got none: take one first")
        if self.steps_left:
            with self._workers.sharing_errors():
                self._ready()
                self._look_between(self._done, "finish")
                self._stopped = True
        if self._step is not None:  # not let go of: also after an end that failed
            self._finish()
        return self.run

    def run_all(self) -> RunFolder:
        """Take all steps that are left, with nothing in between.

        Returns:
            The `RunFolder` of the finished run.

        Raises:
            UserError: parts of the model were frozen or exchanged, a scheduler is not in `state`,
                or the training diverged.
        """
        while self.steps_left:
            self.step()
        return self.run

    def score(
        self, held_out: Any, *, every: int, noise: float | None = None, value: Value | None = None
    ) -> None:
        """Declare noisy scores of the model on held-out PRIVATE records, before the first step.

        Returns nothing; after every so many steps `step` returns a report with `score`, a float.

        Guarantee: a score is the records' values, each in [0, 1], added up with Gaussian noise, and
        divided by the public number of records. The plan pays for all scores from the beginning. No
        step trains on these records, so a record pays for the steps or for the scores, and the
        guarantee is the worse of both. With `privacy.epsilon` neither costs more than that.

        A loop may depend on scores, to choose a rate or when to stop. One that cannot be taken
        again to the bit after a crash is drawn afresh and counts as another: when all that the plan
        pays for are taken, later ones are None.

        Several workers score together: all call this with the same records, of which each evaluates
        its share, and all get the one noisy score, whose sum is that of one process.

        Args:
            held_out: private records `(X, y)`, or anything that `dpdist.as_records` takes; refused
                where one of them is in the training's records, by keyed hashes of their inputs.
                Where privacy has unit: group, they say their units, which have no record in data;
                a unit adds the mean of its records' values, and units are what is counted.
            every: steps from one score to the next; the first comes after so many.
            noise: standard deviation of the noise on the sum, in records: of M records a score is
                off by noise / M. Default: the least that epsilon allows.
            value: of the module and a batch of one record, `(inputs, targets)`, to its value, shape
                (1,), cut to [0, 1]; default: 1 where the largest output is that of the target's
                class. A record on which it fails counts 0.

        Raises:
            UserError: the run has begun without these scores, the noise is too small for epsilon, a
                record is trained on as well, or the value cannot be had; nothing was released.

        Source:
            McSherry, SIGMOD 2009 (parallel composition).

        Example:
            >>> import tempfile, torch, dpdist
            >>> inputs, labels = torch.randn(300, 4), torch.randint(2, (300,))
            >>> model = torch.nn.Linear(4, 2)
            >>> training = dpdist.PrivateTraining(
            ...     model, torch.optim.SGD(model.parameters(), lr=0.1),
            ...     (inputs[:200], labels[:200]), loss="cross-entropy",
            ...     privacy=dpdist.Privacy(epsilon=3, delta=1e-3),
            ...     batch_size=20, steps=4, folder=tempfile.mkdtemp() + "/run",
            ... )
            >>> training.score((inputs[200:], labels[200:]), every=2)
            >>> [training.step().score is None for _ in range(4)]
            [True, False, True, False]
            >>> training.guarantee.epsilon <= 3
            True
        """
        if self._hashed is not None:
            raise UserError(
                "score: must be left out with privacy.budget, whose records are charged for steps "
                "alone; train without one of the two"
            )
        with self._workers.sharing_errors():
            self._scored = self._declared_score(as_records(held_out), value, every, noise)

    def _declared_score(
        self, records: Records, value: Value | None, every: int, noise: float | None
    ) -> PrivateScore:
        """Return the scores that `score` declares, checked; the plan pays for them afterwards."""
        begun = self._recipe.score
        if self._recipe.group_unit is not None:
            records = scored_by_unit(self._recipe, self._records, records)
            if self._public is not None:
                check_units_apart(self._public, single_records(records))
        if self._scored is not None or (self._started and begun is None):
            raise UserError(
                "score: must be declared once, before the first step of a new run: the plan pays "
                f"for it from the beginning; begin another one than {self.run.path}",
                see="how-to/own-loop.md#looking-at-private-records-at-a-price",
            )
        if value is None and self._kind() != "class":
            raise UserError(
                "score.value: must be a function of module and batch where targets are no classes, "
                "got None"
            )
        terms = declare(
            self._recipe, self.plan, len(records), value, every=every, noise=noise
        )  # fmt: skip
        if self._recipe.group_unit is None:
            check_scored_groups(self._recipe, self._records, records)
        check_apart(records, {"data": self._records, "held_out": self._public})
        scored = PrivateScore(records, terms, value, self._device)
        scored.check(self.model)
        self._check_form()
        scored.check_same(self._workers, code_digest_of(self.model, value))
        if begun is None:
            self._planned(with_score(self._recipe, terms, value is not None))
        if self._started:
            scored.open(self.run, self.plan, self._workers)
        return scored

    def close(self) -> None:
        """Close the run folder, so that another process may continue the run. Returns nothing."""
        self._started = True
        self._step = None
        self._stack.close()
        if self._monitor is not None:
            self._monitor.metrics.close()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> None:
        """Raise UserError where no step can be taken."""
        if not self.steps_left:
            raise UserError(f"step: all {self.plan.steps:,} steps of the plan are done")
        if (begun := self._recipe.score) is not None and self._scored is None:
            raise UserError(
                f"step: the run was begun with scores every {begun.every:,} steps on "
                f"{begun.records:,} held-out records: call score(...) with them first"
            )
        if self._started and self._step is None:
            raise UserError(
                f"step: this object let go of {self.run.path}; make PrivateTraining again, and it "
                "continues the run"
            )
        if self._inside:
            raise UserError(
                "step: the last one was interrupted inside; make PrivateTraining again, and it "
                "continues from the newest checkpoint"
            )
        if not self._begun:
            _check_schedulers(self.optimizer, self.state)
            self._begun = True
        if self._parts is None or not self._parts.are_those_of(self.model):
            self._check_as_before()
            self._parts = ModelParts(self.model)
        if not self._started:
            self._begin()
            mark_trained(self.model, self.run.path)
            self._parts = ModelParts(self.model)

    def _check_as_before(self) -> None:
        """Raise UserError where mode, trained parameters or form of the model are others."""
        modes = {name: module.training for name, module in self.model.named_modules()}
        if other := [name for name in modes if modes[name] != self._modes.get(name, modes[name])]:
            raise UserError(
                f"model: must be in the mode in which it was checked, {other[0] or 'the model'} is "
                f"in another: call model.{'train' if self._modes[other[0]] else 'eval'}() before "
                "step()"
            )
        if (now := self._trained()) != self._trained_names:
            other = sorted(set(now) ^ set(self._trained_names)) or ["another module"]
            raise UserError(
                f"model: must train the same parameters in all steps, changed since the last one: "
                f"{', '.join(other[:3])}; freeze them before PrivateTraining is made, or "
                "train each stage in a folder of its own, with began_with= the run before it, "
                "whose epsilon is then counted",
                see="how-to/own-loop.md#what-your-loop-may-look-at",
            )
        self._check_form()

    def _check_form(self) -> None:
        """Raise UserError where the model changed since the object was made."""
        now = form_of(self.model)
        if now == self._form:
            return
        every = sorted(now.keys() | self._form.keys())
        other = [name for name in every if now.get(name, ()) != self._form.get(name, ())]
        raise UserError(
            f"model: must stay as it is checked, changed: {', '.join(other[:3])}; set layers, "
            "hooks, types and attributes before PrivateTraining is made, and let the forward pass "
            "keep nothing in the model"
        )

    def _trained(self) -> dict[str, int]:
        """Return the trained parameters, by name, and which objects they are."""
        named = self.model.named_parameters()
        return {name: id(parameter) for name, parameter in named if parameter.requires_grad}

    def _look_between(self, number: int, call: str = "step") -> bool:
        """Note what the script changed since the last step, before anything more is released.

        Args:
            number: of the next step.
            call: of the script, on all workers the same: else some would wait for the others' sums.

        Returns:
            Whether a checkpoint is due, on all workers the same.
        """
        assert self._parts is not None
        changed = self._watch.changed(self._parts, self.state)
        due = time.monotonic() - self._saved > self._recipe.resources.checkpoint_seconds
        said = {"step": str(number), "call": call, **self._settings()}
        parts = {} if self._workers.count == 1 else said
        told = self._workers.check_same(
            parts, changed=changed, due=due, shown=self._private_metrics
        )
        if any(each["shown"] for each in told):
            assert self._step is not None
            if self._step.ledger is not None:
                self._step.ledger.note_shown(number)
            self._workers.agree()  # worker 0 has written
        if any(each["changed"] for each in told):
            parts = {"changes between steps": ", ".join(changed), **self._digests("parameters")}
            self._workers.check_same(parts)
            assert self._step is not None
            if self._step.ledger is not None:
                self._step.ledger.note_changes(changed)
            self._workers.agree()  # worker 0 has written
        return bool(told[0]["due"])

    def _settings(self) -> dict[str, str]:
        """Return the optimizer's settings, as workers compare them."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        return {"optimizer settings": repr(groups)}

    # --- pieces of a step

    def _gradient(self, number: int) -> tuple[Tensor, StepMetrics]:
        """Return the step's noisy gradient.

        Where its sum is not the announced one, that of a new attempt, and both are charged.
        """
        assert self._step is not None
        step_plan = self.plan.step(number)
        try:
            with kept_buffers(self.model):
                return self._step.gradient(number, step_plan)[:2]
        except ReplayConflict:
            key = self._step.key
            self._stack.close()
            with self._workers.sharing_errors():
                self._attempt(key)
                self._save()
            with kept_buffers(self.model):
                return self._step.gradient(number, step_plan)[:2]

    def _noisy_score(self, number: int) -> float | None:
        """Return the score that is due after this step, or None."""
        if self._scored is None or not self._scored.is_due(number):
            return None
        assert self._step is not None
        fixed = self._recipe.privacy.run_key is not None
        ledger = self._step.ledger
        return self._scored.release(number, self.model, ledger, self.plan, fixed, self._workers)

    def _update(self, gradient: Tensor) -> None:
        """Let the optimizer take its step from this gradient (size,) and nothing else."""
        assert self._parts is not None
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        trained = self._engine.parameters
        if len({(parameter.dtype, parameter.device) for parameter in trained}) == 1:
            gradient = gradient.to(trained[0])  # in one transfer
        pieces = gradient.split([parameter.numel() for parameter in trained])
        for parameter in (*self._parts.parameters, *held):
            parameter.grad = None
        for parameter, piece in zip(trained, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).to(parameter)
        self.optimizer.step()
        for parameter in self._engine.parameters:
            parameter.grad = None

    def _check_finite(self, number: int) -> None:
        """Raise TrainingDiverged where a parameter is not finite; its release is paid for."""
        if all(_is_finite(parameter.detach()) for parameter in self._engine.parameters):
            return
        raise TrainingDiverged(
            f"training diverged: after step {number + 1:,} the parameters are not finite. The "
            "steps so far are charged; lower the learning rate (or privacy.clip_norm), build the "
            "model anew, and begin a run in another folder"
        )

    def _so_far(self) -> Callable[[], Guarantee]:
        """Return a function that computes the guarantee of the steps up to the present one."""
        plan, path, last = self.plan, self.run.ledger, self._done
        epoch, before = self._epoch, self._before

        def found() -> Guarantee:
            counts, ledger = [0 for _ in plan.step_counts()], Ledger.read(path)
            for of in range(epoch + 1):
                for step in ledger.released_steps(of):
                    # What an earlier process released of later steps was released by then.
                    counts[plan.training_phase_index(step)] += (
                        of < epoch or step < last or step in before
                    )
            return self._recipe.guarantee_of(plan, plan.executed_phases(counts))

        return found

    def _finish(self) -> None:
        """Save the model, sum the training up, and let go of the run."""
        with self._workers.sharing_errors():
            self._save()
            if self._step is not None and self._step.ledger is not None:
                assert self._monitor is not None
                charge_rest(self._step.ledger, self.plan.steps)
                models.save(self.model, self._spec, self.run.model_folder)
                write_trained(self.model, self.run.model_folder)
                frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
                self._monitor.finish(
                    self._engine.fallback_layers, frozen, self._step.ledger, self._done,
                    rounding=measured_rounding(
                        self._engine, lambda: self._examples(MEASURED), self.plan,
                        self._step.shards.largest_shard,
                    ),
                )  # fmt: skip
            self.close()
            self._evaluate()

    def _evaluate(self) -> None:
        """Measure the accuracy on the public records, if there are any and it was not done."""
        if self._public is not None and self._workers.first:
            evaluate_stage(self._recipe, self.run)
        self._workers.agree()  # worker 0 has written


def _is_finite(values: Tensor) -> bool:
    """Return whether all values are finite numbers."""
    # A finite sum has finite terms, and is found in one pass; that of finite terms may overflow.
    total = values.sum().item()
    return total - total == 0 or bool(values.isfinite().all())


def _records_key(run_key: bytes) -> bytes:
    """Return the key of the fingerprint of a run's records."""
    return derive_key(run_key, _FINGERPRINT)


def _warn_of_fixed_key(recipe: Recipe) -> None:
    if recipe.privacy.run_key is not None:
        warnings.warn(
            "privacy.run_key: is fixed, so this run is NOT PRIVATE (whoever knows the key can "
            "subtract the noise); leave it out outside of tests",
            stacklevel=5,
        )


def _take_over(path: Path, training: PrivateTraining) -> None:
    """Close an older object of this process that trains the same run, as a notebook leaves it."""
    older = _open.get(path)
    other = None if older is None else older()
    if other is not None and other is not training:
        other.close()
    _open[path] = weakref.ref(training)


# --- the whole of it --------------------------------------------------------------------------


def fit(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross-entropy",
    optimizer: str | Callable[..., Optimizer] = "sgd",
    learning_rate: float,
    privacy: PrivacyRecipe | Mapping[str, Any],
    batch_size: int,
    steps: int | None = None,
    epochs: int | None = None,
    folder: str | Path,
    **options: Any,
) -> RunFolder:
    """Train a module privately, all of it, and return its run folder.

    Guarantee: the trained weights and everything else that the run released are (epsilon,
    delta)-differentially private, as `PrivateTraining(...).guarantee` states; `fit` builds a
    `PrivateTraining` and takes all of its steps, with nothing in between.

    Args:
        model: the module itself, as in `PrivateTraining`; its trainable parameters are given to the
            optimizer.
        data: the private records: `(X, y)`, or anything that `dpdist.as_records` takes.
        loss: a name, such as "cross-entropy"; a criterion object, such as
            `torch.nn.CrossEntropyLoss()`; or a callable that returns one value per record.
        optimizer: "sgd", "adam" or "adamw", or a callable of (parameters, lr=...).
        learning_rate: learning rate of the optimizer, constant.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        batch_size: expected number of records in a step; the real one is drawn.
        steps: number of steps; give this or epochs.
        epochs: passes over the data, in expectation; give this or steps.
        folder: folder of the run, made where it is not there; the same call continues it.
        options: further options of `PrivateTraining`, such as `held_out` and `factory`.

    Returns:
        The `RunFolder` of the trained run; of a finished run without another step.

    Raises:
        UserError: the optimizer's name is unknown, `PrivateTraining` refuses an argument, or the
            training diverged.

    Source:
        Abadi et al., CCS 2016 (DP-SGD).

    Example:
        >>> import tempfile, torch, dpdist
        >>> inputs, labels = torch.randn(200, 4), torch.randint(2, (200,))
        >>> run = dpdist.fit(
        ...     torch.nn.Linear(4, 2), (inputs, labels), learning_rate=0.1,
        ...     privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
        ...     batch_size=20, steps=3, folder=tempfile.mkdtemp() + "/run",
        ... )
        >>> run.model_folder.is_dir()
        True
    """
    make = optimizer_of(optimizer)
    _check_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        made = make(trained, lr=learning_rate)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"learning_rate: must be a number that {_name_of(make)} takes, got {learning_rate!r}: "
            f"{error}"
        ) from error
    training = PrivateTraining(
        model, made, data, loss=loss, privacy=privacy,
        batch_size=batch_size, steps=steps, epochs=epochs, folder=folder, **options,
    )  # fmt: skip
    return training.run_all()


# --- pairs of answers -------------------------------------------------------------------------


_COMPARED_TOKENS = 16  # of invented documents, on which the reference is checked


def _check_first_weights(
    model: nn.Module, records: Records, run: RunFolder, stages: Sequence[Stage]
) -> None:
    """Raise UserError for weights that a run trained which the card of this one would not name."""
    pairs = _are_pairs(records.examples(2)[0])
    here = run.path.resolve()
    named = {here, *(Path(place) for each in stages if not pairs for place in each.places)}
    trainings = {path: each() for path, each in _open.items() if path != here}
    live = {path: each.model for path, each in trainings.items() if each and each.steps_taken}
    for places in origins(model, run, _open, live, named):
        around = {each for place in places for each in (place, *place.parents)}
        if named & around:
            continue
        place = min(places)
        if pairs:
            raise UserError(
                f"model: must begin with public weights for pairs, got what {place} trained: its "
                "epsilon is not composed with that of this run; load the public base"
            )
        raise UserError(
            f"model: must hold no weights that another run trained, unless it is named, got some "
            f"of {place}: give began_with={str(place)!r}, and the guarantee covers both, or build "
            "the model anew from public weights",
            see="how-to/own-loop.md#stages",
        )


def _stages(began_with: Any) -> list[Stage]:
    """Return what the cards say of the runs and releases that a script begins with."""
    given = began_with if isinstance(began_with, list | tuple) else [began_with]
    return [_stage(each) for each in given if each is not None]


def _stage(given: Any) -> Stage:
    path = getattr(given, "path", given)
    if not isinstance(path, str | PathLike):
        raise UserError(
            "began_with: must be the folder of a run or a release, or several, got a "
            f"{type(given).__name__}"
        )
    if (card := card_of_release(Path(path))) is not None:
        return stage_of_card(card, Path(path).name, [str(Path(path).resolve())])
    return read_stage(open_run(str(path), Path("runs")))


def preferences(
    data: Any,
    tokenizer: Any,
    *,
    length: int,
    reference: nn.Module,
    saw: str,
    prompt: str = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
    unit: str | Sequence[Hashable] | np.ndarray | None = None,
    name: str = "preferences",
) -> PreferenceRecords:
    """Make records of pairs of answers for direct preference optimisation (DPO).

    Guarantee: one pair is one record, and its tensors are made of one row and the reference alone:
    the reference sees one pair at a time, and the first one again at the end, where it must say the
    same. Tokens of the prompt are read and not learned. An
    answer is cut where prompt and answer have `length` tokens; a pair of which one answer is all
    cut away teaches nothing, and their number is told.

    Args:
        data: rows with named fields: a list of dicts, a `datasets.Dataset`, or a pandas DataFrame
            or a pyarrow Table. The fields are texts, or lists of messages with a role and a
            content, as TRL has them. Without a prompt, chosen and rejected are whole conversations,
            and the messages that both begin with are the prompt.
        tokenizer: a fast tokenizer of `transformers`, or the folder of one, as `dpdist.documents`
            takes it. Its chat template shows texts and messages; where it has none, the texts of
            prompt and answer stand behind one another.
        length: most tokens of a prompt with one answer; a record has twice as many.
        reference: the model as training begins with it, whose adapters of peft are switched off; or
            its base. It must be public, as must the first weights.
        saw: what the reference and the first weights were trained on, such as "public texts". It
            stands on the run's card: that no private pair was among it cannot be checked.
        prompt: name of the field of a prompt.
        chosen: name of the field of the answer that is preferred.
        rejected: name of the field of the other answer.
        unit: whom each pair belongs to: a field's name, such as that of the prompt, or one value
            for each pair. Required where prompts are equal but for white space and compatible
            characters of Unicode; give `Privacy(unit="group", ...)`.
        name: name of the data in complaints and on cards.

    Returns:
        `dpdist.Records` for `dpdist.PrivateTraining` with `loss=dpdist.preference_loss`. Their
        `batch(indices)` returns a dict: `input_ids` and `labels`, int64 (B, 2 * length), chosen
        then rejected, and `reference` (B,), the reference's log-probability of the chosen answer
        minus that of the rejected one.

    Raises:
        UserError: a row lacks its fields, prompts are equal without a unit, the tokenizer or the
            model does not fit, or the reference keeps a state or is known to be trained on private
            records, as a model of a run here is, and each copy of it. No row's text is shown.

    Source:
        Rafailov et al., NeurIPS 2023 (DPO).

    Example:
        >>> import dpdist, tokenizers, transformers
        >>> words = {"?": 0, "2": 1, "+": 2, "=": 3, "4": 4, "5": 5, "end": 6}
        >>> cutter = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
        >>> cutter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = transformers.PreTrainedTokenizerFast(
        ...     tokenizer_object=cutter, eos_token="end"
        ... )
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        ...     vocab_size=7, n_embd=8, n_layer=1, n_head=1, n_positions=8,
        ... ))
        >>> rows = [{"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}]
        >>> pairs = dpdist.preferences(
        ...     rows, tokenizer, length=6, reference=model, saw="nothing: random weights"
        ... )
        >>> pairs.batch([0])["labels"].tolist()
        [[-100, -100, -100, -100, 4, 6, -100, -100, -100, -100, 5, 6]]
    """
    _check_reference(reference, saw, name)
    device = next(reference.parameters()).device

    def difference(pair: dict[str, Tensor]) -> Tensor:
        there = {field: each.to(device) for field, each in pair.items()}
        found = pair_log_probabilities(reference, there["input_ids"], there["labels"])
        return (found[:, 0] - found[:, 1]).cpu()

    few = max(1, min(length, _COMPARED_TOKENS)) if isinstance(length, int) else 1
    check_takes_pairs(without_wrapper(reference), few)
    limits = token_limits(reference)
    _check_positions(reference, length, name)
    if limits is not None:
        _check_adapters_are_new(reference, few, limits[0], name)
    with _as_reference(reference):
        if limits is not None and not keeps_documents_apart(reference, few, limits[0]):
            raise UserError(
                f"{name}: reference must keep the two answers of a row apart, got a "
                f"{type(without_wrapper(reference)).__name__}, which heeds no mask or no positions"
            )
        return preference_records(
            data, tokenizer, difference, length=length, saw=saw, prompt=prompt, chosen=chosen,
            rejected=rejected, unit=unit, name=name,
        )  # fmt: skip


def _check_reference(reference: Any, saw: Any, name: str) -> None:
    """Raise UserError for a reference that is no public model, as far as that can be known."""
    if not isinstance(reference, nn.Module):
        raise UserError(
            f"{name}: reference must be a model of transformers that is public, got a "
            f"{type(reference).__name__}: releases and runs are not taken, since their epsilon is "
            "not composed with that of an own loop"
        )
    if not isinstance(saw, str) or not saw.strip():
        raise UserError(
            f"{name}: saw must say what the reference and the first weights were trained on, such "
            f"as 'public texts', got {saw!r}"
        )
    if saw.strip().casefold() == name.casefold():
        raise UserError(
            f"{name}: saw must be other data than {name}, whose records are private here: a "
            "reference that was trained on them voids the guarantee; take its public base"
        )
    if found := [*trained_by(reference), *trained_by(without_wrapper(reference))]:
        raise UserError(
            f"{name}: reference must be public, got one that {found[0]} trained: epsilon of "
            "a release is not composed with that of an own loop; load the public base"
        )


def _check_positions(reference: nn.Module, length: Any, name: str) -> None:
    """Raise UserError where a prompt with its answer has more tokens than the model has places."""
    settings = getattr(without_wrapper(reference), "config", None)
    most = getattr(settings, "max_position_embeddings", None)
    if isinstance(most, int) and isinstance(length, int) and length > most:
        raise UserError(
            f"{name}: length must be at most {most:,}, the positions of the reference, got "
            f"{length:,}"
        )


def _check_adapters_are_new(reference: nn.Module, few: int, vocabulary: int, name: str) -> None:
    """Raise UserError for adapters that say something: the reference is computed without them."""
    if not any(hasattr(module, "disable_adapter") for module in reference.modules()):
        return
    modes = {module: module.training for module in reference.modules()}
    inner = without_wrapper(reference.eval())
    device = next(inner.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, few), generator=generator).to(device)

    def said() -> list[Tensor]:
        look_up, every = inner.get_input_embeddings(), torch.arange(vocabulary, device=device)
        norms = torch.cat([look_up(some).float().norm(dim=-1) for some in every.split(4096)])
        return [inner(input_ids=tokens, use_cache=False).logits, norms]

    try:
        with torch.no_grad():
            given = said()
        with _as_reference(reference):
            base = said()
    finally:
        for module, mode in modes.items():
            module.training = mode
    alike = partial(torch.allclose, rtol=1e-4, atol=1e-4, equal_nan=True)
    if not all(map(alike, given, base)):
        raise UserError(
            f"{name}: reference must have adapters that change nothing yet, since they are "
            "switched off, got ones that do: put public ones into the weights (merge_and_unload) "
            "first"
        )


@contextmanager
def _as_reference(model: nn.Module) -> Iterator[None]:
    """Switch adapters of peft and dropout off, and gradients, within the block."""
    modes = {module: module.training for module in model.modules()}
    learned = {parameter: parameter.requires_grad for parameter in model.parameters()}
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "disable_adapter")
               and hasattr(module, "peft_config")]  # fmt: skip
    tuned = any(hasattr(module, "active_adapters") and hasattr(module, "disable_adapters")
                and hasattr(module, "base_layer") for module in model.modules())  # fmt: skip
    if tuned and len(adapted) != 1:
        raise UserError(
            "reference: must have its adapters from peft.get_peft_model, which can be switched off"
        )
    model.eval()
    try:
        with torch.no_grad(), ExitStack() as stack:
            for each in adapted[:1]:
                stack.enter_context(each.disable_adapter())
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, learns in learned.items():  # peft unfreezes whatever it switches on again
            parameter.requires_grad_(learns)
