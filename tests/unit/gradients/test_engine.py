"""The engine as a whole: the sum, what it refuses, what one bad record can do, micro-batches."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.networks import Of, cross_entropy, mixing_refused
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import AutomaticClipping, FlatClipping, PerLayerClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import _PassState, find_layers


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(size, 1, 12, 12, generator=generator)
    return inputs, torch.randint(0, 3, (size,), generator=generator)


def per_example_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        loss = cross_entropy(model(x[None]), y[None]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return small_cnn()


def test_parameters_and_graph_are_left_alone(model):
    before = copy.deepcopy(model.state_dict())
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(0.3))
    engine.clipped_sum(*batch(5))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    pickle.loads(pickle.dumps(model))  # no hooks stay behind


def test_empty_batch_is_a_zero_sum(model):
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(0.3))
    inputs, targets = batch(3)
    result = engine.clipped_sum(inputs[:0], targets[:0])
    assert result.flat.shape == (engine.size,) and not result.flat.any()
    assert (result.examples, result.nonfinite, result.loss_sum) == (0, 0, 0.0)


def test_micro_batch_is_chosen_from_the_shapes_of_an_example_only():
    """A weight with two rows looks like two examples: workers must choose alike."""
    sizes = set()
    for size in (1, 2, 8):
        model = nn.Sequential(nn.Flatten(), nn.Linear(144, 2), nn.Tanh(), nn.Linear(2, 3))
        engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(0.3))
        engine.clipped_sum(*batch(size, seed=size))
        sizes.add(engine.micro_batch)
    assert len(sizes) == 1 and sizes.pop() > 8


# ---- one bad record


@pytest.mark.parametrize("poison", [float("nan"), -float("inf"), 1e30])
@pytest.mark.parametrize("where", ["inputs", "hidden"])
def test_a_nonfinite_gradient_counts_as_zero(model, poison, where):
    exploding = Of(lambda m, x: torch.where(x > 100, poison * x, x))
    network = nn.Sequential(exploding, model) if where == "hidden" else model
    inputs, targets = batch(6)
    good = [0, 1, 3, 4, 5]
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(0.3), micro_batch=4)
    expected = engine.clipped_sum(inputs[good], targets[good])
    inputs[2] = 1e30 if where == "hidden" else poison
    result = engine.clipped_sum(inputs, targets)
    if result.nonfinite == 0:  # GroupNorm can bring a huge finite input back to earth
        assert poison == 1e30
        assert float((result.flat - expected.flat).norm()) <= 0.3 + 1e-5
        return
    assert (result.nonfinite, result.examples) == (1, 6)
    torch.testing.assert_close(result.flat, expected.flat, rtol=1e-5, atol=1e-6)


# ---- what is refused


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.detach().sum()
        return inputs


def adapted() -> nn.Module:
    """An adapter at its start: the second factor is zero, the first is used outside its layer."""
    model = Of(
        lambda m, x: m.inner(x) + m.up(F.linear(x, m.down.weight)),
        inner=nn.Linear(4, 3), down=nn.Linear(4, 2, bias=False), up=nn.Linear(2, 3, bias=False),
    )  # fmt: skip
    nn.init.zeros_(model.up.weight)
    return model


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.SyncBatchNorm(4),
        nn.LazyBatchNorm1d(),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
    ids=str,
)
def test_batch_norm_is_refused_by_name(layer):
    network = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(UserError, match="layer 1 "):
        GradientEngine(network, cross_entropy, clipping=FlatClipping(1.0))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(Of(lambda m, x: x - x.mean(0)), nn.Linear(4, 3)), "mixes examples"),
        (nn.Sequential(nn.Linear(4, 3), _Counting()), "1.seen"),
        (Of(lambda m, x: m.inner(x) + F.linear(x * x, m.inner.weight), inner=nn.Linear(4, 3)),
         "inner.weight"),
        (adapted(), "down.weight"),
        (Of(lambda m, x: m.inner(x), inner=nn.Linear(4, 3), idle=nn.Linear(4, 3)), "idle.weight"),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.Linear(2, 3)), "dimension 0"),
    ],
)  # fmt: skip
def test_other_leaks_are_found_by_the_self_check(network, message):
    torch.manual_seed(0)
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(1.0))
    with pytest.raises(UserError, match=message):
        engine.clipped_sum(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))


def detached(weight: float, least: int = 1) -> nn.Module:
    """Mixes by values that autograd does not follow, in batches of at least `least` examples."""
    return Of(lambda m, x: x - weight * (len(x) >= least) * x.detach().mean(0))


def scale_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """The values are the example's own; its gradient is scaled by the batch."""
    return x.detach() + (1 + x.detach().abs().mean()) * (x - x.detach())


