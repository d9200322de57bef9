"""Criterion objects of torch, such as `nn.CrossEntropyLoss(label_smoothing=0.1)`, as record losses.

Guarantee: a record's value is a function of the model and that record. The object runs with
`reduction="none"`, so nothing is divided by a number that depends on the batch. Its reduction is
applied to a record's own values:

* "mean" and "none": their mean, without targets of the ignored index. Weights of classes stay
  factors: torch's mean over a batch of one would cancel them.
* "sum" and, for a divergence, "batchmean": their sum.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError

TARGETS = "targets"  # name of the field, as `dpdist.data.protocol` has it
_Values = Callable[[nn.Module, Any, Tensor], Tensor]


def _of_classes(criterion: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of classes, or of their probabilities: (B, ...)."""
    if targets.dim() == outputs.dim() - 1 and outputs.dim() > 2:
        first = outputs.shape[2:] == targets.shape[1:]  # classes on dimension 1, as in torch
        last = outputs.shape[1:-1] == targets.shape[1:]
        if first and last:
            raise UserError(
                f"loss: must know which dimension of outputs (B, {outputs.shape[1]}, "
                f"{outputs.shape[2]}) holds the classes: give a function of module and batch that "
                "calls torch.nn.functional.cross_entropy with reduction='none'"
            )
        if last:
            outputs = outputs.movedim(-1, 1)
    found: Tensor = criterion(outputs, targets)
    counted: Tensor
    if targets.is_floating_point() or found.dim() == 1 or not criterion.averages:
        return found
    counted = (targets != criterion.ignore_index).flatten(1).sum(1).clamp(min=1)
    return found.flatten(1).sum(1).div(counted)


def _compared(criterion: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of outputs of the targets' shape."""
    if outputs.shape != targets.shape:
        if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)  # never broadcast: (B, 1) and (B,) would be (B, B)
        if outputs.shape != targets.shape:
            shapes = [
                (f"(B, {', '.join(map(str, s))})" if s else "(B,)")
                for s in (tuple(outputs.shape[1:]), tuple(targets.shape[1:]))
            ]
            raise UserError(
                f"loss: {type(criterion).__name__} needs outputs of the targets' shape, got "
                f"{shapes[0]} and {shapes[1]}: give the model as many outputs as a record has "
                "targets"
            )
    found: Tensor = criterion(outputs, targets.to(outputs.dtype))
    return found


def _gaussian(criterion: Any, outputs: Any, targets: Tensor) -> Tensor:
    if not isinstance(outputs, tuple | list) or len(outputs) != 2:
        raise UserError("loss: GaussianNLLLoss needs a model that returns (mean, variance)")
    mean, variance = outputs
    found: Tensor = criterion(mean, targets.to(mean.dtype).reshape(mean.shape), variance)
    return found


def _plain(criterion: Any, outputs: Any, targets: Tensor) -> Tensor:
    found: Tensor = criterion(outputs, targets)
    return found


_OF: dict[type[nn.Module], _Values] = {
    nn.CrossEntropyLoss: _of_classes,
    nn.NLLLoss: _of_classes,
    **dict.fromkeys(
        (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss,
         nn.SoftMarginLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.MultiLabelSoftMarginLoss,
         nn.HingeEmbeddingLoss),
        _compared,
    ),
    nn.GaussianNLLLoss: _gaussian,
    nn.MultiLabelMarginLoss: _plain,
    nn.MultiMarginLoss: _plain,
}  # fmt: skip


class CriterionLoss:
    """A criterion object as a loss of module and batch, one value per record.

    Args:
        criterion: one of torch's losses, or a module of your own of outputs and targets, which
            honors `reduction="none"` if it has a reduction.

    Raises:
        UserError: it has parameters, which nothing would train, or its arguments are not outputs
            and targets.
    """

    def __init__(self, criterion: nn.Module) -> None:
        kind = type(criterion)
        self.values = _OF.get(kind)
        if next(criterion.parameters(), None) is not None:
            raise UserError(
                f"loss: must have no parameters, got a {kind.__name__} whose parameters nothing "
                "would train: put them into the model, and return losses from it"
            )
        if self.values is None:
            if kind.__module__.partition(".")[0] == "torch":
                raise UserError(
                    f"loss: must be of outputs and targets, got a {kind.__name__}; give a function "
                    "of module and batch that calls it with reduction='none'"
                )
            self.values = _plain
            self.__module__ = kind.__module__  # whose code it is
        self.criterion = copy.deepcopy(criterion)
        reduction = getattr(criterion, "reduction", "none")
        self.criterion.averages = reduction in ("mean", "none")  # type: ignore[assignment]
        if hasattr(criterion, "reduction"):
            self.criterion.reduction = "none"  # type: ignore[assignment]
        self._placed: dict[tuple[torch.device, torch.dtype], nn.Module] = {}

    @property
    def __name__(self) -> str:
        return type(self.criterion).__name__

    def takes_classes(self, targets: Tensor) -> bool:
        """Return whether each target must be a class, whose value torch's error would quote."""
        known = isinstance(self.criterion, nn.CrossEntropyLoss | nn.NLLLoss)
        return known and targets.dim() == 1 and not targets.is_floating_point()

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        """Return the losses (B,) of a module and a batch."""
        if isinstance(batch, dict):
            fields = {name: value for name, value in batch.items() if name != TARGETS}
            return self.of_outputs(module(**fields), batch[TARGETS])
        *inputs, targets = batch
        return self.of_outputs(module(*inputs), targets)

    def of_outputs(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the losses (B,) of a model's outputs and the targets."""
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        assert self.values is not None
        found = self.values(self._placed_at(first), outputs, targets)
        if found.dim() < 2 or found.shape[0] != len(targets):
            return found  # (B,), or `example_losses` raises an error
        flat = found.flatten(1)
        return flat.mean(1) if self.criterion.averages else flat.sum(1)

    def _placed_at(self, outputs: Tensor) -> nn.Module:
        """Return the criterion with weights on the device and in the precision of the outputs."""
        key = outputs.device, outputs.dtype
        if key not in self._placed:
            self._placed[key] = copy.deepcopy(self.criterion).to(*key)
        return self._placed[key]

    def describe(self) -> str:
        """Return the loss and its settings as text, which must stay the same when a run resumes."""
        own = {
            name: value
            for name, value in sorted(vars(self.criterion).items())
            if isinstance(value, bool | int | float | str) and name != "training"
        }
        said = [f"{name}={value}" for name, value in own.items() if name != "reduction"]
        for name, buffer in self.criterion.named_buffers():
            raw = buffer.detach().cpu().double().numpy().tobytes()
            said.append(f"{name}={hashlib.blake2b(raw, digest_size=8).hexdigest()}")
        kind = type(self.criterion)
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(said)})"
