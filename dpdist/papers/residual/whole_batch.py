"""Gradients of whole batches, BatchNorm included: the baseline without privacy (NOT PRIVATE).

BatchNorm normalizes by the batch, so one record changes every record's gradient, and its running
statistics are written without noise.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import Clipping, NoClipping
from dpdist.gradients.engine import ClippedSum, GradientEngine, UserMembers, hidden_noise
from dpdist.gradients.hooks import Inputs, Objective, device_of, example_losses, rows_of
from dpdist.gradients.per_example import sums_in_order
from dpdist.gradients.random_passes import keyed_draws, pass_key
from dpdist.gradients.validation import normalizes_over_batch
from dpdist.randomness.noisy_modules import override_outputs


class WholeBatchEngine(GradientEngine):
    """Sum the gradient of a whole batch in one pass, BatchNorm included: NOT PRIVATE.

    For runs that prove nothing. BatchNorm normalizes by the batch, so one record changes every
    record's gradient, and its statistics are written without noise.

    Raises:
        UserError: there is a clip, which speaks of single records.
    """

    def __init__(self, model: nn.Module, objective: Objective, *, clipping: Clipping) -> None:
        if not isinstance(clipping, NoClipping):
            raise UserError(
                "privacy.clipping: must be none for a model with BatchNorm, which mixes records"
            )
        super().__init__(model, objective, clipping=clipping, micro_batch=1)
        self._captured.channels_last = False

    def _refuse_layers(self, model: nn.Module) -> None:
        """Take BatchNorm."""

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Return running means, variances and numbers of batches, by the names of their buffers."""
        return {
            f"{name}.{key}": buffer
            for name, module in self.model.named_modules()
            if isinstance(module, _BatchNorm)
            for key, buffer in module.named_buffers(recurse=False)
        }

    def validate(self, inputs: Inputs, targets: Tensor) -> None:
        """Check nothing: records are allowed to mix."""

    def clipped_sum(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        draw_key: bytes = b"",
        record_ids: Tensor | None = None,
        out: Tensor | None = None,
        members: UserMembers | None = None,
    ) -> ClippedSum:
        """Return the sum of the batch's gradients, unclipped; arguments as in `GradientEngine`."""
        draws, batch = self.perturbation, rows_of(inputs)
        if members is not None or draws.count > 1 or draws.per_example:
            raise UserError("a model with BatchNorm: must have one draw, and no groups")
        flat = self.parameters[0].new_zeros(self.size, dtype=torch.float64) if out is None else out
        if not batch:
            return ClippedSum(flat, 0, 0, 0.0)
        seen = self.perturb_inputs(inputs, record_ids, draw_key, 0)
        perturbed = draws.perturb_parameters(self._captured.values(), draw_key, 0)
        values = {name: value.detach().requires_grad_() for name, value in perturbed.items()}
        before = self.model.training
        self.model.train()
        try:
            with (
                override_outputs(self.model, hidden_noise(draws, record_ids, draw_key, 0)),
                keyed_draws(pass_key(draw_key, "whole batch"), device_of(inputs))
                if draw_key
                else nullcontext(),
                torch.enable_grad(),
                sums_in_order(device_of(inputs)),
            ):
                losses = example_losses(self.model, self.objective, values, seen, targets)
                found = torch.autograd.grad(losses.sum(), [*values.values()])
        finally:
            self.model.train(before)
        flat += torch.cat([each.reshape(-1) for each in found]).double() * draws.gradient_weight
        return ClippedSum(flat, batch, 0, float(losses.detach().double().sum()))


def mixes_records(model: nn.Module) -> bool:
    """Return whether a layer of the model normalizes over the batch."""
    return any(map(normalizes_over_batch, model.modules()))
