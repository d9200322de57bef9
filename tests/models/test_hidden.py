"""The cut behind the first layer, and the noise that a model carries there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpdist import models
from dpdist.errors import UserError
from dpdist.models import ModelSpec

CNN = ModelSpec("hgm-cnn", (2, 8, 8), 3, {"filters": [4], "kernels": [3], "strides": [2]})
SPECS = [
    CNN,
    ModelSpec("hgm-cnn", (2, 8, 8), 3, CNN.options, mean=(0.2, 0.4), std=(0.5, 2.0)),
    ModelSpec("mlp", (2, 4, 4), 3, {"hidden": [6]}, mean=(0.1,), std=(0.5, 2.0)),
]


@pytest.mark.parametrize("spec", SPECS, ids=["cnn", "normalised", "dense"])
def test_the_cut_is_the_model_and_its_first_part_is_affine(spec: ModelSpec) -> None:
    model = models.initialise(spec, 0).eval()
    split = models.require_split(model)
    x = torch.rand(5, *spec.input_shape)
    assert torch.equal(split.rest(split.first(x)), model(x))
    assert dict(model.named_modules())[split.name] is split.layer
    # The first part as one linear map in input units, against its Jacobian.
    layer = split.affine(spec.input_shape)
    jacobian = torch.autograd.functional.jacobian(lambda v: split.first(v[None])[0], x[0])
    direction = torch.rand(spec.input_shape)
    moved = (jacobian * direction).flatten(-len(spec.input_shape)).sum(-1)
    still = torch.zeros_like(direction)[None]
    flat = isinstance(layer, nn.Linear)
    shift = layer(direction[None].flatten(1) if flat else direction[None])
    shift = shift - layer(still.flatten(1) if flat else still)
    assert torch.allclose(shift[0], moved, atol=1e-5)


def test_a_model_that_sees_its_input_twice_is_not_cut() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + x

    assert models.split_first(Skip()) is None
    assert models.split_first(nn.Sequential(nn.ReLU(), nn.Linear(4, 4))) is None
    with pytest.raises(UserError, match="sequence of layers"):
        models.attach_noise(Skip(), torch.ones(4))


def test_noise_is_saved_and_loaded_with_the_weights(tmp_path) -> None:
    model = models.initialise(CNN, 1)
    std = torch.rand(4, 4, 4) + 0.1
    assert models.hidden_noise(model) is None
    models.attach_noise(model, std)
    spec = ModelSpec(**{**CNN.__dict__, "hidden_noise": True})
    models.save(model, spec, tmp_path)
    loaded = models.load(tmp_path)
    noise = models.hidden_noise(loaded)
    assert noise is not None and noise.module == "0" and torch.equal(noise.std, std)
    assert noise.scale == pytest.approx(float(std.double().square().mean().sqrt()))
    assert torch.allclose(noise.scale * noise.shares.sqrt(), std.double())
    # Plain passes draw nothing, so that whoever needs noise must ask for it.
    x = torch.rand(3, 2, 8, 8)
    assert torch.equal(loaded(x), models.initialise(CNN, 1).eval()(x))
    # Another noise is another model to whoever names it by its hash.
    first = models.model_hash(tmp_path)
    models.attach_noise(model, 2 * std)
    models.save(model, spec, tmp_path)
    assert models.model_hash(tmp_path) != first
    # Its weights alone may start a model without noise.
    plain = models.initialise(CNN, 5)
    models.load_weights(plain, tmp_path)
    assert torch.equal(plain(x), loaded(x))
