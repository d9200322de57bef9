"""Capture every layer's inputs and output gradients in one forward and one backward pass.

No parameter requires a gradient during the pass (`call_with_values` with detached values), so
autograd computes back-signals only, and the model's own parameters are never written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils import _pytree as pytree

from dpdist.core.errors import UserError
from dpdist.gradients.layer_rules import (
    POSITIONWISE,
    Rule,
    call_for_each_example,
    call_with_values,
    embedding,
    find_rule,
    per_example_vjp,
)
from dpdist.gradients.per_example import LayerCall, PerExampleGradient, sums_in_order
from dpdist.gradients.random_passes import States, random_states

# --- losses and batches -----------------------------------------------------------------------


@dataclass(frozen=True)
class OwnLoss:
    """A loss that runs the forward passes itself.

    function: of the module and a batch, returns losses (B,), one value per record. The batch is
    `(inputs, targets)`, `(*inputs, targets)` if a record has several inputs, or the dict of its
    fields. then: of losses (B,) and targets (B, ...), returns the losses to learn; None for the
    same.
    """

    function: Callable[[nn.Module, Any], Tensor]
    then: Callable[[Tensor, Tensor], Tensor] | None = None


Losses = Callable[[Tensor, Tensor], Tensor]  # of the model's outputs and the targets
Objective = Losses | OwnLoss
Inputs = Any  # (B, ...): a tensor, or a tuple or dict of tensors, all with B first


def example_losses(
    model: nn.Module,
    objective: Objective,
    values: Mapping[str, Tensor],
    inputs: Inputs,
    targets: Tensor,
) -> Tensor:
    """Compute the losses (B,) of a model with these parameters instead of its own.

    Raises:
        UserError: the objective does not return one value per record.
    """
    if isinstance(objective, OwnLoss):
        several = inputs if isinstance(inputs, tuple) else (inputs,)
        batch = inputs if isinstance(inputs, dict) else (*several, targets)
        losses = run_with_values(model, values, partial(objective.function, model, batch))
        losses = losses if objective.then is None else objective.then(losses, targets)
    else:
        losses = objective(call_with_values(model, values, (inputs,)), targets)
    count = rows_of(inputs)
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise UserError(
            f"loss: must return one loss per example, shape ({count},), got {got}: use "
            "reduction='none'"
        )
    return losses


def weighted_by_class(objective: Objective, weights: Sequence[float]) -> Objective:
    """Return an objective whose losses are multiplied by public weights of the targets' classes.

    A record's gradient is then clipped with its weight in it, so that it adds no more to a sum.
    """

    def weighted(losses: Tensor, targets: Tensor) -> Tensor:
        # A mean over the batch must not become (B,) here: `example_losses` raises an error for it.
        if not isinstance(losses, Tensor) or losses.shape != targets.shape:
            return losses
        by_class = torch.tensor(weights, dtype=losses.dtype, device=losses.device)
        return losses * by_class[targets.long()]  # bools and bytes would select rows

    if isinstance(objective, OwnLoss):
        return replace(objective, then=weighted)
    return lambda outputs, targets: weighted(objective(outputs, targets), targets)


def each_tensor(function: Callable[[Tensor], Any], inputs: Inputs) -> Inputs:
    """Return inputs of the same kind with the function's result for each tensor."""
    return function(inputs) if isinstance(inputs, Tensor) else pytree.tree_map(function, inputs)


