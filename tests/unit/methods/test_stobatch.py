"""Sound StoBatch: adversarial examples inside each record's clip, through the model's own noise.

One record less changes no other record's example or gradient, and the sum by at most C, whichever
attack each record gets. What would break that (attacks chosen by place, labels that leak, a size
taken from the batch) is planted, and must be found.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.threads import one_thread_each  # noqa: F401
from support.training import execute, make
from torch import Tensor, nn

from dpdist import models
from dpdist.attacks.gradient_attacks import Ball, distance
from dpdist.certification.worker import combined_noise_of_model
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.sampling import Blocks
from dpdist.methods.base import MethodState
from dpdist.models import ModelSpec
from dpdist.papers.stobatch.stobatch import StoBatch
from dpdist.papers.stobatch.stobatch_draws import AdversarialDraws
from dpdist.randomness.noise_location import (
    HiddenNoise,
    ModuleNoise,
    NoNoise,
    find_noise_location,
)
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.training.job import prepare

SPEC = ModelSpec("small-cnn", (1, 8, 8), 3, {"width": 4})
C, ROWS = 0.2, 12


def network() -> nn.Module:
    """Confident enough that an attack moves its answers."""
    model = models.initialize(SPEC, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def draws_of(model: nn.Module, **options) -> AdversarialDraws:
    method = StoBatch(**{"size": (0.1, 0.3), "steps": 3, **options})
    draws = method.execution().perturbation(None, 0.1, MethodState(model))  # type: ignore[arg-type]
    assert isinstance(draws, AdversarialDraws)
    return draws


def engine_of(model: nn.Module, draws: AdversarialDraws) -> GradientEngine:
    """In keyed blocks and passes of one shape, as a run has it."""
    engine = GradientEngine(
        model, cross_entropy, clipping=FlatClipping(C), perturbation=draws, micro_batch=ROWS,
        blocks=Blocks(2, ROWS),
    )  # fmt: skip
    engine._checked = True
    return engine


def batch(size: int = 20, seed: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(size, 1, 8, 8, generator=generator)
    targets = torch.randint(0, 3, (size,), generator=generator)
    return inputs, targets, torch.randperm(1000, generator=generator)[:size]


def key(number: int) -> bytes:
    return bytes([number]) * 32


# ---- what an example is


@pytest.mark.parametrize(("norm", "size"), [("linf", (0.1, 0.3)), ("l2", (1.0, 2.0))])
def test_examples_lie_in_their_ball_and_lead_away_from_the_predicted_class(norm, size) -> None:
    draws = draws_of(network(), norm=norm, size=size, split=0.5, sensitivity=2.0, eot=2)
    inputs, _, ids = batch(40)
    found = draws.adversarial_examples(inputs, ids, key(1))
    mu = draws.attack_size(key(1))
    moved = distance(found.numpy(), inputs.numpy(), norm)
    assert (moved <= mu).all() and np.median(moved) > 0.6 * mu
    assert float(found.min()) >= 0 and float(found.max()) <= 1
    # Judged by fresh noise: the predicted class is lost far more often than by random points.
    normals = torch.randn(40, *draws.classifier.noise_shape((1, 8, 8)))
    own = draws._noise(inputs, ids, key(1))
    predicted = draws._predicted(inputs, own)
    ball = Ball(inputs, torch.full((40,), mu, dtype=torch.float64), norm)
    chance = ball.project_to_float32(draws._random_points(ball, ids, key(2)))

    def kept(points: Tensor) -> float:
        answers = draws.classifier.logits(points, normals).argmax(1)
        return float((answers == predicted).double().mean())

    assert kept(found) < kept(inputs) - 0.15 and kept(found) < kept(chance) - 0.1


# ---- of one record alone


def gradients(engine: GradientEngine, inputs, targets, ids, draw_key) -> dict[int, Tensor]:
    """Each record's clipped gradient, as the engine adds it to the sum."""
    found: dict[int, Tensor] = {}

    for rows, real in engine.iter_passes(len(inputs), draw_key, ids):
        own, _ = engine._per_example_gradients(inputs[rows], targets[rows], draw_key, ids[rows], {})
        table = sum(gradient.squared_norms() for gradient in own)
        factors = engine.clipping.factors(table[None], 0.0)[0]
        for place in torch.arange(len(rows))[real]:
            flat = [torch.zeros(p.shape, dtype=torch.float64) for p in engine.parameters]
            alone = torch.zeros_like(factors)
            alone[place] = factors[place]
            for gradient, view in zip(own, flat, strict=True):
                gradient.add_weighted_sum(alone, view, 1)
            found[int(ids[rows[place]])] = torch.cat([piece.flatten() for piece in flat])
    return found


