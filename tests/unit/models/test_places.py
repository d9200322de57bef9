"""The places of a model's noise: stored with it, drawn alike by everybody, keyed by record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from support.networks import Of
from torch import Tensor, nn

from dpdist import models
from dpdist.attacks.gradient_attacks import RandomizedClassifier, loss_gradient
from dpdist.attacks.job import choose_backend, count_answers, counting_assignment
from dpdist.certification.cohen import Cohen
from dpdist.certification.predict import Predictor
from dpdist.certification.registry import settings_of
from dpdist.certification.worker import build_checked_counter, expected_log_scores
from dpdist.core.errors import UserError
from dpdist.gradients.perturbations import ModulePerturbation, standard_normal_per_record
from dpdist.models import BlockNoise, ModelSpec, find_batch_dependence
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import (
    InputNoise,
    ModuleNoise,
    NoNoise,
    find_noise_location,
)
from dpdist.randomness.noisy_modules import MODES

SHAPE, SOURCE = (1, 6, 6), StreamKeys("test", "1", "m", "d", "", 1.0)
SPEC = ModelSpec("small-cnn", SHAPE, 3, {"width": 4})
STDS = {"1": 0.25, "0": 0.5}  # not in the order in which they run


def model_with(place: ModuleNoise, spec: ModelSpec = SPEC) -> tuple[nn.Module, ModelSpec]:
    model = models.initialize(spec, 0)
    place.attach(model)
    return model.eval(), replace(
        spec, block_noise=BlockNoise(tuple(place.stds), place.mode, place.floor)
    )


def by_hand(model: nn.Module, place: ModuleNoise, x: Tensor, normals: Tensor) -> Tensor:
    """One draw of one record, layer by layer."""
    shapes = {"input": x.shape, **{n: model[: int(n) + 1](x).shape for n in place.stds}}
    parts = normals.split([s.numel() for s in shapes.values()])
    noise = {k: p.view(s) for (k, s), p in zip(shapes.items(), parts, strict=True)}
    h = x + place.input_std * noise["input"]
    for number, layer in enumerate(model):
        h = layer(h)
        if (name := str(number)) in place.stds:
            std, n = place.stds[name], noise[name]
            if place.mode == "multiplicative":
                h = h + std * h.sign() * h.abs().clamp_min(place.floor) * n
            else:
                h = h + std * n * (h.std(correction=0) if place.mode == "relative" else 1)
    return h


@pytest.mark.parametrize(
    ("mode", "floor"), [*((mode, 0.0) for mode in MODES), ("multiplicative", 0.5)]
)
def test_a_draw_is_the_network_with_noise_in_its_places(mode: str, floor: float) -> None:
    place = ModuleNoise(STDS, mode, 0.3, floor)
    model, _ = model_with(place)
    x, shape = torch.rand(5, *SHAPE), place.normals_shape(model, SHAPE)
    normals = torch.randn(5, *shape)
    got = place.logits(model, x, normals)
    for row in range(5):
        want = by_hand(model, place, x[row : row + 1], normals[row])
        assert torch.allclose(got[row : row + 1], want, atol=1e-6)
    assert torch.equal(place.logits(model, x, None), model(x))  # no hook stays
    assert not torch.allclose(got, model(x), atol=1e-2)
    # The network behind the noise treats each record alone, wherever it stands in a batch.
    cut = place.split(model, SHAPE)
    assert find_batch_dependence(cut.after_noise, cut.before_noise(x) + cut.std * normals) is None


def test_noise_in_several_places_is_saved_with_the_model(tmp_path: Path) -> None:
    place = ModuleNoise(STDS, "relative", 0.3, 0.1)
    model, spec = model_with(place)
    models.save(model, spec, tmp_path)
    loaded = models.load(tmp_path)
    assert models.read_spec(tmp_path) == spec and spec.has_noise
    assert find_noise_location(loaded) == place
    assert list(find_noise_location(loaded).stds) == list(STDS)
    plain = models.build_model(SPEC)
    models.load_weights(plain, tmp_path)  # its weights serve a model without noise
    assert isinstance(find_noise_location(plain), NoNoise)


@pytest.mark.parametrize("place", [InputNoise(0.5), ModuleNoise(STDS, "relative", 0.3)], ids=str)
def test_an_evaluated_input_has_noise_of_its_own_wherever_it_stands(place) -> None:
    model, x = models.initialize(SPEC, 0).eval(), torch.rand(6, *SHAPE)
    if not place.is_random or not place.has_inner_noise:
        place = ModuleNoise({}, input_std=place.sigma)
    place.attach(model)
    whole = expected_log_scores(model, x, 4, "seed")
    part = expected_log_scores(model, x[2:5], 4, "seed", first_index=2)
    assert torch.allclose(part, whole[2:5], atol=1e-6)
    same = expected_log_scores(model, x[:1].expand(2, -1, -1, -1), 4, "seed")
    assert not torch.allclose(same[0], same[1], atol=1e-3)  # two inputs, two noises
    assert not torch.allclose(expected_log_scores(model, x, 4, "other"), whole, atol=1e-3)


# ---- a network whose smoothed answer is known: class 1 iff 2 x0 + pi n + s m > 1


PI, INNER, X = 0.5, 1.5, torch.tensor([0.8])
P = stats.norm.cdf((2 * 0.8 - 1) / np.hypot(2 * PI, INNER))
QUIETER = stats.norm.cdf((2 * 0.8 - 1) / (2 * PI))


def threshold() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2))
    with torch.no_grad():
        for layer, weight, bias in ((model[0], [[2.0]], [-1.0]), (model[1], [[-1.0], [1.0]], 0.0)):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))
    ModuleNoise({"0": INNER}, input_std=PI).attach(model)
    return model.eval()


def likely(hits: int, draws: int) -> None:
    """Two-sided exact test, false failure 1e-5; without the inner noise it is rejected."""
    assert stats.binomtest(hits, draws, P).pvalue > 1e-5
    assert stats.binomtest(hits, draws, QUIETER).pvalue < 1e-5


@pytest.mark.parametrize("form", ["eager", "frozen"])
def test_input_noise_with_noise_behind_it_is_certified_by_both(form: str) -> None:
    model = threshold()
    sigma = find_noise_location(model).smoothing_sigma
    settings = Cohen(sigma=sigma, n=80_000, n0=1000, alpha=1e-6, backend=form)
    verdict = Predictor(model, settings, 2, (1,)).certify(X)
    assert (verdict.prediction, verdict.n) == (1, 80_000)
    likely(verdict.k, verdict.n)
    # A certified radius is a true one: the boundary is 0.3 away. Neither noise alone reaches that.
    # Fresh noise: false failure 1e-6.
    assert PI * stats.norm.ppf(P) < 0.8 * 0.3 < verdict.radius < 0.3
    with pytest.raises(UserError):
        settings.model_copy(update={"noise": "laplace"}).build_sampler(model, (1,))
    with pytest.raises(UserError):
        Predictor(model, settings_of({"sigma": None, "n": 100}), 2, (1,))


@pytest.mark.parametrize(
    "place", [find_noise_location(threshold()), ModuleNoise({"0": np.hypot(2 * PI, INNER)})]
)
def test_an_attack_counts_and_differentiates_under_all_the_noise(place: ModuleNoise) -> None:
    counted = counting_assignment(threshold(), place, 2, X.numpy()[None], SOURCE, n=20_000)
    spec = choose_backend(counted)
    counter = build_checked_counter(replace(counted, spec=spec)).for_purpose("a")
    likely(int(count_answers(counter, X, 0, "s", 20_000, spec.batch)[1]), 20_000)
    classifier = RandomizedClassifier(counted.model, place)
    normals = torch.randn(4, *classifier.noise_shape((1,)))
    x = X.expand(4, 1)
    logits = classifier.logits(x, normals)
    own = X + place.input_std * normals[:, :1]
    want = 2 * own - 1 + place.stds["0"] * normals[:, 1:]
    assert torch.allclose(logits, torch.cat([-want, want], 1), atol=1e-6)
    assert loss_gradient(classifier, X[None], torch.tensor([1]), normals)[0, 0] < 0
    assert place.with_input_noise(0.25) == replace(place, input_std=0.25)


def torn(model: nn.Module, x: Tensor) -> Tensor:
    """Two classes that only the order of a sum tells apart: as executed, the other one leads."""
    last = 1e-6 * (1 if torch.jit.is_tracing() else -1)
    return torch.cat([1 + 0 * x, 1 + 0 * x + last], 1)


def test_an_attack_executes_the_form_that_was_certified() -> None:
    """And its workers are held to the answers of that form, ties included."""
    counted = counting_assignment(Of(torn), InputNoise(0.25), 2, X.numpy()[None], SOURCE, n=100)
    spec = choose_backend(counted)
    for form, leads in (("frozen", 1), ("eager", 0)):
        fixed = choose_backend(counted, replace(spec, backend=form, generator="philox"))
        assert (fixed.backend, fixed.generator) == (form, "aes")  # what an attack draws by
        counter = build_checked_counter(replace(counted, spec=fixed))
        assert count_answers(counter, X, 0, "s", 100, spec.batch)[leads] == 100


# ---- training draws the same


def test_training_and_prediction_put_noise_alike() -> None:
    place, key, ids = ModuleNoise(STDS, "relative", 0.3), b"k" * 32, torch.tensor([7, 3])
    model, _ = model_with(place)
    draws, x = ModulePerturbation(2, place), torch.rand(2, *SHAPE)
    sizes = [36, *(model[: int(n) + 1](x)[0].numel() for n in STDS)]
    purposes = ["draws/inputs", "draws/block/0", "draws/block/1"]
    normals = torch.cat(
        [
            standard_normal_per_record(key, purpose, 1, ids, size)
            for purpose, size in zip(purposes, sizes, strict=True)
        ],
        1,
    )
    h = model[0](draws.perturb_inputs(x, ids, key, 1))
    h = model[1](draws.perturb_output(h, ids, key, 1, 1))
    h = model[2:](draws.perturb_output(h, ids, key, 1, 0))
    assert torch.allclose(h, place.logits(model, x, normals), atol=1e-6)
    # Row b depends on record b: alone, and beside a record of another size.
    outputs = torch.stack([torch.rand(4), 100 * torch.rand(4)])
    together = draws.perturb_output(outputs, ids, key, 0)
    assert torch.equal(draws.perturb_output(outputs[:1], ids[:1], key, 0), together[:1])
    assert torch.equal(draws.perturb_output(outputs.flip(0), ids.flip(0), key, 0), together.flip(0))
    constant = torch.ones(2, 4, requires_grad=True)
    draws.perturb_output(constant, ids, key, 0).sum().backward()
    assert bool(constant.grad.isfinite().all())
