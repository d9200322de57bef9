"""Scores of a record by a model, each in [0, 1] and the larger the better, which searches add up.

Sensitivity. A score of M held-out records is S = (v_1 + ... + v_M) / M with v_i in [0, 1], where
v_i depends only on record i and the model, and M is public.

* One record, added or removed: the sum changes by v_i, at most 1. Replaced by a different one: by
  |v - v'|, at most 1, since both are in [0, 1].
* One person, if a user is the unit: a person adds the mean of the values of all own records, which
  is in [0, 1] for any number of records. Added, removed or replaced: at most 1. M is the number of
  persons.

So noise of standard deviation s on the sum is a Gaussian mechanism of sensitivity 1 with noise
multiplier s, for each of the scores here. What they measure is an affine map of the mean:

| score | is 1 - S, or S, times | sensitivity of the sum in those units |
|---|---|---|
| Brier score, in [0, 2] | (1 - S) * 2 | 2 |
| log loss, clipped at `cap` | (1 - S) * cap | cap |
| balanced accuracy | S * max(weights) | max(weights) |
| `bounded_score` of a function | low + S * (high - low) | high - low |

Values are rounded down to multiples of 2^-20 before they are added, so they stay in [0, 1].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpdist import models
from dpdist.core.errors import UserError


@dataclass(frozen=True)
class RecordScore:
    """Compute a record's value of a model's outputs.

    Args:
        name: of the score, with all that it depends on.
        values: of outputs (B, classes) and classes (B,), to values in [0, 1], float64 (B,).
    """

    name: str
    values: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the values (B,) of outputs (B, classes) for classes (B,); 0 if not finite.

        Raises:
            ValueError: the outputs are not one for each of several classes.
        """
        if outputs.dim() != 2 or outputs.shape[1] < 2:
            raise ValueError(f"{self.name} needs one output for each of 2 or more classes")
        finite = outputs.isfinite().all(-1)
        found = self.values(outputs.double().nan_to_num(), targets)
        return found.masked_fill(~finite, 0.0)


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (models.predicted_classes(outputs) == targets).double()


ACCURACY = RecordScore("accuracy", _accuracy)


