"""Networks as everybody writes them, the hardest: they train, and their sums are right.

Each trains two steps, whose sums equal one-by-one autograd with the same draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.networks import Of
from support.one_by_one import one_by_one
from torch import Tensor, nn

import dpdist
from dpdist import FlatClipping, GradientEngine, UserError
from dpdist.gradients.engine import cross_entropy
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.sampling import Blocks
from dpdist.randomness.keys import derive_key

KEY, COUNT, CLASSES = derive_key(bytes(32), "ordinary"), 6, 3
ROWS, SERIES, IMAGES = (6,), (5, 6), (3, 9, 9)


def with_head(layer: nn.Module, run: Callable[..., Tensor]) -> nn.Module:
    return Of(run, layer=layer, head=nn.Linear(6, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def vae_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, _ = batch
    mean, spread = module[0](inputs).chunk(2, 1)
    drawn = mean + spread.exp() * torch.randn_like(mean)
    divergence = (mean.square() + (2 * spread).exp() - 2 * spread).sum(1) / 2
    return (module[1](drawn) - inputs).square().sum(1) + divergence


def flat(module: nn.Module, x: Tensor) -> Tensor:
    """Rows of all records in one dimension, which no hook can cut."""
    return module.head(module.layer(x).reshape(-1, 2)).view(len(x), -1, CLASSES).mean(1)


def relative(module: nn.Module, x: Tensor) -> Tensor:
    place = torch.arange(5)
    bias = module.table(place[:, None] - place[None] + 4)  # no dimension of the batch
    return (module.head(x) + bias.mean((0, 1))).mean(1)


def by_cell(module: nn.Module, x: Tensor) -> Tensor:
    """The last state of a cell that begins with one of its own."""
    state = None
    for step in x.unbind(1):
        state = module.layer(step, state)
    return module.head(state)


def rrelu() -> nn.Module:
    """Draws for negative numbers only, so that records shift the draws of others."""
    return nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, CLASSES))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, CLASSES)), ROWS,
    ),
    "spectral-norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, CLASSES)), ROWS,
    ),
    "weight-norm-by-hook": (
        lambda: dpdist.prepare(nn.Sequential(nn.utils.weight_norm(nn.Linear(6, CLASSES)))), ROWS,
    ),
    "rrelu": (lambda: dpdist.prepare(rrelu()), ROWS),
    "cnn-batchnorm": (lambda: dpdist.prepare(convolutions()), IMAGES),
    "gru-time-first-dropout": (
        lambda: with_head(nn.GRU(6, 6, 2, dropout=0.3),
                          lambda m, x: m.head(m.layer(x.transpose(0, 1))[0])[-1]), SERIES,
    ),
    "lstm-dropout": (
        lambda: with_head(nn.LSTM(6, 3, 2, dropout=0.3, batch_first=True, bidirectional=True),
                          lambda m, x: m.head(m.layer(x)[0][:, -1])), SERIES,
    ),
    "gru-cell": (lambda: with_head(nn.GRUCell(6, 6), by_cell), SERIES),
    "encoder": (
        lambda: with_head(encoder(), lambda m, x: m.head(m.layer(x).mean(1))), SERIES,
    ),
    "decoder-layer": (
        lambda: with_head(nn.TransformerDecoderLayer(6, 2, 8, batch_first=True),
                          lambda m, x: m.head(m.layer(x, x).mean(1))), SERIES,
    ),
    "view-through-the-batch": (
        lambda: Of(flat, layer=nn.Conv1d(5, 3, 1), head=nn.Linear(2, CLASSES)), SERIES,
    ),
    "relative-positions": (
        lambda: Of(relative, table=nn.Embedding(9, CLASSES), head=nn.Linear(6, CLASSES)), SERIES,
    ),
    "vae": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(2, 6)), ROWS),
    "shared-depth": (
        lambda: with_head(nn.Linear(6, 6), lambda m, x: m.head(
            x + m.layer(x) * torch.empty(()).bernoulli_(0.5))), ROWS,
    ),
}  # fmt: skip


def begin(make: Callable[[], nn.Module], shape: tuple[int, ...], loss: Any = cross_entropy) -> Any:
    torch.manual_seed(0)
    engine = GradientEngine(
        make(), loss, clipping=FlatClipping(0.1), micro_batch=4, blocks=Blocks(1, 8)
    )
    inputs = torch.rand(COUNT, *shape, generator=torch.Generator().manual_seed(1))
    return engine, inputs, torch.arange(COUNT) % CLASSES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_ordinary_network_trains_and_its_sum_is_that_of_one_by_one(name):
    loss = OwnLoss(vae_loss) if name == "vae" else cross_entropy
    engine, inputs, targets = begin(*CASES[name], loss)
    engine.rounding = "fixed-row" if name == "shared-depth" else "standard"
    ids = 3 * torch.arange(COUNT) + 2
    before = torch.cat([p.detach().flatten().clone() for p in engine.parameters])
    for step in range(2):
        key = derive_key(KEY, "step", step)
        found = engine.clipped_sum(inputs, targets, draw_key=key, record_ids=ids).flat
        expected = one_by_one(engine, inputs, targets, ids, key)
        assert found.norm() > 0
        assert (found - expected).norm() <= 0.006 * expected.norm() + 1e-6  # the clip's slack
        with torch.no_grad():
            for parameter, part in zip(engine.parameters, found.split(engine._sizes), strict=True):
                parameter -= 0.01 * part.view_as(parameter).to(parameter)
    after = torch.cat([p.detach().flatten() for p in engine.parameters])
    assert after.isfinite().all() and not torch.equal(before, after)


# draws that other records shift, and a state that a pass changes
@pytest.mark.parametrize("make", [rrelu, lambda: nn.utils.spectral_norm(nn.Linear(6, CLASSES))])
def test_what_records_share_unseen_is_refused(make):
    with pytest.raises(UserError):
        GradientEngine(make(), cross_entropy, clipping=FlatClipping(0.1))
