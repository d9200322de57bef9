"""Clipped sums by autograd, one record after the other, with the draws that the engine makes."""

import numpy as np
import torch
from torch import Tensor

from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import drawing_as_in_passes, example_losses, take
from dpdist.gradients.passes import labeled_passes
from dpdist.gradients.random_passes import keyed_draws, pass_key


def one_by_one(engine: GradientEngine, inputs, targets: Tensor, ids: Tensor, key: bytes) -> Tensor:
    """Return the sum of gradients, each clipped to the engine's sensitivity: float64 (size,).

    A pass runs once, so that its rows draw what they draw together; each row's loss is then
    differentiated by itself.
    """
    model, blocks = engine.model, engine.blocks
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = torch.zeros(engine.size, dtype=torch.float64)
    rows = engine.rows_per_pass(blocks)
    for label, members, real in labeled_passes(blocks, key, ids.numpy(), rows, engine.rounding):
        of_shard = ("shard", engine.shard) if label[0] == "pass" else ()
        # In the engine's memory format, in whose order dropout draws.
        some = engine._laid_out(take(inputs, torch.from_numpy(members)))
        wanted = targets[torch.from_numpy(members)]
        drawing = keyed_draws(pass_key(key, *of_shard, *label, "draw", 0), targets.device)
        with drawing, drawing_as_in_passes(engine._layers, some):
            losses = example_losses(model, engine.objective, {}, some, wanted)
        for row in np.arange(len(members))[real]:
            found = torch.autograd.grad(
                losses[row], parameters, retain_graph=True, allow_unused=True
            )
            parts = zip(found, parameters, strict=True)
            gradient = torch.cat(
                [(torch.zeros_like(p) if g is None else g).double().flatten() for g, p in parts]
            )
            total += gradient * min(1.0, engine.sensitivity / max(1e-12, float(gradient.norm())))
    return total
