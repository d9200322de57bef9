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

    A pass runs once for each of the engine's K perturbations, so that its rows draw what they draw
    together; each row's loss is then differentiated by itself, and its gradients are averaged
    before the clip.
    """
    blocks, draws = engine.blocks, range(engine.perturbation.count)
    total = torch.zeros(engine.size, dtype=torch.float64)
    rows = engine.rows_per_pass(blocks)
    for label, members, real in labeled_passes(blocks, key, ids.numpy(), rows, engine.rounding):
        of_shard = ("shard", engine.shard) if label[0] == "pass" else ()
        # In the engine's memory format, in whose order dropout draws.
        some = engine._captured.laid_out(take(inputs, torch.from_numpy(members)))
        wanted, own_ids = targets[torch.from_numpy(members)], ids[torch.from_numpy(members)]
        passes = []
        for draw in draws:
            drawing = keyed_draws(pass_key(key, *of_shard, *label, "draw", draw), targets.device)
            values = engine.perturbation.perturb_parameters(engine._captured.values(), key, draw)
            values = {name: value.requires_grad_() for name, value in values.items()}
            seen = engine.perturb_inputs(some, own_ids, key, draw)
            with drawing, drawing_as_in_passes(engine._captured.layers, some):
                losses = example_losses(engine.model, engine.objective, values, seen, wanted)
            passes.append((losses, list(values.values())))
        for row in np.arange(len(members))[real]:
            gradient = sum(_gradient(losses[row], of) for losses, of in passes) / len(draws)
            total += gradient * min(1.0, engine.sensitivity / max(1e-12, float(gradient.norm())))
    return total


def _gradient(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    parts = zip(found, parameters, strict=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).double().flatten() for g, p in parts]
    )
