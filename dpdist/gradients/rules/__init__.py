"""Per-example gradient rules by layer type: from inputs and output gradients to contributions.

A rule takes a `LayerCall` and yields (local parameter name, Contribution) for the trainable
parameters. `rule_for` finds it; None means the layer is left to `torch.func`
(`dpdist.gradients.rules.fallback`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from dpdist.gradients.forms import Contribution
from dpdist.gradients.rules import convolution, dense, normalisation, recurrent
from dpdist.gradients.rules.call import LayerCall

Rule = Callable[[LayerCall], Iterable[tuple[str, Contribution]]]

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: dense.linear,
    nn.Embedding: dense.embedding,
    nn.Conv1d: convolution.convolution,
    nn.Conv2d: convolution.convolution,
    nn.ConvTranspose2d: convolution.transposed,
    nn.GroupNorm: normalisation.group_norm,
    nn.LayerNorm: normalisation.layer_norm,
    nn.InstanceNorm1d: normalisation.instance_norm,
    nn.InstanceNorm2d: normalisation.instance_norm,
    nn.InstanceNorm3d: normalisation.instance_norm,
    nn.RNN: recurrent.recurrent,
    nn.LSTM: recurrent.recurrent,
    nn.GRU: recurrent.recurrent,
}


def rule_for(module: nn.Module) -> Rule | None:
    """The rule for this module, or None; a subclass that changed `forward` has none."""
    for base in type(module).__mro__:
        if base in _RULES:
            if type(module).forward is not base.forward or "forward" in vars(module):
                return None
            if base in (nn.RNN, nn.LSTM, nn.GRU) and not recurrent.replayable(module):
                return None
            return _RULES[base]
    return None


__all__ = ["LayerCall", "Rule", "rule_for"]
