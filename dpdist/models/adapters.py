"""Adapters of `peft`: small trained parts in a frozen base.

Only kinds and options are taken whose records can be told apart and that begin from nothing but
random numbers: others read data or weights that are loaded later, or import what they name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dpdist.base.errors import UserError
from dpdist.base.extras import library

# kind: its class in peft, and the options that may be given.
KINDS: dict[str, tuple[str, frozenset[str]]] = {
    "lora": (
        "LoraConfig",
        frozenset({
            "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "bias",
            "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
        }),
    ),
    "ia3": ("IA3Config", frozenset({"target_modules", "feedforward_modules", "exclude_modules"})),
}  # fmt: skip
_KEY = "model.options.adapter"


def inject(base: nn.Module, adapter: Mapping[str, Any]) -> None:
    """Put adapters into `base`, in place; they are its only trained parameters, in float32.

    adapter: `kind`, lora or ia3, and options of peft's LoraConfig or IA3Config. Raises UserError
    for others.
    """
    kind = adapter.get("kind", "lora")
    if kind not in KINDS:
        raise UserError(f"{_KEY}.kind: must be one of {', '.join(KINDS)}, got {kind!r}")
    name, allowed = KINDS[kind]
    options = {key: value for key, value in adapter.items() if key != "kind"}
    unknown = sorted(options.keys() - allowed)
    if unknown:
        raise UserError(f"{_KEY}.{unknown[0]}: kind {kind} takes {', '.join(sorted(allowed))}")
    with torch.device("cpu"):
        peft = library("peft", "hf", _KEY)
    transposed = any(type(module).__name__ == "Conv1D" for module in base.modules())
    try:
        peft.inject_adapter_in_model(
            getattr(peft, name)(**options, fan_in_fan_out=transposed), base
        )
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{_KEY}: {' '.join(str(error).split())[:300]}") from error
    for parameter in base.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
