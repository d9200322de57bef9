"""Linear (any leading dimensions) and Embedding."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dpdist.gradients.forms import Contribution, Dense, Outer, Rows
from dpdist.gradients.rules.call import LayerCall


def linear(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """y = x W^T + b on (B, ..., in): every position between is one term of the sum."""
    signal = call.backsignal
    batch = signal.shape[0]
    signal = signal.reshape(batch, -1, signal.shape[-1])
    if "weight" in call.trainable:
        right = call.input.reshape(batch, -1, call.input.shape[-1])
        yield "weight", Outer(signal, right, source=call.input)
    if "bias" in call.trainable:
        yield "bias", Dense(signal[:, 0] if signal.shape[1] == 1 else signal.sum(1))


def embedding(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """A looked-up row receives its position's output gradient; padding_idx receives none.

    `scale_grad_by_freq` counts tokens over the batch and is refused by the engine, `max_norm`
    changes weights in the forward pass and is refused too.
    """
    module = call.module
    assert isinstance(module, nn.Embedding)
    if "weight" not in call.trainable:
        return
    batch = call.input.shape[0]
    ids = call.input.reshape(batch, -1)
    if module.padding_idx is not None:
        ids = ids.masked_fill(ids == module.padding_idx, -1)
    values = call.backsignal.reshape(batch, -1, module.embedding_dim)
    yield "weight", Rows(ids, values, module.num_embeddings)
