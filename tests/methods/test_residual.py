"""Residual perturbation: where its noise is, and what a run says of its claim."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe
from support.settings import sets
from support.training import make, train, train_and_crash
from torch import Tensor, nn

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.gradients.clipping import NoClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.perturbations import ModulePerturbation
from dpdist.methods.base import MethodState
from dpdist.models import ModelSpec
from dpdist.models.zoo import residual_blocks
from dpdist.papers.residual import claims
from dpdist.papers.residual import method as residual
from dpdist.papers.residual.method import ResidualPerturbation, largest_mean_norm
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.noise_location import ModuleNoise, find_noise_location
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import make_plan, parse_recipe
from dpdist.training.records import data_source, load_test_records

SHAPE, KEY = (1, 8, 8), b"k" * 32
OPTIONS = {"width": 4, "groups": 2}


def network(shape: tuple[int, ...] = SHAPE, **options: object) -> nn.Module:
    return models.initialize(ModelSpec("resnet-rp", shape, 5, {**OPTIONS, **options}), 0)


# ---- the network


def by_hand(member: nn.Module, x: Tensor, skip: bool) -> Tensor:
    h = member[0](x)
    for block in member[1:4]:
        out = h
        for layer in block.residual:
            out = layer(out)
        h = out + block.skip(h) if skip else out
    for layer in member[4:]:
        h = layer(h)
    return h


@pytest.mark.parametrize(("ensemble", "skip"), [(1, True), (1, False), (2, True)])
def test_the_network_is_the_mean_of_its_members(ensemble: int, skip: bool) -> None:
    model, x = network(ensemble=ensemble, skip=skip), torch.rand(3, *SHAPE)
    members = [model] if ensemble == 1 else list(model.members)
    each = [by_hand(member, x, skip) for member in members]
    assert torch.allclose(model(x), sum(each) / ensemble, atol=1e-6)
    assert len(residual_blocks(model)) == 3 * ensemble
    if ensemble > 1:
        assert not torch.allclose(each[0], each[1], atol=1e-3)  # they begin apart


# ---- the noise


METHODS = [
    ResidualPerturbation(gamma=0.5),
    ResidualPerturbation(gamma=0.5, pi=0.1, noise_mode="relative"),
    ResidualPerturbation(gamma=0.5, strategy="multiplicative", eta0=0.2),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.strategy}, {m.noise_mode}")
def test_training_and_the_trained_model_have_one_noise(method: ResidualPerturbation) -> None:
    model = network(ensemble=2)
    execution = method.execution()
    draws = execution.perturbation(None, 0.1, MethodState(model))  # type: ignore[arg-type]
    spec = ModelSpec("resnet-rp", SHAPE, 5, {**OPTIONS, "ensemble": 2})
    carried = execution.finalize(spec, MethodState(model))
    assert (
        find_noise_location(model) == draws.location == execution.noise_location(model)
        and carried.has_noise
    )
    assert set(draws.hidden_modules) == {f"members.{m}.{b}" for m in (0, 1) for b in (1, 2, 3)}
    assert set(draws.location.stds.values()) == {0.5}
    assert draws.location.smoothing_sigma == (0.25 if method.pi is None else 0.1)  # gamma / 2


def test_a_model_without_blocks_and_options_that_do_not_fit_are_refused() -> None:
    plain = models.initialize(ModelSpec("small-cnn", SHAPE, 5, {"width": 4}), 0)
    with pytest.raises(UserError, match="the model has none: take resnet-rp or resnet-gn"):
        ResidualPerturbation(gamma=1).execution().project_parameters(plain)
    known = models.initialize(ModelSpec("resnet-gn", SHAPE, 5, {"depth": 8}), 0)
    assert len(ResidualPerturbation(gamma=1).execution().noise_location(known).stds) == 3
    for wrong, message in (
        ({"strategy": "multiplicative", "noise_mode": "relative"}, "belongs to strategy: additive"),
        ({"eta0": 0.1}, "eta0 belongs to strategy: multiplicative"),
    ):
        with pytest.raises(ValueError, match=message):
            ResidualPerturbation(gamma=1, **wrong)


# ---- what it is worth


def plan(noise: float = 0.0, clip: float = math.inf) -> PrivacyPlan:
    return PrivacyPlan.dp_sgd(
        records=1000, batch_size=100, noise_multiplier=noise, steps=50, delta=1e-5, clip_norm=clip
    )


def test_the_claim_is_theorem_one_and_proves_nothing() -> None:
    method, proved = ResidualPerturbation(gamma=4.5), plan().guarantee()
    claim = method.claim(plan(), proved)
    assert claim.proved.epsilon == math.inf and claim.verdict == "not sound"
    assert claim.claimed == claims.residual_claim(2.25, 4.5, 30, 30, 5.0)  # 50 x 100 / 1000 passes
    for without in (
        ResidualPerturbation(gamma=4.5, noise_mode="relative"),
        ResidualPerturbation(gamma=4.5, strategy="multiplicative"),
        ResidualPerturbation(gamma=4.5, pi=0),
    ):
        claim = without.claim(plan(), proved)
        assert claim.claimed is None and claim.summary_line.startswith("no formula: not sound: ")
    private = plan(1.0, 1.0)
    assert method.claim(private, private.guarantee()) is None  # DP-SGD's epsilon holds, no other
    assert method.cost(private.phases[0]) == private.phases


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        ModuleNoise({}, input_std=0.25),  # TransDenoiser's: noise on the input alone
        ModuleNoise({"1": 4.5, "2": 4.5, "3": 4.5}, input_std=2.25),
        ModuleNoise({"1": 1e4, "2": 1e4, "3": 1e4}, input_std=1e4),
        ModuleNoise({"1": 1e4, "2": 1e4, "3": 1e4}, "multiplicative", 1e4, 0.1),
    ],
    ids=str,
)
def test_one_released_step_gives_the_label_away_whatever_the_noise(place: ModuleNoise) -> None:
    """A softmax behind a bias: of the bias's gradient, softmax - onehot(y), the only negative entry
    is the label's. So (x, y) and (x, y') are told apart with probability 1: for no epsilon and no
    delta < 1 does Theorem 1 hold of records with their labels, nor any claim for noise before the
    loss."""
    engine = GradientEngine(
        network(),
        cross_entropy,
        clipping=NoClipping(),
        perturbation=ModulePerturbation(1, place),
        micro_batch=1,
    )
    for label in range(5):
        released = engine.clipped_sum(
            torch.rand(1, *SHAPE), torch.tensor([label]), draw_key=KEY, record_ids=torch.tensor([7])
        ).flat[-5:]
        assert int(released.argmin()) == label and int((released < 0).sum()) == 1


# ---- whole runs

RECIPE = {
    "name": "r",
    "data": {"name": "digits", "max_train": 200},
    "model": {
        "name": "resnet-rp",
        "options": {**OPTIONS, "ensemble": 2},
        "mean": [0.3],
        "std": [0.4],
    },
    "method": {"name": "residual", "gamma": 0.5, "input_norm": 3.5},
    "privacy": {"noise_multiplier": 0, "clipping": "none", "delta": 1e-5},
    "training": {"batch_size": 20, "steps": 2, "learning_rate": 0.1, "ema": 0.5},
    "certify": {"sigma": 0.25, "n": 20, "n0": 10, "max_inputs": 2, "form": "eager"},
}  # fmt: skip


@pytest.mark.slow
def test_a_run_is_trained_evaluated_certified_and_says_what_it_is_worth(
    tmp_path, monkeypatch, capsys
) -> None:
    run_without_ray(monkeypatch)
    asked, seen = [], largest_mean_norm

    def watched(model, *rest):
        asked.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return seen(model, *rest)

    monkeypatch.setattr(residual, "largest_mean_norm", watched)
    write_recipe(tmp_path, RECIPE)
    done = command(monkeypatch, capsys, tmp_path, "run", "r.yaml")
    out = " ".join(done.out.split())
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert "NOT PRIVATE: epsilon is infinite" in out
    assert re.search(r"Claimed, not proved .*Theorem 1\): not sound: labels", out), out
    said = r"norm <= 3\.5: (\S+) % of (\d+); largest mean norm .* before training, .* after"
    share, images = re.search(said, out).groups()
    assert re.search(r"Certified accuracy .*r=0\.25", out), out
    run = tmp_path / "runs/r"
    recipe = parse_recipe(RECIPE, "r")
    inputs = load_test_records(recipe, data_source(recipe)).batch(slice(None))
    within = (inputs.flatten(1).norm(dim=1) <= 3.5).double().mean()
    assert 0 < within < 1 and len(inputs) == int(images)  # of test images, in input units
    assert 0 <= 100 * float(within) - float(share) < 0.1  # never printed larger than it is
    model = models.load(run / "private/model")
    stds = {f"network.members.{m}.{b}": 0.5 for m in (0, 1) for b in (1, 2, 3)}
    assert find_noise_location(model) == ModuleNoise(stds, input_std=0.25)
    kept = dict(model.named_parameters())
    assert len(asked) == 2 and all(torch.equal(p, kept[name]) for name, p in asked[1].items())
    measured = json.loads((run / "private/assumptions.json").read_text())
    assert measured["before"] > 0 and measured["before"] != measured["after"]
    assert "assumed by the claim, measured" in (run / "report/index.html").read_text()


@pytest.mark.slow
def test_every_stage_of_a_private_run_on_two_workers(tmp_path, monkeypatch, capsys) -> None:
    """Through all of its noise: certified at sigma = pi, predicted, attacked, released."""
    run_without_ray(monkeypatch)
    recipe = {
        **RECIPE,
        "data": {"name": "digits", "max_train": 100},
        "model": {**RECIPE["model"], "options": OPTIONS},
        "privacy": {"noise_multiplier": 2.0, "delta": 1e-5},
        "training": {**RECIPE["training"], "steps": 3, "crop": 1, "flip": True},
        "resources": {"workers": 2},
    }
    write_recipe(tmp_path, recipe)
    np.save(tmp_path / "x.npy", np.full(SHAPE, 0.5, dtype=np.float32))

    def dpdist(*arguments: object) -> str:
        done = command(monkeypatch, capsys, tmp_path, *arguments)
        assert done.code == 0, f"{done.out}\n{done.err}"
        return " ".join(done.out.split())

    out = dpdist("run", "r.yaml")
    assert "assumed by the claim" not in out and "claimed" not in out  # DP-SGD's holds, no other
    folder, same = RunFolder(tmp_path / "runs/r"), {**recipe, "method": {"name": "dp-sgd"}}
    plan = folder.read_plan()
    assert plan == make_plan(parse_recipe(same, "r"), plan.records, "r")
    assert 0 < load_results(folder).guarantee.epsilon == plan.guarantee().epsilon < math.inf
    label = {str(n) for n in range(10)} | {"ABSTAIN"}
    said = dpdist("predict", "r", "x.npy", "--set", "certify.n=100")
    assert label & set(said.split()), said
    assert "fgsm" in dpdist(
        "attack", "r",
        *sets("attack", "norm=l2", "sizes=[0.5]", "attacks=[fgsm]", "n=20", "samples=2"),
        *sets("attack", "max_inputs=2"),
    )  # fmt: skip
    said = dpdist(
        "audit",
        "r.yaml",
        "--kind",
        "membership",
        *sets("membership", "models=2", "attacks=[rmia,shadow]", "passes=[2,3]"),
    )
    for title in ("rmia, mean of 2 passes", "rmia, mean of 3", "shadow, mean of 3", "shadow: "):
        assert title in said
    assert "ceiling, proved" in said
    dpdist("release", "r")
    released = models.load(tmp_path / "runs/r/release")
    stds = {f"network.{b}": 0.5 for b in (1, 2, 3)}
    assert find_noise_location(released) == ModuleNoise(stds, input_std=0.25)


@pytest.mark.slow
def test_a_killed_training_goes_on_and_measures_as_if_it_had_not_been(
    tmp_path, monkeypatch
) -> None:
    found = []
    for name, killed in (("whole", False), ("killed", True)):
        recipe, folder = make(
            tmp_path, name, data__max_train=200, model=RECIPE["model"], method=RECIPE["method"],
            privacy__noise_multiplier=0, privacy__clipping="none", training__batch_size=20,
            training__steps=3, training__learning_rate=0.1,
        )  # fmt: skip
        if killed:
            train_and_crash(recipe, folder, monkeypatch, 2)
            assert set(json.loads((folder.private / "assumptions.json").read_text())) == {
                "images", "within", "before",
            }  # fmt: skip
        last = train(recipe, folder)
        found.append((last, json.loads((folder.private / "assumptions.json").read_text())))
        ((_, said),) = recipe.method.reported_values(folder.private)
        assert "before training" in said and "after" in said
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
