"""What the last linear layer reads."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from dpdist.models.features import PenultimateFeatures


def test_a_reader_is_gone_with_its_last_reference():
    """Models that vote are trained one after the other: none waits for the collector."""
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        read = PenultimateFeatures(model, torch.zeros(2, 3))
        assert torch.equal(read(torch.ones(2, 3)), model[:2](torch.ones(2, 3)))
        there = weakref.ref(read)
        del read
        assert there() is None
    finally:
        gc.enable()
