"""Models that look at their batch are seen; those that do not are let pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpdist import models
from dpdist.models import ModelSpec, find_batch_dependence


class Of(nn.Module):
    """A network behind a function of its batch of inputs."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.network = change, network()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(self.change(x))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def position(x: Tensor) -> Tensor:
    return x * torch.linspace(1, 1.01, len(x)).to(x).view(-1, 1, 1, 1)


def symmetric(x: Tensor) -> Tensor:
    return x * (1 + 0.01 * torch.linspace(-1, 1, len(x)).to(x).abs().view(-1, 1, 1, 1))


def one_row(x: Tensor) -> Tensor:
    return torch.cat([x[:77], x[77:78] + 0.01, x[78:]])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "detached": lambda x: x - x.detach().mean(0),
    "small": lambda x: x - 1e-4 * x.mean(0),
    "largest": lambda x: x / x.abs().max(),
    "next": lambda x: x + 0.01 * x.roll(1, 0),
    "first": lambda x: x + 0.01 * x[:1],
    "far": lambda x: x * (1 + 0.01 * bool(x.max() > 5)),  # seen in company that is far away only
    "size": lambda x: x * (1 + 1 / len(x)),
    "position": position,
    "symmetric": symmetric,
    "one row": one_row,
    "random": lambda x: x + 0.01 * torch.rand_like(x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_mixes_is_seen(name: str) -> None:
    batch = torch.rand(100, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    found = find_batch_dependence(Of(CHANGES[name]).eval(), batch)
    assert found is not None
    assert "position" in found or name not in ("position", "symmetric", "one row")


@pytest.mark.parametrize("dimensions", [1, 2])
def test_batch_statistics_at_inference_are_seen(dimensions: int) -> None:
    kind, shape = ((nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (5, 3, 3)))[dimensions - 1]
    norm = kind(5, track_running_stats=False)
    model = nn.Sequential(norm, nn.Flatten(), nn.LazyLinear(3)).eval()
    model(torch.rand(2, *shape))
    assert find_batch_dependence(model, torch.rand(30, *shape)) is not None


def test_whole_numbers_are_tried_with_other_ones() -> None:
    class Tokens(nn.Module):
        def __init__(self, mix: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.mix = nn.Embedding(20, 4), mix

        def forward(self, x: Tensor) -> Tensor:
            answers = self.table(x).mean(1)
            return answers + self.mix * answers.mean(0)

    batch = torch.randint(20, (30, 6), generator=torch.Generator().manual_seed(0))
    assert find_batch_dependence(Tokens(0.0), batch) is None
    assert find_batch_dependence(Tokens(0.1), batch) is not None
    assert find_batch_dependence(Tokens(1e-4), batch) is not None


@pytest.mark.parametrize("mix", [0.0, 1e-4])
@pytest.mark.parametrize("large", [-1e4, -1e9])
def test_a_masked_class_does_not_hide_what_the_others_say(mix: float, large: float) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.network(x - mix * x.mean(0)), 0 * x[:, 0, 0, :1] + large], 1)

    found = find_batch_dependence(Masked().eval(), torch.rand(100, 1, 4, 4))
    assert (found is not None) == (mix > 0)


MODELS = [
    ModelSpec("small-cnn", (1, 12, 12), 3),
    ModelSpec("mlp", (1, 12, 12), 3, mean=(0.5,), std=(0.3,)),
    ModelSpec("hgm-cnn", (1, 12, 12), 3),
]


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("rows", [1, 2, 333])
def test_what_does_not_mix_passes(spec: ModelSpec, rows: int) -> None:
    model = models.initialize(spec, 0).eval()
    batch = torch.randn(rows, *spec.input_shape, generator=torch.Generator().manual_seed(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert find_batch_dependence(model, batch) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_stored_statistics_and_large_numbers_that_cancel_pass() -> None:
    # Logits of size 1 as differences of numbers of size 2e3: float32 leaves 2e-4 of rounding.
    last = nn.Linear(8, 3)
    with torch.no_grad():
        last.weight[:, ::2] = 2e3 + torch.rand(3, 4)
        last.weight[:, 1::2] = -last.weight[:, ::2]
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4), nn.ReLU()
    )
    head = nn.Sequential(model, Twice(), last)
    head(torch.rand(50, 1, 4, 4))
    assert find_batch_dependence(head.eval(), torch.rand(200, 1, 4, 4)) is None


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, 1)


def test_alone_nothing_but_memory_is_looked_for() -> None:
    """In a batch of one there is no company; what an answer leaves behind is seen all the same."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = network(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) + 1e-5 * self.calls

    batch = torch.rand(4, 1, 4, 4)
    assert find_batch_dependence(Counts(), batch[:1], alone=True) is not None
    assert find_batch_dependence(Of(CHANGES["random"]), batch, alone=True) is not None
    assert find_batch_dependence(Of(CHANGES["mean"]), batch, alone=True) is None
    assert find_batch_dependence(Of(CHANGES["mean"]), batch) is not None