def take(inputs: Inputs, rows: Any) -> Inputs:
    """Return these rows of the inputs."""
    return each_tensor(lambda tensor: tensor[rows], inputs)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of the inputs, in order."""
    return [inputs] if isinstance(inputs, Tensor) else pytree.tree_leaves(inputs)


def rows_of(inputs: Inputs) -> int:
    """Return the number of examples."""
    return len(tensors_of(inputs)[0])


def device_of(inputs: Inputs) -> torch.device:
    """Return the device of the inputs."""
    return tensors_of(inputs)[0].device


# --- layers -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Layer:
    """A module that owns trainable parameters.

    parameter_indices: position among the trainable parameters, by local name. parameter_names: name
    in the model, by local name, of all its parameters. fallback: whether it has no rule and runs by
    torch.func, with all its submodules. shared: for such a layer and for an embedding, shapes of
    the arguments that belong to no example, by place; by the number of a call in its pass and the
    form of its arguments. lengths: for a layer that treats positions separately, number of
    dimensions of its output and the inputs as long as it, by number of the call. draws: whether its
    rule runs it again and it uses random numbers; without a rule it then runs by torch.func in the
    forward pass too. alone: whether it runs by torch.func because hooks cannot follow a layer in
    it. `CapturedModel` finds the last four.
    """

    name: str
    module: nn.Module
    rule: Rule
    parameter_indices: dict[str, int]
    parameter_names: dict[str, str]
    fallback: bool
    shared: dict[tuple[int, str], dict[int, torch.Size]] = field(default_factory=dict)
    lengths: dict[int, tuple[int, Beginnings]] = field(default_factory=dict)
    draws: bool = False
    alone: bool = False

    @property
    def may_share(self) -> bool:
        return self.fallback or self.rule is embedding

    @property
    def runs_again(self) -> bool:
        """Return whether its rule runs it a second time."""
        return self.fallback or isinstance(self.module, nn.RNNBase)


# (input, number of its first dimensions) with a given number of positions
Beginnings = frozenset[tuple[int, int]]

_HALF = (torch.float16, torch.bfloat16)

LayerCallback = Callable[[Layer, LayerCall], None]


def collector(gradients: Sequence[PerExampleGradient]) -> LayerCallback:
    """Return a callback that adds the contributions of each layer's rule to the gradients."""

    def collect(layer: Layer, call: LayerCall) -> None:
        for local, contribution in layer.rule(call):
            gradients[layer.parameter_indices[local]].add(contribution)

    return collect


class LayoutError(UserError):
    """A layer whose output does not have the examples on the expected dimension."""

    def __init__(self, layer: str, message: str) -> None:
        super().__init__(message)
        self.layer = layer


def find_layers(model: nn.Module, alone: Collection[str] = ()) -> list[Layer]:
    """Return the layers to capture, in the model's order.

    alone: names of modules that run as a whole by torch.func, for each example.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    index = {id(parameter): slot for slot, parameter in enumerate(trainable)}
    full_name = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: list[Layer] = []
    claimed: set[int] = set()
    for name, module in model.named_modules():
        own, holders = _own_parameters(module)
        whole = (name or WHOLE) in alone
        if whole:
            own = dict(module.named_parameters())
        if id(module) in claimed or not any(id(p) in index for p in own.values()):
            continue
        claimed.update(id(holder) for holder in holders)
        rule = None if whole else find_rule(module)
        fallback = rule is None
        if rule is None:
            # Differentiated as a whole: hooks may not see how it uses its submodules.
            rule = per_example_vjp
            claimed.update(id(child) for child in module.modules())
            own = dict(module.named_parameters())
        slots = {local: index[id(p)] for local, p in own.items() if id(p) in index}
        names = {local: full_name[id(p)] for local, p in own.items()}
        layers.append(Layer(name or WHOLE, module, rule, slots, names, fallback, alone=whole))
    return layers


WHOLE = "(the model itself)"


# modules that hold parameters and are never called on examples
_ParameterContainer = nn.ParameterList | nn.ParameterDict | ParametrizationList


def _own_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], list[nn.Module]]:
    """Return a module's own parameters by local name, and the modules that hold them.

    They include those in lists, in dicts and of its parametrizations.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    children = list(module.named_children())
    if is_parametrized(module):
        parts = module.get_submodule("parametrizations")
        children += [(f"parametrizations.{name}", child) for name, child in parts.named_children()]
    holders = [(name, child) for name, child in children if isinstance(child, _ParameterContainer)]
    for name, holder in holders:
        own |= {f"{name}.{inner}": p for inner, p in holder.named_parameters()}
    return own, [holder for _, holder in holders]


