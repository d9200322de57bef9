"""Normalisation layers that look at one example at a time: y = weight * normalised + bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from dpdist.gradients.forms import Contribution, Dense
from dpdist.gradients.rules.call import LayerCall

Normalise = Callable[[Tensor], Tensor]
# So many examples at a time: what is normalised is multiplied and summed while still in the cache.
_PIECE_BYTES = 1 << 19


def group_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """GroupNorm on (B, C, ...)."""
    module = call.module
    assert isinstance(module, nn.GroupNorm)
    return _per_channel(call, partial(F.group_norm, num_groups=module.num_groups, eps=module.eps))


def instance_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """InstanceNorm on (B, C, ...), without running statistics (the engine refuses those)."""
    module = call.module
    assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    return _per_channel(call, partial(F.instance_norm, eps=module.eps))


def _per_channel(call: LayerCall, normalise: Normalise) -> Iterator[tuple[str, Contribution]]:
    signal, positions = call.backsignal, tuple(range(2, call.backsignal.dim()))
    if "weight" in call.trainable:
        example = math.prod(signal.shape[1:]) * signal.element_size()
        step = max(1, _PIECE_BYTES // max(1, example))
        weight = signal.new_empty(signal.shape[:2])
        pieces = (each.split(step) for each in (call.input, signal, weight))
        for values, some, out in zip(*pieces, strict=True):
            product = normalise(values).mul_(some)
            out.copy_(product.sum(positions) if positions else product)
        yield "weight", Dense(weight)
    if "bias" in call.trainable:
        yield "bias", Dense(signal.sum(positions) if positions else signal)


def layer_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """LayerNorm over the last dimensions of (B, ..., *normalized_shape)."""
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape, signal = module.normalized_shape, call.backsignal
    batch = signal.shape[0]
    if "weight" in call.trainable:
        product = F.layer_norm(call.input, shape, eps=module.eps).mul_(signal)
        yield "weight", Dense(product.reshape(batch, -1, *shape).sum(1))
    if "bias" in call.trainable:
        yield "bias", Dense(signal.reshape(batch, -1, *shape).sum(1))
