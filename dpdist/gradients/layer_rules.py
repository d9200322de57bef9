"""Per-example gradient rules by layer type: from inputs and output gradients to contributions.

A rule takes a captured layer call and yields (local parameter name, contribution) for the
trainable parameters. `find_rule` returns it; None means that the layer runs by `torch.func`: one
vmapped backward pass of that layer, with memory of (micro-batch x the layer's parameters). Such a
layer must treat dimension 0 of its tensor inputs and outputs as the batch, and must not update
buffers.

Covered are Linear (any leading dimensions) and Embedding; Conv1d, Conv2d and ConvTranspose2d with
any stride, padding, dilation and groups; normalization of one example at a time; RNN, LSTM and
GRU. The fused recurrent layer hides its gates, so the rule replays it step by step from the
captured input: every gate is a Linear layer repeated over time, with one position per time step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpdist.gradients.per_example import (
    Contribution,
    DenseGradient,
    EmbeddingGradient,
    LayerCall,
    OuterProductGradient,
)
from dpdist.gradients.random_passes import draws_again

# --- Linear and Embedding ---------------------------------------------------------------------


def linear(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Apply the rule of y = x W^T + b on (B, ..., in): every position is one term of the sum."""
    signal = _by_position(call.output_gradient)
    if "weight" in call.trainable:
        right = _by_position(call.input)
        yield "weight", OuterProductGradient(signal, right, source=call.input)
    if "bias" in call.trainable:
        yield "bias", DenseGradient(signal[:, 0] if signal.shape[1] == 1 else signal.sum(1))


