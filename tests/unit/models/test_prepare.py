"""`dpdist.prepare`: networks of others, converted so that each record is treated alone."""

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import dpdist
from dpdist import UserError
from dpdist.core.optional_imports import import_torchvision
from dpdist.gradients.engine import cross_entropy
from dpdist.gradients.sampling import Blocks
from dpdist.models.zoo import FixedBatchNorm

torchvision = import_torchvision("models")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_networks_of_torchvision_train_and_keep_their_weights(name):
    torch.manual_seed(0)
    network = torchvision.get_model(name, weights=None, num_classes=3)
    prepared = dpdist.prepare(network)
    assert not any(isinstance(each, _BatchNorm) for each in prepared.modules())
    before = [parameter.shape for parameter in network.parameters()]
    assert [parameter.shape for parameter in prepared.parameters()] == before
    for one, other in zip(network.parameters(), prepared.parameters(), strict=True):
        assert torch.equal(one, other)
    engine = dpdist.GradientEngine(
        prepared, cross_entropy, clipping=dpdist.FlatClipping(1.0), blocks=Blocks(1, 4)
    )
    inputs, ids = torch.rand(3, 3, 40, 40), torch.arange(3)
    found = engine.clipped_sum(inputs, ids, draw_key=bytes(32), record_ids=ids).flat
    assert found.any() and found.isfinite().all() and found.norm() <= 3


@pytest.mark.parametrize("affine", [True, False])
def test_fixed_statistics_answer_as_in_evaluation_mode(affine):
    torch.manual_seed(0)
    layer, shape = nn.BatchNorm2d(5, affine=affine), (6, 5, 3, 3)
    for _ in range(3):
        layer(torch.randn(shape) * 2 + 1)
    fixed = dpdist.prepare(nn.Sequential(layer), batch_norm="eval").train()
    inputs = torch.randn(shape)
    assert isinstance(fixed[0], FixedBatchNorm)
    torch.testing.assert_close(fixed(inputs), layer.eval()(inputs))
    assert any(p.requires_grad for p in fixed.parameters()) == affine


def test_one_layer_in_two_places_stays_one_and_the_model_itself_may_be_one():
    shared = nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(4, 16), shared, nn.Linear(16, 16), shared)
    prepared = dpdist.prepare(model)
    assert prepared[1] is prepared[3] and model[1] is shared
    assert isinstance(dpdist.prepare(nn.BatchNorm2d(8)), nn.GroupNorm)
    assert dpdist.prepare(nn.GroupNorm(4, 32))(torch.rand(2, 32)).any()  # flat inputs keep signal
    assert dpdist.prepare(nn.BatchNorm1d(32))(torch.rand(2, 32)).abs().max() > 0.1


def test_other_layers_that_mix_are_switched_off():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.ModuleList(
        [nn.InstanceNorm1d(3, track_running_stats=True), nn.Embedding(5, 4, max_norm=1.0),
         nn.TransformerEncoder(layer, 1)]
    )  # fmt: skip
    prepared = dpdist.prepare(model)
    assert not prepared[0].track_running_stats and prepared[0].running_mean is None
    assert prepared[1].max_norm is None and model[1].max_norm == 1.0
    assert not prepared[2].use_nested_tensor


class _More(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class _WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


def test_a_subclass_that_does_more_is_refused_or_keeps_what_follows():
    with pytest.raises(UserError):
        dpdist.prepare(nn.Sequential(_More(8)))
    assert dpdist.prepare(nn.Sequential(_WithActivation(8)))(torch.randn(2, 8, 3, 3)).min() == 0
    with pytest.raises(UserError):
        dpdist.prepare(nn.BatchNorm2d(8, track_running_stats=False), batch_norm="eval")
