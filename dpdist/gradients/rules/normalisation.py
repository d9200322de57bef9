"""Normalisation layers that look at one example at a time: y = weight * normalised + bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from dpdist.gradients.forms import Contribution, Dense
from dpdist.gradients.rules.call import LayerCall


def group_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """GroupNorm on (B, C, ...)."""
    module = call.module
    assert isinstance(module, nn.GroupNorm)
    normalised = F.group_norm(call.input, module.num_groups, eps=module.eps)
    return _per_channel(call, normalised)


def instance_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """InstanceNorm on (B, C, ...), without running statistics (the engine refuses those)."""
    module = call.module
    assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    return _per_channel(call, F.instance_norm(call.input, eps=module.eps))


def _per_channel(call: LayerCall, normalised: Tensor) -> Iterator[tuple[str, Contribution]]:
    signal = call.backsignal
    batch, channels = signal.shape[:2]
    if "weight" in call.trainable:
        yield "weight", Dense((signal * normalised).reshape(batch, channels, -1).sum(2))
    if "bias" in call.trainable:
        yield "bias", Dense(signal.reshape(batch, channels, -1).sum(2))


def layer_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """LayerNorm over the last dimensions of (B, ..., *normalized_shape)."""
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape, signal = module.normalized_shape, call.backsignal
    batch = signal.shape[0]
    if "weight" in call.trainable:
        normalised = F.layer_norm(call.input, shape, eps=module.eps)
        yield "weight", Dense((signal * normalised).reshape(batch, -1, *shape).sum(1))
    if "bias" in call.trainable:
        yield "bias", Dense(signal.reshape(batch, -1, *shape).sum(1))