def test_one_record_moves_the_sum_by_its_clip_and_no_other_record() -> None:
    """No other record's gradient changes a bit, and with it no other example: a sign would make a
    step of any bit."""
    draws = draws_of(network(), attacks=("i-fgsm", "mim", "pgd"), split=0.5)
    engine, (inputs, targets, ids) = engine_of(draws.model, draws), batch(20)
    engine.rounding = "fixed-row"  # else a record left out may move others by a row
    keep = torch.arange(20) != 7
    rest = (inputs[keep], targets[keep], ids[keep])
    whole = engine.clipped_sum(inputs, targets, draw_key=key(1), record_ids=ids)
    less = engine.clipped_sum(*rest[:2], draw_key=key(1), record_ids=rest[2])
    assert 0.9 < float((whole.flat - less.flat).norm()) / C <= 1 + 1e-6
    each = gradients(engine, inputs, targets, ids, key(1))
    without = gradients(engine, *rest, key(1))
    assert all(torch.equal(each[i], without[i]) for i in map(int, ids[keep]))


# ---- the gradient


@pytest.mark.parametrize("xi", [0.0, 2.0])
def test_the_clipped_gradient_is_the_weighted_mean_of_both(xi) -> None:
    model = network()
    draws = draws_of(model, xi=xi, split=0.5)
    engine, (inputs, targets, ids) = engine_of(model, draws), batch(3)
    found = engine.clipped_sum(inputs, targets, draw_key=key(7), record_ids=ids)
    examples = torch.zeros_like(inputs)
    for rows, real in engine.iter_passes(3, key(7), ids):
        got = draws.adversarial_examples(inputs[rows], ids[rows], key(7))
        examples[rows[real]] = got[real]
    total = 0.0
    assert draws.location.stds["0"] == pytest.approx(0.25 * math.sqrt(0.5))
    losses = 0.0
    for i in range(3):
        gradient = 0.0
        for draw, (x, share) in enumerate(
            zip((inputs, examples), (1 / (1 + xi), xi / (1 + xi)), strict=True)
        ):
            if not share:
                continue
            one = ids[i : i + 1]
            seen_x = super(AdversarialDraws, draws).perturb_inputs(x[i : i + 1], one, key(7), draw)
            h = draws.perturb_output(model[0](seen_x), one, key(7), draw)
            loss = cross_entropy(model[1:](h), targets[i : i + 1]).sum()
            losses += share * float(loss.detach())
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradient = gradient + share * torch.cat([part.flatten() for part in parts])
        total = total + gradient * min(1.0, C / float(gradient.detach().norm()))
    shrunk = total / (1 + 2.0**-9)
    torch.testing.assert_close(found.flat.float(), shrunk, rtol=1e-3, atol=1e-4)
    assert found.loss_sum == pytest.approx(losses, rel=1e-4)


# ---- whole runs


def recipe_of(tmp_path, name="run", **changes):
    return make(
        tmp_path, name, data={"name": "digits", "max_train": 60},
        model={"name": "small-cnn", "options": {"width": 4, "activation": "tanh"}},
        method={"name": "stobatch", "size": [0.05, 0.2], "steps": 2, "split": 0.36} | changes,
        training={"batch_size": 20, "steps": 2, "learning_rate": 0.5},
    )  # fmt: skip


def test_a_run_proves_dp_sgd_and_carries_its_noise(tmp_path) -> None:
    recipe, folder = recipe_of(tmp_path)
    job = prepare(recipe, folder, "test")
    execute(job)
    plain, _ = make(
        tmp_path, "plain", data=recipe.data.model_dump(), method="dp-sgd",
        training={"batch_size": 20, "steps": 2, "learning_rate": 0.5},
    )  # fmt: skip
    same = prepare(plain, RunFolder(tmp_path / "plain"), "test").plan
    assert job.plan.guarantee() == same.guarantee()
    model = models.load(folder.model_folder)
    assert find_noise_location(model) == ModuleNoise({"0": 0.15}, input_std=0.2)
    facts = load_results(folder)
    assert facts.claim is not None and facts.claim.claimed is None
    assert facts.claim.verdict == "not sound"
    bound = models.noise.first_layer_norm_bound(models.require_split(model))
    assert bound <= 1 + 1e-6


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"split": 1.0}, HiddenNoise), ({"split": 0.5}, ModuleNoise), ({"sigma": 0.0}, NoNoise),
    ],
)  # fmt: skip
def test_every_split_certifies_by_sigma_or_more(tmp_path, options, kind) -> None:
    method = StoBatch(sensitivity=4.0, **options)
    model = models.initialize(SPEC, 1)
    with torch.no_grad():
        next(model.parameters()).mul_(100)  # beyond the norm that is allowed
    execution = method.execution()
    execution.project_parameters(model)()
    spec = execution.finalize(SPEC, MethodState(model))
    models.save(model, spec, tmp_path)
    loaded = models.load(tmp_path)
    where = find_noise_location(loaded)
    assert type(where) is kind and where.is_random == (method.sigma > 0)
    if not method.sigma:
        return
    both = combined_noise_of_model(where, loaded, SPEC.input_shape, method.input_noise_std)
    worth = method.input_noise_std if both is None else both.combined_sigma
    assert worth >= method.sigma * (1 - 1e-6)  # the layer's norm is at most what is allowed
