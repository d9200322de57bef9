"""Checks of what a script gives to its training: model, optimizer, records and loss.

They raise an error if the wrong input would give a wrong number, or would be noticed only after a
step is on the ledger.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpdist.config.sections import PrivacyRecipe
from dpdist.core.errors import UserError
from dpdist.core.script_errors import warn
from dpdist.data.documents import PreferenceRecords, check_tokens
from dpdist.data.protocol import (
    Records,
    UserRecords,
    Users,
    check_classes,
    check_targets,
    count_common,
    single_records,
)
from dpdist.data.record_hashes import hash_inputs, names_nobody
from dpdist.data.registry import store_split
from dpdist.gradients.criterion import CriterionLoss
from dpdist.gradients.independence import SYNTHETIC_KEY
from dpdist.gradients.objective import (
    checked_losses,
    language_model_loss,
    objective_of,
    token_limits,
)
from dpdist.gradients.random_passes import keyed_draws
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, field_error
from dpdist.training.script_state import kept_buffers

# --- model and optimizer ----------------------------------------------------------------------


_WRAPPED = {
    "DistributedDataParallel": "module", "DataParallel": "module", "FSDPModule": "module",
    "FullyShardedDataParallel": "module", "GradSampleModule": "_module",
}  # fmt: skip


def check_model(model: nn.Module) -> None:
    """Raise UserError for a module wrapped for distributed training, or by Opacus."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if inside := _WRAPPED.get(kind.__name__):
                raise UserError(
                    f"model: must be the module itself, got {type(module).__name__} at "
                    f"{name or 'the top'}: pass the wrapped module (model.{inside})",
                    see="how-to/own-loop.md#what-is-refused",
                )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise UserError for an optimizer that needs more than `.grad`, or lacks parameters."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optimizer: must take its step only from .grad, got {type(optimizer).__name__}, "
            "which evaluates a closure on the records again: use SGD, Adam or AdamW"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if lacking := [name for name, parameter in named if id(parameter) not in held]:
        if len(lacking) == len(named):
            raise UserError(
                "optimizer: must have the parameters of this model, got those of a different one; "
                "build it from model.parameters() after every copy or change of the model"
            )
        raise UserError(
            f"optimizer: must have every trained parameter, lacks {', '.join(lacking)}: add it, or "
            "freeze it with requires_grad_(False) before PrivateTraining(...)"
        )


def check_what_is_learned(records: Records, loss: Any, model: nn.Module, classes: int) -> None:
    """Raise UserError for targets or tokens that do not fit the loss or the model."""
    if isinstance(loss, str):
        check_targets(records, loss, classes)
    elif isinstance(loss, nn.Module) and CriterionLoss(loss).takes_classes(records.examples(1)[1]):
        ignored: Any = loss.ignore_index  # its records have the loss 0
        check_targets(records, "cross-entropy", classes, ignored)
    tokens = loss is language_model_loss or isinstance(records, PreferenceRecords)
    if tokens and (limits := token_limits(model)) is not None:
        check_tokens(records, *limits)


_LEFT_OUT = "_dpdist_left_out"  # marks a parameter, for a second training of the same module


