"""No gradient's computed norm is below its true one, so that none escapes the clip."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from support.networks import Of, cross_entropy
from torch import Tensor, nn

from dpdist.gradients import per_example
from dpdist.gradients.clipping import FlatClipping, rounding_slack, sum_slack
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.per_example import (
    DenseGradient,
    EmbeddingGradient,
    OuterProductGradient,
    PerExampleGradient,
    add_embedding_rows,
    add_products,
    embedding_squared_norms,
    outer_squared_norms,
    squared_row_norms,
    tied_squared_norms,
)
from dpdist.gradients.sampling import MAX_BLOCK_RECORDS, Blocks

KEY = bytes(range(32))
SLACK = rounding_slack(torch.float32)


def exact_norms(left: Tensor, right: Tensor) -> np.ndarray:
    """Norms of sum_t left[b, t] ⊗ right[b, t], by exact integer arithmetic: every float32 is an
    integer times a power of two."""
    found = []
    for one, other in zip(left.double().numpy(), right.double().numpy(), strict=True):
        rows = [[int(v * 2.0**60) for v in row] for row in one]
        columns = [[int(v * 2.0**60) for v in row] for row in other]
        grams = [
            [[sum(a * b for a, b in zip(s, t, strict=True)) for t in factor] for s in factor]
            for factor in (rows, columns)
        ]
        pairs = [(s, t) for s in range(len(rows)) for t in range(len(rows))]
        square = sum(grams[0][s][t] * grams[1][s][t] for s, t in pairs)
        found.append(math.sqrt(square / 2**240))
    return np.array(found)


def cancelling(
    width: int, other: int, positions: int, gap: float, seed: int
) -> OuterProductGradient:
    """Records whose positions nearly cancel: constant left rows with a sum of nearly zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(4, 1, 1, generator=generator) * 10 + 0.1
    signs = torch.where(torch.arange(positions) % 2 == 0, 1.0, -(1.0 + gap))
    left = (scale * signs[None, :, None]).expand(4, positions, width).contiguous()
    right = torch.rand(4, 1, other, generator=generator).expand(4, positions, other).contiguous()
    return OuterProductGradient(left, right)


@pytest.mark.parametrize("gap", [1e-3, 1e-6])
@pytest.mark.parametrize(("width", "other", "positions"), [(8, 1024, 2), (4096, 4, 4), (64, 64, 8)])
def test_positions_that_cancel_do_not_escape(width, other, positions, gap):
    """In float32 the true norm was up to 6.1 times the computed one, the more the wider."""
    piece = cancelling(width, other, positions, gap, seed=width + positions)
    computed = outer_squared_norms(piece).sqrt().numpy()
    true = exact_norms(piece.left, piece.right)
    assert (true <= computed * (1 + SLACK)).all()
    # Nor is a norm raised by more than the floor under cancellation asks for.
    magnitude = (piece.left.double().norm(dim=2) * piece.right.double().norm(dim=2)).sum(1).numpy()
    floor = math.sqrt(positions**2 * 2.0**-42 + (width + other + positions**2 + 8) * 2.0**-52)
    assert (computed <= true * (1 + SLACK) + floor * magnitude).all()


@pytest.mark.parametrize(("width", "gap"), [(64, 1e-5), (16_384, 1e-3)])
def test_looked_up_rows_that_cancel_do_not_escape(width, gap):
    generator = torch.Generator().manual_seed(width)
    scale = torch.rand(6, 1, 1, generator=generator) * 10
    values = (scale * torch.tensor([1.0, -(1 + gap), 0.0])[None, :, None]).repeat(1, 1, width)
    ids = torch.tensor([[3, 3, -1]]).repeat(6, 1)
    computed = embedding_squared_norms(EmbeddingGradient(ids, values, 5)).sqrt()
    true = values.double().sum(1).norm(dim=1)
    assert (true <= computed * (1 + SLACK)).all()


def test_the_bound_on_rounding_grows_with_the_widths():
    """Positions that cancel exactly: the floor alone is left, at least what is proved."""
    width, other = 2**20, 3
    left = torch.ones(1, 2, width)
    left[:, 1] = -1
    computed = float(outer_squared_norms(OuterProductGradient(left, torch.ones(1, 2, other))))
    assert computed >= (width + other + 2**2 + 1) * 2.0**-52 * (4 * width * other)


def read_out(width: int, scale: float, gap: float) -> nn.Module:
    """A Linear layer on two positions, read out by +a and -a (1 + gap)."""

    def run(model: nn.Module, inputs: Tensor) -> Tensor:
        hidden = model.linear(inputs).sum(2)
        logit = scale * (hidden[:, 0] - (1 + gap) * hidden[:, 1])
        return torch.stack([logit, -logit], dim=1)

    linear = nn.Linear(4, width, bias=False)
    nn.init.zeros_(linear.weight)
    return Of(run, linear=linear)


