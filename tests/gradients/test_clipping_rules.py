"""Every layer rule against one-example-at-a-time autograd, float64, over random shapes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.hypothesis_settings import hypothesis_settings
from support.language_models import one_at_a_time as definition
from support.networks import mixing_refused
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from dpdist.core.errors import UserError
from dpdist.gradients import layer_rules
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.hooks import find_layers, run_pass

EXAMPLES = hypothesis_settings(25)
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
    batch=st.integers(2, 4), groups=st.integers(1, 3), per_in=st.integers(1, 2),
    per_out=st.integers(1, 2), size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_conv2d(
    batch, groups, per_in, per_out, size, kernel, stride, dilation, padding, mode, bias, seed
):
    torch.manual_seed(seed)
    conv = nn.Conv2d(
        groups * per_in, groups * per_out, kernel, stride, padding, dilation, groups, bias, mode
    )
    head = nn.Conv2d(groups * per_out, 2, 1)
    check(nn.Sequential(conv, nn.Tanh(), head), torch.randn(batch, groups * per_in, *size))


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
    batch=st.integers(2, 4), groups=st.integers(1, 2), channels=st.integers(1, 2),
    length=st.integers(6, 10), kernel=st.integers(1, 4), stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.one_of(st.integers(0, 2), st.sampled_from(["same", "valid"])),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_conv1d(batch, groups, channels, length, kernel, stride, dilation, padding, mode, seed):
    torch.manual_seed(seed)
    stride = 1 if padding == "same" else stride
    conv = nn.Conv1d(
        groups * channels, groups * 2, kernel, stride, padding, dilation, groups, True, mode
    )
    model = nn.Sequential(conv, nn.Tanh(), nn.Conv1d(groups * 2, 2, 1))
    check(model, torch.randn(batch, groups * channels, length))


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


@pytest.mark.parametrize("at_once", [1, 3, 7])
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
    check(model, torch.randint(0 if not padded else 1, 5, (batch, length)))
    mixed = torch.randint(0, 5, (batch, length))
    mixed[:, 0] = 1  # every example has a token that is trained
    check(model, mixed)


@pytest.mark.parametrize("padding", [None, 0, 3, -2])
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


@hypothesis_settings(20)
@given(
    st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]), st.integers(2, 3), st.integers(1, 5),
    st.integers(1, 4), st.integers(1, 2), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 10**6),
)  # fmt: skip
def test_recurrent(kind, batch, length, width, layers, bias, batch_first, bidirectional, seed):
    torch.manual_seed(seed)
    model = _Recurrent(
        kind, width, num_layers=layers, bias=bias, batch_first=batch_first,
        bidirectional=bidirectional,
    )  # fmt: skip
    check(model, torch.randn(batch, length, width))


class _Tied(nn.Module):
    """An embedding that is also the output layer, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.embed(tokens)))
        return self.head(torch.tanh(self.inner(hidden)))


class _FlippedKernel(nn.ConvTranspose2d):
    """Its own forward pass, so no rule applies."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.conv_transpose2d(inputs, self.weight.flip(2, 3), self.bias)


class _TiedConvolutions(nn.Module):
    """One weight used by a convolution and, differently, by a layer the rules do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), _FlippedKernel(2, 2, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


class _CalledAtTwoSizes(nn.Module):
    """One convolution on a large and a small image: one call materializes, one may not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        small = self.conv(inputs[:, :, :3, :3])
        return torch.cat([self.conv(inputs).flatten(1), small.flatten(1)], dim=1)


def test_shared_parameters_have_their_cross_terms():
    torch.manual_seed(0)
    check(_Tied(), torch.randint(0, 6, (4, 5)))
    check(_TiedConvolutions(), torch.randn(3, 2, 5, 5), fallback=["second"])
    check(_CalledAtTwoSizes(), torch.randn(3, 1, 9, 9))


class _OwnScale(nn.Module):
    """A layer nobody has a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale.exp()


def test_other_layers_fall_back_to_torch_func_and_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), _OwnScale(), nn.PReLU())
    check(model, torch.randn(5, 2, 4), fallback=["1", "2"])
    model = nn.Sequential(nn.ConvTranspose1d(2, 3, 3), nn.Conv1d(3, 1, 2))
    check(model, torch.randn(3, 2, 4), fallback=["0"])


