"""The engine as a whole: the sum, what it refuses, what one bad record can do, micro-batches."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.networks import cross_entropy, mixing_refused
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import AutomaticClipping, FlatClipping, PerLayerClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import _PassState, find_layers
from dpdist.gradients.perturbations import HiddenPerturbation


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


def test_float32_sum_and_losses(model):
    inputs, targets = batch(9)
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(0.3), micro_batch=4)
    result = engine.clipped_sum(inputs, targets)
    rows = per_example_gradients(model, inputs, targets)
    expected = (rows * (0.3 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    assert result.flat.dtype == torch.float64
    torch.testing.assert_close(result.flat.float(), expected, rtol=1e-4, atol=1e-5)
    loss = float(cross_entropy(model(inputs), targets).sum())
    assert result.loss_sum == pytest.approx(loss, rel=1e-5)


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


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 7, 64])
def test_micro_batches_do_not_change_the_sum(model, micro_batch):
    inputs, targets = batch(13)
    whole = GradientEngine(model, cross_entropy, clipping=FlatClipping(0.3), micro_batch=13)
    split = GradientEngine(
        model, cross_entropy, clipping=FlatClipping(0.3), micro_batch=micro_batch
    )
    torch.testing.assert_close(
        split.clipped_sum(inputs, targets).flat,
        whole.clipped_sum(inputs, targets).flat,
        rtol=1e-5,
        atol=1e-6,
    )


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


class _Exploding(nn.Module):
    """Turns inputs above 100 into the chosen poison inside the network."""

    def __init__(self, poison: float) -> None:
        super().__init__()
        self.poison = poison

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.where(inputs > 100, inputs * self.poison, inputs)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("where", ["inputs", "hidden"])
@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_a_nonfinite_gradient_counts_as_zero(poison, where, kind):
    torch.manual_seed(0)
    base = small_cnn() if kind == "cnn" else nn.Sequential(
        nn.Flatten(), nn.Linear(144, 20), nn.ReLU(), nn.Linear(20, 3)
    )  # fmt: skip
    network = nn.Sequential(_Exploding(poison), base) if where == "hidden" else base
    inputs, targets = batch(6)
    good = [0, 1, 3, 4, 5]
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(0.3), micro_batch=4)
    expected = engine.clipped_sum(inputs[good], targets[good])
    inputs[2] = 1e30 if where == "hidden" else poison
    result = engine.clipped_sum(inputs, targets)
    if result.nonfinite == 0:  # GroupNorm can bring a huge finite input back to earth
        assert abs(poison) == 1e30 and kind == "cnn"
        assert float((result.flat - expected.flat).norm()) <= 0.3 + 1e-5
        return
    assert (result.nonfinite, result.examples) == (1, 6)
    torch.testing.assert_close(result.flat, expected.flat, rtol=1e-5, atol=1e-6)


# ---- what is refused


class _Centered(nn.Module):
    """Subtracts the batch mean: mixes examples without being a BatchNorm."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0, keepdim=True)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.detach().sum()
        return inputs


class _Functional(nn.Module):
    """Uses its child's weight outside the child's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + F.linear(inputs.square(), self.inner.weight)


class _Adapted(nn.Module):
    """An adapter at its start: the second factor is zero, the first is used outside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down = nn.Linear(4, 3), nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + self.up(F.linear(inputs, self.down.weight))


class _Idle(nn.Module):
    """Has a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        *((norm, r"layer 1 .*BatchNorm.*GroupNorm") for norm in
          (nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm1d())),
        (nn.InstanceNorm1d(4, track_running_stats=True), "track_running_stats"),
    ],
    ids=str,
)  # fmt: skip
def test_batch_norm_is_refused_by_name(layer, message):
    with pytest.raises(UserError, match=message):
        GradientEngine(nn.Sequential(nn.Linear(4, 4), layer), cross_entropy,
                       clipping=FlatClipping(1.0))  # fmt: skip


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), _Centered(), nn.Linear(4, 3)), "mixes examples"),
        (nn.Sequential(_Centered(), nn.Linear(4, 3)), "mixes examples"),
        (nn.Sequential(nn.Linear(4, 3), _Counting()), "1.seen"),
        (_Functional(), "inner.weight"),
        (_Adapted(), "down.weight"),
        (_Idle(), "idle.weight"),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.Linear(2, 3)), "dimension 0"),
    ],
)
def test_other_leaks_are_found_by_the_self_check(network, message):
    torch.manual_seed(0)
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(1.0))
    with pytest.raises(UserError, match=message):
        engine.clipped_sum(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))


class _TwoOffsets(nn.Module):
    """Autograd gives both offsets one gradient, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.one, self.other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + (self.one + self.other)


