"""The cut behind the first layer, and the noise that a model carries there."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.networks import Of
from torch import nn

from dpdist import models
from dpdist.certification.worker import first_layer_sensitivity
from dpdist.core.errors import UserError
from dpdist.models import ModelSpec
from dpdist.models.noise import first_layer_norm_bound, project_first_layer_norm
from dpdist.models.zoo import NormalizedNetwork
from dpdist.randomness.noise_location import HiddenNoise, find_noise_location

CNN = ModelSpec("hgm-cnn", (2, 8, 8), 3, {"filters": [4], "kernels": [3], "strides": [2]})
SPECS = [
    CNN,
    ModelSpec("hgm-cnn", (2, 8, 8), 3, CNN.options, mean=(0.2, 0.4), std=(0.5, 2.0)),
    ModelSpec("mlp", (2, 4, 4), 3, {"hidden": [6]}, mean=(0.1,), std=(0.5, 2.0)),
]


@pytest.mark.parametrize("spec", SPECS, ids=["cnn", "normalized", "dense"])
def test_the_cut_is_the_model_and_its_first_part_is_affine(spec: ModelSpec) -> None:
    model = models.initialize(spec, 0).eval()
    split = models.require_split(model)
    x = torch.rand(5, *spec.input_shape)
    assert torch.equal(split.rest(split.first(x)), model(x))
    assert dict(model.named_modules())[split.name] is split.layer
    # The first part as one linear map in input units, against its Jacobian.
    layer = split.affine_layer(spec.input_shape)
    jacobian = torch.autograd.functional.jacobian(lambda v: split.first(v[None])[0], x[0])
    direction = torch.rand(spec.input_shape)
    moved = (jacobian * direction).flatten(-len(spec.input_shape)).sum(-1)
    still = torch.zeros_like(direction)[None]
    flat = isinstance(layer, nn.Linear)
    direction = direction.double()
    shift = layer(direction[None].flatten(1) if flat else direction[None])
    shift = shift - layer(still.flatten(1).double() if flat else still.double())
    assert torch.allclose(shift[0], moved.double(), atol=1e-5)


def test_a_model_that_sees_its_input_twice_is_not_cut() -> None:
    skip = Of(lambda m, x: m.layer(x) + x, layer=nn.Linear(4, 4))
    assert models.split_after_first_layer(skip) is None
    assert models.split_after_first_layer(nn.Sequential(nn.ReLU(), nn.Linear(4, 4))) is None
    with pytest.raises(UserError):
        models.attach_noise(skip, torch.ones(4))


class Wider(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 330 * super().forward(x)


def dense(layer: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), layer or nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))


def twice() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(16, 3))


REFUSED = {
    "dense subclass": lambda: dense(Wider(16, 6)),
    "used twice": twice,
    "reflecting padding": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten()
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_first_layer_that_computes_something_else_is_refused(name: str) -> None:
    model = REFUSED[name]().eval()
    assert models.split_after_first_layer(model) is None
    with pytest.raises(UserError):
        models.require_split(model)


def test_what_the_cut_does_not_see_is_found_by_numbers() -> None:
    model = dense().eval()
    split = models.require_split(model)
    assert isinstance(split.affine_layer((1, 4, 4)), nn.Linear)
    with torch.no_grad():
        other = dataclasses.replace(split, first=nn.Sequential(split.first, nn.ReLU()))
        with pytest.raises(UserError):
            other.affine_layer((1, 4, 4))
        other = dataclasses.replace(split, rest=nn.Sequential(nn.ReLU(), nn.ReLU(), model[3]))
        other.affine_layer((1, 4, 4))  # the same function
        other = dataclasses.replace(split, rest=nn.Sequential(nn.Tanh(), model[3]))
        with pytest.raises(UserError):
            other.affine_layer((1, 4, 4))
    # A dense layer along the last dimension of an image is not the dense layer of its pixels.
    rows = nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(8, 3)).eval()
    with pytest.raises(UserError):
        models.require_split(rows).affine_layer((1, 4, 4))


NORMALIZED = {
    "nested": lambda layer: NormalizedNetwork(
        NormalizedNetwork(layer, constant(0.0), constant(0.01)),
        constant(0.5, 0.4),
        constant(0.3, 2.0),
    ),
    "inside": lambda layer: nn.Sequential(
        NormalizedNetwork(nn.Identity(), constant(0.1), constant(0.05)),
        NormalizedNetwork(layer, constant(0.2), constant(0.2)),
    ),
}


def constant(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


@pytest.mark.parametrize(("name", "kind"), [("nested", "dense"), ("inside", "convolution")])
def test_norms_are_of_the_normalized_first_layer(name: str, kind: str) -> None:
    """Every norm that noise is measured by, against the Jacobian of the model's own first part."""
    torch.manual_seed(0)
    shape = (2, 4, 4)
    layer: nn.Module = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    if kind == "dense":
        layer = nn.Sequential(nn.Flatten(), nn.Linear(32, 5))
    model = nn.Sequential(NORMALIZED[name](layer), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, *shape))
    split = models.require_split(model.eval())
    jacobian = torch.autograd.functional.jacobian(
        lambda v: split.first(v[None])[0], torch.rand(shape)
    )
    matrix = jacobian.reshape(-1, 32).double()
    spectral = float(torch.linalg.matrix_norm(matrix, 2))
    std = torch.full(split.hidden_shape(shape), 0.7)
    norms = first_layer_sensitivity(split, HiddenNoise(split.name, std), shape)
    assert norms.l2 == pytest.approx(spectral, rel=1e-5)
    rows = matrix.abs().sum(1).norm()
    assert norms.linf == pytest.approx(min(float(rows), 32**0.5 * spectral), rel=1e-5)
    # The bound that training keeps is of the same map.
    assert first_layer_norm_bound(split) >= spectral * (1 - 1e-6)
    project_first_layer_norm(split, 1.0)
    again = torch.autograd.functional.jacobian(lambda v: split.first(v[None])[0], torch.rand(shape))
    assert float(torch.linalg.matrix_norm(again.reshape(-1, 32), 2)) <= 1 + 1e-5


def test_noise_is_saved_and_loaded_with_the_weights(tmp_path) -> None:
    model = models.initialize(CNN, 1)
    std = torch.rand(4, 4, 4) + 0.1
    assert not find_noise_location(model).is_random
    models.attach_noise(model, std)
    spec = ModelSpec(**{**CNN.__dict__, "hidden_noise": True})
    models.save(model, spec, tmp_path)
    loaded = models.load(tmp_path)
    noise = find_noise_location(loaded).as_first_layer_noise()
    assert noise is not None and noise.module == "0" and torch.equal(noise.std, std)
    assert noise.rms_std == pytest.approx(float(std.double().square().mean().sqrt()))
    assert torch.allclose(noise.rms_std * noise.relative_variances.sqrt(), std.double())
    # Another noise is another model to whoever names it by its hash.
    first = models.model_hash(tmp_path)
    models.attach_noise(model, 2 * std)
    models.save(model, spec, tmp_path)
    assert models.model_hash(tmp_path) != first
    # Its weights alone may start a model without noise.
    plain, x = models.initialize(CNN, 5), torch.rand(3, 2, 8, 8)
    models.load_weights(plain, tmp_path)
    assert torch.equal(plain(x), loaded(x))
