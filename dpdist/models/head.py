"""The last linear layer of a model, and what it reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError


def last_linear(model: nn.Module) -> nn.Linear:
    """The last dense layer, with a bias, among the modules. Raises UserError for a model without;
    `Features` finds out whether it is what the model ends with."""
    found = [module for module in model.modules() if type(module) is nn.Linear]
    if not found or found[-1].bias is None:
        raise UserError("the model must end in a linear layer with a bias: its head")
    return found[-1]


class Features:
    """What the last linear layer of a model reads of a batch: (B, ...) to (B, D), in inference.

    Raises UserError for a model that does not end in that layer.
    """

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        """inputs: (B, ...) to try it on. The model is this object's from now on."""
        self._model, self._head = model.eval().requires_grad_(False), last_linear(model)
        self._seen: list[Tensor] = []
        seen = self._seen  # the hook holds the list, not us: a cycle keeps models and features
        self._head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        with torch.no_grad():
            answers = self._model(inputs)
            first = self._seen[0] if self._seen else inputs
            if len(self._seen) != 1 or first.dim() != 2 or not self._head(first).equal(answers):
                raise UserError("the model must end in its last linear layer, used once: its head")

    def __call__(self, inputs: Tensor, graph: bool = False) -> Tensor:
        """graph: for gradients by the inputs."""
        self._seen.clear()
        with torch.set_grad_enabled(graph):
            self._model(inputs)
        return self._seen[0]