def _brier(outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = nn.functional.one_hot(targets, outputs.shape[1])
    return 1 - (outputs.softmax(-1) - wanted).square().sum(-1) / 2


def brier_score() -> RecordScore:
    """Return a score of records: 1 - half the Brier score (sum of squared errors of all classes).

    Guarantee: the value lies in [0, 1], since a Brier score lies in [0, 2], so one record or person
    moves a sum of such values by at most 1: in units of the Brier score by at most 2.

    Returns:
        A `RecordScore` for `score={"value": ...}` of `dpdist.tune` and `PrivateTraining.score`:
        called with outputs (B, classes) and classes (B,), it returns a float64 tensor (B,) in [0,
        1].

    Raises:
        ValueError: the score is called on outputs that are not one for each of several classes.

    Source:
        Brier, Monthly Weather Review 1950.

    Example:
        >>> import torch
        >>> from dpdist import brier_score
        >>> brier_score()(torch.tensor([[0.0, 0.0], [99.0, 0.0]]), torch.tensor([1, 1]))
        tensor([0.7500, 0.0000], dtype=torch.float64)
    """
    return RecordScore("Brier score", _brier)


def log_loss_score(cap: float = 5.0) -> RecordScore:
    """Return a score of records: 1 - min(loss, cap) / cap of a record's log loss.

    Guarantee: the value lies in [0, 1], whatever the loss, so one record or person moves a sum of
    such values by at most 1: in units of the loss by at most `cap`.

    Args:
        cap: largest loss, in nats; a larger loss counts as this much. Choose it without the
            records.

    Returns:
        A `RecordScore` for `score={"value": ...}` of `dpdist.tune` and `PrivateTraining.score`:
        called with outputs (B, classes) and classes (B,), it returns a float64 tensor (B,) in [0,
        1].

    Raises:
        UserError: the cap is not above 0 and finite.

    Example:
        >>> import torch
        >>> from dpdist import log_loss_score
        >>> log_loss_score(cap=2.0)(torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.tensor([1, 1]))
        tensor([0.9999, 0.0000], dtype=torch.float64)
    """
    if not 0 < cap < float("inf"):
        raise UserError(f"cap: must be above 0 and finite, got {cap}")

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return 1 - loss.clamp(0, cap) / cap

    return RecordScore(f"log loss clipped at {cap:g}", values)


def balanced_accuracy(weights: Mapping[int, float]) -> RecordScore:
    """Return a score of records: weight / largest weight if the class is correct, else 0.

    With weights 1 / (classes * fraction of the class) the mean of these values, times the largest
    weight, is the balanced accuracy: the mean over classes of the accuracy in each.

    Guarantee: the value lies in [0, 1], so one record or person moves a sum of such values by at
    most 1: in units of balanced accuracy by at most the largest weight.

    Args:
        weights: weights by class, from 0 on. They must be PUBLIC: fractions that you count in the
            records are not.

    Returns:
        A `RecordScore` for `score={"value": ...}` of `dpdist.tune` and `PrivateTraining.score`:
        called with outputs (B, classes) and classes (B,), it returns a float64 tensor (B,) in [0,
        1].

    Raises:
        UserError: a class has no weight, or one that is not above 0.

    Example:
        >>> import torch
        >>> from dpdist import balanced_accuracy
        >>> rare = balanced_accuracy({0: 0.55, 1: 5.5})  # 1 of 11 records is of class 1
        >>> rare(torch.tensor([[2.0, 1.0], [1.0, 2.0], [1.0, 2.0]]), torch.tensor([0, 1, 0]))
        tensor([0.1000, 1.0000, 0.0000], dtype=torch.float64)
    """
    listed = [weights[each] for each in range(len(weights)) if each in weights]
    if len(listed) != len(weights) or not all(0 < each < float("inf") for each in listed):
        raise UserError(f"weights: must be above 0 for each class from 0 on, got {dict(weights)}")
    shares = torch.tensor(listed, dtype=torch.float64) / max(listed)

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[1] != len(shares):
            raise ValueError(f"weights are of {len(shares)} classes, outputs of {outputs.shape[1]}")
        return _accuracy(outputs, targets) * shares.to(targets.device)[targets]

    told = ", ".join(f"{each:g}" for each in listed)
    return RecordScore(f"balanced accuracy (weights {told})", values)


def bounded_score(
    function: Callable[[nn.Module, Any], Tensor], low: float, high: float
) -> Callable[[nn.Module, Any], Tensor]:
    """Return a function whose values are clipped to a declared range and mapped to [0, 1].

    Guarantee: the value lies in [0, 1], whatever the function returns, so one record or person
    moves a sum of such values by at most 1: in units of the function by at most high - low.

    Args:
        function: function of a model and a batch that returns one value per record, (B,), the
            larger the better.
        low: lower end of the range, chosen without the records. A value that is not a number counts
            as this.
        high: upper end of the range.

    Returns:
        A function of a model and a batch, for `score={"value": ...}` of `dpdist.tune` and
        `PrivateTraining.score`. It returns a tensor (B,) in [0, 1].

    Raises:
        UserError: the range is empty or not finite.

    Example:
        >>> import torch
        >>> from dpdist import bounded_score
        >>> def minus_error(model, batch):
        ...     return -(model(batch[0])[:, 0] - batch[1]).abs()
        >>> bounded_score(minus_error, -10, 0)(torch.nn.Identity(), (torch.ones(1, 1), 3))
        tensor([0.8000])
    """
    if not -float("inf") < low < high < float("inf"):
        raise UserError(f"low: must be below high, both finite, got {low} and {high}")

    @functools.wraps(function)
    def value(model: nn.Module, batch: Any) -> Tensor:
        return (function(model, batch).nan_to_num(low).clamp(low, high) - low) / (high - low)

    name = getattr(function, "__qualname__", type(function).__qualname__)
    value.__qualname__ = f"{name}, clipped to [{low:g}, {high:g}],"
    return value