class _PassState:
    """The state of one pass over these inputs, with these parameters."""

    def __init__(
        self, inputs: Inputs, values: Mapping[str, Tensor], on_call: LayerCallback
    ) -> None:
        self.batch, self.shapes = rows_of(inputs), [each.shape for each in tensors_of(inputs)]
        self.values, self.on_call = values, on_call
        self.anchor = torch.zeros(0, device=device_of(inputs), requires_grad=True)
        # Calls with several outputs wait for the end of the backward pass.
        self.pending: list[Callable[[], None]] = []
        self.in_rule = False
        self.calls: Counter[str] = Counter()  # by layer
        # For layers that draw: generators when the call began, and the shared arguments.
        self.entered: dict[str, list[tuple[States, frozenset[int]]]] = {}

    def beginnings(self, length: int) -> Beginnings:
        """Return inputs, and numbers of their first dimensions, with this many positions."""
        return frozenset(
            (number, size)
            for number, shape in enumerate(self.shapes)
            for size in range(1, len(shape) + 1)
            if math.prod(shape[:size]) == length
        )

    def shared_arguments(self, layer: Layer, arguments: Any) -> frozenset[int]:
        """Return the places of arguments of a layer's next call that belong to no example.

        Raises UserError if an argument has a different shape than before that looks like records.
        """
        if not layer.may_share:
            return frozenset()
        key, leaves = self.next_call(layer, arguments)
        known = layer.shared.get(key, {})
        for place, shape in known.items():
            now = leaves[place].shape
            if now != shape and now[:1] == (self.batch,):
                raise UserError(
                    f"layer {layer.name} must be given positions or a mask of shape {tuple(shape)} "
                    f"in each pass, got {tuple(now)} for a batch of {self.batch}, which looks like "
                    "records: let no shape depend on values"
                )
        return frozenset(place for place, shape in known.items() if leaves[place].shape == shape)

    def next_call(self, layer: Layer, arguments: Any) -> tuple[tuple[int, str], list[Any]]:
        """Return the number of a layer's next call, the form of its arguments, and their leaves."""
        leaves, form = pytree.tree_flatten(arguments)
        self.calls[layer.name] += 1
        kinds = [type(leaf).__name__ for leaf in leaves]
        return (self.calls[layer.name], f"{form} {kinds}"), leaves

    def deliver(
        self,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output_gradients: list[Tensor],
        shared: frozenset[int] = frozenset(),
        states: States | None = None,
    ) -> None:
        parameters = {local: self.values[name] for local, name in layer.parameter_names.items()}
        if any(_is_half(leaf) for leaf in pytree.tree_leaves((args, kwargs, output_gradients))):
            # Autocast may give a layer inputs in half precision: widened before norms and sums.
            args, kwargs, output_gradients = pytree.tree_map_only(
                Tensor, _at_least_float32, (args, kwargs, output_gradients)
            )
            if layer.runs_again:  # with these arguments
                parameters = {name: _at_least_float32(p) for name, p in parameters.items()}
        call = LayerCall(
            layer.module,
            args,
            kwargs,
            output_gradients,
            parameters,
            frozenset(layer.parameter_indices),
            shared,
            states,
        )
        self.in_rule = True
        try:
            self.on_call(layer, call)
        except Exception as error:
            if layer.fallback and not isinstance(error, UserError):
                error.add_note(
                    f"(layer {layer.name} has no rule, so torch.func runs it for each example "
                    "separately: it must take and return one or more examples on dimension 0)"
                )
            raise
        finally:
            self.in_rule = False


