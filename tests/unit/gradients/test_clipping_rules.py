"""Every layer rule against one-example-at-a-time autograd, float64, over random shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.hypothesis_settings import hypothesis_settings
from support.language_models import one_at_a_time as definition
from support.networks import Of, mixing_refused
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dpdist.core.errors import UserError
from dpdist.gradients import layer_rules
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy

EXAMPLES = hypothesis_settings(20)
RTOL = 1e-6


def weighted_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that reaches every output entry with a different weight."""
    flat = outputs.flatten(1)
    weights = torch.linspace(0.3, 1.7, flat.shape[1], dtype=flat.dtype)
    return ((flat - targets[:, None].to(flat.dtype)) * weights).square().sum(1)


def one_at_a_time(
    model: nn.Module, inputs: Tensor, targets: Tensor, clip_norm: float
) -> tuple[Tensor, float]:
    """The definition: autograd on each example alone, clipped, added; and the mean norm."""
    each = [
        definition(
            model, lambda _, i=i: weighted_square(model(inputs[i : i + 1]), targets[i : i + 1]),
            1, clip_norm,
        )
        for i in range(len(inputs))
    ]  # fmt: skip
    return torch.stack(each).sum(0), float(torch.stack(each).norm(dim=1).mean())


def check(model: nn.Module, inputs: Tensor, fallback: list[str] | None = None) -> None:
    """Clipped and unclipped sums, in several micro-batches, equal the definition."""
    model = model.double()
    if inputs.is_floating_point():
        inputs = inputs.double()
    targets = torch.arange(len(inputs)) % 3
    typical = max(one_at_a_time(model, inputs, targets, 1e12)[1], 1e-3)
    for clip_norm, micro_batch in ((1e12, None), (typical, 2), (typical / 50, len(inputs))):
        engine = GradientEngine(
            model, weighted_square, clipping=FlatClipping(clip_norm), micro_batch=micro_batch
        )
        result = engine.clipped_sum(inputs, targets)
        assert engine.fallback_layers == (fallback or [])
        assert (result.examples, result.nonfinite) == (len(inputs), 0)
        expected, scale = one_at_a_time(model, inputs, targets, clip_norm)
        torch.testing.assert_close(result.flat, expected, rtol=RTOL, atol=RTOL * scale)