def test_gradients_that_lie_in_the_same_memory_are_checked_each():
    model, (inputs, targets) = _TwoOffsets(), (torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    found = torch.autograd.grad(
        cross_entropy(model(inputs), targets).sum(), [model.one, model.other]
    )
    assert found[0].data_ptr() == found[1].data_ptr()
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
    assert engine.clipped_sum(inputs, targets).examples == 6


def test_sparse_gradients_are_checked_too():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
    tokens = torch.randint(0, 5, (6, 4))
    assert engine.clipped_sum(tokens, torch.zeros(6, dtype=torch.long)).examples == 6


class _Detached(nn.Module):
    """Mixes by values that autograd does not follow, in batches of at least `least` examples."""

    def __init__(self, least: int = 1, weight: float = 1.0) -> None:
        super().__init__()
        self.least, self.weight = least, weight

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) < self.least:
            return inputs
        return inputs - self.weight * inputs.detach().mean(0)


class _BackwardOnly(nn.Module):
    """The values are the example's own; its gradient is scaled by the batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        scale = 1 + inputs.detach().abs().mean()
        return inputs.detach() + scale * (inputs - inputs.detach())


class _OneBlindCount(nn.Module):
    """Integer inputs: adds how often each token occurs in the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        counts = torch.bincount(tokens.flatten(), minlength=7)
        return (self.embed(tokens) * counts[tokens][..., None]).sum(1)


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(4, 4), _Detached(), nn.Linear(4, 3)),
        nn.Sequential(_Detached(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), _Detached(least=9), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), _Detached(least=30), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), _Detached(weight=1e-4), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), _BackwardOnly(), nn.Linear(4, 3)),
        nn.Sequential(_OneBlindCount(), nn.Linear(4, 3)),
    ],
    ids=["detached", "at the input", "from 9", "from 30", "weakly", "backward only", "tokens"],
)
def test_mixing_that_autograd_does_not_see_is_refused(network):
    torch.manual_seed(0)
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(1.0))
    tokens = any(isinstance(module, nn.Embedding) for module in network.modules())
    inputs = torch.randint(0, 7, (6, 5)) if tokens else torch.randn(6, 4)
    with mixing_refused():
        engine.clipped_sum(inputs, torch.arange(6) % 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_models_whose_gradients_vanish_are_not_refused(dtype, scale):
    """A bias before a normalization has gradient zero; what is computed is rounding."""
    torch.manual_seed(0)
    for norm in (nn.InstanceNorm2d(8), nn.GroupNorm(8, 8), nn.GroupNorm(1, 8)):
        network = nn.Sequential(
            nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(800, 3)
        ).to(dtype)
        inputs, targets = batch(16)
        engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(0.3))
        assert engine.clipped_sum(scale * inputs.to(dtype), targets).flat.any()
        assert engine._checked


