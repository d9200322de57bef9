"""RNN, LSTM and GRU: every gate is a Linear layer repeated over time.

The fused layer hides its gates, so the rule replays it step by step from the captured input and
asks autograd for the gradients of the gates' pre-activations only. They are the back-signals of two
Linear layers (input-to-hidden, hidden-to-hidden) with one position per time step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dpdist.gradients.forms import Contribution, Dense, Outer
from dpdist.gradients.rules.call import LayerCall

_Gates = list[tuple[Tensor, Tensor]]  # per time step: pre-activations from the input, from h


def replayable(module: nn.Module) -> bool:
    """False for what the replay does not cover: projections, and dropout between layers."""
    assert isinstance(module, nn.RNNBase)
    return module.proj_size == 0 and (module.dropout == 0 or module.num_layers == 1)


def recurrent(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """Any number of layers, one or two directions, batch first or second."""
    module = call.module
    assert isinstance(module, nn.RNNBase)
    inputs = call.input if module.batch_first else call.input.transpose(0, 1)
    state = call.inputs[1] if len(call.inputs) > 1 else call.kwargs.get("hx")
    suffixes = [
        f"_l{layer}{'_reverse' if direction else ''}"
        for layer in range(module.num_layers)
        for direction in range(1 + module.bidirectional)
    ]
    with torch.enable_grad():
        outputs, gates, pairs = _replay(module, call.parameters, inputs, state, suffixes)
    wanted = [tensor for steps in gates for pair in steps for tensor in pair]
    grads = iter(torch.autograd.grad(outputs, wanted, call.backsignals, allow_unused=True))
    for suffix, steps, (inputs_seen, hidden_seen) in zip(suffixes, gates, pairs, strict=True):
        signals = [
            [_or_zero(next(grads), tensor) for tensor in (from_input, from_hidden)]
            for from_input, from_hidden in steps
        ]
        sides = (("ih", inputs_seen, 0), ("hh", hidden_seen, 1))
        for name, seen, side in sides:
            signal = torch.stack([pair[side] for pair in signals], dim=1)
            if f"weight_{name}{suffix}" in call.trainable:
                yield f"weight_{name}{suffix}", Outer(signal, torch.stack(seen, dim=1))
            if f"bias_{name}{suffix}" in call.trainable:
                yield f"bias_{name}{suffix}", Dense(signal.sum(1))


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _replay(
    module: nn.RNNBase,
    parameters: dict[str, Tensor],
    inputs: Tensor,
    state: Tensor | tuple[Tensor, Tensor] | None,
    suffixes: list[str],
) -> tuple[list[Tensor], list[_Gates], list[tuple[list[Tensor], list[Tensor]]]]:
    """Outputs as the module gives them (output, h_n[, c_n]), gates, and what the gates saw."""
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
    result = torch.stack(below, dim=1 if module.batch_first else 0)
    if not module.batch_first:
        result = torch.stack(below, dim=0)
    finals = [torch.stack(last_hidden)] + ([torch.stack(last_cell)] if is_lstm else [])
    return [result, *finals], gates, pairs


def _gates(
    parameters: dict[str, Tensor], suffix: str, inputs: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    pair = []
    for name, seen in (("ih", inputs), ("hh", hidden)):
        bias = parameters.get(f"bias_{name}{suffix}")
        value = torch.nn.functional.linear(seen, parameters[f"weight_{name}{suffix}"], bias)
        pair.append(value if value.requires_grad else value.requires_grad_())
    return pair[0], pair[1]


def _cell(
    module: nn.RNNBase, pair: tuple[Tensor, Tensor], hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of torch.nn's documented equations from the two pre-activations."""
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
