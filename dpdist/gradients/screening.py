"""Refusing what would void the guarantee: layers that mix examples, parameters the hooks miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from dpdist.errors import UserError
from dpdist.gradients.capture import Layer, Objective, run_pass
from dpdist.gradients.contributions import PerExampleGradient
from dpdist.gradients.rules import LayerCall

_PROBE = 4  # examples of the self-check
_GROUP = 1 << 20  # parameters differentiated at a time


def refuse_mixing_layers(model: nn.Module) -> None:
    """Raise UserError, naming the layer, for layer types known to mix examples."""
    for name, module in model.named_modules():
        where = f"layer {name or '(the model itself)'} ({type(module).__name__})"
        if isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm):
            raise UserError(
                f"{where} normalises over the batch, so one record would change every record's "
                "gradient: use torch.nn.GroupNorm instead"
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise UserError(
                f"{where} keeps running statistics of private data: set track_running_stats=False "
                "or use torch.nn.GroupNorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.scale_grad_by_freq or module.max_norm is not None
        ):
            raise UserError(
                f"{where}: scale_grad_by_freq counts tokens over the batch and max_norm rewrites "
                "weights in the forward pass: switch both off"
            )


def self_check(
    model: nn.Module,
    layers: list[Layer],
    objective: Objective,
    parameters: Mapping[str, nn.Parameter],
    gradients: list[PerExampleGradient],
    inputs: Tensor,
    targets: Tensor,
) -> bool:
    """Check on a few examples that they do not mix and that no parameter's gradient is missed.

    1. The gradient of the first example's loss with respect to every layer's output must be zero on
       the rows of all other examples.
    2. The unclipped sum by book-keeping must equal autograd's own gradient.

    gradients: empty ones, one per parameter. Returns False if the check could not be made (one
    example only, values not finite) and is to be repeated; raises UserError if it failed.
    """
    inputs, targets = inputs[:_PROBE], targets[:_PROBE]
    if len(inputs) < 2:
        return False
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    state = _random_state(inputs.device)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mixed: list[str] = []
    first_only = torch.zeros(len(inputs), device=inputs.device)
    first_only[0] = 1

    def watch(layer: Layer, call: LayerCall) -> None:
        dimension = 0
        if isinstance(layer.module, nn.RNNBase) and not layer.module.batch_first:
            dimension = 1
        for signal in call.backsignals[:1]:
            if _reaches(signal.movedim(dimension, 0)[1:]):
                mixed.append(layer.name)

    def collect(layer: Layer, call: LayerCall) -> None:
        for local, contribution in layer.rule(call):
            gradients[layer.slots[local]].add(contribution)

    run_pass(
        model, layers, objective, inputs, targets, values, watch,
        weights=first_only,
    )  # fmt: skip
    if mixed or _inputs_mix(model, objective, values, inputs, targets):
        where = f"at or after layer {mixed[0]}" if mixed else "before the first trained layer"
        raise UserError(
            f"the model mixes examples {where}: one example's loss depends on another example. "
            "Normalise within each example (torch.nn.GroupNorm), never over the batch"
        )
    _restore(state, inputs.device)
    losses = run_pass(model, layers, objective, inputs, targets, values, collect)
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, buffers[name]) and not buffer.isnan().any():
            raise UserError(
                f"buffer {name} changed in a forward pass: statistics of private data would be "
                "stored without noise"
            )
    _restore(state, inputs.device)
    with torch.enable_grad():
        total_loss = objective(model(inputs), targets).sum()
    finite = bool(losses.isfinite().all())
    named = list(parameters.items())
    for group in _groups([parameter.numel() for parameter in parameters.values()]):
        expected = _autograd(total_loss, [named[slot][1] for slot in group])
        for slot, grad in zip(group, expected, strict=True):
            name, gradient = named[slot][0], gradients[slot]
            total = torch.zeros(grad.shape, dtype=torch.float64, device=grad.device)
            gradient.squared_norms()
            gradient.add_weighted_sum(torch.ones_like(first_only, dtype=torch.float64), total, 1)
            finite = finite and bool(grad.isfinite().all())
            if finite and float((total - grad).norm()) > 1e-2 * max(float(grad.norm()), 1e-6):
                raise UserError(
                    f"the gradient of parameter {name} cannot be followed example by example: it "
                    "is used outside the forward of the module that owns it, or a random layer "
                    "draws differently in each pass"
                )
    return finite


def _groups(sizes: list[int]) -> Iterator[list[int]]:
    """Parameters to differentiate together: the check never holds a second full gradient."""
    group: list[int] = []
    for slot, size in enumerate(sizes):
        if group and sum(sizes[member] for member in group) + size > _GROUP:
            yield group
            group = []
        group.append(slot)
    yield group


def _inputs_mix(
    model: nn.Module,
    objective: Objective,
    values: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> bool:
    """Whether the first loss depends on the other examples' (floating-point) inputs."""
    if not inputs.is_floating_point():
        return False
    seen = inputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = objective(torch.func.functional_call(model, dict(values), (seen,)), targets)
        if not losses.requires_grad:
            return False
        (grad,) = torch.autograd.grad(losses[0], [seen], allow_unused=True)
    return grad is not None and _reaches(grad[1:])


def _reaches(others: Tensor) -> bool:
    """Whether a gradient is not zero; NaN, which 0 * Inf makes, says nothing."""
    return bool(torch.any(others.isfinite() & (others != 0)))


def _autograd(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    grads: Sequence[Tensor | None] = [None] * len(parameters)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(parameter) if grad is None else grad
        for parameter, grad in zip(parameters, grads, strict=True)
    ]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