def leave_out_unused(model: nn.Module, loss: Any, examples: tuple[Any, Tensor]) -> list[str]:
    """Freeze the parameters that the loss does not depend on; return their names, and warn once.

    They would get noise and learn nothing. Invented examples determine them, never records. Clip,
    noise and update are then those of the other parameters.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(named.values())).device if named else torch.device("cpu")
    try:
        with kept_buffers(model), keyed_draws(SYNTHETIC_KEY, device), torch.enable_grad():
            total = checked_losses(model, objective_of(loss), *examples).sum()
            found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    except Exception:  # the engine raises it again, with what to do
        return []
    unused = [name for name, each in zip(named, found, strict=True) if each is None]
    for name in unused:
        named[name].requires_grad_(False)
        setattr(named[name], _LEFT_OUT, True)
    if unused:
        warn(
            f"model: the loss does not depend on {', '.join(unused)}, so it is not trained "
            "(requires_grad is False now)"
        )
    return [
        name
        for name, each in model.named_parameters()
        if hasattr(each, _LEFT_OUT) and not each.requires_grad
    ]


# --- users of the records ---------------------------------------------------------------------


def check_users(recipe: Recipe, *given: Records) -> None:
    """Raise UserError if a unit has several records, and the guarantee is for single records."""
    grouped = [each for each in given if type(each).unit_id is not Records.unit_id]
    counts = Counter(unit for each in grouped for unit in units_of(each))
    largest = max(counts.values(), default=0)
    if recipe.user_unit is None and largest > 1:
        rule = (
            f"must be user, for the largest unit has {largest} records (or give records without "
            "units, to protect single ones)"
        )
        raise field_error("PrivateTraining", "privacy.unit", rule, recipe.privacy.unit)


def by_unit(recipe: Recipe, records: Records, argument: str = "data") -> Records:
    """Return the records, by user if a user is the unit. Raises UserError without users."""
    if recipe.user_unit is None:
        return records
    units = units_of(records)
    if units == list(range(len(records))):
        raise UserError(
            f"{argument}: must name the user of each record with privacy unit: user, has each as "
            "its own unit: give dpdist.as_records(data, unit=...), or a class with unit_id",
            see="explanation/privacy.md#a-person-as-the-unit",
        )
    if len({isinstance(unit, str) for unit in units}) > 1:
        raise UserError(
            f"{argument}: must have numbers or texts as units, got both: 7 and '7' would be two"
        )
    return UserRecords(records, Users.from_values(units, recipe.user_unit.max_records))


def check_scored_users(recipe: Recipe, records: Records, private_eval_data: Records) -> None:
    """Raise UserError if a unit has too many records in both sets together.

    Also if the training's records name their units, and the held-out ones do not.
    """
    named = [each for each in (records, private_eval_data) if _names_units(each)]
    if named == [records]:
        raise UserError(
            "score: held-out records must name their units, as those of data do; give them as "
            "dpdist.as_records(..., unit=...)"
        )
    check_users(recipe, *named)


def scored_by_unit(recipe: Recipe, records: Records, private_eval_data: Records) -> Records:
    """Return held-out records by user. Raises UserError if a user has records on both sides.

    The units of both must be numbers or both texts, or equal ones would be missed.
    """
    given = by_unit(recipe, private_eval_data, "score: held-out records")
    units = [set(units_of(single_records(each))) for each in (records, given)]
    if len({isinstance(unit, str) for both in units for unit in both}) > 1:
        raise UserError(
            "score: held-out records must have units of the same kind as data, got numbers and "
            "texts: 7 and '7' would be two"
        )
    if common := len(units[0] & units[1]):
        raise UserError(
            f"score: held-out records must share no unit with data, got {common:,} in common; a "
            "unit is used by the steps or by the scores"
        )
    return given


def _names_units(records: Records) -> bool:
    """Return whether any record's unit differs from its position, the default."""
    return units_of(records) != list(range(len(records)))


def units_of(records: Records) -> list[Hashable]:
    """Return the units of records as plain values, so that equal ones are the same unit."""
    found = []
    for index in range(len(records)):
        unit = records.unit_id(index)
        unit = unit.item() if isinstance(unit, Tensor | np.generic) and unit.ndim == 0 else unit
        if isinstance(unit, Tensor) or names_nobody(unit):
            got = "an empty text" if isinstance(unit, str) else type(unit).__name__
            raise UserError(
                f"{records.name}: unit_id must return a number or a text for each record, got "
                f"{got} at {index:,}; let it return int(...) or str(...), and drop records without "
                "a unit"
            )
        found.append(unit)
    return found


def check_units_apart(public: Records, private: Records) -> None:
    """Raise UserError if a public record belongs to a private unit."""
    if not _names_units(public):
        return
    if common := len(set(units_of(private)) & set(units_of(public))):
        raise UserError(
            f"eval_data: must share no unit with data, got {common:,} in common: scores on private "
            "users would be published"
        )


