"""Perturbations: their distribution, their keys, and the clip of the average over them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from support.networks import Of, cross_entropy
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.perturbations import (
    CropAndFlip,
    HiddenPerturbation,
    InputPerturbation,
    ModulePerturbation,
    ParameterPerturbation,
    Perturbation,
    standard_normal_per_record,
    standard_normal_shared,
)
from dpdist.papers.secure_sgd.shares import FixedHiddenPerturbation
from dpdist.randomness.noise_location import ModuleNoise

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
IDS = torch.tensor([17, 4, 901, 33, 250])


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.rand(5, 1, 6, 6, generator=generator), torch.tensor([0, 1, 2, 1, 0])


def flat_gradient(model: nn.Module, values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    loss = cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None]).sum()
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(values.values()))])


def expected_sum(model: nn.Module, draws: Perturbation, clip_norm: float) -> Tensor:
    """By the definition: autograd on every (record, draw), averaged or summed, then clipped."""
    inputs, targets = batch()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    total = 0.0
    for i in range(len(inputs)):
        gradient = 0.0
        for k in range(draws.count):
            values, x, ids = parameters, inputs[i], IDS[i : i + 1]
            if isinstance(draws, ParameterPerturbation):
                if draws.per_example:
                    own = draws.perturb_parameters_per_example(parameters, ids, KEY, k)
                    values = {name: value[0] for name, value in own.items()}
                else:
                    values = draws.perturb_parameters(parameters, KEY, k)
            x = draws.perturb_inputs(x[None], ids, KEY, k)[0]
            hooks = [
                model.get_submodule(name).register_forward_hook(
                    lambda _m, _a, out, ids=ids, k=k, i=i: draws.perturb_output(out, ids, KEY, k, i)
                )
                for i, name in enumerate(draws.hidden_modules)
            ]
            gradient = gradient + flat_gradient(model, values, x, targets[i])
            for hook in hooks:
                hook.remove()
        gradient = gradient * (draws.count**-1 if draws.aggregate == "mean" else 1)
        total = total + gradient * min(1.0, clip_norm / float(gradient.norm()))
    return total


ALL_DRAWS = [
    ParameterPerturbation(4, 0.1, aggregate="sum"),
    ParameterPerturbation(3, 0.1, input_std=0.5),
    ParameterPerturbation(2, 0.1, per_example=True, input_std=0.5),
    InputPerturbation(8, torch.linspace(0, 1, 6)),
    HiddenPerturbation(3, "3", 0.5),
    ModulePerturbation(3, ModuleNoise({"1": 0.5, "3": 0.2}, input_std=0.3)),
    ModulePerturbation(2, ModuleNoise({"1": 0.5, "3": 0.2}, "multiplicative", floor=0.1)),
    ModulePerturbation(2, ModuleNoise({"3": 0.5, "1": 0.2}, "relative"), aggregate="sum"),
]


@pytest.mark.parametrize("draws", ALL_DRAWS, ids=lambda d: f"{type(d).__name__}-{d.aggregate}")
@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
def test_the_average_over_draws_is_what_is_clipped(draws, clip_norm):
    model = network()
    engine = GradientEngine(
        model, cross_entropy, clipping=FlatClipping(clip_norm), perturbation=draws, micro_batch=2
    )
    inputs, targets = batch()
    result = engine.clipped_sum(inputs, targets, draw_key=KEY, record_ids=IDS)
    expected = expected_sum(model, draws, clip_norm)
    torch.testing.assert_close(
        result.flat.float(), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max())
    )


def test_an_input_that_is_changed_in_place_is_refused():
    """The product of all draws would be of another input than the first draw saw."""

    brighter = Of(lambda m, x: m.layer(x.detach().add_(0.1).flatten(1)), layer=nn.Linear(36, 3))
    engine = GradientEngine(
        brighter, cross_entropy, clipping=FlatClipping(0.1), micro_batch=5,
        perturbation=ParameterPerturbation(3, 0.1),
    )  # fmt: skip
    with pytest.raises(UserError):
        engine.clipped_sum(*batch(), draw_key=KEY, record_ids=IDS)


# ---- the distribution of the noise. Fixed keys: these tests are deterministic; for a random key
# each would fail with probability below 1e-6 for a right generator.


def kolmogorov(sample: np.ndarray, std: float) -> float:
    return stats.kstest(sample, "norm", args=(0.0, std)).pvalue


@pytest.mark.parametrize("kind", ["shared", "record"])
def test_standard_normal_and_not_two_thirds_or_three_halves_of_it(kind):
    if kind == "shared":
        sample = standard_normal_shared(KEY, "test", 0, 200_000).numpy()
    else:
        sample = standard_normal_per_record(KEY, "test", 0, torch.arange(2000), 100).numpy().ravel()
    assert kolmogorov(sample, 1.0) > 1e-6
    for wrong in (2 / 3, 3 / 2):
        assert kolmogorov(sample, wrong) < 1e-6


def test_records_draws_purposes_and_keys_are_independent():
    first = standard_normal_per_record(KEY, "test", 0, torch.tensor([5, 6]), 50_000)
    others = [
        first[1],
        standard_normal_per_record(KEY, "test", 1, torch.tensor([5]), 50_000)[0],
        standard_normal_per_record(KEY, "other", 0, torch.tensor([5]), 50_000)[0],
        standard_normal_per_record(OTHER_KEY, "test", 0, torch.tensor([5]), 50_000)[0],
        standard_normal_shared(KEY, "test", 0, 50_000),
        standard_normal_per_record(KEY, "test", 0, torch.tensor([5 + 2**32]), 50_000)[0],
    ]
    for other in others:
        # |correlation| of independent samples exceeds 5/sqrt(n) with probability 6e-7.
        assert abs(float((first[0] * other).mean())) < 5 / math.sqrt(50_000)


def test_the_input_and_each_module_get_noise_of_their_own():
    draws = ModulePerturbation(1, ModuleNoise({"a": 1.0, "b": 1.0}, input_std=1.0))
    nothing, ids = torch.zeros(1, 50_000), IDS[:1]
    made = [draws.perturb_output(nothing, ids, KEY, 0, module) for module in (0, 1)]
    made.append(draws.perturb_inputs(nothing, ids, KEY, 0))
    off = np.corrcoef(torch.cat(made)) - np.eye(3)
    assert np.abs(off).max() < 5 / math.sqrt(50_000)


def test_parameter_noise_has_the_asked_scale():
    values = {"a": torch.ones(300, 300)}
    noisy = ParameterPerturbation(1, 0.3).perturb_parameters(values, KEY, 0)
    assert kolmogorov((noisy["a"] - 1).numpy().ravel(), 0.3) > 1e-6


# ---- crop and flip


def test_one_hidden_noise_is_the_run_s_and_of_its_scale():
    std = torch.linspace(0.1, 5, 400).view(4, 100)
    draws = FixedHiddenPerturbation("0", std, KEY)
    once = draws.perturb_output(torch.zeros(3, 4, 100), IDS[:3], OTHER_KEY, 0)
    normals = standard_normal_shared(KEY, "draws/one-hidden", 0, 400).view(4, 100)
    torch.testing.assert_close(once, (std * normals).float().expand(3, -1, -1))
    assert torch.equal(once, draws.perturb_output(torch.zeros(3, 4, 100), IDS[2:], KEY, 1))


def test_a_copy_is_of_record_key_and_draw():
    """In whatever company and place, on whichever worker; and it is one of the possible copies."""
    changed, ids = CropAndFlip(2, flip=True), torch.arange(40) * 7
    images = torch.rand(40, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    first = changed(images, ids, KEY, 0)
    some = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:9]
    assert torch.equal(changed(images[some], ids[some], KEY, 0), first[some])
    for key, draw in ((KEY, 1), (OTHER_KEY, 0)):
        same = (changed(images, ids, key, draw) == first).flatten(1).all(1)
        assert int(same.sum()) < 10  # of 40, each with probability 1/50
    padded = F.pad(images, [2] * 4)
    places = set()
    for image, copy in zip(padded, first, strict=True):
        windows = {
            (y, x, f): window.flip(2) if f else window
            for y in range(5)
            for x in range(5)
            for window in [image[:, y : y + 5, x : x + 7]]
            for f in (False, True)
        }
        places |= {place for place, window in windows.items() if torch.equal(window, copy)}
    assert {y for y, _, _ in places} == {x for _, x, _ in places} == set(range(5))
    assert {f for *_, f in places} == {False, True}


@pytest.mark.parametrize(
    "draws", [Perturbation(), InputPerturbation(2, 0.5)], ids=lambda d: type(d).__name__
)
def test_an_augmented_record_adds_its_own_gradient_whatever_the_batch(draws):
    """So one record more or less changes the sum by its clipped gradient: the neighbor's bound."""
    engine = GradientEngine(
        network(), cross_entropy, clipping=FlatClipping(0.1), perturbation=draws
    )
    engine.augmentation = CropAndFlip(2, flip=True)
    inputs, targets = batch()

    def of(*rows: int) -> Tensor:
        chosen = list(rows)
        return engine.clipped_sum(
            inputs[chosen], targets[chosen], draw_key=KEY, record_ids=IDS[chosen]
        ).flat

    added = of(4, 2, 0, 1, 3) - of(1, 2, 0, 4)
    torch.testing.assert_close(added, of(3), rtol=1e-4, atol=1e-6)
    assert float(added.norm()) <= 0.1
    with pytest.raises(UserError):
        engine.clipped_sum(inputs, targets, draw_key=KEY)


# ---- mistakes


def test_noise_behind_a_layer_without_a_rule_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 3))
    place = ModuleNoise({"0": 0.1, "1": 0.1})
    for draws in (HiddenPerturbation(1, "1", 0.1), ModulePerturbation(1, place)):
        with pytest.raises(UserError, match="layer 1"):
            GradientEngine(model, cross_entropy, clipping=FlatClipping(0.1), perturbation=draws)
