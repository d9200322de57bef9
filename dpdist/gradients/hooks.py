"""Capture every layer's inputs and output gradients in one forward and one backward pass.

No parameter requires a gradient during the pass (`torch.func.functional_call` with detached
values), so autograd computes back-signals only, and the model's own parameters are never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpdist.core.errors import UserError
from dpdist.gradients.layer_rules import Rule, per_example, rule_for
from dpdist.gradients.per_example import LayerCall

Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """A module that owns trainable parameters.

    slots: local parameter name -> position among the trainable parameters. names: local name ->
    name in the model, of all its parameters. fallback: it has no rule and goes to torch.func, with
    all its submodules.
    """

    name: str
    module: nn.Module
    rule: Rule
    slots: dict[str, int]
    names: dict[str, str]
    fallback: bool


_HALF = (torch.float16, torch.bfloat16)

OnCall = Callable[[Layer, LayerCall], None]


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers to capture, in the model's order; slots number the trainable parameters."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    index = {id(parameter): slot for slot, parameter in enumerate(trainable)}
    full_name = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: list[Layer] = []
    claimed: set[int] = set()
    for name, module in model.named_modules():
        own, holders = _own_parameters(module)
        if id(module) in claimed or not any(id(p) in index for p in own.values()):
            continue
        claimed.update(id(holder) for holder in holders)
        rule = rule_for(module)
        fallback = rule is None
        if rule is None:
            # Differentiated as a whole: its submodules may be used in ways hooks do not see.
            rule = per_example
            claimed.update(id(child) for child in module.modules())
            own = dict(module.named_parameters())
        slots = {local: index[id(p)] for local, p in own.items() if id(p) in index}
        names = {local: full_name[id(p)] for local, p in own.items()}
        layers.append(Layer(name or "(the model itself)", module, rule, slots, names, fallback))
    return layers


_Holder = nn.ParameterList | nn.ParameterDict  # never called: they are their module's own


def _own_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], list[nn.Module]]:
    """By local name, those it holds itself and in lists and dicts; and these."""
    own = dict(module.named_parameters(recurse=False))
    holders = [
        (name, child) for name, child in module.named_children() if isinstance(child, _Holder)
    ]
    for name, holder in holders:
        own |= {f"{name}.{inner}": p for inner, p in holder.named_parameters()}
    return own, [holder for _, holder in holders]


@dataclass
class _Pass:
    """The state of one pass."""

    batch: int
    values: Mapping[str, Tensor]
    anchor: Tensor
    on_call: OnCall
    # Calls with several outputs wait for the end of the backward pass.
    pending: list[tuple[Layer, _Deferred]] = field(default_factory=list)
    in_rule: bool = False

    def deliver(
        self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], signals: list[Tensor]
    ) -> None:
        parameters = {local: self.values[name] for local, name in layer.names.items()}
        if any(_is_half(leaf) for leaf in pytree.tree_leaves((args, kwargs, signals))):
            # Autocast may give a layer half its input alone: widened before norms and sums.
            args, kwargs, signals = pytree.tree_map_only(
                Tensor, _at_least_float32, (args, kwargs, signals)
            )
            if layer.fallback:  # runs again, with frozen parameters of its own
                parameters = {name: _at_least_float32(p) for name, p in parameters.items()}
        call = LayerCall(layer.module, args, kwargs, signals, parameters, frozenset(layer.slots))
        self.in_rule = True
        try:
            self.on_call(layer, call)
        finally:
            self.in_rule = False


@dataclass
class _Deferred:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    signals: list[Tensor | None]


def _is_half(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _HALF


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_half(tensor) else tensor


class _Attach(torch.autograd.Function):
    """Puts a layer output on the autograd graph although nothing before it requires a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def run_pass(
    model: nn.Module,
    layers: list[Layer],
    objective: Objective,
    inputs: Tensor,
    targets: Tensor,
    values: Mapping[str, Tensor],
    on_call: OnCall,
    *,
    weights: Tensor | float | None = None,
) -> Tensor:
    """Run the model on one micro-batch; `on_call` receives every layer call with its back-signals.

    values: the trainable parameters by name, detached. weights: of the losses in the sum that
    is differentiated, (B,) or one for all (default 1). Returns the losses (B,), detached. Raises
    UserError if the objective does not return one loss per example or a layer does not keep the
    examples apart.
    """
    everything = {name: p.detach() for name, p in model.named_parameters()} | dict(values)
    anchor = torch.zeros(0, device=inputs.device, requires_grad=True)
    current = _Pass(len(inputs), everything, anchor, on_call)
    with _hooked(layers, current), torch.enable_grad():
        outputs = torch.func.functional_call(model, everything, (inputs.detach(),))
        losses = objective(outputs, targets)
        if losses.shape != (len(inputs),):
            raise UserError(
                f"the objective must return one loss per example, shape ({len(inputs)},), got "
                f"{tuple(losses.shape)}: use reduction='none'"
            )
        if losses.requires_grad:
            (losses if weights is None else losses * weights).sum().backward()
        with torch.no_grad():
            for layer, call in current.pending:
                if any(signal is not None for signal in call.signals):
                    signals = [
                        torch.zeros_like(output) if signal is None else signal
                        for output, signal in zip(call.outputs, call.signals, strict=True)
                    ]
                    current.deliver(layer, call.args, call.kwargs, signals)
    return losses.detach()


@contextmanager
def _hooked(layers: list[Layer], current: _Pass) -> Iterator[None]:
    """Hooks live for one pass only, so the model stays picklable and copyable."""
    handles = []
    try:
        for layer in layers:
            hook = _forward_hook(layer, current)
            # Before all others: noise that somebody puts on the output is none of the layer's.
            handles.append(layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward_hook(layer: Layer, current: _Pass) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if current.in_rule:  # torch.func is replaying this layer
            return None
        args, kwargs = _detached(args, kwargs)
        leaves, spec = (
            ([output], None) if isinstance(output, Tensor) else pytree.tree_flatten(output)
        )
        wanted = [
            position
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        _check_batch_dimension(layer, current.batch, [leaves[position] for position in wanted])
        for position in wanted:
            if leaves[position]._is_view():  # a hook on a view is lost if it is changed in place
                leaves[position] = leaves[position].clone()
            if not leaves[position].requires_grad:
                leaves[position] = _Attach.apply(leaves[position], current.anchor)  # type: ignore[no-untyped-call]
        if len(wanted) == 1:
            leaves[wanted[0]].register_hook(
                lambda signal: current.deliver(layer, args, kwargs, [signal])
            )
        else:
            outputs = [leaves[position].detach() for position in wanted]
            call = _Deferred(args, kwargs, outputs, [None] * len(wanted))
            current.pending.append((layer, call))
            for order, position in enumerate(wanted):
                leaves[position].register_hook(_store(call.signals, order))
        return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)

    return hook


def _detached(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return (args[0].detach(),), kwargs
    result: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        Tensor, Tensor.detach, (args, kwargs)
    )
    return result


def _store(signals: list[Tensor | None], order: int) -> Callable[[Tensor], None]:
    def store(signal: Tensor) -> None:
        signals[order] = signal

    return store


def _check_batch_dimension(layer: Layer, batch: int, outputs: list[Tensor]) -> None:
    first = not isinstance(layer.module, nn.RNNBase) or layer.module.batch_first
    dimension = 0 if first else 1
    shape = tuple(outputs[0].shape) if outputs else ()
    if len(shape) <= dimension or shape[dimension] != batch:
        raise UserError(
            f"layer {layer.name} returned shape {shape} for a batch of {batch}: its output must "
            f"keep the examples on dimension {dimension}"
        )