class _OwnPrecision(nn.Module):
    """Does not run in float64: screened in its own precision, not refused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs) @ torch.ones(10, 3, dtype=torch.float32)


def test_a_model_that_needs_its_own_precision_is_screened_in_it():
    torch.manual_seed(0)
    inputs, targets = batch(16)

    def network(middle: nn.Module) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), middle, _OwnPrecision(), nn.Flatten(), nn.Linear(120, 3)
        )

    engine = GradientEngine(network(nn.Identity()), cross_entropy, clipping=FlatClipping(0.3))
    assert engine.clipped_sum(inputs, targets).flat.any() and engine._checked
    engine = GradientEngine(network(_Detached(9)), cross_entropy, clipping=FlatClipping(0.3))
    with mixing_refused():
        engine.clipped_sum(inputs, targets)


def test_mixing_far_from_usual_inputs_is_found_before_the_first_sum():
    """The records give no sign: the mixing needs inputs above 2, which are invented."""

    class Late(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + (inputs > 2).any()

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), Late(), nn.Linear(3, 3))
    engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(1.0))
    with mixing_refused():
        engine.clipped_sum(torch.zeros(6, 4), torch.zeros(6, dtype=torch.long))


def test_an_isolated_model_cannot_mix():
    """Each example runs alone: the same sum as for the model without its mixing."""
    torch.manual_seed(0)
    honest = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    inputs, targets = torch.randn(9, 4), torch.arange(9) % 3

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = honest

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs) + (inputs.detach() - inputs.detach().mean(0))[:, :3]

    sums = [
        GradientEngine(
            model, cross_entropy, clipping=FlatClipping(0.3), vmap=True, micro_batch=micro_batch
        ).clipped_sum(inputs, targets).flat
        for model, micro_batch in ((Centered(), None), (Centered(), 4), (honest, None))
    ]  # fmt: skip
    plain = GradientEngine(honest, cross_entropy, clipping=FlatClipping(0.3))
    for found in sums:
        torch.testing.assert_close(found, plain.clipped_sum(inputs, targets).flat, rtol=1e-4,
                                   atol=1e-6)  # fmt: skip
    with mixing_refused():
        GradientEngine(Centered(), cross_entropy, clipping=FlatClipping(0.3)).clipped_sum(
            inputs, targets
        )
    with pytest.raises(UserError, match=r"model\.vmap"):
        GradientEngine(honest, cross_entropy, clipping=FlatClipping(0.3), vmap=True,
                       perturbation=HiddenPerturbation(1, "0", 0.1))  # fmt: skip


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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_half_precision_are_trained(kind):
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head = kind(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1]).float()

    inputs, targets = torch.randn(5, 6, 4).bfloat16(), torch.tensor([0, 1, 0, 1, 0])
    half = GradientEngine(Read().bfloat16(), cross_entropy, clipping=FlatClipping(1e6))
    wide = GradientEngine(Read(), cross_entropy, clipping=FlatClipping(1e6))
    found = half.clipped_sum(inputs, targets).flat
    expected = wide.clipped_sum(inputs.float(), targets).flat
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_mean_objective_and_frozen_model_are_refused(model):
    engine = GradientEngine(model, F.cross_entropy, clipping=FlatClipping(1.0))
    with pytest.raises(UserError, match="reduction='none'"):
        engine.clipped_sum(*batch(3))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UserError):
        GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))


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


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_one_example_never_exceeds_the_sensitivity_in_float32(scale):
    """The norm of what was added, recomputed in float64, is at most C; and not needlessly less."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))
    tokens = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 3), nn.Flatten(), nn.Linear(60, 3))
    for network, inputs in (
        (model, scale * torch.randn(40, 30)),
        (model, scale * torch.randn(40, 25, 30)),
        (tokens, torch.randint(0, 7, (40, 20))),
    ):

        def objective(outputs: Tensor, targets: Tensor) -> Tensor:
            return scale * outputs.flatten(1).square().sum(1)

        for clipping in (FlatClipping(0.1), AutomaticClipping(0.1), PerLayerClipping(0.1)):
            engine = GradientEngine(network, objective, clipping=clipping)
            for i in range(len(inputs)):
                one = engine.clipped_sum(inputs[i : i + 1], torch.zeros(1)).flat.double()
                assert float(one.norm()) <= 0.1
                if scale >= 1 and isinstance(clipping, FlatClipping):
                    assert float(one.norm()) > 0.1 * (1 - 1e-3)


