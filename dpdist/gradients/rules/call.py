"""One call of one layer, as the engine captured it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class LayerCall:
    """What a rule may look at.

    inputs, kwargs: the arguments of `module.forward`, detached. backsignals: the gradient of the
    summed loss with respect to every tensor of the (flattened) output, zeros where it was not
    used. parameters: the values used in this call by local name (perturbed ones under parameter
    draws). trainable: the local names whose gradients are wanted.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    backsignals: list[Tensor]
    parameters: dict[str, Tensor]
    trainable: frozenset[str]

    @property
    def input(self) -> Tensor:
        """The one tensor input of the common layers."""
        return self.inputs[0] if self.inputs else self.kwargs["input"]

    @property
    def backsignal(self) -> Tensor:
        return self.backsignals[0]
