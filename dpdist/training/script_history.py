"""Released values of a script's steps, kept in its run, and scores of its model on public records.

Guarantee: everything here is computed from released values and public records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.core.files import own_only
from dpdist.data.protocol import Records, check_labels, map_fields
from dpdist.models.signature import naming_inputs
from dpdist.privacy.guarantee import FIXED_KEY, Guarantee, format_epsilon
from dpdist.training.script_checks import check_has_targets
from dpdist.training.script_state import evaluation_mode, kept_buffers, outputs_of

# --- the report of a step ---------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """Hold the public and released values of one step of `dpdist.PrivateTraining`.

    Guarantee: all fields except `private` follow from released values and public settings, so a
    loop may print them and depend on them at no further privacy cost.

    Attributes:
        step: int, number of the step, from 0 on.
        learning_rate: float, learning rate of the optimizer's first parameter group in this step.
        noisy_norm: float, L2 norm of the noisy sum of clipped gradients, which was released; one
            record adds at most the clip norm.
        epsilon: float, epsilon of all that was released up to this step, at the delta of the plan;
            computed when you ask for it.
        private: dict with losses and counts of private records, or None without
            `private_metrics=True`. Do not publish them, and do not let the loop depend on them.
        score: float, noisy score on held-out private records after the steps that
            `PrivateTraining.score` declared, else None. It is about 0 to 1; its noise can move it
            beyond.

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

        It is computed when you first ask for it, and infinite if nothing is proved.
        """
        return self._guarantee.epsilon

    @cached_property
    def _guarantee(self) -> Guarantee:
        return self._so_far()

    def __str__(self) -> str:
        """Return the released values in one line."""
        scored = "" if self.score is None else f", score {self.score:.4g}"
        fixed = f"{FIXED_KEY}, " if self._guarantee.fixed_key else ""
        return (
            f"step {self.step}: {fixed}epsilon {format_epsilon(self.epsilon)}, learning rate "
            f"{self.learning_rate:g}, noisy norm {self.noisy_norm:.4g}{scored}"
        )


# --- history ----------------------------------------------------------------------------------


class History:
    """Keep values of each step in a file of the run; for a replayed step the last ones count."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **values: Any) -> None:
        """Append values of a step to those it has."""
        with open(self._path, "a", opener=own_only) as file:
            file.write(json.dumps(values) + "\n")

    def columns(self, done: int) -> dict[str, list[Any]]:
        """Return the values of the steps before `done` by name; None for a step without one."""
        rows: dict[int, dict[str, Any]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    values = json.loads(line)
                except ValueError:  # a crash cut it off
                    continue
                rows.setdefault(values["step"], {}).update(values)
        kept = [rows[step] for step in sorted(rows) if step < done]
        names = dict.fromkeys(["step", *(name for row in kept for name in row)])
        return {name: [row.get(name) for row in kept] for name in names}


def as_table(columns: Mapping[str, list[Any]]) -> Any:
    """Return columns as a pandas DataFrame, or unchanged if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return dict(columns)
    return pandas.DataFrame(columns)


# --- public evaluation ------------------------------------------------------------------------


Metric = str | Callable[[Tensor, Tensor], Any]
_ROWS = 512
_EVAL_DATA = "eval_data"  # in error messages
_OF_CLASSES = 'metric: must be "accuracy", "auc" or a function, as targets are classes'


def accuracy(outputs: Tensor, targets: Tensor, threshold: float = 0.0) -> float:
    """Return the fraction of correct classes, or of correct signs of logits.

    threshold: of outputs for labels 0 and 1; that of labels -1 and 1 is 0.
    """
    _check_classes(outputs, targets)
    if outputs.numel() == targets.numel():
        middle = 0.0 if (targets < 0).any() else threshold
        answers = (outputs.reshape(targets.shape) > middle) == (targets > 0.5)
    else:
        answers = outputs.argmax(1) == targets
    return float(answers.double().mean())


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve; for several classes, the mean of one against all."""
    from sklearn.metrics import roc_auc_score

    _check_classes(outputs, targets)
    _check_curves(outputs, targets)
    scores, wanted = outputs.double(), targets.numpy()
    if outputs.numel() == targets.numel():
        return float(roc_auc_score(wanted, scores.reshape(targets.shape).numpy()))
    if outputs.shape[1] == 2:
        return float(roc_auc_score(wanted, (scores[:, 1] - scores[:, 0]).numpy()))
    return float(roc_auc_score(wanted, scores.softmax(1).numpy(), multi_class="ovr"))


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean of absolute differences."""
    _check_numbers(outputs, targets)
    return float((outputs.reshape(targets.shape) - targets).abs().mean())


def mean_squared_error(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean of squared differences."""
    _check_numbers(outputs, targets)
    return float((outputs.reshape(targets.shape) - targets).square().mean())


def _check_classes(outputs: Tensor, targets: Tensor) -> None:
    """Raise UserError unless targets are classes or labels that the outputs have."""
    if targets.is_floating_point() and not ((targets == 0) | (targets == 1)).all():
        raise UserError('metric: must be "mae", "mse" or a function, as targets are numbers')
    if outputs.numel() == targets.numel():  # one logit each; -1 and 1 are labels, too
        check_labels(targets.long().flatten().clamp(min=0), 2, _EVAL_DATA)
        return
    if targets.is_floating_point() or (*outputs.shape[:1], *outputs.shape[2:]) != targets.shape:
        raise UserError(
            f"{_EVAL_DATA}: targets must be one class (a whole number) for each record, or one "
            f"label (0 or 1) for each output, got {_type_and_shape(targets)} for outputs "
            f"{_type_and_shape(outputs)}"
        )
    check_labels(targets, outputs.shape[1], _EVAL_DATA)


def _check_curves(outputs: Tensor, targets: Tensor) -> None:
    """Raise UserError unless each ROC curve has positive and negative records."""
    signs = outputs.numel() == targets.numel()
    if targets.dim() > 1 + signs:
        raise UserError('metric: must be "accuracy" or a function, as a record has several classes')
    kinds = 2 if signs else outputs.shape[1]
    if any(len(each.unique()) < kinds for each in targets.reshape(len(targets), -1).T):
        raise UserError(
            f"{_EVAL_DATA}: must have records of every class for the metric auc, lacks some; add "
            'them, or use "accuracy"'
        )
    if not outputs.isfinite().all():
        raise UserError(
            "model: must have finite outputs for the metric auc, got NaN or Inf; lower the "
            "learning rate"
        )


def _check_numbers(outputs: Tensor, targets: Tensor) -> None:
    """Raise UserError unless there is one target for each output."""
    if outputs.numel() == targets.numel():
        return
    if not targets.is_floating_point():
        raise UserError(_OF_CLASSES)
    raise UserError(
        f"{_EVAL_DATA}: targets must be one number for each output, got "
        f"{_type_and_shape(targets)} for outputs {_type_and_shape(outputs)}"
    )


def _type_and_shape(tensor: Tensor) -> str:
    """Return the type and the shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


_METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "auc": auc,
    "mae": mean_absolute_error,
    "mse": mean_squared_error,
}


def named_metric(
    metric: Metric, kind: str, threshold: float
) -> tuple[str, Callable[[Tensor, Tensor], Any]]:
    """Return the name of a metric and its function.

    kind, threshold: of the training's targets and outputs, as of `Script`; labels cannot be told
    from numbers later, nor probabilities from logits.

    Raises UserError for an unknown name, and for errors of numbers if outputs are logits of labels.
    """
    if isinstance(metric, str):
        if metric not in _METRICS:
            raise UserError(
                f"metric: must be {', '.join(_METRICS)} or a function of outputs and targets, got "
                f"{metric!r}"
            )
        if kind == "labels" and metric in ("mae", "mse"):
            raise UserError(_OF_CLASSES)
        function = _METRICS[metric]
        return metric, partial(accuracy, threshold=threshold) if function is accuracy else function
    return getattr(metric, "__name__", type(metric).__name__).strip("<>"), metric


def evaluate_public(
    model: nn.Module,
    public: Records,
    signature: Mapping[str, Any],
    metric: Callable[[Tensor, Tensor], Any],
) -> float:
    """Return a metric of a model's outputs in evaluation mode; its modes are then restored.

    Args:
        model: the module.
        public: records with targets.
        signature: how it is called with several fields (`ModelSpec.signature`), else empty.
        metric: of all outputs and targets.
    """
    check_has_targets(public)
    device = next(model.parameters()).device
    outputs, targets = [], []
    with evaluation_mode(model), kept_buffers(model), torch.inference_mode():
        for start in range(0, len(public), _ROWS):
            rows = np.arange(start, min(start + _ROWS, len(public)))
            batch = public.batch(rows)
            there = map_fields(lambda each: each.to(device), batch)
            with naming_inputs(_EVAL_DATA):
                found = outputs_of(model, there, signature)
            if not isinstance(found, Tensor):
                raise UserError(
                    "model: must return one tensor to be evaluated, got a "
                    f"{type(found).__name__}: compute the metric yourself"
                )
            outputs.append(found)
            targets.append(public.targets(rows))
    return float(metric(torch.cat(outputs).cpu(), torch.cat(targets).cpu()))
