"""A denoiser before a frozen classifier, as one model; torchvision classifiers made fit for it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.optional_imports import import_torchvision
from dpdist.models import ModelSpec
from dpdist.models.zoo import (
    FixedBatchNorm,
    batch_statistics,
    replace_batch_norm_and_dropout,
    torchvision_classifier,
)

CLASSIFIER = ModelSpec("small-cnn", (1, 8, 8), 10, {"width": 4}, mean=(0.5,), std=(0.25,))
SPEC = ModelSpec("conv-autoencoder", (1, 8, 8), 10, {"channels": [4]}, classifier=CLASSIFIER)


def test_the_whole_is_the_classifier_of_the_denoised_image(tmp_path):
    model = models.initialize(SPEC, 0)
    x = torch.rand(5, 1, 8, 8)
    denoiser = model.get_submodule(models.DENOISER)
    classifier = model.get_submodule(models.CLASSIFIER)
    assert torch.equal(model(x), classifier(denoiser(x)))
    assert all(p.requires_grad for p in denoiser.parameters())
    assert not any(p.requires_grad for p in classifier.parameters())
    models.check_outputs(model, SPEC)
    models.save(model, SPEC, tmp_path)
    assert models.read_spec(tmp_path) == SPEC
    assert torch.equal(models.load(tmp_path)(x), model.eval()(x))


@pytest.mark.parametrize(
    "name, options", [("conv-autoencoder", {"residual": True}), ("dncnn", {"depth": 4, "width": 8})]
)
def test_residual_denoisers_begin_at_the_identity(name, options):
    denoiser = models.build_model(ModelSpec(name, (3, 8, 8), 10, options))
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(denoiser(x), x)
    nn.init.ones_(list(denoiser.parameters())[-1])  # the last bias: predicts noise of one
    assert torch.allclose(denoiser(x), x - 1)


def test_each_level_of_a_u_net_sees_half_the_side_and_adds_to_the_one_above():
    spec = ModelSpec("unet", (3, 16, 8), 10, {"channels": [4, 5]})
    outer, x = models.initialize(spec, 0), torch.rand(2, 3, 16, 8)
    inner = outer.inner
    with torch.no_grad():
        half = outer.down(x).relu()
        quarter = inner.down(half).relu()
        assert half.shape == (2, 4, 8, 4) and quarter.shape == (2, 5, 4, 2)
        half = (half + inner.up((quarter + inner.same(quarter)).relu())).relu()
        torch.testing.assert_close(outer(x), outer.up((half + outer.same(half)).relu()))
    assert outer.down.kernel_size == (6, 6) and inner.down.kernel_size == (4, 4)
    one = models.build_model(ModelSpec("unet", (1, 8, 8), 10, {"channels": [4], "kernel": 2}))
    assert one(torch.rand(1, 1, 8, 8)).shape == (1, 1, 8, 8)


def test_a_strangers_classifier_is_not_imported_either(tmp_path):
    model = models.initialize(SPEC, 0)
    models.save(model, SPEC, tmp_path)
    path = tmp_path / "model.json"
    described = json.loads(path.read_text())
    described["classifier"]["name"] = "evil:factory"
    path.write_text(json.dumps(described))
    with pytest.raises(UserError, match="evil:factory"):
        models.load(tmp_path)


def test_torchvision_networks_equal_their_originals_in_eval_mode():
    torch.manual_seed(0)
    original = import_torchvision("models").get_model(
        "mobilenet_v3_small", weights=None, num_classes=7
    )
    with torch.no_grad():  # statistics that are not the initial ones
        original.train()(torch.rand(8, 3, 32, 32))
    ours = torchvision_classifier((3, 32, 32), 7, architecture="mobilenet_v3_small")
    state = {k: v for k, v in original.state_dict().items() if "num_batches" not in k}
    ours.load_state_dict(state)
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        expected = original.eval()(x)
        # In both modes: nothing in it draws or mixes examples.
        for mode in (True, False):
            assert torch.allclose(ours.train(mode)(x), expected, atol=1e-5)
        assert torch.allclose(ours(x[:1]), expected[:1], atol=1e-5)
    assert any(isinstance(m, FixedBatchNorm) for m in ours.modules())
    assert not any(isinstance(m, nn.Dropout | nn.BatchNorm2d) for m in ours.modules())


def test_statistics_are_estimated_only_when_asked():
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    ours = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    ours.load_state_dict(theirs.state_dict())
    replace_batch_norm_and_dropout(ours)
    x = 3 + torch.randn(16, 3, 6, 6)
    before = ours[1].running_mean.clone()
    ours(x)
    assert torch.equal(ours[1].running_mean, before)
    with batch_statistics(ours):
        assert torch.allclose(ours(x), theirs.train()(x), atol=1e-5)
    assert torch.allclose(ours[1].running_var, theirs[1].running_var)
    assert torch.allclose(ours(x), theirs.eval()(x), atol=1e-5)