class _Cell(nn.Module):
    """An LSTMCell returns two outputs and computes the first from the second."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        state = (inputs.new_zeros(len(inputs), 5),) * 2
        for step in inputs.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


def test_outputs_of_which_one_is_made_of_the_other_are_counted_once():
    torch.manual_seed(0)
    check(_Cell(), torch.randn(5, 4, 4), fallback=["cell"])


def test_layers_whose_weights_are_made_of_others_fall_back_with_them():
    torch.manual_seed(0)
    normed = weight_norm(nn.Linear(4, 6, bias=False))
    check(nn.Sequential(normed, nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4), fallback=["0"])
    adapted = nn.Linear(4, 6)
    adapted.weight.requires_grad_(False)
    register_parametrization(adapted, "weight", _LowRank())
    check(nn.Sequential(adapted, nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4), fallback=["0"])


class _LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(6, 1)), nn.Parameter(torch.randn(1, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def test_batch_norm_trains_while_it_stays_in_evaluation_mode():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(8, 3, 4, 4) + 1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), norm.eval(), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    )
    check(model, torch.randn(5, 2, 4, 4), fallback=["1"])
    engine = GradientEngine(model, weighted_square, clipping=FlatClipping(0.3))
    inputs, targets = torch.randn(5, 2, 4, 4).double(), torch.arange(5) % 3
    before = engine.clipped_sum(inputs, targets).flat
    model.train()
    isolated = GradientEngine(model.eval(), weighted_square, clipping=FlatClipping(0.3), vmap=True)
    model.train()
    for each in (engine, engine, isolated):
        with pytest.raises(UserError, match=r"layer 1 "):
            each.clipped_sum(inputs, targets)
    norm.eval()
    assert torch.equal(engine.clipped_sum(inputs, targets).flat, before)


class _ScaledBy(nn.Linear):
    """A layer whose scales lie in a dictionary, which is no layer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.requires_grad_(False)
        self.scales = nn.ParameterDict({"mine": nn.Parameter(torch.rand(4))})

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.scales["mine"]


def test_parameters_in_a_dictionary_are_those_of_its_module():
    check(nn.Sequential(_ScaledBy(), nn.Tanh(), nn.Linear(4, 3)), torch.randn(5, 4), ["0"])


def test_attention_falls_back_with_its_submodules():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    check(layer, torch.randn(3, 3, 4), fallback=["self_attn"])


class _SharedPositions(nn.Module):
    """Words and learned positions; the positions of a batch are looked up once, or for each row."""

    def __init__(self, rows: str) -> None:
        super().__init__()
        self.rows, self.words, self.head = rows, nn.Embedding(9, 4), nn.Linear(4, 3)
        self.positions = nn.Embedding(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        if self.rows == "one":
            places = places[None]
        elif self.rows == "each":
            places = places.expand(len(tokens), -1)
        learned = self.positions(places)
        if self.rows == "added":
            learned = learned.unsqueeze(0)
        elif self.rows == "pooled":
            learned = learned.mean(0)
        return self.head(torch.tanh(self.words(tokens) + learned))


@pytest.mark.parametrize("rows", ["one", "each", "none"])
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
    with pytest.raises(
        UserError, match=r"positions must be given .*\(6,\) in each pass, got \(4,\)"
    ):
        engine.clipped_sum(tokens, targets)


@pytest.mark.parametrize("rows", ["added", "pooled"])
def test_positions_that_cannot_be_copied_are_taken_one_by_one(rows):
    """Their gradient is that of the whole batch, so the module around them runs for each record."""
    torch.manual_seed(0)
    model, tokens = _SharedPositions(rows).double(), torch.randint(0, 9, (5, 6))
    targets, clip = torch.arange(5) % 3, FlatClipping(0.3)
    with pytest.warns(UserWarning, match="positions"):
        own = GradientEngine(model, weighted_square, clipping=clip).clipped_sum(tokens, targets)
    alone = GradientEngine(model, weighted_square, clipping=clip, vmap=True)
    expected, scale = one_at_a_time(model, tokens, targets, 0.3)
    for found in (alone.clipped_sum(tokens, targets), own):
        torch.testing.assert_close(found.flat, expected, rtol=RTOL, atol=RTOL * scale)


class _Flat(nn.Module):
    """Positions lie beside the examples, as OPT has them: example by example, or not."""

    def __init__(self, by_example: bool) -> None:
        super().__init__()
        self.by_example, self.words = by_example, nn.Embedding(9, 4)
        self.norm, self.inner, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        count, length = tokens.shape
        words = self.words(tokens)
        flat = (words if self.by_example else words.transpose(0, 1)).reshape(-1, 4)
        inner = torch.tanh(self.inner(self.norm(flat)))
        if self.by_example:
            return self.head(inner.view(count, length, 4))
        return self.head(inner.view(length, count, 4).transpose(0, 1))


def test_positions_beside_the_examples_are_told_apart_or_refused():
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (5, 6))
    check(_Flat(by_example=True), tokens)
    model = _Flat(by_example=False).double()
    engine = GradientEngine(model, weighted_square, clipping=FlatClipping(0.3))
    with mixing_refused():
        engine.clipped_sum(tokens, torch.arange(5) % 3)


