"""Consistency of a record's noisy copies (Jeong & Shin, NeurIPS 2020), inside its own clip.

To the cross-entropy of each of a record's K noisy copies, weight * KL(mean || p_k) is added: the
divergence of its prediction p_k from the mean of the K predictions, which is held constant. So the
copies learn to agree, which is what randomised smoothing certifies. The mean is of the record's own
copies only; the gradients are clipped per record afterwards, so it costs no privacy.

Up to a constant the sum of both is the cross-entropy against weighted classes, onehot(label) +
weight * mean. That is how it is computed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.kernel_rows import INVENTED_KEY


def weighted_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, C) and weights of the classes (B, C), >= 0, of any sum, to losses (B,)."""
    return -(targets * outputs.log_softmax(1)).sum(1)


def agreed_targets(
    engine: GradientEngine,
    inputs: Tensor,
    labels: Tensor,
    draw_key: bytes,
    record_ids: Tensor,
    weight: float,
) -> Tensor:
    """Class weights (B, C) for `weighted_cross_entropy`, from the engine's draws of this key."""

    def agreed(some: Tensor, ids: Tensor, key: bytes) -> Tensor:
        copies = [
            engine.model(engine.seen(some, ids, key, k)).softmax(1)
            for k in range(engine.draws.count)
        ]
        return torch.stack(copies).mean(0)

    def invented_pass(some: Tensor, _: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [agreed(some, torch.zeros_like(record_ids[:1]).expand(len(some)), INVENTED_KEY)]

    def classes(rows: int) -> np.ndarray | None:
        return engine.row_classes("consistency", invented_pass, rows, inputs, labels)

    passes = list(engine.passes(len(inputs), draw_key, record_ids, classes))
    parts = []
    with torch.no_grad():
        for rows, real in passes or [(torch.arange(0), slice(0))]:
            parts.append(agreed(inputs[rows], record_ids[rows], draw_key)[real])
    mean = torch.cat(parts)
    if passes:
        order = torch.cat([rows[real] for rows, real in passes])
        mean = mean[order.argsort()]
    return torch.nn.functional.one_hot(labels, mean.shape[1]).to(mean) + weight * mean