def count_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    """Integer inputs: how often each token occurs in the whole batch is a factor."""
    counts = torch.bincount(tokens.flatten(), minlength=7)
    return (model.embed(tokens) * counts[tokens][..., None]).sum(1)


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(detached(1.0), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), detached(1.0, least=30), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), detached(1e-4), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), Of(scale_gradient), nn.Linear(4, 3)),
        # values that only invented examples have here
        nn.Sequential(Of(lambda m, x: x + (x > 2).any()), nn.Linear(4, 3)),
        nn.Sequential(Of(count_tokens, embed=nn.Embedding(7, 4)), nn.Linear(4, 3)),
    ],
    ids=["at the input", "from 30", "weakly", "backward only", "far values", "tokens"],
)
def test_mixing_that_autograd_does_not_see_is_refused(network):
    torch.manual_seed(0)
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(1.0))
    tokens = any(isinstance(module, nn.Embedding) for module in network.modules())
    inputs = torch.randint(0, 7, (6, 5)) if tokens else torch.zeros(6, 4)
    with mixing_refused():
        engine.clipped_sum(inputs, torch.arange(6) % 3)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(8), nn.GroupNorm(8, 8)])
def test_models_whose_gradients_vanish_are_not_refused(norm):
    """A bias before a normalization has gradient zero; what is computed is rounding."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(800, 3))
    inputs, targets = batch(16)
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(0.3))
    assert engine.clipped_sum(1e3 * inputs, targets).flat.any() and engine._checked


def test_an_isolated_model_cannot_mix():
    """Each example runs alone: the same sum as for the model without its mixing."""
    torch.manual_seed(0)
    honest = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    inputs, targets = torch.randn(9, 4), torch.arange(9) % 3

    centered = Of(lambda m, x: m.inner(x) + (x - x.mean(0)).detach()[:, :3], inner=honest)
    alone, plain, mixed = (
        GradientEngine(model, cross_entropy, clipping=FlatClipping(0.3), vmap=vmap, micro_batch=4)
        for model, vmap in ((centered, True), (honest, False), (centered, False))
    )
    found, expected = (each.clipped_sum(inputs, targets).flat for each in (alone, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with mixing_refused():
        mixed.clipped_sum(inputs, targets)


@pytest.mark.parametrize("vmap", [False, True])
def test_a_layer_with_two_names_is_trained_and_left_alone(vmap):
    """torch.func.functional_call left a plain tensor in it: what a training then wrote to the
    parameter never reached the model."""
    torch.manual_seed(0)
    shared, twice = nn.PReLU(), nn.Linear(4, 4)
    twice.again = twice.weight  # one parameter, two names
    network = nn.Sequential(twice, shared, nn.Linear(4, 4), shared, twice, nn.Linear(4, 3))
    held = [shared.weight, twice.weight, twice.again]
    inputs, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(1e6), vmap=vmap)
    found = engine.clipped_sum(inputs, targets).flat
    assert all(map(operator.is_, held, [shared.weight, twice.weight, twice.again]))
    parameters = [*network.parameters()]
    total = cross_entropy(network(inputs), targets).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)


# ---- clippings


def test_per_layer_clipping(model):
    inputs, targets = batch(7)
    limits = [0.05, 0.1, 0.2, 0.4]
    clipping = PerLayerClipping.from_layer_norms(limits)
    assert clipping.sensitivity == pytest.approx(sum(c * c for c in limits) ** 0.5)
    engine = GradientEngine(model, cross_entropy, clipping=clipping)
    rows = per_example_gradients(model, inputs, targets)
    ends = [sum(p.numel() for p in model[i].parameters()) for i in (0, 1, 5, 7)]
    expected = torch.cat(
        [
            (part * (limit / part.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
            for part, limit in zip(rows.split(ends, dim=1), limits, strict=True)
        ]
    )
    result = engine.clipped_sum(inputs, targets).flat.float()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    equal = GradientEngine(model, cross_entropy, clipping=PerLayerClipping(1.0))
    one = equal.clipped_sum(inputs[:1] * 50, targets[:1]).flat
    assert all(float(part.norm()) <= 0.5 for part in one.split(ends))


def test_automatic_clipping_is_its_formula_one_record_at_a_time():
    """By autograd in float64; a record of any length, and of none, moves the sum by less than C."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs = torch.randn(9, 6).double() * torch.logspace(-7, 5, 9).double()[:, None]
    weights = list(model.parameters())

    def objective(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets[:, None]).square().sum(1)

    targets = torch.tensor([0.0, 1e-3, 1e-2, 0.1, 1.0, 1.0, 10.0, 100.0, 1e3]).double()
    engine = GradientEngine(model, objective, clipping=AutomaticClipping(0.7))
    whole, expected = engine.clipped_sum(inputs, targets).flat, torch.zeros(engine.size).double()
    for i in range(9):
        loss = objective(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        own = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
        expected += own * 0.7 / (own.norm() + 0.01)
        others = torch.arange(9) != i
        moved = float((whole - engine.clipped_sum(inputs[others], targets[others]).flat).norm())
        assert moved <= 0.7 and (moved > 0.69) == (float(own.norm()) > 1)
        assert (moved == 0) == (i == 0)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)
    flat = GradientEngine(model, objective, clipping=FlatClipping(0.7))
    assert not torch.allclose(flat.clipped_sum(inputs, targets).flat, expected, rtol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_one_example_never_exceeds_the_sensitivity_in_float32(scale):
    """The norm of what was added, recomputed in float64, is at most C; and not needlessly less."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))
    tokens = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 3), nn.Flatten(), nn.Linear(60, 3))
    for network, inputs in (
        (model, scale * torch.randn(20, 25, 30)),
        (tokens, torch.randint(0, 7, (20, 20))),
    ):

        def objective(outputs: Tensor, targets: Tensor) -> Tensor:
            return scale * outputs.flatten(1).square().sum(1)

        for clipping in (FlatClipping(0.1), AutomaticClipping(0.1), PerLayerClipping(0.1)):
            engine = GradientEngine(network, objective, clipping=clipping)
            for i in range(len(inputs)):
                one = engine.clipped_sum(inputs[i : i + 1], torch.zeros(1)).flat.double()
                assert float(one.norm()) <= 0.1
                if isinstance(clipping, FlatClipping):
                    assert float(one.norm()) > 0.1 * (1 - 1e-3)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_no_convolution_lets_a_record_pass_the_clip(scale):
    """Wide, equal and cancelling entries, in float32: the slack covers each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.Flatten())
    signs = torch.ones(8, 8)
    signs[::2] = -1
    pictures = [
        torch.ones(32, 8, 8),
        torch.randn(32, 8, 8),
        signs.expand(32, 8, 8) * 1e4,
        torch.randn(32, 8, 8) * 10.0 ** torch.randint(-6, 6, (32, 1, 1)),
    ]
    x = torch.stack(pictures) * scale

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum(1)

    engine = GradientEngine(model, losses, clipping=FlatClipping(1e-3))
    engine.validate(torch.randn(33, 32, 8, 8), torch.zeros(33))
    for record in x.split(1):
        assert engine.clipped_sum(record, torch.zeros(1)).flat.norm() <= engine.sensitivity


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("clipping", [FlatClipping(0.3), PerLayerClipping(0.3)])
def test_a_gradient_that_is_not_finite_in_one_layer_alone_counts_as_zero(place, clipping):
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 4), torch.zeros(6)
    halves = Of(
        lambda m, x: m.left(x[:, :2]) + m.right(x[:, 2:]),
        left=nn.Linear(2, 1, bias=False), right=nn.Linear(2, 1, bias=False),
    )  # fmt: skip
    engine = GradientEngine(halves, lambda out, _: out[:, 0], clipping=clipping)
    good = [0, 1, 3, 4, 5]
    expected = engine.clipped_sum(inputs[good], targets[good])
    inputs[2, place] = torch.inf
    result = engine.clipped_sum(inputs, targets)
    assert result.nonfinite == 1
    torch.testing.assert_close(result.flat, expected.flat)


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=type)
def test_a_half_input_is_widened_before_the_rule(layer):
    """As autocast gives it to layers that answer in float32: norm and sum would be rounded."""
    (found,), calls = find_layers(layer), []
    inputs, signal = torch.randn(6, 8).bfloat16(), torch.randn(6, 8)
    parameters = dict(layer.named_parameters())
    current = _PassState(inputs, parameters, lambda _, call: calls.append(call))
    current.deliver(found, (inputs,), {}, [signal])
    assert calls[0].input.dtype == torch.float32 and calls[0].output_gradient.dtype == torch.float32
    assert all(each.values.dtype == torch.float32 for _, each in found.rule(calls[0]))
