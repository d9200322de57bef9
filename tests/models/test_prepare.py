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
NETWORKS = {
    "resnet18": 40, "mobilenet_v2": 40, "mobilenet_v3_small": 40, "efficientnet_b0": 40,
    "shufflenet_v2_x0_5": 40, "mnasnet0_5": 40, "squeezenet1_1": 40, "densenet121": 40,
    "regnet_y_400mf": 40, "vgg11_bn": 40,
}  # fmt: skip
QUICK = ("resnet18",)


def _sum(model: nn.Module, side: int) -> torch.Tensor:
    engine = dpdist.GradientEngine(
        model, cross_entropy, clipping=dpdist.FlatClipping(1.0), blocks=Blocks(1, 4)
    )
    inputs = torch.rand(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    return engine.clipped_sum(
        inputs, torch.arange(3), draw_key=bytes(32), record_ids=torch.arange(3)
    ).flat


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in NETWORKS],
)
def test_networks_of_torchvision_train_and_keep_their_weights(name, capsys):
    torch.manual_seed(0)
    network = torchvision.get_model(name, weights=None, num_classes=3)
    prepared = dpdist.prepare(network)
    said = capsys.readouterr().out
    assert ("-> GroupNorm" in said) == any(isinstance(m, _BatchNorm) for m in network.modules())
    assert not any(isinstance(each, _BatchNorm) for each in prepared.modules())
    before = [parameter.shape for parameter in network.parameters()]
    assert [parameter.shape for parameter in prepared.parameters()] == before
    for one, other in zip(network.parameters(), prepared.parameters(), strict=True):
        assert torch.equal(one, other)
    found = _sum(prepared, NETWORKS[name])
    assert found.any() and found.isfinite().all() and found.norm() <= 3


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("affine", [True, False])
def test_fixed_statistics_answer_as_in_evaluation_mode(kind, affine):
    torch.manual_seed(0)
    layer = kind(5, affine=affine)
    shape = (6, 5, *[3] * {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[kind])
    for _ in range(3):
        layer(torch.randn(shape) * 2 + 1)
    fixed = dpdist.prepare(nn.Sequential(layer), batch_norm="eval").train()
    inputs = torch.randn(shape)
    assert isinstance(fixed[0], FixedBatchNorm)
    torch.testing.assert_close(fixed(inputs), layer.eval()(inputs))
    assert any(p.requires_grad for p in fixed.parameters()) == affine


def test_one_layer_in_two_places_stays_one_and_the_model_itself_may_be_one(capsys):
    shared = nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(4, 16), shared, nn.Linear(16, 16), shared)
    prepared = dpdist.prepare(model)
    assert prepared[1] is prepared[3] and model[1] is shared
    assert "1 BatchNorm1d" in capsys.readouterr().out
    assert isinstance(dpdist.prepare(nn.BatchNorm2d(8)), nn.GroupNorm)
    assert dpdist.prepare(nn.GroupNorm(4, 32))(torch.rand(2, 32)).any()  # flat inputs keep signal
    assert dpdist.prepare(nn.BatchNorm1d(32))(torch.rand(2, 32)).abs().max() > 0.1


def test_other_layers_that_mix_are_switched_off(capsys):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.ModuleList(
        [nn.InstanceNorm1d(3, track_running_stats=True), nn.Embedding(5, 4, max_norm=1.0),
         nn.TransformerEncoder(layer, 1)]
    )  # fmt: skip
    prepared = dpdist.prepare(model)
    assert not prepared[0].track_running_stats and prepared[0].running_mean is None
    assert prepared[1].max_norm is None and model[1].max_norm == 1.0
    assert not prepared[2].use_nested_tensor
    assert capsys.readouterr().out.count("without") == 3
    dpdist.prepare(nn.Linear(2, 2))
    assert capsys.readouterr().out == "prepare: nothing to change\n"


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
    with pytest.raises(UserError, match=r"layer 0: .* _More"):
        dpdist.prepare(nn.Sequential(_More(8)))
    assert dpdist.prepare(nn.Sequential(_WithActivation(8)))(torch.randn(2, 8, 3, 3)).min() == 0
    with pytest.raises(UserError, match="batch_norm='eval'"):
        dpdist.prepare(nn.BatchNorm2d(8, track_running_stats=False), batch_norm="eval")
    with pytest.raises(UserError, match="batch_norm:"):
        dpdist.prepare(nn.Linear(2, 2), batch_norm="layer")