def test_one_record_moves_the_engines_sum_by_at_most_the_clip_norm():
    """An ordinary model and loss: the sum moved by 3.00 C."""
    norms = []
    for scale, gap in product((30.0, 71.3, 110.0, 170.0), (1e-3, 3e-4)):
        engine = GradientEngine(
            read_out(4096, scale, gap), cross_entropy, clipping=FlatClipping(1.0),
            blocks=Blocks(1, 1), micro_batch=1,
        )  # fmt: skip
        found = engine.clipped_sum(
            torch.full((1, 2, 4), 0.37), torch.tensor([1]), draw_key=KEY,
            record_ids=torch.tensor([0]),
        )  # fmt: skip
        norms.append(float(found.flat.norm()))
    assert 0.5 < max(norms) <= 1.0


# ---- long gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 129, 3 * 2048 * 2048])
def test_norms_of_equal_entries_do_not_shrink_with_length(size, dtype):
    """Equal entries round one way: float32 lanes lost 0.7 % of the norm at 12.6 million."""
    for value in (0.1, 1 / 3, 0.7, 1 + 2.0**-12):
        values = torch.full((1, size), value, dtype=dtype)
        true = math.sqrt(size) * float(values[0, 0])
        computed = float(squared_row_norms(values).sqrt())
        assert true * (1 - 1e-13) <= computed * (1 + rounding_slack(dtype))
        assert computed <= true * (1 + rounding_slack(dtype))


@pytest.mark.parametrize("vmap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_do_not_escape(dtype, vmap):
    """Isolated, a half model's gradients were multiplied in half: 1.00025 C."""
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3)).to(dtype)
        engine = GradientEngine(
            model, lambda out, target: (out.float() * 50).logsumexp(1),
            clipping=FlatClipping(1.0), vmap=vmap,
        )  # fmt: skip
        found = engine.clipped_sum(torch.randn(1, 300, dtype=dtype), torch.zeros(1))
        assert 0.99 < float(found.flat.norm()) <= 1.0


# ---- what rounding adds to sums


