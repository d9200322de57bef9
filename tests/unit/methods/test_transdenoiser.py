"""TransDenoiser's three variants: what is private, what is frozen, what the run folder says."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, squared_error
from dpdist.gradients.perturbations import InputPerturbation
from dpdist.papers.transdenoiser.method import TransDenoiser
from dpdist.papers.transdenoiser.split import (
    MixedJacobian,
    SplitEngine,
    remainders,
    split_noise,
)
from dpdist.publishing import write_release
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.pretraining import pretrain
from dpdist.training.provenance import PROVENANCE_FILE, RECORDS_FILE
from dpdist.training.records import data_source, records_with_canaries
from dpdist.training.worker import run_training

KEY = "5a" * 32
STEP_KEY = bytes(range(32))
C = 0.1


# ---- Algorithm 1 ------------------------------------------------------------------------------


def denoiser(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1), activation(),
        nn.ConvTranspose2d(2, 1, 4, stride=2, padding=1),
    )  # fmt: skip


def images(count: int, seed: int = 7) -> Tensor:
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def brute_force(model: nn.Module, inputs: Tensor) -> Tensor:
    """A (w, n v), row by row from the definition: d/dx of the gradient of |g(x) - target|^2."""
    parameters = list(model.parameters())
    blocks = []
    for clean in inputs:
        x = clean[None].clone().requires_grad_()
        loss = (model(x) - clean[None]).square().sum()
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        flat = torch.cat([piece.reshape(-1) for piece in gradient])
        each = torch.eye(len(flat), dtype=flat.dtype)
        rows = torch.autograd.grad(flat, x, each, is_grads_batched=True)[0]
        blocks.append(rows.reshape(len(flat), -1))
    return torch.cat(blocks, dim=1)


def test_the_split_credits_what_brute_force_finds():
    """xi_low tiny and a long run: sqrt(T S_min) sigma lies between xi_low and xi_up."""
    model, x = denoiser(nn.Tanh).double(), images(9).double()
    method = TransDenoiser(variant="full", sigma=0.3, xi_low=1e-12, xi_up=2.0)
    z = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    chosen = x[remainders(model, x, z) >= 0]
    a = brute_force(model, chosen)
    identity, m = torch.eye(len(a), dtype=torch.float64), a @ a.T / 9**2
    part = MixedJacobian(model, squared_error, chosen, chosen)
    assert torch.allclose(part.gram_matvec(identity[3]), 9**2 * m[3], rtol=1e-9)
    s_min = float(torch.linalg.eigvalsh(m)[0])
    assert s_min > 0
    steps = int(0.5 * method.xi_up**2 / (s_min * method.sigma**2))
    found = split_noise(model, x, z, method, batch=9, steps=steps)
    assert found.nonnegative == len(chosen) and found.negative == 9 - len(chosen)
    assert found.s_min.value == pytest.approx(s_min, rel=1e-6)
    assert found.added_std == pytest.approx(
        math.sqrt(method.xi_up**2 - steps * s_min * method.sigma**2), rel=1e-6
    )
    assert found.added_std < 0.8 * method.xi_up
    # Without the factor T there is next to nothing to credit.
    honest = method.model_copy(update={"credit_steps": False})
    assert split_noise(model, x, z, honest, batch=9, steps=steps).added_std == pytest.approx(2.0)
    # The whole covariance: credited and added noise together have xi_up^2 in the weakest direction.
    total = steps * method.sigma**2 * m + found.added_std**2 * identity
    weakest = float(torch.linalg.eigvalsh((total + total.T) / 2)[0])
    assert weakest == pytest.approx(method.xi_up**2, rel=1e-6)


def test_relu_leaves_nothing_to_credit():
    model, x = denoiser(nn.ReLU), images(9)
    with torch.no_grad():
        model[0].bias += 1
    z = x + 0.1
    method = TransDenoiser(variant="full", xi_low=1e-6)
    found = split_noise(model, x, z, method, batch=9, steps=10**6)
    assert (found.s_min.value, found.added_std) == (0.0, method.xi_up)
    assert found.s_min.exact


def worst_change(engine: GradientEngine, rounds: int = 12) -> float:
    """Largest change of the sum when one record is added, in units of C."""
    worst = 0.0
    generator = torch.Generator().manual_seed(11)
    for _ in range(rounds):
        size = int(torch.randint(2, 9, (), generator=generator))
        inputs = torch.rand(size + 1, 1, 4, 4, generator=generator)
        inputs = inputs.to(engine.parameters[0].dtype)
        ids = torch.randperm(1000, generator=generator)[: size + 1]

        def total(rows: slice, inputs: Tensor = inputs, ids: Tensor = ids) -> Tensor:
            x = inputs[rows]
            return engine.clipped_sum(x, x, draw_key=STEP_KEY, record_ids=ids[rows]).flat

        change = (total(slice(None)) - total(slice(0, size))).double().norm()
        worst = max(worst, float(change) / C)
    return worst


def test_one_record_changes_separate_dp_by_at_most_c():
    draws = InputPerturbation(2, 0.25)
    engine = GradientEngine(
        denoiser(), squared_error, clipping=FlatClipping(C), perturbation=draws, micro_batch=3
    )
    assert 0.9 < worst_change(engine) <= 1 + 1e-5


def test_one_record_changes_full_by_much_more():
    """Negative: under the same keys the noise itself changes with the records.

    The fourth record makes A A^T regular, and with a long run's credit the added noise vanishes.
    """
    method = TransDenoiser(variant="full", sigma=0.25, xi_low=1e-9)
    model = denoiser(nn.Tanh).double()
    engine = SplitEngine(
        model, method, clipping=FlatClipping(C), expected_batch=5, steps=10**12, micro_batch=9
    )
    engine.perturbation = InputPerturbation(1, 0.25)
    assert worst_change(engine) > 3


# ---- runs -------------------------------------------------------------------------------------


def raw(folder, **changes) -> dict:
    described = {
        "name": "x",
        "data": {"name": "digits", "public": 0.4},
        "model": {
            "name": "conv-autoencoder",
            "options": {"channels": [4], "residual": True},
            "classifier": str(folder),
        },
        "method": {"name": "transdenoiser", "sigma": 0.25},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": KEY},
        "training": {"batch_size": 40, "steps": 4, "learning_rate": 0.1},
        "public": {
            "model": {"name": "small-cnn", "options": {"width": 4}},
            "training": {
                "batch_size": 50, "epochs": 12, "learning_rate": 0.01, "optimizer": "adam",
            },
        },
    }  # fmt: skip
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            described[section][field] = value
        else:
            described[section] = value
    return described


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A classifier pre-trained on the public part of the digits."""
    folder = tmp_path_factory.mktemp("public") / "classifier"
    _, accuracy = pretrain(parse_recipe(raw(folder), "test"), "test")
    assert accuracy > 0.8
    return folder