@EXAMPLES
@given(
    st.integers(2, 5), st.lists(st.integers(1, 4), max_size=2), st.integers(1, 6),
    st.integers(1, 6), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_linear(batch, leading, width_in, width_out, bias, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(width_in, width_out, bias=bias), nn.Tanh(), nn.Linear(width_out, 3)
    )
    check(model, torch.randn(batch, *leading, width_in))


@EXAMPLES
@given(
    dims=st.sampled_from([1, 2]),
    batch=st.integers(2, 4), groups=st.integers(1, 3), per_in=st.integers(1, 2),
    per_out=st.integers(1, 2), size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_convolution(
    dims, batch, groups, per_in, per_out, size, kernel, stride, dilation, padding, mode, bias, seed
):
    torch.manual_seed(seed)
    layer, sizes = (nn.Conv1d, nn.Conv2d)[dims - 1], (kernel, stride, padding, dilation)
    conv = layer(
        groups * per_in, groups * per_out, *(each[:dims] for each in sizes), groups, bias, mode
    )
    head = layer(groups * per_out, 2, 1)
    inputs = torch.randn(batch, groups * per_in, *size[:dims])
    check(nn.Sequential(conv, nn.Tanh(), head), inputs)


@EXAMPLES
@given(
    batch=st.integers(2, 4), groups=st.integers(1, 3), per_in=st.integers(1, 2),
    per_out=st.integers(1, 2), size=st.tuples(st.integers(3, 6), st.integers(3, 6)),
    kernel=st.tuples(st.integers(3, 4), st.integers(3, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    extra=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    bias=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_conv_transpose2d(
    batch, groups, per_in, per_out, size, kernel, stride, dilation, padding, extra, bias, seed
):
    torch.manual_seed(seed)
    pairs = zip(extra, stride, dilation, strict=True)  # must stay below one of them
    extra = tuple(min(e, max(s, d) - 1) for e, s, d in pairs)
    conv = nn.ConvTranspose2d(
        groups * per_in, groups * per_out, kernel, stride, padding, extra, groups, bias, dilation
    )
    head = nn.Conv2d(groups * per_out, 2, 1)
    check(nn.Sequential(conv, nn.Tanh(), head), torch.randn(batch, groups * per_in, *size))


@EXAMPLES
@given(
    st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.integers(2, 4),
    st.sampled_from(["group", "layer", "instance"]), st.integers(0, 10**6),
)  # fmt: skip
def test_normalization(batch, groups, per_group, size, kind, seed):
    torch.manual_seed(seed)
    channels = groups * per_group
    norm = {
        "group": nn.GroupNorm(groups, channels, eps=0.1),
        "layer": nn.LayerNorm([size, size], eps=0.1),
        "instance": nn.InstanceNorm2d(channels, eps=0.1, affine=True),
    }[kind]
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    model = nn.Sequential(nn.Conv2d(1, channels, 1), norm, nn.Tanh())
    check(model, torch.randn(batch, 1, size, size))


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_norm_of_many_examples_is_made_in_pieces(at_once, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4, eps=0.1), nn.Tanh())
    nn.init.normal_(model[1].weight)
    monkeypatch.setattr(layer_rules, "_PIECE_BYTES", at_once * 4 * 3 * 3 * 8)
    check(model, torch.randn(7, 1, 3, 3))


@EXAMPLES
@given(
    st.integers(2, 4), st.integers(1, 8), st.integers(1, 5), st.booleans(), st.integers(0, 10**6)
)
def test_embedding_with_repeated_tokens(batch, length, width, padded, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(5, width, padding_idx=0 if padded else None), nn.Tanh())
    tokens = torch.randint(0, 5, (batch, length))
    tokens[:, 0] = 1  # every example has a token that is trained
    check(model, tokens)


@pytest.mark.parametrize("padding", [3, -2])
def test_the_padding_s_row_is_the_one_that_the_layer_names(padding):
    torch.manual_seed(0)
    table = nn.Embedding(6, 4, padding_idx=padding)
    nn.init.normal_(table.weight)
    ids = torch.tensor([[0, 3, 4, 0], [1, 4, 4, 3], [5, 2, 0, 3], [4, 4, 4, 4]])
    check(nn.Sequential(table, nn.Flatten(), nn.Linear(16, 3)), ids)


class _Recurrent(nn.Module):
    """Uses the sequence and the final states, so that every output carries a gradient."""

    def __init__(self, kind: type[nn.RNNBase], width: int, **options: Any) -> None:
        super().__init__()
        self.cell = kind(width, 3, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.cell.batch_first:
            inputs = inputs.transpose(0, 1)
        sequence, state = self.cell(inputs)
        if not self.cell.batch_first:
            sequence = sequence.transpose(0, 1)
        finals = torch.cat(state, dim=0) if isinstance(state, tuple) else state
        return torch.cat([sequence.flatten(1), finals.transpose(0, 1).flatten(1)], dim=1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@hypothesis_settings(3, max_examples=3)
@given(
    batch=st.integers(2, 3), length=st.integers(1, 5), width=st.integers(1, 4),
    layers=st.integers(1, 2), bias=st.booleans(), batch_first=st.booleans(),
    bidirectional=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_recurrent(kind, batch, length, width, layers, bias, batch_first, bidirectional, seed):
    torch.manual_seed(seed)
    model = _Recurrent(
        kind, width, num_layers=layers, bias=bias, batch_first=batch_first,
        bidirectional=bidirectional,
    )  # fmt: skip
    check(model, torch.randn(batch, length, width))


def tied() -> nn.Module:
    """An embedding that is also the output layer, and a layer that is called twice."""

    def run(model: nn.Module, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(model.inner(model.embed(tokens)))
        return model.head(torch.tanh(model.inner(hidden)))

    model = Of(run, embed=nn.Embedding(6, 4), inner=nn.Linear(4, 4), head=nn.Linear(4, 6, False))
    model.head.weight = model.embed.weight
    return model


def at_two_sizes(model: nn.Module, images: Tensor) -> Tensor:
    """Call one layer on a large and on a small image: their norms may have different forms."""
    small = model.conv(images[:, :, :3, :3])
    return torch.cat([model.conv(images).flatten(1), small.flatten(1)], dim=1)


def test_shared_parameters_have_their_cross_terms():
    torch.manual_seed(0)
    check(tied(), torch.randint(0, 6, (4, 5)))
    check(Of(at_two_sizes, conv=nn.Conv2d(1, 8, 3)), torch.randn(3, 1, 9, 9))
    table = Of(lambda m, x: torch.tanh(m.words(x) * m.words(x.flip(1))), words=nn.Embedding(6, 4))
    check(table, torch.randint(0, 6, (4, 5)))
    layers = nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(2, 2, 3)
    layers[2].weight = layers[0].weight  # which the two keep in different orders
    check(nn.Sequential(*layers), torch.randn(3, 2, 5, 5))


class _Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, 2 * self.weight, self.bias)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_run_isolated(kind):
    torch.manual_seed(0)
    model = Of(lambda m, x: m.layer(x)[0], layer=kind(4, 3, 2, batch_first=True)).double()
    inputs, targets = torch.randn(4, 5, 4).double(), torch.arange(4) % 3
    alone = GradientEngine(model, weighted_square, clipping=FlatClipping(0.3), vmap=True)
    expected, scale = one_at_a_time(model, inputs, targets, 0.3)
    found = alone.clipped_sum(inputs, targets).flat
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=RTOL * scale)


def test_other_layers_fall_back_to_torch_func_and_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(_Doubled(4, 3), nn.PReLU())
    check(model, torch.randn(5, 2, 4), fallback=["0", "1"])
    model = nn.Sequential(nn.ConvTranspose1d(2, 3, 3), nn.Conv1d(3, 1, 2))
    check(model, torch.randn(3, 2, 4), fallback=["0"])


def by_cell(model: nn.Module, inputs: Tensor) -> Tensor:
    """An LSTMCell returns two outputs and computes the first from the second."""
    state = (inputs.new_zeros(len(inputs), 5),) * 2
    for step in inputs.unbind(1):
        state = model.cell(step, state)
    return model.head(state[0])


def test_outputs_of_which_one_is_made_of_the_other_are_counted_once():
    torch.manual_seed(0)
    model = Of(by_cell, cell=nn.LSTMCell(4, 5), head=nn.Linear(5, 3))
    check(model, torch.randn(5, 4, 4), fallback=["cell"])


def test_layers_whose_weights_are_made_of_others_fall_back_with_them():
    torch.manual_seed(0)
    normed = weight_norm(nn.Linear(4, 6, bias=False))
    check(nn.Sequential(normed, nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4), fallback=["0"])


def test_batch_norm_trains_while_it_stays_in_evaluation_mode():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(8, 3, 4, 4) + 1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), norm.eval(), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    )
    check(model, torch.randn(5, 2, 4, 4), fallback=["1"])
    engines = [
        GradientEngine(model, weighted_square, clipping=FlatClipping(0.3), vmap=vmap)
        for vmap in (False, True)
    ]
    norm.train()
    for engine in engines:
        with pytest.raises(UserError, match=r"layer 1 "):
            engine.clipped_sum(torch.randn(5, 2, 4, 4).double(), torch.arange(5) % 3)


def test_attention_falls_back_with_its_submodules():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    check(layer, torch.randn(3, 3, 4), fallback=["self_attn"])


class _SharedPositions(nn.Module):
    """Words and learned positions, which are looked up once for a batch."""

    def __init__(self, rows: str) -> None:
        super().__init__()
        self.rows, self.words, self.head = rows, nn.Embedding(9, 4), nn.Linear(4, 3)
        self.positions = nn.Embedding(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        if self.rows == "one":
            places = places[None]
        learned = self.positions(places)
        if self.rows == "added":
            learned = learned.unsqueeze(0)
        elif self.rows == "pooled":
            learned = learned.mean(0)
        return self.head(torch.tanh(self.words(tokens) + learned))


@pytest.mark.parametrize("rows", ["one", "none"])
def test_positions_that_a_batch_shares_are_looked_up_for_each_example(rows):
    torch.manual_seed(0)
    check(_SharedPositions(rows), torch.randint(0, 9, (5, 6)))
    check(_SharedPositions(rows), torch.randint(0, 9, (6, 6)))  # as many rows as positions


@pytest.mark.parametrize("rows", [3, 5])
def test_positions_are_told_apart_for_records_of_every_length(rows):
    """The second batch has other lengths than the checked one: as many positions as records were
    taken for these, and one record moved a sum by 2.2 C."""
    torch.manual_seed(0)
    model, targets = _SharedPositions("none").double(), torch.arange(rows) % 3
    engine = GradientEngine(model, weighted_square, clipping=FlatClipping(0.3))
    for length in (6, 3, 2, 6):
        tokens = torch.randint(0, 9, (rows, length))
        found = engine.clipped_sum(tokens, targets).flat
        expected, scale = one_at_a_time(model, tokens, targets, 0.3)
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=RTOL * scale)


def test_positions_as_long_as_a_value_says_are_not_taken_for_records():
    """A model trims its tokens to the longest record: of as many positions as records, each was
    taken for one, and one record moved a sum by 2 C. No invented example is shorter."""

    class Trimmed(_SharedPositions):
        vocabulary = 9

        def forward(self, tokens: Tensor) -> Tensor:
            longest = int((tokens < 9).sum(1).max())
            return super().forward(tokens[:, :longest]).mean(1)

    model, targets = Trimmed("none"), torch.arange(4) % 3
    engine = GradientEngine(model, weighted_square, clipping=FlatClipping(0.3))
    tokens = torch.randint(0, 9, (4, 6))
    assert engine.clipped_sum(tokens, targets).flat.any()
    tokens[:, 4:] = 9
    with pytest.raises(UserError):
        engine.clipped_sum(tokens, targets)


@pytest.mark.parametrize("rows", ["added", "pooled"])
def test_positions_that_cannot_be_copied_are_taken_one_by_one(rows):
    """Their gradient is that of the whole batch, so the module around them runs for each record."""
    torch.manual_seed(0)
    model, tokens = _SharedPositions(rows).double(), torch.randint(0, 9, (5, 6))
    targets, clip = torch.arange(5) % 3, FlatClipping(0.3)
    with pytest.warns(UserWarning):
        own = GradientEngine(model, weighted_square, clipping=clip).clipped_sum(tokens, targets)
    alone = GradientEngine(model, weighted_square, clipping=clip, vmap=True)
    expected, scale = one_at_a_time(model, tokens, targets, 0.3)
    for found in (alone.clipped_sum(tokens, targets), own):
        torch.testing.assert_close(found.flat, expected, rtol=RTOL, atol=RTOL * scale)


def flat(by_example: bool) -> nn.Module:
    """Positions lie beside the examples, as OPT has them: example by example, or not."""

    def run(model: nn.Module, tokens: Tensor) -> Tensor:
        words = model.words(tokens) if by_example else model.words(tokens).transpose(0, 1)
        inner = torch.tanh(model.inner(model.norm(words.reshape(-1, 4)))).view_as(words)
        return model.head(inner if by_example else inner.transpose(0, 1))

    parts = {"norm": nn.LayerNorm(4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    return Of(run, words=nn.Embedding(9, 4), **parts)


def test_positions_beside_the_examples_are_told_apart_or_refused():
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (5, 6))
    check(flat(by_example=True), tokens)
    model = flat(by_example=False).double()
    engine = GradientEngine(model, weighted_square, clipping=FlatClipping(0.3))
    with mixing_refused():
        engine.clipped_sum(tokens, torch.arange(5) % 3)


def test_what_gives_no_parameter_a_gradient_is_refused():
    """It would get noise and learn nothing (LoRA that was switched off)."""

    base = nn.Linear(4, 3).requires_grad_(False)
    off = Of(lambda m, x: m.base(x) + 0.0 * m.adapter(x), base=base, adapter=nn.Linear(4, 3))
    engine = GradientEngine(off, cross_entropy, clipping=FlatClipping(1.0))
    with pytest.raises(UserError, match=r"^model:"):
        engine.clipped_sum(torch.randn(5, 4), torch.arange(5) % 3)


@pytest.mark.parametrize(
    ("key", "value"), [("output_router_logits", True), ("expert_capacity", 64)]
)
def test_mixtures_of_experts_that_couple_records_are_refused(key, value):
    model = nn.Linear(4, 3)
    model.config = SimpleNamespace(**{key: value})
    with pytest.raises(UserError, match=key):
        GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
    setattr(model.config, key, None)
    GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))


@pytest.mark.parametrize("keep", [("0.weight",), ("0.bias", "2.bias")])
def test_frozen_and_bias_only(keep):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in keep)
    check(model, torch.randn(4, 2, 5, 5))


def test_in_place_operations_after_a_layer():
    def in_place(model: nn.Module, inputs: Tensor) -> Tensor:
        hidden = F.relu_(model.first(inputs))
        out = model.second(hidden)
        out += hidden
        return out

    torch.manual_seed(0)
    check(Of(in_place, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), torch.randn(5, 3, 4))


@pytest.mark.parametrize("length", [2, 4, 5])
def test_a_tensor_as_long_as_the_pass_is_not_cut_into_examples(length):
    """A mask; every pass has another number of rows."""
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)

    def causal(model: nn.Module, x: Tensor) -> Tensor:
        return model.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    torch.manual_seed(0)
    model = Of(causal, attention=nn.MultiheadAttention(4, 2, batch_first=True))
    check(model, torch.randn(5, length, 4), fallback=["attention"])


def test_complex_parameters_are_refused():
    """Their imaginary parts would be dropped from the sum."""
    model = nn.Linear(4, 3, dtype=torch.complex64)
    with pytest.raises(UserError, match="weight"):
        GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))


def test_one_layer_in_float64_does_not_lift_the_others_slack():
    """The first parameter alone used to decide it: a record reached 1.00000017 C."""

    def mixed(model: nn.Module, inputs: Tensor) -> Tensor:
        return model.layer(inputs) + 1e-9 * model.wide(inputs[:, :1].double()).float()

    wide = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model = Of(mixed, wide=wide, layer=nn.Linear(1280, 1, bias=False))
    engine = GradientEngine(
        model, lambda outputs, targets: 1e3 * outputs.squeeze(1), clipping=FlatClipping(1.0)
    )
    values = torch.rand(60, generator=torch.Generator().manual_seed(0)) + 1
    largest = max(
        float(engine.clipped_sum(value.expand(1, 1280), torch.zeros(1)).flat.norm())
        for value in values
    )
    assert 0.99 < largest <= 1