# --- public records ---------------------------------------------------------------------------


EVAL_DATA = "eval-data"  # folder of public records in a run folder
_AT_ONCE = 1024  # records compared at once
_BUDGET_LABEL = b"records of a budget"  # no secret: the budget's own key is one


def _arrays(records: Records, rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs float32 (B, ...) of public records, and their targets.

    Targets are classes int64 (B,), or numbers or labels float32 (B, K). Raises UserError for other
    types.
    """
    inputs, targets = records.batch(rows), records.targets(rows)
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        raise UserError(
            "eval_data: must have one tensor of numbers for each record as its input; with several "
            "inputs, leave eval_data out and call training.evaluate"
        )
    if kind != "class":
        return inputs.float().cpu().numpy(), targets.float().reshape(len(targets), -1).cpu().numpy()
    if targets.is_floating_point() or targets.dim() != 1:
        raise UserError("eval_data: must have one class for each record as its target")
    return inputs.float().cpu().numpy(), targets.long().cpu().numpy()


def store_public(public: Records, folder: RunFolder, recipe: Recipe) -> None:
    """Keep public records in the run folder."""
    kind = recipe.data.targets
    inputs, labels = _arrays(public, np.arange(len(public)), kind)
    folder.create_or_open(recipe)
    root, data = folder.path / EVAL_DATA, recipe.data
    store_split(root, data.name, inputs, labels, data.classes, kind)


def check_has_targets(public: Records) -> None:
    """Raise UserError for public records without targets."""
    if not public.has_targets:
        raise UserError(
            "eval_data: must have targets, got only inputs: give (X, y), or name the target: "
            "dpdist.as_records(data, target='label')"
        )


def check_public(public: Records, private: Records, kind: str, classes: int) -> None:
    """Raise UserError if a private record, or one of its user, is among the public ones.

    Also if they are not records of the same kind.
    """
    check_has_targets(public)
    if kind == "class" and not public.examples(1)[1].is_floating_point():
        check_classes(public, classes)
    if isinstance(private, UserRecords):
        private = private.records
        check_units_apart(public, private)
    _arrays(public, np.arange(len(public)), kind)
    if common := count_common(public, private):
        raise UserError(
            f"eval_data: must share no record with data, got {common:,} in common: scores on them "
            "would be published"
        )


# --- records of a budget ----------------------------------------------------------------------


def refuse_budget_of_features(privacy: PrivacyRecipe, records: Records) -> None:
    """Raise UserError if a budget would be charged for features instead of their records."""
    if privacy.budget is not None and getattr(records, "of_features", False):
        raise UserError(
            "privacy.budget: must be left out, as the records are features of a network: whether "
            "the budget knows the same records in a different form cannot be told"
        )


class HashedRecords:
    """Identify records for a budget, by their inputs and by items before random transforms."""

    def __init__(self, *parts: Records) -> None:
        self._parts = parts

    @cached_property
    def hashes(self) -> np.ndarray:
        """Return hashes of 16 bytes, one or more for each record.

        For records of one tensor they are those of a recipe with the same inputs. They are not
        stored: a budget stores them under its own key.
        """
        return np.array([each for part in self._parts for each in _hashes_of(part)], dtype="S16")


def _hashes_of(records: Records) -> list[bytes]:
    found, single = list[bytes](), True
    for start in range(0, len(records), _AT_ONCE):
        some = records.batch(np.arange(start, min(start + _AT_ONCE, len(records))))
        if not isinstance(some, Tensor):
            single = False
            break
        rows = some.cpu() if some.dtype == torch.uint8 else some.float().cpu()
        found += hash_inputs(np.ascontiguousarray(rows.numpy())).tolist()
    if not single or type(records).input_macs is not Records.input_macs:
        found += [mac for macs in records.input_macs(_BUDGET_LABEL) for mac in macs]
    return found
