"""Released values of a script's steps, kept in its run, and scores of its model on public records.

Guarantee: nothing here is computed from private records but what the steps released.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.data.protocol import Records, count_common, fields_of
from dpdist.models.signature import Signature, plain_outputs
from dpdist.training.script_state import evaluation_mode, kept_buffers

# --- history ----------------------------------------------------------------------------------


class History:
    """One line for each step in a file of the run; of a step that is replayed, the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **values: Any) -> None:
        """Append values of a step; those of one step are put together."""
        with open(self._path, "a") as file:
            file.write(json.dumps(values) + "\n")

    def columns(self, done: int) -> dict[str, list[Any]]:
        """Return the values of the steps before `done` by name; None where a step has none."""
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
    """Return columns as a pandas DataFrame, or as they are if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return dict(columns)
    return pandas.DataFrame(columns)


# --- public evaluation ------------------------------------------------------------------------


Metric = str | Callable[[Tensor, Tensor], Any]
_ROWS = 512


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of correct classes, or of correct yes-or-no answers of logits above 0."""
    if targets.is_floating_point() or outputs.shape == targets.shape:
        answers = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
    elif outputs.dim() == 1 or outputs.shape[1] == 1:
        answers = (outputs.reshape(-1) > 0) == (targets > 0)
    else:
        answers = outputs.argmax(1) == targets
    return float(answers.double().mean())


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve; of several classes, the mean of one against the rest."""
    from sklearn.metrics import roc_auc_score

    wanted = targets.cpu().numpy()
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return float(roc_auc_score(wanted, outputs.reshape(-1).cpu().numpy()))
    if outputs.shape[1] == 2 and targets.dim() == 1:
        return float(roc_auc_score(wanted, (outputs[:, 1] - outputs[:, 0]).cpu().numpy()))
    if targets.dim() > 1:
        return float(roc_auc_score(wanted, outputs.cpu().numpy()))
    shares = outputs.double().softmax(1).cpu().numpy()
    return float(roc_auc_score(wanted, shares, multi_class="ovr"))


_METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy, "auc": auc}


def named_metric(metric: Metric) -> tuple[str, Callable[[Tensor, Tensor], Any]]:
    """Return the name of a metric and its function. Raises UserError for an unknown name."""
    if isinstance(metric, str):
        if metric not in _METRICS:
            raise UserError(
                f"metric: must be {', '.join(_METRICS)} or a function of outputs and targets, got "
                f"{metric!r}"
            )
        return metric, _METRICS[metric]
    return getattr(metric, "__name__", type(metric).__name__).strip("<>"), metric


def check_apart(public: Records, private: Records) -> None:
    """Raise UserError where an evaluation record is a training record."""
    if common := count_common(public, private):
        raise UserError(
            f"eval_data: must share no record with data, got {common:,} in common: a score on "
            "private records would be published; training.score(...) releases one with noise"
        )


def evaluate_public(
    model: nn.Module,
    public: Records,
    signature: Mapping[str, Any],
    metric: Callable[[Tensor, Tensor], Any],
) -> float:
    """Return a metric of a model's outputs in evaluation mode, whose modes are then restored.

    Args:
        model: the module.
        public: records with targets.
        signature: how it is called with several fields (`ModelSpec.signature`), else empty.
        metric: of all outputs and targets.
    """
    if not public.has_targets:
        raise UserError("eval_data: must have targets, got inputs alone: give (X, y)")
    called = Signature.parse(signature, "model") if signature else None
    device = next(model.parameters()).device
    outputs, targets = [], []
    with evaluation_mode(model), kept_buffers(model), torch.inference_mode():
        for start in range(0, len(public), _ROWS):
            rows = np.arange(start, min(start + _ROWS, len(public)))
            batch = public.batch(rows)
            fields = {name: each.to(device) for name, each in fields_of(batch).items()}
            if called is not None:
                answers = called.outputs(model, fields)
            elif isinstance(batch, Tensor):
                answers = plain_outputs(model(batch.to(device)))
            else:
                answers = plain_outputs(model(fields if isinstance(batch, dict)
                                              else tuple(fields.values())))  # fmt: skip
            outputs.append(answers)
            targets.append(public.targets(rows))
    return float(metric(torch.cat(outputs).cpu(), torch.cat(targets).cpu()))