def test_a_pass_adds_the_same_whatever_was_summed_before():
    """Positions cancel from 2^20 times the sum to itself: a product that began with the sum so far
    would round its terms by it."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(8, 1, 300, generator=generator).repeat(1, 2, 1)
    left = torch.randn(8, 1, 40, generator=generator).repeat(1, 2, 1) * 2.0**20
    left[:, 1] *= -(1 - 2.0**-20)
    piece = OuterProductGradient(left, right)
    factors = torch.rand(8, generator=generator, dtype=torch.float64)
    zero, base = (torch.zeros(40 * 300, dtype=torch.float64) for _ in range(2))
    base += 1 / 3
    add_products(piece, factors, zero)
    before = base.clone()
    add_products(piece, factors, base)
    assert torch.equal(base, before + zero)
    rows = EmbeddingGradient(torch.randint(0, 3, (8, 2), generator=generator), left, 3)
    sums, others = (torch.zeros(3, 40, dtype=torch.float64) for _ in range(2))
    others += 1 / 3
    add_embedding_rows(rows, factors, sums)
    before = others.clone()
    add_embedding_rows(rows, factors, others)
    assert torch.equal(others, before + sums)


def test_the_floor_under_cancellation_bounds_what_a_record_multiplies_by():
    """`sum_slack` rests on it: f_b sum_t |l_t| |r_t| <= 2^21 / T C, whatever the positions do."""
    for positions in (2, 16, 100):
        left = torch.full((1, positions, 3), 2.0**40)
        left[:, 1::2] *= -1  # the sum over positions is exactly zero
        piece = OuterProductGradient(left, torch.ones(1, positions, 5))
        clip = FlatClipping(1.0).factors(outer_squared_norms(piece)[None], 0.0)
        magnitude = positions * math.sqrt(15) * 2.0**40
        assert float(clip) * magnitude <= 2.0**21 / positions
    both = 2 * (MAX_BLOCK_RECORDS + 1) * (MAX_BLOCK_RECORDS + 3) * 2.0**-32
    assert 2 * 34 * 2.0**-24 * 256 + both <= sum_slack(torch.float32)


# ---- the forms meet


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_cross_terms_between_forms_are_in_the_norm(order):
    """A dense piece and outer pieces of one parameter, too large to be made dense: the norm is of
    their sum."""
    generator = torch.Generator().manual_seed(2)
    left, right = torch.randn(2, 3, 600, generator=generator), torch.randn(2, 3, 500)
    first = OuterProductGradient(left, right)
    dense = DenseGradient(-(left.transpose(1, 2) @ right) * 0.999)
    second = OuterProductGradient(
        torch.randn(2, 1, 600, generator=generator) * 0.01, torch.randn(2, 1, 500)
    )
    gradient = PerExampleGradient(torch.Size((600, 500)))
    pieces = [first, dense, second]
    for place in order:
        gradient.add(pieces[place])
    found = gradient.squared_norms().sqrt()
    true = sum(
        p.to_dense().double() if isinstance(p, OuterProductGradient) else p.values.double()
        for p in pieces
    )
    assert torch.allclose(found, true.flatten(1).norm(dim=1), rtol=1e-4)


def tied(tokens: int = 11, width: int = 4) -> nn.Module:
    """A table of tokens that is also the output layer, as GPT-2 has it."""
    model = Of(
        lambda m, x: m.head(torch.tanh(m.inner(m.words(x)))).mean(1),
        words=nn.Embedding(tokens, width), inner=nn.Linear(width, width),
        head=nn.Linear(width, tokens, bias=False),
    )  # fmt: skip
    model.head.weight = model.words.weight
    return model


@pytest.mark.parametrize("wide", [64, 32 << 20])  # bytes that are widened at once
def test_a_table_that_is_also_the_output_layer_has_its_cross_terms_in_the_norm(wide, monkeypatch):
    """Added before the norm is taken, without per-example gradients of the table's size."""
    monkeypatch.setattr(per_example, "_LARGE", 0)  # of numbers, beyond which forms are kept
    monkeypatch.setattr(per_example, "_WIDE_BYTES", wide)
    monkeypatch.setattr(per_example, "_TRAFFIC_COST", 1e9)  # Gram matrices, however small
    monkeypatch.setattr(EmbeddingGradient, "to_dense", None)
    monkeypatch.setattr(OuterProductGradient, "to_dense", None)
    torch.manual_seed(0)
    model = tied().double()
    tokens, targets = torch.randint(0, 11, (6, 5)), torch.arange(6)
    trained = list(model.parameters())
    each = []
    for row, target in zip(tokens, targets, strict=True):
        found = torch.autograd.grad(cross_entropy(model(row[None]), target[None])[0], trained)
        each.append(torch.cat([part.flatten() for part in found]))
    norms = torch.stack([one.norm() for one in each])
    clip = float(norms.median())
    expected = sum(one * min(1.0, clip / float(one.norm())) for one in each)
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(clip), micro_batch=4)
    assert [p.shape for p in engine.parameters] == [p.shape for p in trained]
    found = engine.clipped_sum(tokens, targets).flat
    assert float((found - expected).norm()) <= 1e-9 * clip


def test_a_tied_norm_is_never_below_the_true_one():
    """Rows that the output layer's gradient nearly takes back: their sum is far below either."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.tensor([[2, 5, -1, 2]])
    values = torch.rand(1, 4, 3, generator=generator)
    left = torch.zeros(1, 3, 9)
    left[0, 0, 2], left[0, 1, 5], left[0, 2, 2] = -1.0, -1.0, -1.0
    left[0, :, 0] = 0.25  # where padding would be looked up
    for gap in (0.0, 2.0**-12):
        right = values[:, [0, 1, 3]] * (1 + gap)
        outer, rows = OuterProductGradient(left, right), EmbeddingGradient(ids, values, 9)
        exact = OuterProductGradient(left.double(), right.double()).to_dense()
        exact += EmbeddingGradient(ids, values.double(), 9).to_dense()
        found = tied_squared_norms(outer, rows)
        assert bool((found >= exact.square().sum((1, 2)) * (1 - 2.0**-50)).all())
        largest = left.norm(dim=2).mul(right.norm(dim=2)).sum() + values.norm(dim=2).sum()
        assert float(found) <= float(exact.square().sum()) + 1e-9 * float(largest) ** 2


@pytest.mark.parametrize("positions", [3, 5, 7])
@pytest.mark.parametrize("widths", [(96, 1001), (65, 256)])
def test_every_row_rounds_the_norm_of_cancelling_positions_alike(positions, widths):
    """Where positions cancel, the last bits of Gram matrices move a clip factor by up to 1e-5, and
    one record more moves all behind it by a row: 1,000 of them moved a sum by 1.012 C."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        right = torch.rand(1, 1, widths[0], generator=generator).expand(1, positions, -1) + 1
        left = torch.randn(1, positions, widths[1], generator=generator)
        left[:, -1] = -left[:, :-1].sum(1)
        pass_ = OuterProductGradient(left.repeat(6, 1, 1), right.repeat(6, 1, 1))
        norms = outer_squared_norms(pass_)
        assert (norms == norms[0]).all()