class _Selects(nn.Module):
    """Lets one layer see some of the positions, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        some = tokens < 4
        return self.head(words.index_put((some,), torch.tanh(self.inner(words[some]))))


def test_a_layer_that_sees_some_positions_is_refused():
    """Ten positions selected from two examples are not taken as five positions of each."""
    torch.manual_seed(0)
    model = _Selects().double()
    tokens = torch.tensor([[1, 1, 1, 8, 8, 8], [1, 8, 8, 8, 8, 8]])
    run = partial(run_pass, model, find_layers(model), weighted_square)
    values = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(UserError, match="layer inner"):
        run(tokens, torch.tensor([0, 1]), values, lambda layer, call: None)


def test_what_gives_no_parameter_a_gradient_is_refused():
    """It would get noise and learn nothing (LoRA that was switched off)."""

    class Off(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.scale * self.adapter(x)

    inputs, targets = torch.randn(5, 4), torch.arange(5) % 3
    for scale in (1.0, 0.0):
        engine = GradientEngine(Off(scale), cross_entropy, clipping=FlatClipping(1.0))
        if scale:
            assert engine.clipped_sum(inputs, targets).flat.any()
            continue
        with pytest.raises(UserError, match=r"^model:"):
            engine.clipped_sum(inputs, targets)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("output_router_logits", True, "router's balance loss, which is computed over the batch"),
        ("expert_capacity", 64, r"expert_capacity must be absent or None, got 64: with a capacity"),
    ],
)
def test_mixtures_of_experts_that_couple_records_are_refused(key, value, said):
    model = nn.Linear(4, 3)
    model.config = SimpleNamespace(**{key: value})
    with pytest.raises(UserError, match=said):
        GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
    setattr(model.config, key, None)
    GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))


@pytest.mark.parametrize(
    "keep", [("0.bias",), ("0.weight",), ("2.weight", "2.bias"), ("0.bias", "2.bias")]
)
def test_frozen_and_bias_only(keep):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in keep)
    check(model, torch.randn(4, 2, 5, 5))


def test_in_place_operations_after_a_layer():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = F.relu_(self.first(inputs))
            out = self.second(hidden)
            out += hidden
            return out

    torch.manual_seed(0)
    check(InPlace(), torch.randn(5, 4))
    check(InPlace(), torch.randn(5, 3, 4))


def test_subclass_with_its_own_forward_is_not_mistaken_for_its_base():
    class Doubled(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return F.linear(inputs, 2 * self.weight, self.bias)

    torch.manual_seed(0)
    check(nn.Sequential(Doubled(3, 2)), torch.randn(4, 3), fallback=["0"])


class _Table(nn.Module):
    """No rule; its second argument belongs to no example."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.temperature = nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs: Tensor, *, table: Tensor) -> Tensor:
        return self.temperature * (inputs + table) * self.scale


