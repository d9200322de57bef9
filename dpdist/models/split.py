"""The network cut after its first affine layer: where noise goes that certifies inputs.

Everything behind the cut must see the input through that layer only. So a model is cut when it is a
sequence of layers beginning with a convolution or a dense layer, and refused otherwise.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpdist.errors import UserError
from dpdist.models.normalised import Normalised


class Normalise(nn.Module):
    """(x - mean) / std alone, as the first step of a sequence."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


@dataclass(frozen=True)
class Split:
    """rest(first(x)) = model(x); both share the model's parameters.

    name: of ``layer``, the last module of ``first``, in ``model.named_modules()``. std: of the
    normalisation before it, or None.
    """

    name: str
    layer: nn.Linear | nn.Conv2d
    first: nn.Module
    rest: nn.Module
    std: Tensor | None

    def hidden_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one example's output of ``first``."""
        with torch.no_grad():
            return tuple(self.first(torch.zeros(1, *input_shape)).shape[1:])

    def affine(self, input_shape: tuple[int, ...]) -> nn.Linear | nn.Conv2d:
        """A copy of ``layer`` whose weight is that of ``first`` as a whole, in input units."""
        layer = copy.deepcopy(self.layer).requires_grad_(False)
        if self.std is None:
            return layer
        if isinstance(layer, nn.Linear):
            layer.weight /= self.std.expand(input_shape).reshape(1, -1)
        else:
            if layer.groups != 1:
                raise UserError("a grouped first convolution behind a normalisation is not handled")
            layer.weight /= self.std.reshape(1, -1, 1, 1)
        return layer


def split_first(model: nn.Module) -> Split | None:
    """The cut after the first convolution or dense layer; None when the model cannot be cut."""
    modules = _flatten(model, "")
    std = None
    for place, (name, module) in enumerate(modules):
        if isinstance(module, nn.Linear | nn.Conv2d):
            first = nn.Sequential(*[m for _, m in modules[: place + 1]]).train(model.training)
            rest = nn.Sequential(*[m for _, m in modules[place + 1 :]]).train(model.training)
            return Split(name, module, first, rest, std)
        if isinstance(module, Normalise):
            std = module.std
        elif not isinstance(module, nn.Flatten | nn.Identity):
            return None
    return None


def require_split(model: nn.Module) -> Split:
    """As `split_first`. Raises UserError when the model cannot be cut."""
    split = split_first(model)
    if split is None:
        raise UserError(
            "noise in the first hidden layer needs a model that is a sequence of layers beginning "
            "with a convolution or a dense layer"
        )
    return split


def _flatten(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    prefix = f"{name}." if name else ""
    if isinstance(model, Normalised):
        inner = _flatten(model.network, f"{prefix}network")
        return [(name, Normalise(model.mean, model.std)), *inner]
    if type(model) is nn.Sequential:
        children = model.named_children()
        return [pair for key, child in children for pair in _flatten(child, prefix + key)]
    return [(name, model)]
