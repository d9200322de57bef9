"""How sums are rounded."""

from __future__ import annotations

import pytest
import torch
from support.threads import new_settings_after
from torch import Tensor, nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.objective import objective_of, under_autocast
from dpdist.gradients.per_example import (
    EmbeddingGradient,
    OuterProductGradient,
    PerExampleGradient,
    add_embedding_rows,
    add_products,
)
from dpdist.gradients.sampling import Blocks


class Slope(nn.Module):
    """Whose per-example gradient is its input, kept as it is: no rule makes a product of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1, keepdim=True)


def engine(**setting) -> GradientEngine:
    return GradientEngine(
        Slope(), lambda outputs, _: outputs[:, 0], clipping=FlatClipping(1e4), **setting
    )


@pytest.mark.parametrize(("blocks", "key"), [(None, b""), (Blocks(1, 16), bytes(32))])
def test_large_batches_without_ids_are_not_added_up_in_float32(key, blocks):
    """The sum's rounding comes on top of the sensitivity there, so it must be nothing. The entries
    lose as much as they can whenever they are added to a sum of 16 to 32 of them."""
    rows = 30_000
    inputs = torch.full((rows, 64), 1 + 0.99 * 2.0**-20)
    found = engine(blocks=blocks).clipped_sum(inputs, torch.zeros(rows), draw_key=key).flat
    exact = rows * float(inputs[0, 0])
    assert float((found - exact).abs().max()) <= 1e-6


def largest_change(made: GradientEngine, clip_norm: float, scale: float = 1.0) -> float:
    """The largest change by one record of 100, of equal and of other sizes, in clip norms."""
    generator, ids, found = torch.Generator().manual_seed(0), torch.arange(100), [0.0]
    made.clipping = FlatClipping(clip_norm)
    for _ in range(20):
        inputs = scale * (1 + torch.rand(100, 1, generator=generator)).expand(100, 64)
        inputs = torch.where(torch.rand(100, 1, generator=generator) < 0.5, inputs, 0.02 * inputs)
        sums = [
            made.clipped_sum(
                inputs[some], ids[some] * 0.0, draw_key=bytes(32), record_ids=ids[some]
            )
            for some in (slice(100), slice(1, 100))
        ]
        found.append(float((sums[0].flat - sums[1].flat).norm()) / clip_norm)
    return max(found)


def test_no_record_exceeds_the_clip_under_autocast():
    """Its products are rounded to bfloat16: a record's own gradient was 1.008 C, a sum moved by
    1.09 C."""
    made = engine(blocks=Blocks(1, 200))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert 0.9 < largest_change(made, 1.0) <= 1.0
        alone = engine(micro_batch=8)
        alone.clipping = FlatClipping(1.0)
        for value in torch.linspace(1, 2, 50):
            one = alone.clipped_sum(value.expand(1, 64), torch.zeros(1)).flat
            assert float(one.norm()) <= 1.0


@pytest.mark.slow
def test_no_float32_product_is_made_where_torch_rounds_its_factors(monkeypatch):
    """TF32 on a GPU and bfloat16 on some CPUs, which a script may allow."""
    made = engine(blocks=Blocks(1, 200))
    assert 0.9 < largest_change(made, 1.0) <= 1.0  # looks at the model
    monkeypatch.setattr(torch, "bmm", None)
    with new_settings_after():
        torch.set_float32_matmul_precision("medium")
        assert 0.9 < largest_change(made, 1.0) <= 1.0


@pytest.mark.parametrize("clip_norm", [1e-14, 1e-26])
def test_factors_too_small_for_float32_do_not_exceed_a_tiny_clip(clip_norm):
    """At 1e-26 factors were one of two numbers."""
    made = engine(blocks=Blocks(1, 200))
    assert 0.9 < largest_change(made, clip_norm, scale=5e17) <= 1.0


def test_a_float64_table_used_twice_is_summed_record_by_record():
    """A look-up and an output may cancel in one record; no other record is added in between."""
    rows, width = 600, 512
    gradient = PerExampleGradient(torch.Size((rows, width)), shared=True)
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(2, 2, rows, dtype=torch.float64, generator=generator)
    right = torch.randn(2, 2, width, dtype=torch.float64, generator=generator)
    ids = torch.tensor([[1, 5], [5, 7]])
    outer, looked_up = OuterProductGradient(left, right), EmbeddingGradient(ids, -right, rows)
    gradient.add(outer)
    gradient.add(looked_up)
    gradient.squared_norms()
    factors = torch.tensor([0.3, 0.7], dtype=torch.float64)
    found = torch.zeros(rows, width).double()
    gradient.add_weighted_sum(factors, found, 1)
    wanted = torch.zeros_like(found)
    for place in range(2):
        own, one = torch.zeros_like(found), torch.ones(1, dtype=torch.float64)
        row = slice(place, place + 1)
        add_products(OuterProductGradient(left[row], right[row]), one, own)
        add_embedding_rows(EmbeddingGradient(ids[row], -right[row], rows), one, own)
        wanted += factors[place] * own
    assert torch.equal(found, wanted)


def test_passes_under_autocast_are_those_of_float32_within_bfloat16():
    """Its sum differs by rounding of products only; norms are float32, so the clip holds."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 3),
    )  # fmt: skip
    inputs, targets = torch.rand(24, 3, 9, 9), torch.arange(24) % 3
    loss = objective_of("cross-entropy")
    types: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: types.append(output.dtype))
    for clip_norm in (0.1, 100.0):  # all are clipped, or none
        sums = {}
        for name, objective in (("float32", loss), ("bfloat16", under_autocast(loss))):
            made = GradientEngine(
                model, objective, clipping=FlatClipping(clip_norm), micro_batch=8,
                blocks=Blocks(1, 32),
            )  # fmt: skip
            types.clear()
            sums[name] = made.clipped_sum(
                inputs, targets, draw_key=bytes(32), record_ids=torch.arange(24)
            ).flat
            assert getattr(torch, name) in types and sums[name].dtype == torch.float64
        difference = float((sums["bfloat16"] - sums["float32"]).norm())
        assert 0 < difference <= 0.03 * float(sums["float32"].norm())