def train(described: dict, folder: RunFolder) -> nn.Module:
    run_training(
        prepare(parse_recipe(described, "test"), folder, "test"), Reducer(0, 1, torch.device("cpu"))
    )
    return models.load(folder.model_folder)


def test_separate_dp_trains_the_denoiser_only(public, tmp_path):
    described = raw(public)
    described["privacy"].pop("run_key")
    folder = RunFolder(tmp_path / "run")
    model = train(described, folder)
    before, after = models.load(public).state_dict(), model.get_submodule("classifier").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    start = models.build_model(models.read_spec(folder.model_folder)).get_submodule("denoiser")
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(start(x), x) and not torch.equal(model.get_submodule("denoiser")(x), x)

    facts = load_results(folder)
    assert 0 < facts.guarantee.epsilon < math.inf and facts.guarantee.kind == "proved"
    write_release(folder)
    card = json.loads((folder.release_folder / "privacy_card.json").read_text())
    assert "public records of digits/train" in card["extra"]["frozen classifier trained on"]
    assert facts.claim is None
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(models.load(folder.release_folder)(x), model(x))


@pytest.mark.slow
def test_no_dp_and_full_prove_nothing(public, tmp_path):
    no_dp = raw(
        public, method__variant="no-dp", privacy__noise_multiplier=0, privacy__clipping="none"
    )
    folder = RunFolder(tmp_path / "no-dp")
    train(no_dp, folder)
    facts = load_results(folder)
    assert facts.guarantee.epsilon == math.inf and facts.claim is None

    full = raw(public, method__variant="full", privacy__noise_multiplier=0)
    folder = RunFolder(tmp_path / "full")
    train(full, folder)
    facts = load_results(folder)
    assert facts.guarantee.epsilon == math.inf and facts.claim.verdict == "not sound"
    assert not facts.privacy_card()["private"]
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert all({"s_min", "added_xi", "nonnegative"} <= line.keys() for line in lines)
    with pytest.raises(UserError):
        write_release(folder)


# ---- what the classifier saw ------------------------------------------------------------------


def test_a_classifier_that_saw_private_records_is_refused(public, tmp_path):
    """Private from the 30th percentile of the hashes on, public up to the 40th."""
    for held_out in (0.0, 0.5):  # what is held out is private, too
        split = {"name": "digits", "public": 0.3, "private_eval_fraction": held_out}
        overlapping = parse_recipe(raw(public, data=split), "test")
        with pytest.raises(UserError, match="digits/train"):
            prepare(overlapping, RunFolder(tmp_path / "run"), "test")
        assert not (tmp_path / "run").exists()
    # One record in common is enough.
    copy = shutil.copytree(public, tmp_path / "copy")
    recipe = parse_recipe(raw(copy), "test")
    seen = np.load(copy / RECORDS_FILE)
    seen[0] = records_with_canaries(recipe, data_source(recipe)).hashes[3]
    np.save(copy / RECORDS_FILE, np.sort(seen))
    with pytest.raises(UserError, match="1 of the"):
        prepare(recipe, RunFolder(tmp_path / "run"), "test")


def test_the_classifier_may_not_change_under_a_run(public, tmp_path):
    copy = shutil.copytree(public, tmp_path / "copy")
    recipe, folder = parse_recipe(raw(copy), "test"), RunFolder(tmp_path / "run")
    prepare(recipe, folder, "test")
    module, spec = models.load(copy), models.read_spec(copy)
    with torch.no_grad():
        next(module.parameters()).add_(1)
    models.save(module, spec, copy)
    with pytest.raises(UserError, match="provenance"):
        prepare(recipe, folder, "test")
    written = json.loads((copy / PROVENANCE_FILE).read_text())
    written["model"] = models.model_hash(copy)
    (copy / PROVENANCE_FILE).write_text(json.dumps(written))
    with pytest.raises(UserError):
        prepare(recipe, folder, "test")
