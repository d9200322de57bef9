"""List what private training would not accept of a script's objects, all at once: `dpdist.check`.

The checks are those of `PrivateTraining`, on copies and invented examples. If a layer mixes
examples, the rest is checked on the model that `dpdist.prepare` returns.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from dpdist.core.errors import UserError
from dpdist.data.adapters import as_records
from dpdist.data.protocol import Records
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import each_tensor
from dpdist.gradients.objective import objective_of
from dpdist.gradients.validation import find_mixing_layers
from dpdist.models.outputs import device_of
from dpdist.models.prepare import prepare
from dpdist.private_training import PrivateTraining
from dpdist.training.estimate import estimate
from dpdist.training.script_checks import check_model, check_optimizer, check_public
from dpdist.training.script_learner import EXAMPLES

_T = TypeVar("_T")
_ANY_SETTINGS: dict[str, Any] = {
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
    "batch_size": 1,
    "steps": 1,
}
_OF_THE_PLAN = ("privacy", "batch_size", "steps", "epochs", "class_sampling", "class_counts")


@dataclass(frozen=True)
class CheckResult:
    """Hold the findings of `dpdist.check`: true if training would start; printed as a list.

    Attributes:
        problems: what `PrivateTraining` would not accept, each with what to do, a tuple of str;
            empty if training would start.
        notes: what it would accept with a warning, a tuple of str.

    Example:
        >>> import dpdist
        >>> print(dpdist.CheckResult(("batch_size: must be positive",), ()))
        1 problem:
          1. batch_size: must be positive
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{count} problem{'s' * (count > 1)}:" if count else "ready to train"]
        lines += [f"  {number}. {each}" for number, each in enumerate(self.problems, 1)]
        return "\n".join([*lines, *(f"  note: {each}" for each in self.notes)])


def check(
    model: nn.Module,
    optimizer: Optimizer,
    data: Any,
    *,
    loss: Any = "cross-entropy",
    eval_data: Any = None,
    state: Sequence[Any] = (),
    **options: Any,
) -> CheckResult:
    """List everything that `PrivateTraining` would not accept of these objects, each with the fix.

    Guarantee: it releases nothing and writes nothing. Model and optimizer stay as they are: copies
    of them run on invented examples, never on records. If `folder` has a run, all of this is
    compared with it, as the training that continues it would be.

    Args:
        model: the module, as in `PrivateTraining`.
        optimizer: the optimizer of its parameters.
        data: the private records, as in `PrivateTraining`.
        loss: a name, a criterion object or a callable, as in `PrivateTraining`.
        eval_data: PUBLIC records, the `eval_data` of `PrivateTraining`.
        state: schedulers and other objects with `state_dict`, as in `PrivateTraining`.
        options: further arguments of `PrivateTraining`, such as `privacy`, `batch_size` and
            `steps`, without which neither the settings nor a run in `folder` are checked.

    Returns:
        A `CheckResult`, which is true if training would start: `problems` and `notes`, tuples of
        str. Print it.

    Raises:
        TypeError: an option is not one of `PrivateTraining`.

    Example:
        >>> import torch, dpdist
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        >>> data = torch.randn(64, 4), torch.randint(2, (64,))
        >>> found = dpdist.check(model, optimizer, data, loss="cross-entropy")
        >>> bool(found), len(found.problems)
        (False, 2)
        >>> "model = dpdist.prepare(model)" in found.problems[1]
        True
    """
    folder, problems = options.pop("folder", None), _Problems()
    problems.of(lambda: check_model(model))
    whole = not problems.found
    problems.of(lambda: check_optimizer(optimizer, model))
    own_optimizer = len(problems.found) == (not whole)
    mixing = list(find_mixing_layers(model))
    problems.add(mixing)
    records = problems.of(lambda: as_records(data))
    public = None
    if eval_data is not None:
        public = problems.of(lambda: as_records(eval_data, name="eval_data"))
    objective = problems.of(lambda: objective_of(loss))
    settings = _settings(options, records, problems)
    notes: list[str] = []
    if whole and records is not None and objective is not None:
        given = (model, optimizer, list(state)) if own_optimizer and not mixing else None
        copied = _copies(model, given, problems)
        if copied is not None:
            if folder is not None and given is not None and not settings:
                options["folder"] = folder
            notes = _build(copied, records, loss, public, {**options, **settings}, problems)
    return CheckResult(tuple(dict.fromkeys(problems.found)), tuple(dict.fromkeys(notes)))