def transposed_linear(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Apply the rule of y = x W + b on (B, ..., in), the Conv1D of `transformers`."""
    signal = _by_position(call.output_gradient)
    if "weight" in call.trainable:
        yield "weight", OuterProductGradient(_by_position(call.input), signal)
    if "bias" in call.trainable:
        yield "bias", DenseGradient(signal.sum(1))


def _by_position(values: Tensor) -> Tensor:
    """Return (B, ..., width) as (B, positions, width)."""
    return values.reshape(values.shape[0], -1, values.shape[-1])


def embedding(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Add each position's output gradient to the row it looks up, except for padding_idx.

    The engine does not support `scale_grad_by_freq`, which counts tokens over the batch, or
    `max_norm`, which changes weights in the forward pass.
    """
    module = call.module
    assert isinstance(module, nn.Embedding)
    if "weight" not in call.trainable:
        return
    batch = call.input.shape[0]
    ids = call.input.reshape(batch, -1)
    if module.padding_idx is not None:
        ids = ids.masked_fill(ids == module.padding_idx, -1)
    values = call.output_gradient.reshape(batch, -1, module.embedding_dim)
    yield "weight", EmbeddingGradient(ids, values, module.num_embeddings)


# --- convolutions -----------------------------------------------------------------------------


# Gradients are formed as (out, kh, kw, in): channels-last patches copy whole pixels, which is ten
# times faster than torch's unfold.
_FROM_CHANNELS_LAST = (0, 3, 1, 2)
_FROM_CHANNELS_LAST_1D = (0, 2, 1)


def convolution(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Treat a convolution as a Linear layer on its patches: one position per output pixel."""
    module = call.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    signal = call.output_gradient
    if isinstance(module, nn.Conv1d):
        signal = signal.unsqueeze(2)
    left = signal.permute(0, 2, 3, 1).flatten(1, 2)  # (B, positions, out)
    if "weight" in call.trainable:
        yield "weight", _weight(module, call.input, left, (signal.shape[2], signal.shape[3]))
    if "bias" in call.trainable:
        yield "bias", DenseGradient(left.sum(1))


def transposed_convolution(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Treat a transposed convolution as one with input and output gradient exchanged.

    One position per input pixel, and the patches are those of the output gradient.
    """
    module = call.module
    assert isinstance(module, nn.ConvTranspose2d)
    inputs, signal = call.input, call.output_gradient
    if "weight" in call.trainable:
        rows, columns = (int(side) for side in module.padding)
        padded = F.pad(signal, (columns, columns, rows, rows))
        windows = _windows(module, padded, (inputs.shape[2], inputs.shape[3]))
        left = inputs.permute(0, 2, 3, 1).flatten(1, 2)  # (B, positions, in)
        yield "weight", _product(left, windows, module.groups, _FROM_CHANNELS_LAST)
    if "bias" in call.trainable:
        yield "bias", DenseGradient(signal.sum((2, 3)))


def _weight(
    module: nn.Conv1d | nn.Conv2d, inputs: Tensor, left: Tensor, size: tuple[int, int]
) -> Contribution:
    one_dimensional = isinstance(module, nn.Conv1d)
    order = _FROM_CHANNELS_LAST_1D if one_dimensional else _FROM_CHANNELS_LAST
    windows = _windows(module, _padded(module, inputs), size)
    return _product(left, windows, module.groups, order, inputs)


def _product(
    left: Tensor,
    windows: Tensor,
    groups: int,
    order: tuple[int, ...],
    source: Tensor | None = None,
) -> Contribution:
    """Return the sum over positions of left (B, positions, channels) ⊗ windows, by group."""
    if groups == 1:
        return OuterProductGradient(left, windows[:, 0], order, source)
    batch, positions, channels = left.shape
    left = left.reshape(batch, positions, groups, -1).permute(0, 2, 3, 1).flatten(0, 1)
    patches = windows.reshape(batch * groups, positions, -1)
    return DenseGradient(torch.bmm(left, patches).view(batch, channels, -1), order)


def _windows(
    module: nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d, padded: Tensor, size: tuple[int, int]
) -> Tensor:
    """Return an overlapping view (B, groups, h, w, kh, kw, C / groups) of padded (B, C, H, W).

    size: (h, w), number of positions of the kernel on the image.
    """
    pixels = padded.permute(0, 2, 3, 1).contiguous()
    # A Conv1d is a Conv2d of height 1.
    kernel, stride, dilation = (
        (1, *value) if len(value) == 1 else value
        for value in (module.kernel_size, module.stride, module.dilation)
    )
    batch, groups, width = pixels.shape[0], module.groups, pixels.shape[3] // module.groups
    step_example, step_row, step_column, _ = pixels.stride()
    return pixels.as_strided(
        (batch, groups, *size, *kernel, width),
        (
            step_example,
            width,
            step_row * stride[0],
            step_column * stride[1],
            step_row * dilation[0],
            step_column * dilation[1],
            1,
        ),
    )


def _padded(module: nn.Conv1d | nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return the input with its padding, (B, C, H, W)."""
    # _reversed_padding_repeated_twice resolves "same"; a Conv1d's two entries pad the width only.
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, padding, mode=mode)
    return inputs.unsqueeze(2) if isinstance(module, nn.Conv1d) else inputs


# --- normalization ----------------------------------------------------------------------------


Normalize = Callable[[Tensor], Tensor]
# Bytes of examples at a time: normalized values are multiplied and summed while in the cache.
_PIECE_BYTES = 1 << 19


def group_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Apply the rule of GroupNorm on (B, C, ...)."""
    module = call.module
    assert isinstance(module, nn.GroupNorm)
    return _per_channel(call, partial(F.group_norm, num_groups=module.num_groups, eps=module.eps))


def instance_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Apply the rule of InstanceNorm on (B, C, ...), without running statistics."""
    module = call.module
    assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    return _per_channel(call, partial(F.instance_norm, eps=module.eps))


def _per_channel(call: LayerCall, normalize: Normalize) -> Iterator[tuple[str, Contribution]]:
    signal, positions = call.output_gradient, tuple(range(2, call.output_gradient.dim()))
    if "weight" in call.trainable:
        example = math.prod(signal.shape[1:]) * signal.element_size()
        step = max(1, _PIECE_BYTES // max(1, example))
        weight = signal.new_empty(signal.shape[:2])
        pieces = (each.split(step) for each in (call.input, signal, weight))
        for values, some, out in zip(*pieces, strict=True):
            product = normalize(values).mul_(some)
            out.copy_(product.sum(positions) if positions else product)
        yield "weight", DenseGradient(weight)
    if "bias" in call.trainable:
        yield "bias", DenseGradient(signal.sum(positions) if positions else signal)


def layer_norm(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Apply the rule of LayerNorm over the last dimensions of (B, ..., *normalized_shape)."""
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape, signal = module.normalized_shape, call.output_gradient
    batch = signal.shape[0]
    if "weight" in call.trainable:
        product = F.layer_norm(call.input, shape, eps=module.eps).mul_(signal)
        yield "weight", DenseGradient(product.reshape(batch, -1, *shape).sum(1))
    if "bias" in call.trainable:
        yield "bias", DenseGradient(signal.reshape(batch, -1, *shape).sum(1))


# --- recurrent layers -------------------------------------------------------------------------


_Gates = list[tuple[Tensor, Tensor]]  # per time step: pre-activations from the input, from h


def replayable(module: nn.Module) -> bool:
    """Return whether the replay covers a recurrent layer.

    It does not cover projections or cuDNN's dropout between layers, which has its own state.
    """
    assert isinstance(module, nn.RNNBase)
    draws = module.dropout > 0 and module.num_layers > 1
    return module.proj_size == 0 and not (draws and module.weight_ih_l0.device.type != "cpu")


def recurrent(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Apply the rule of RNN, LSTM and GRU of any depth, direction and layout."""
    module = call.module
    assert isinstance(module, nn.RNNBase)
    inputs = call.input if module.batch_first else call.input.transpose(0, 1)
    state = call.inputs[1] if len(call.inputs) > 1 else call.kwargs.get("hx")
    suffixes = [
        f"_l{layer}{'_reverse' if direction else ''}"
        for layer in range(module.num_layers)
        for direction in range(1 + module.bidirectional)
    ]
    again = nullcontext() if call.states is None else draws_again(call.states, inputs.device)
    with again, torch.enable_grad():
        outputs, gates, pairs = _replay(module, call.parameters, inputs, state, suffixes)
    wanted = [tensor for steps in gates for pair in steps for tensor in pair]
    grads = iter(torch.autograd.grad(outputs, wanted, call.output_gradients, allow_unused=True))
    for suffix, steps, (inputs_seen, hidden_seen) in zip(suffixes, gates, pairs, strict=True):
        signals = [
            [torch.zeros_like(tensor) if (grad := next(grads)) is None else grad for tensor in pair]
            for pair in steps
        ]
        for side, (name, seen) in enumerate((("ih", inputs_seen), ("hh", hidden_seen))):
            signal = torch.stack([pair[side] for pair in signals], dim=1)
            if f"weight_{name}{suffix}" in call.trainable:
                factors = OuterProductGradient(signal, torch.stack(seen, dim=1))
                yield f"weight_{name}{suffix}", factors
            if f"bias_{name}{suffix}" in call.trainable:
                yield f"bias_{name}{suffix}", DenseGradient(signal.sum(1))


def _replay(
    module: nn.RNNBase,
    parameters: dict[str, Tensor],
    inputs: Tensor,
    state: Tensor | tuple[Tensor, Tensor] | None,
    suffixes: list[str],
) -> tuple[list[Tensor], list[_Gates], list[tuple[list[Tensor], list[Tensor]]]]:
    """Return the module's outputs (output, h_n[, c_n]), the gates, and the inputs of the gates."""
    is_lstm = isinstance(module, nn.LSTM)
    batch, length, _ = inputs.shape
    zeros = inputs.new_zeros(len(suffixes), batch, module.hidden_size)
    hidden0, cell0 = zeros, zeros
    if state is not None:
        hidden0, cell0 = (state[0], state[1]) if is_lstm else (state, zeros)  # type: ignore[assignment]
    directions = 1 + module.bidirectional
    gates, pairs, last_hidden, last_cell = [], [], [], []
    below = [inputs[:, t] for t in range(length)]
    for layer in range(module.num_layers):
        outputs: list[list[Tensor]] = []
        for direction in range(directions):
            index = layer * directions + direction
            order = range(length - 1, -1, -1) if direction else range(length)
            hidden, cell = hidden0[index], cell0[index]
            steps: _Gates = []
            inputs_seen, hidden_seen = [], []
            produced: list[Tensor | None] = [None] * length
            for t in order:
                inputs_seen.append(below[t].detach())
                hidden_seen.append(hidden.detach())
                pair = _gates(parameters, suffixes[index], below[t], hidden)
                steps.append(pair)
                hidden, cell = _cell(module, pair, hidden, cell)
                produced[t] = hidden
            gates.append(steps)
            pairs.append((inputs_seen, hidden_seen))
            outputs.append([step for step in produced if step is not None])
            last_hidden.append(hidden)
            last_cell.append(cell)
        below = [torch.cat(step, dim=-1) for step in zip(*outputs, strict=True)]
        if module.dropout and module.training and layer < module.num_layers - 1:
            # In the layout of the layer's own random numbers.
            below = list(F.dropout(torch.stack(below), module.dropout))
    result = torch.stack(below, dim=1 if module.batch_first else 0)
    finals = [torch.stack(last_hidden)] + ([torch.stack(last_cell)] if is_lstm else [])
    return [result, *finals], gates, pairs


def _gates(
    parameters: dict[str, Tensor], suffix: str, inputs: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    pair = []
    for name, seen in (("ih", inputs), ("hh", hidden)):
        bias = parameters.get(f"bias_{name}{suffix}")
        value = F.linear(seen, parameters[f"weight_{name}{suffix}"], bias)
        pair.append(value if value.requires_grad else value.requires_grad_())
    return pair[0], pair[1]


def _cell(
    module: nn.RNNBase, pair: tuple[Tensor, Tensor], hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Return hidden and cell state after one step of torch.nn's documented equations."""
    from_input, from_hidden = pair
    if isinstance(module, nn.LSTM):
        i, f, g, o = (from_input + from_hidden).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell
    if isinstance(module, nn.GRU):
        reset_i, update_i, new_i = from_input.chunk(3, dim=-1)
        reset_h, update_h, new_h = from_hidden.chunk(3, dim=-1)
        reset, update = torch.sigmoid(reset_i + reset_h), torch.sigmoid(update_i + update_h)
        new = torch.tanh(new_i + reset * new_h)
        return (1 - update) * new + update * hidden, cell
    total = from_input + from_hidden
    return (torch.tanh(total) if module.nonlinearity == "tanh" else torch.relu(total)), cell


# --- any other layer, by torch.func -----------------------------------------------------------


def per_example_vjp(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Compute vector-Jacobian products of the layer for each example (a batch of one)."""
    batch = call.output_gradients[0].shape[0]
    tensors, filled = _cut((call.inputs, call.kwargs), batch, call.shared)
    wanted = {name: call.parameters[name] for name in sorted(call.trainable)}
    fixed = {name: value for name, value in call.parameters.items() if name not in wanted}

    def one_example(
        tensors: list[Tensor], signals: list[Tensor], zero: Tensor | None = None
    ) -> dict[str, Tensor]:
        args, kwargs = filled(tensors)

        def outputs(values: dict[str, Tensor]) -> list[Tensor]:
            draws = nullcontext() if zero is None else DrawsByExample(zero)
            with draws, RecurrentByExample():
                result = call_with_values(call.module, {**values, **fixed}, args, kwargs)
            return float_tensors(result)

        pullback = torch.func.vjp(outputs, wanted)[1]
        answer: dict[str, Tensor] = pullback([signal.unsqueeze(0) for signal in signals])[0]
        return answer

    signals = list(call.output_gradients)
    if call.states is None:
        grads = torch.func.vmap(one_example)(tensors, signals)
    else:
        by_example = torch.func.vmap(one_example, randomness="different")
        with draws_again(call.states, signals[0].device):
            grads = by_example(tensors, signals, signals[0].new_zeros(batch))
    for name, values in grads.items():
        yield name, DenseGradient(values)


def call_for_each_example(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    shared: frozenset[int],
) -> Any:
    """Call a layer for each example, a batch of one, so that each draws its own numbers.

    `per_example_vjp` draws the same numbers from the same state, by the same calls in order.
    """
    tensors, filled = _cut((args, kwargs), batch, shared)
    kept: list[Any] = []

    def one_example(tensors: list[Tensor], zero: Tensor) -> list[Tensor]:
        args, kwargs = filled(tensors)
        with DrawsByExample(zero), RecurrentByExample():
            leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
        made = [isinstance(leaf, Tensor) for leaf in leaves]
        kept[:] = (
            made,
            [None if own else leaf for own, leaf in zip(made, leaves, strict=True)],
            spec,
        )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    zeros = torch.zeros(batch, device=tensors[0].device)
    found = torch.func.vmap(one_example, randomness="different")(tensors, zeros)
    made, others, spec = kept
    rows = iter(each.flatten(0, 1) if each.dim() > 1 else each for each in found)
    filled_in = [next(rows) if own else other for own, other in zip(made, others, strict=True)]
    return pytree.tree_unflatten(filled_in, spec)


def _cut(
    arguments: Any, batch: int, shared: Collection[int]
) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the tensors among arguments that belong to examples, and a function that replaces them
    by those of one example, as a batch of one."""
    leaves, spec = pytree.tree_flatten(arguments)
    batched = [
        isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,) and place not in shared
        for place, leaf in enumerate(leaves)
    ]

    def filled(tensors: list[Tensor]) -> Any:
        given = iter(tensors)
        alone = [
            next(given).unsqueeze(0) if is_batched else leaf
            for leaf, is_batched in zip(leaves, batched, strict=True)
        ]
        return pytree.tree_unflatten(alone, spec)

    return [leaf for leaf, own in zip(leaves, batched, strict=True) if own], filled


class DrawsByExample(TorchFunctionMode):
    """Give each example of `torch.func.vmap` its own tensors to draw into.

    zero: a 0 of each example. `torch.empty(...).bernoulli_(p)` would be one tensor for all.
    """

    def __init__(self, zero: Tensor) -> None:
        super().__init__()
        self._zero = zero

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _MAKES and isinstance(found, Tensor) and found.is_floating_point():
            return found + self._zero.to(found)
        return found


class RecurrentByExample(TorchFunctionMode):
    """Run RNN, LSTM and GRU step by step, because `torch.func.vmap` cannot run them as a whole.

    Their cells get a state for each example: they write into it, and a state that a cell creates
    itself is not split into examples.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CELLS and func is getattr(torch, name) and len(args) > 1:
            inputs, state, *rest = args
            own = torch.zeros_like(inputs[..., :1])
            state = state + own if isinstance(state, Tensor) else [each + own for each in state]
            return func(inputs, state, *rest, **(kwargs or {}))
        by_step = _RECURRENT.get(name) if func is getattr(torch, name, None) else None
        if by_step is None or len(args) != 9:  # packed sequences have 8
            return func(*args, **(kwargs or {}))
        return by_step(*args)


def _lstm_by_step(
    inputs: Tensor, states: tuple[Tensor, Tensor], weights: list[Tensor], biases: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run torch's decomposition of an LSTM instead of a fused kernel."""
    hidden, cells = states
    torchs: Any = decompositions
    by_layer = torchs.gather_params(weights, biases, hidden.shape[2] != cells.shape[2])
    found, last = torchs._rnn_helper(
        inputs, list(zip(hidden, cells, strict=True)), by_layer, biases, *rest,
        decompositions.one_layer_lstm,
    )  # fmt: skip
    return found, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])


_CELLS = {"gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"}
_RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm": _lstm_by_step,
    "gru": decompositions.gru_impl,
    "rnn_tanh": decompositions.rnn_tanh_input,
    "rnn_relu": decompositions.rnn_relu_input,
}
_MAKES = {
    torch.empty, torch.zeros, torch.ones, torch.empty_like, torch.zeros_like, torch.ones_like,
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones,
}  # fmt: skip


def call_with_values(
    module: nn.Module,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a module with these values instead of its parameters, shared ones included.

    `torch.func.functional_call` replaces the parameters of a submodule with two names twice and
    does not restore them: here each submodule is named once.

    Args:
        values: by the names of `module.named_parameters()`; other parameters stay.
    """
    chosen = {id(p): values[name] for name, p in module.named_parameters() if name in values}
    named = {
        f"{path}.{local}" if path else local: chosen[id(parameter)]
        for path, each in module.named_modules()
        for local, parameter in each.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in chosen
    }
    with _held_parametrizations(module):
        return torch.func.functional_call(module, named, args, kwargs, tie_weights=False)


def _spectral_norms(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if isinstance(each, _SpectralNorm) and each.training]


@contextmanager
def _held_parametrizations(module: nn.Module) -> Iterator[None]:
    """Keep the power iteration vectors of spectral norms, as in evaluation mode.

    In training mode a pass would change them and so depend on the number of earlier passes.
    """
    held = _spectral_norms(module)
    for each in held:
        each.training = False
    try:
        yield
    finally:
        for each in held:
            each.training = True


@torch.no_grad()
def advance_spectral_norms(model: nn.Module) -> None:
    """Run the power iterations of spectral norms in training mode, once after each step.

    Only parameters are read, which were released.
    """
    if not _spectral_norms(model):
        return
    for module in model.modules():
        if is_parametrized(module):
            for name in cast("nn.ModuleDict", module.parametrizations):
                getattr(module, name)


def float_tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a nested output, in a fixed order."""
    leaves = pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


# --- the rule of a layer ----------------------------------------------------------------------


Rule = Callable[[LayerCall], Iterable[tuple[str, Contribution]]]

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.RNN: recurrent,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
}


# Rules of layers that treat each position separately, whatever the dimensions.
POSITIONWISE: tuple[Rule, ...] = (linear, transposed_linear, layer_norm)


def _known_rules() -> dict[type[nn.Module], Rule]:
    """Return rules by class, with those of `transformers` if it is imported."""
    library = sys.modules.get("transformers.pytorch_utils")
    return _RULES if library is None else {**_RULES, library.Conv1D: transposed_linear}


def find_rule(module: nn.Module) -> Rule | None:
    """Return the rule for this module, or None.

    A subclass that changes `forward` has no rule, nor does a layer whose weights are computed, as
    with `parametrizations.weight_norm`.
    """
    if is_parametrized(module):
        return None
    rules = _known_rules()
    for base in type(module).__mro__:
        if base in rules:
            if type(module).forward is not base.forward or "forward" in vars(module):
                return None
            if base in (nn.RNN, nn.LSTM, nn.GRU) and not replayable(module):
                return None
            return rules[base]
    return None
