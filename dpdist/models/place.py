"""Where a model lies: on a CPU, or on a device."""

from __future__ import annotations

import itertools

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """Of its first parameter or buffer; the CPU for a model without any."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device