def _is_half(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _HALF


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_half(tensor) else tensor


class _Attach(torch.autograd.Function):
    """Put a layer output on the autograd graph although nothing before it requires a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


@contextmanager
def captured_calls(
    layers: list[Layer], inputs: Inputs, values: Mapping[str, Tensor], on_call: LayerCallback
) -> Iterator[None]:
    """Give each call of a layer in a forward and backward pass to `on_call`, with the gradients of
    its output. values: all parameters by name, detached."""
    current = _PassState(inputs, values, on_call)
    with _install_hooks(layers, current), torch.enable_grad(), sums_in_order(device_of(inputs)):
        yield
        with torch.no_grad():
            while current.pending:  # each refers to `current`, and to activations
                current.pending.pop(0)()


def is_watched(layer: Layer) -> bool:
    """Return whether it may have arguments that belong to no example, or treats positions."""
    return layer.may_share or layer.rule in POSITIONWISE


@contextmanager
def watched_calls(layers: list[Layer], twins: list[Layer], inputs: Inputs) -> Iterator[None]:
    """Let the layers of a model's copy keep the shapes of all arguments in a forward pass.

    They also keep the lengths of outputs. What an embedding looks up for all examples is copied.
    """
    state = _PassState(inputs, {}, lambda layer, call: None)

    def watched(layer: Layer, twin: Layer) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not layer.may_share:
                if isinstance(output, Tensor) and output.dim():
                    state.calls[layer.name] += 1
                    length = output.dim(), state.beginnings(len(output))
                    twin.lengths[state.calls[layer.name]] = length
                return None
            key, leaves = state.next_call(layer, (args, kwargs))
            twin.shared[key] = {
                place: leaf.shape for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
            }
            if layer.rule is embedding and layer.shared.get(key):
                return _for_each_example(state.batch, layer.shared[key], output)[0]
            return None

        return hook

    handles = [
        twin.module.register_forward_hook(watched(layer, twin), with_kwargs=True, prepend=True)
        for layer, twin in zip(layers, twins, strict=True)
        if is_watched(layer)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_with_values(model: nn.Module, values: Mapping[str, Tensor], run: Callable[[], Any]) -> Any:
    """Run a forward and a backward pass with these parameters instead of the model's own.

    Checkpoints run parts of the model again in the backward pass, with the same parameters.
    """
    named = {f"model.{name}": value for name, value in values.items()}
    return call_with_values(_Enclosing(model, run), named, ())


class _Enclosing(nn.Module):
    """Run a function while the parameters of a model are replaced."""

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self) -> Any:
        return self.run()


_RUNNING: dict[int, _PassState] = {}  # by the identity of a module, the pass that it is in


@contextmanager
def _install_hooks(layers: list[Layer], current: _PassState) -> Iterator[None]:
    """Install hooks for one pass, so that the model stays picklable and copyable.

    Raises UserError if a second thread runs one of the layers: each would see both's records.
    """
    handles = []
    try:
        for layer in layers:
            if _RUNNING.setdefault(id(layer.module), current) is not current:
                raise UserError(
                    f"layer {layer.name} must be trained by one thread at a time, got a second "
                    "thread: give each a copy of the model (copy.deepcopy)"
                )
            hook = _forward_hook(layer, current)
            # Before other hooks: noise added to the output does not belong to the layer.
            handles.append(layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        with _drawing_layers(layers, current):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            if _RUNNING.get(id(layer.module)) is current:
                del _RUNNING[id(layer.module)]


def _forward_hook(layer: Layer, current: _PassState) -> Callable[..., Any]:
    def by_example(tensor: Tensor) -> Tensor:
        return tensor.view(current.batch, -1, tensor.shape[-1])

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if current.in_rule:  # torch.func is replaying this layer
            return None
        args, kwargs = _detach_arguments(args, kwargs)
        states = None
        if layer.draws:
            states, shared = current.entered[layer.name].pop()
        else:
            shared = current.shared_arguments(layer, (args, kwargs))
        if layer.rule is embedding and isinstance(output, Tensor):
            args, kwargs, output = _for_each_example(current.batch, shared, args, kwargs, output)
            shared = frozenset()
        _refuse_selection(layer, current, output)
        flat = _is_flat(layer, current, output)
        leaves, spec = (
            ([output], None) if isinstance(output, Tensor) else pytree.tree_flatten(output)
        )
        wanted = [
            position
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        if not flat:
            _check_batch_dimension(layer, current.batch, [leaves[position] for position in wanted])
        for position in wanted:
            # A hook on a view is lost if the view changes in place. If one output is computed from
            # another, as in an LSTMCell, a hook on the latter sees the signals of both.
            if leaves[position]._is_view() or len(wanted) > 1:
                leaves[position] = leaves[position].clone()
            if not leaves[position].requires_grad:
                leaves[position] = _Attach.apply(leaves[position], current.anchor)  # type: ignore[no-untyped-call]
            _require_gradients(layer, leaves[position])
        if flat:
            args, kwargs = pytree.tree_map_only(Tensor, by_example, (args, kwargs))

        def deliver(signals: list[Tensor]) -> None:
            current.deliver(layer, args, kwargs, signals, shared, states)

        if len(wanted) == 1:
            leaves[wanted[0]].register_hook(
                lambda signal: deliver([by_example(signal) if flat else signal])
            )
        else:
            outputs = [leaves[position] for position in wanted]
            current.pending.append(_deliver_later(outputs, deliver))
        return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)

    return hook


@contextmanager
def _drawing_layers(layers: list[Layer], current: _PassState) -> Iterator[None]:
    """Let layers that draw and run again draw the same numbers both times, until the block ends.

    Layers without a rule run by torch.func in the forward pass too.
    """
    device, replaced = current.anchor.device, []

    def drawing(layer: Layer, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if current.in_rule:
                return forward(*args, **kwargs)
            shared = current.shared_arguments(layer, (args, kwargs))
            current.entered.setdefault(layer.name, []).append((random_states(device), shared))
            if not layer.fallback:
                return forward(*args, **kwargs)
            given = [
                each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)
            ]
            if not any(each.shape[:1] == (current.batch,) for each in given):
                raise LayoutError(
                    layer.name,
                    f"layer {layer.name} must take the examples on dimension 0, got shapes "
                    f"{[tuple(each.shape) for each in given]} for a batch of {current.batch}",
                )
            return call_for_each_example(forward, args, kwargs, current.batch, shared)

        return run

    try:
        for layer in layers:
            if layer.draws:
                module: Any = layer.module
                replaced.append((module, vars(module).get("forward")))
                module.forward = drawing(layer, module.forward)
        yield
    finally:
        for module, before in replaced:
            del module.forward
            if before is not None:
                module.forward = before


@contextmanager
def drawing_as_in_passes(layers: list[Layer], inputs: Inputs) -> Iterator[None]:
    """Let an ordinary forward and backward pass in the block draw what a captured one draws."""
    with _drawing_layers(layers, _PassState(inputs, {}, lambda layer, call: None)):
        yield


def _for_each_example(batch: int, shared: Collection[int], *values: Any) -> Any:
    """Return the arguments and, last, the output of an embedding for each example.

    What it looks up once for all, (1, T) or with shared arguments (T,), is copied.
    """

    def copied(tensor: Tensor) -> Tensor:
        one = tensor[None] if shared else tensor
        return one.expand(batch, *one.shape[1:])

    if not shared and len(values[-1]) != 1:
        return values
    return pytree.tree_map_only(Tensor, copied, values)


def _require_gradients(layer: Layer, output: Tensor) -> None:
    """Raise UserError for an output without gradients."""
    if not output.requires_grad:
        raise UserError(
            f"layer {layer.name} must run with gradients, got torch.no_grad() or reentrant "
            "checkpointing: its parameters would learn nothing; use checkpoints with "
            "use_reentrant=False"
        )


def _is_flat(layer: Layer, current: _PassState, output: Any) -> bool:
    """Return whether a layer's output has positions and examples in one dimension, (B * T, F).

    The layer treats positions separately, and T is that of an input, so that a selection of
    positions, as for experts, does not count. `check_example_independence` checks that positions
    are ordered by example.
    """
    return (
        layer.rule in POSITIONWISE
        and isinstance(output, Tensor)
        and output.dim() == 2
        and len(output) != current.batch
        and len(current.beginnings(len(output))) > 0
    )


def _refuse_selection(layer: Layer, current: _PassState, output: Any) -> None:
    """Raise UserError for a call whose rows depend on the inputs differently than before.

    As many selected positions as examples would be mistaken for the examples.
    """
    if layer.rule not in POSITIONWISE or not isinstance(output, Tensor) or not output.dim():
        return
    current.calls[layer.name] += 1
    known = layer.lengths.get(current.calls[layer.name])
    now = current.beginnings(len(output))
    if known is None or not now:  # `_check_batch_dimension` reports other lengths
        return
    if known[0] != output.dim() or not known[1] & now:
        raise UserError(
            f"layer {layer.name} must be given all positions of each example, got a selection that "
            f"depends on values, of {len(output)} rows for a batch of {current.batch}: run it on "
            "all positions, and multiply those that do not count by zero"
        )


def _detach_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return (args[0].detach(),), kwargs
    return pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))  # type: ignore[no-any-return]


def _deliver_later(
    outputs: list[Tensor], deliver: Callable[[list[Tensor]], None]
) -> Callable[[], None]:
    """Return a function that delivers the signals of these outputs, if there are any."""
    signals: dict[int, Tensor] = {}
    likes = [output.detach() for output in outputs]
    for place, output in enumerate(outputs):
        output.register_hook(partial(signals.__setitem__, place))

    def run() -> None:
        if signals:
            numbered = enumerate(likes)
            deliver([signals[n] if n in signals else torch.zeros_like(o) for n, o in numbered])

    return run


def _check_batch_dimension(layer: Layer, batch: int, outputs: list[Tensor]) -> None:
    module, dimension = layer.module, 0
    shape = tuple(outputs[0].shape) if outputs else ()
    if isinstance(module, nn.RNNBase):
        dimension = 0 if module.batch_first else 1
        if len(shape) != 3:
            raise UserError(
                f"layer {layer.name} must take a batch of sequences of one length, three "
                f"dimensions, got a packed or an unbatched one: it returned shape {shape} for a "
                f"batch of {batch}"
            )
    if len(shape) <= dimension or shape[dimension] != batch:
        raise LayoutError(
            layer.name,
            f"layer {layer.name} returned shape {shape} for a batch of {batch}: its output must "
            f"keep the examples on dimension {dimension}",
        )
