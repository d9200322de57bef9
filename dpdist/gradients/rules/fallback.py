"""Any other layer: its per-example gradients by `torch.func`, one vmapped backward of that layer.

Memory is (micro-batch x the layer's parameters). The layer must treat dimension 0 of its tensor
inputs and outputs as the batch, must not be random and must not update buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpdist.gradients.forms import Contribution, Dense
from dpdist.gradients.rules.call import LayerCall


def per_example(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Vector-Jacobian products of the layer for each example alone (a batch of one)."""
    batch = call.backsignals[0].shape[0]
    leaves, spec = pytree.tree_flatten((call.inputs, call.kwargs))
    batched = [isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,) for leaf in leaves]
    wanted = {name: call.parameters[name] for name in sorted(call.trainable)}
    fixed = {name: value for name, value in call.parameters.items() if name not in wanted}

    def one_example(tensors: list[Tensor], signals: list[Tensor]) -> dict[str, Tensor]:
        given = iter(tensors)
        filled = [
            next(given).unsqueeze(0) if is_batched else leaf
            for leaf, is_batched in zip(leaves, batched, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(filled, spec)

        def outputs(values: dict[str, Tensor]) -> list[Tensor]:
            result = torch.func.functional_call(call.module, {**values, **fixed}, args, kwargs)
            return float_tensors(result)

        pullback = torch.func.vjp(outputs, wanted)[1]
        return pullback([signal.unsqueeze(0) for signal in signals])[0]

    tensors = [leaf for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched]
    grads = torch.func.vmap(one_example)(tensors, list(call.backsignals))
    for name, values in grads.items():
        yield name, Dense(values)


def float_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of any nested output, in a fixed order."""
    leaves = pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