CONVOLUTIONS = [
    (nn.Conv2d, (4, 6, 3), {"padding": 1}, (7, 5)),
    (nn.Conv2d, (4, 6, (3, 2)), {"stride": (2, 1), "padding": (0, 1)}, (8, 6)),
    (nn.Conv2d, (4, 8, 3), {"dilation": 2, "groups": 2, "padding": "same"}, (9, 7)),
    (nn.Conv2d, (4, 4, 3), {"groups": 4, "padding": 1, "padding_mode": "circular"}, (5, 5)),
    (nn.Conv2d, (4, 6, 1), {}, (3, 1)),
    (nn.Conv2d, (4, 6, 3), {"stride": 3, "bias": False}, (8, 8)),
    (nn.Conv1d, (4, 6, 3), {"stride": 2, "padding": 1}, (9,)),
]


@pytest.mark.parametrize(("layer", "sizes", "options", "shape"), CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_convolution_is_autograd_s(layer, sizes, options, shape, dtype):
    """Clipped sums of records one by one; on a CPU pictures are in channels-last format."""

    class Twice(nn.Module):
        """Calls its layer for two sizes of picture, so that results are added up."""

        def __init__(self):
            super().__init__()
            self.layer = layer(*sizes, **options)

        def forward(self, x):
            again = self.layer(torch.cat([x, x], -1))
            return self.layer(x).flatten(1).square().sum(1) + again.flatten(1).sum(1)

    torch.manual_seed(0)
    model = Twice().to(dtype)
    x = torch.randn(5, 4, *shape, dtype=dtype)

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs

    engine = GradientEngine(model, losses, clipping=FlatClipping(1.0))
    found = engine.clipped_sum(x, torch.zeros(5)).flat
    expected = torch.zeros_like(found)
    for record in x.split(1):
        grads = torch.autograd.grad(model(record).sum(), list(model.parameters()))
        alone = torch.cat([grad.flatten() for grad in grads]).double()
        assert alone.norm() > 1  # so that the clip acts
        expected += alone / alone.norm()
        one = engine.clipped_sum(record, torch.zeros(1)).flat
        assert one.norm() <= 1
    allowed = 1e-9 if dtype == torch.float64 else 5e-5
    assert (found - expected).norm() <= allowed * expected.norm()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
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

    clipping = FlatClipping(1e-3)
    engine = GradientEngine(model, losses, clipping=clipping)
    engine.validate(torch.randn(33, 32, 8, 8), torch.zeros(33))
    for record in x.split(1):
        assert engine.clipped_sum(record, torch.zeros(1)).flat.norm() <= engine.sensitivity


class _TwoHalves(nn.Module):
    """Two layers, each on one half of the input: their gradients are the halves."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.left(inputs[:, :2]) + self.right(inputs[:, 2:])


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("clipping", [FlatClipping(0.3), PerLayerClipping(0.3)])
def test_a_gradient_that_is_not_finite_in_one_layer_alone_counts_as_zero(place, clipping):
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 4), torch.zeros(6)
    engine = GradientEngine(_TwoHalves(), lambda out, _: out[:, 0], clipping=clipping)
    good = [0, 1, 3, 4, 5]
    expected = engine.clipped_sum(inputs[good], targets[good])
    inputs[2, place] = torch.inf
    result = engine.clipped_sum(inputs, targets)
    assert result.nonfinite == 1
    torch.testing.assert_close(result.flat, expected.flat)


def test_all_examples_nonfinite():
    model = nn.Linear(2, 2)
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
    result = engine.clipped_sum(torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.long))
    assert result.nonfinite == 3 and not result.flat.any() and result.loss_sum == 0.0


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=type)
def test_a_half_input_is_widened_before_the_rule(layer):
    """As autocast gives it to layers that answer in float32: norm and sum would be rounded."""
    (found,), calls = find_layers(layer), []
    current = _PassState(
        6, dict(layer.named_parameters()), torch.zeros(0), lambda _, call: calls.append(call)
    )
    inputs, signal = torch.randn(6, 8).bfloat16(), torch.randn(6, 8)
    current.deliver(found, (inputs,), {}, [signal])
    assert calls[0].input.dtype == torch.float32 and calls[0].output_gradient.dtype == torch.float32
    assert all(each.values.dtype == torch.float32 for _, each in found.rule(calls[0]))
