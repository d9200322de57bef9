"""Models that look at their batch are seen; those that do not are let pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.networks import Of
from torch import Tensor, nn

from dpdist import models
from dpdist.models import ModelSpec, find_batch_dependence


def changed(change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A network behind a function of its batch of inputs."""
    return Of(lambda m, x: m.network(change(x)), network=network()).eval()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def symmetric(x: Tensor) -> Tensor:
    return x * (1 + 0.01 * torch.linspace(-1, 1, len(x)).to(x).abs().view(-1, 1, 1, 1))


def one_row(x: Tensor) -> Tensor:
    return torch.cat([x[:77], x[77:78] + 0.01, x[78:]])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "small": lambda x: x - 1e-4 * x.mean(0),
    "largest": lambda x: x / x.abs().max(),
    "far": lambda x: x * (1 + 0.01 * bool(x.max() > 5)),  # seen in company that is far away only
    "symmetric": symmetric,
    "one row": one_row,
    "random": lambda x: x + 0.01 * torch.rand_like(x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_mixes_is_seen(name: str) -> None:
    batch = torch.rand(100, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    found = find_batch_dependence(changed(CHANGES[name]), batch)
    assert found is not None
    assert "position" in found or name not in ("symmetric", "one row")


def test_whole_numbers_are_tried_with_other_ones() -> None:
    def tokens(mix: float) -> nn.Module:
        torch.manual_seed(0)
        answers = nn.Embedding(20, 4)
        mixed = Of(lambda m, x: x + mix * x.mean(0))
        return nn.Sequential(answers, Of(lambda m, x: x.mean(1)), mixed)

    batch = torch.randint(20, (30, 6), generator=torch.Generator().manual_seed(0))
    assert find_batch_dependence(tokens(0.0), batch) is None
    assert find_batch_dependence(tokens(0.1), batch) is not None
    assert find_batch_dependence(tokens(1e-4), batch) is not None


@pytest.mark.parametrize("mix", [0.0, 1e-4])
def test_a_masked_class_does_not_hide_what_the_others_say(mix: float) -> None:
    def masked(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([model.network(x - mix * x.mean(0)), 0 * x[:, 0, 0, :1] - 1e9], 1)

    found = find_batch_dependence(Of(masked, network=network()).eval(), torch.rand(100, 1, 4, 4))
    assert (found is not None) == (mix > 0)


@pytest.mark.parametrize("rows", [1, 2, 333])
def test_what_does_not_mix_passes(rows: int) -> None:
    spec = ModelSpec("small-cnn", (1, 12, 12), 3)
    model = models.initialize(spec, 0).eval()
    batch = torch.randn(rows, *spec.input_shape, generator=torch.Generator().manual_seed(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert find_batch_dependence(model, batch) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_alone_nothing_but_memory_is_looked_for() -> None:
    """In a batch of one there is no company; what an answer leaves behind is seen all the same."""

    def counted(model: nn.Module, x: Tensor) -> Tensor:
        model.calls += 1
        return model.network(x) + 1e-5 * model.calls

    counts = Of(counted, network=network())
    counts.calls = 0
    batch = torch.rand(4, 1, 4, 4)
    assert find_batch_dependence(counts, batch[:1], alone=True) is not None
    assert find_batch_dependence(changed(CHANGES["random"]), batch, alone=True) is not None
    assert find_batch_dependence(changed(CHANGES["small"]), batch, alone=True) is None
    assert find_batch_dependence(changed(CHANGES["small"]), batch) is not None