class _Unbegun(PrivateTraining):
    """Compare a training with the run that it would continue, without continuing it."""

    def _begin(self) -> None:
        self._compared_data()
        self._learner.restore(self.run, False)


class _Problems:
    """Collect the messages of the checks."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, errors: Iterable[UserError]) -> None:
        self.found += [
            line.removeprefix("estimate: ") for each in errors for line in str(each).splitlines()
        ]

    def of(self, look: Callable[[], _T]) -> _T | None:
        """Return what a check returns; None if it raises UserError, which is added."""
        try:
            return look()
        except UserError as error:
            self.add([error])
            return None


def _settings(
    options: Mapping[str, Any], records: Records | None, problems: _Problems
) -> dict[str, Any]:
    """Return settings that replace missing ones, or those without a plan."""
    given = {name: options[name] for name in _OF_THE_PLAN if name in options}
    if "privacy" in given and "batch_size" in given:
        before = len(problems.found)
        size = given["batch_size"]  # fits if the records cannot be counted
        count = max(2, size if records is None and isinstance(size, int) else len(records or ()))
        problems.of(lambda: estimate(nn.Linear(1, 1), count, **given))
        if len(problems.found) == before:
            return {}
    clean = dict.fromkeys(("epochs", "class_sampling", "class_counts"))
    return {**_ANY_SETTINGS, **clean, "importance_weights": False}


def _copies(
    model: nn.Module, given: tuple[nn.Module, Optimizer, list[Any]] | None, problems: _Problems
) -> tuple[nn.Module, Optimizer, list[Any]] | None:
    """Return copies of model, optimizer and state, prepared by `dpdist.prepare` if needed.

    Without a given optimizer that fits, a plain one is used.
    """
    if given is not None:
        return copy.deepcopy(given)
    with contextlib.redirect_stdout(io.StringIO()):
        ready = problems.of(lambda: prepare(model))
    if ready is None or any(find_mixing_layers(ready)):
        return None
    trained = [each for each in ready.parameters() if each.requires_grad]
    return None if not trained else (ready, torch.optim.SGD(trained, lr=0.1), [])


def _build(
    copied: tuple[nn.Module, Optimizer, list[Any]],
    records: Records,
    loss: Any,
    public: Records | None,
    options: Mapping[str, Any],
    problems: _Problems,
) -> list[str]:
    """Build a training of the copies, without a run; return its warnings."""
    model, optimizer, state = copied
    with warnings.catch_warnings(record=True) as warned, tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("always")
        given = {"loss": loss, "state": state, "eval_data": public, "folder": Path(place) / "run"}
        built = problems.of(lambda: _Unbegun(model, optimizer, records, **{**given, **options}))
        if built is None:  # check what comes after the first error
            problems.of(lambda: _screen(model, loss, records, bool(options.get("vmap"))))
            if public is not None:
                kind = "number" if public.examples(1)[1].is_floating_point() else "class"
                problems.of(lambda: check_public(public, records, kind, 2**31))
    return [str(each.message) for each in warned if each.category is UserWarning]


def _screen(model: nn.Module, loss: Any, records: Records, vmap: bool) -> None:
    """Raise UserError if the model or the loss cannot be clipped record by record."""
    device = device_of(model)
    inputs, targets = records.examples(EXAMPLES)
    engine = GradientEngine(model, objective_of(loss), clipping=FlatClipping(1.0), vmap=vmap)
    engine.validate(each_tensor(lambda each: each.to(device), inputs), targets.to(device))