class _Positions(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer, self.head = _Table(), nn.Linear(3, 2)
        self.register_buffer("table", torch.randn(length, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(inputs, table=self.table)))


class _Causal(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.attention(inputs, inputs, inputs, attn_mask=self.mask, need_weights=False)[0]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_a_tensor_as_long_as_the_pass_is_not_cut_into_examples(length):
    """A table of positions, and a mask: every pass has another number of rows."""
    torch.manual_seed(0)
    check(_Positions(length), torch.randn(5, length, 3), fallback=["layer"])
    check(_Causal(length), torch.randn(5, length, 4), fallback=["attention"])


def test_checkpoints_of_the_user_s_own_run_again_with_the_same_parameters():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(checkpoint(self.inner, inputs, use_reentrant=False))

    torch.manual_seed(0)
    check(Checkpointed(), torch.randn(5, 4))


def test_recurrent_layers_may_share_their_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.GRU(4, 4, num_layers=2, batch_first=True)
            self.layers.weight_ih_l1 = self.layers.weight_ih_l0

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers(inputs)[0]

    torch.manual_seed(0)
    check(Tied(), torch.randn(5, 3, 4))


class _Of(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(inputs, inputs, inputs)[0].mean(1)
        return self.layer(inputs)[0]


class _Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.mean(1) @ self.weight).squeeze()[:, None]


class _Masked(nn.Module):
    """In evaluation mode torch packs the tokens that a mask leaves, unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        none = torch.zeros(inputs.shape[:2], dtype=torch.bool)
        return self.encoder(inputs, src_key_padding_mask=none).mean(1)


class _Looked(nn.Module):
    """Takes a column of numbers for the places of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.embedding(inputs[:, 3].long(), self.table)


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        (_Of(nn.MultiheadAttention(4, 2)), (3, 4), "batch_first=True"),
        (_Masked(), (3, 4), "enable_nested_tensor=False"),
        (_Looked(), (4,), r"ranges=\{'inputs': \(0, 2\)\}"),
        (_Squeezed(), (3, 4), "the model itself"),
        (_Of(nn.LSTM(4, 4, proj_size=2, batch_first=True)), (3, 4), "proj_size must be 0, got 2"),
        (_Of(nn.LSTM(4, 4, batch_first=True)), (4,), "sequences"),
    ],
)
def test_what_cannot_run_example_by_example_is_refused_with_its_reason(model, shape, said):
    engine = GradientEngine(model, weighted_square, clipping=FlatClipping(1.0))
    with pytest.raises(UserError, match=said):
        engine.clipped_sum(torch.randn(5, *shape), torch.arange(5) % 3)


def test_what_cannot_run_isolated_is_refused_with_its_reason():
    class Branching(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    engine = GradientEngine(Branching(4, 3), cross_entropy, clipping=FlatClipping(1.0), vmap=True)
    with pytest.raises(UserError, match=r"model\.vmap"):
        engine.clipped_sum(torch.randn(5, 4), torch.arange(5) % 3)


def test_complex_parameters_are_refused():
    """Their imaginary parts would be dropped from the sum."""
    model = nn.Linear(4, 3, dtype=torch.complex64)
    with pytest.raises(UserError, match="weight"):
        GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))


def test_one_layer_in_float64_does_not_lift_the_others_slack():
    """The first parameter alone used to decide it: a record reached 1.00000017 C."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(1, 1, bias=False, dtype=torch.float64)
            self.layer = nn.Linear(1280, 1, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs) + 1e-9 * self.wide(inputs[:, :1].double()).float()

    engine = GradientEngine(
        Mixed(), lambda outputs, targets: 1e3 * outputs.squeeze(1), clipping=FlatClipping(1.0)
    )
    values = torch.rand(60, generator=torch.Generator().manual_seed(0)) + 1
    largest = max(
        float(engine.clipped_sum(value.expand(1, 1280), torch.zeros(1)).flat.norm())
        for value in values
    )
    assert 0.99 < largest <= 1


def test_forgetting_the_cross_terms_would_be_noticed():
    """The oracle is sharp: norms of the two uses of a tied weight added without cross terms."""
    torch.manual_seed(0)
    model, tokens = _Tied().double(), torch.randint(0, 6, (1, 5))
    engine = GradientEngine(model, weighted_square, clipping=FlatClipping(1.0), micro_batch=1)
    targets = torch.zeros(1)
    whole, _ = one_at_a_time(model, tokens, targets, 1e12)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    pieces, _ = one_at_a_time(model, tokens, targets, 1e12)
    assert abs(float(pieces.norm() / whole.norm()) - 1) > 1e-3
    assert engine.size == len(whole)
