"""Residual perturbation: where its noise is, and what a run says of its claim."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from support.benchmarks import load as load_benchmark
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe
from support.settings import sets
from torch import nn

import dpdist.data
from dpdist import models
from dpdist.audits.membership_statistics import Roc, log_odds
from dpdist.certification.worker import expected_log_scores
from dpdist.gradients.clipping import NoClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.perturbations import ModulePerturbation
from dpdist.methods.base import MethodState
from dpdist.models import ModelSpec
from dpdist.models.zoo import residual_blocks
from dpdist.papers.residual import claims
from dpdist.papers.residual.method import ResidualPerturbation
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.noise_location import ModuleNoise, find_noise_location
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import make_plan, parse_recipe

SHAPE, KEY = (1, 8, 8), b"k" * 32
OPTIONS = {"width": 4, "groups": 2}


def network(shape: tuple[int, ...] = SHAPE, **options: object) -> nn.Module:
    return models.initialize(ModelSpec("resnet-rp", shape, 5, {**OPTIONS, **options}), 0)


# ---- the network


def test_the_network_is_the_mean_of_its_members() -> None:
    model, x = network(ensemble=2), torch.rand(3, *SHAPE)
    each = [member(x) for member in model.members]
    assert torch.allclose(model(x), sum(each) / 2, atol=1e-6)
    assert len(residual_blocks(model)) == 6
    assert not torch.allclose(each[0], each[1], atol=1e-3)  # they begin apart


# ---- the noise


METHODS = {
    "additive": ResidualPerturbation(gamma=0.5, pi=0.1, noise_mode="relative"),
    "multiplicative": ResidualPerturbation(gamma=0.5, strategy="multiplicative", eta0=0.2),
}


@pytest.mark.parametrize("name", METHODS)
def test_training_and_the_trained_model_have_one_noise(name: str) -> None:
    method = METHODS[name]
    model = network(ensemble=2)
    execution = method.execution()
    draws = execution.perturbation(None, 0.1, MethodState(model))  # type: ignore[arg-type]
    spec = ModelSpec("resnet-rp", SHAPE, 5, {**OPTIONS, "ensemble": 2})
    carried = execution.finalize(spec, MethodState(model))
    assert find_noise_location(model) == draws.location == execution.noise_location(model)
    assert carried.has_noise
    assert set(draws.hidden_modules) == {f"members.{m}.{b}" for m in (0, 1) for b in (1, 2, 3)}
    assert set(draws.location.stds.values()) == {0.5}
    assert draws.location.smoothing_sigma == (0.25 if method.pi is None else 0.1)  # gamma / 2


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
        assert claim.claimed is None and claim.verdict == "not sound"
    private = plan(1.0, 1.0)
    assert method.claim(private, private.guarantee()) is None  # DP-SGD's epsilon holds, no other
    assert method.cost(private.phases[0]) == private.phases


@pytest.mark.parametrize(
    "place",
    [
        ModuleNoise({}, input_std=0.25),  # TransDenoiser's: noise on the input alone
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
    "certify": {"sigma": 0.25, "n": 20, "n0": 10, "max_inputs": 2, "backend": "eager"},
}  # fmt: skip


@pytest.mark.slow
def test_a_run_is_trained_evaluated_certified_and_says_what_it_is_worth(
    tmp_path, monkeypatch, capsys
) -> None:
    run_without_ray(monkeypatch)
    write_recipe(tmp_path, RECIPE)
    done = command(monkeypatch, capsys, tmp_path, "run", "r.yaml")
    assert done.code == 0, f"{done.out}\n{done.err}"
    run = tmp_path / "runs/r"
    facts = load_results(RunFolder(run))
    assert facts.guarantee.epsilon == math.inf and facts.claim.verdict == "not sound"
    assert list((run / "certificates").rglob("*.parquet"))
    model = models.load(run / "private/model")
    stds = {f"network.members.{m}.{b}": 0.5 for m in (0, 1) for b in (1, 2, 3)}
    assert find_noise_location(model) == ModuleNoise(stds, input_std=0.25)
    measured = json.loads((run / "private/assumptions.json").read_text())
    assert measured["before"] > 0 and measured["before"] != measured["after"]


@pytest.mark.slow
def test_every_stage_of_a_private_run_on_two_workers(tmp_path, monkeypatch, capsys) -> None:
    """Through all of its noise: certified at sigma = pi, predicted, audited, released."""
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

    dpdist("run", "r.yaml")
    folder, same = RunFolder(tmp_path / "runs/r"), {**recipe, "method": {"name": "dp-sgd"}}
    plan = folder.read_plan()
    assert plan == make_plan(parse_recipe(same, "r"), plan.records, "r")
    facts = load_results(folder)
    assert 0 < facts.guarantee.epsilon == plan.guarantee().epsilon < math.inf
    assert facts.claim is None  # DP-SGD's epsilon holds, no other
    label = {str(n) for n in range(10)} | {"ABSTAIN"}
    said = dpdist("predict", "r", "x.npy", "--set", "certify.n=100")
    assert label & set(said.split()), said
    said = dpdist(
        "audit", "r.yaml", "--kind", "membership",
        *sets("membership", "models=2", "attacks=[shadow]", "passes=[2]"),
    )  # fmt: skip
    assert "shadow, mean of 2" in said.lower()
    dpdist("release", "r")
    released = models.load(tmp_path / "runs/r/release")
    stds = {f"network.{b}": 0.5 for b in (1, 2, 3)}
    assert find_noise_location(released) == ModuleNoise(stds, input_std=0.25)


@pytest.mark.slow
def test_the_swirl_is_undone_but_for_noise_that_averages_away() -> None:
    """The figures of an independent prototype, to 1 dB."""
    sde = vars(load_benchmark("papers/residual/sde"))
    x, rng, psnr = sde["picture"](), np.random.default_rng(0), sde["psnr"]
    flowed = sde["forward"](x, 0.0, False, rng)
    assert psnr(flowed, x) == pytest.approx(0.2, abs=1)
    assert psnr(sde["backward"](flowed, 0.0, False, rng), x) == pytest.approx(44.4, abs=1)
    assert psnr(sde["inverse"](flowed), x) > 300
    cases = ((1.0, False, 4, (-4.4, -1.4)), (0.1, True, 2, (14.6, 17.7)))
    for gamma, times, queries, want in cases:
        panels = sde["noisy_panels"](x, gamma, times, queries)
        fresh, without, mean = [psnr(panel, x) for panel in list(panels.values())[1:]]
        assert (fresh, without) == pytest.approx(want, abs=1)
        assert mean - without == pytest.approx(10 * np.log10(queries), abs=1)


# ---- counterexamples


@pytest.mark.slow
def test_queries_compose_the_mean_of_many_answers_tells_more() -> None:
    """Theorem 2 is of one answer, "however we query" is not in it: noise that is drawn afresh
    averages away, and with it what hid the members."""
    digits = dpdist.data.DataSource("digits", 10)
    splits = [dpdist.data.load(digits, split) for split in ("train", "test")]
    x = torch.cat([records.batch(slice(60)) for records in splits])
    y = torch.cat([records.targets(slice(60)) for records in splits])
    member, rng = np.arange(120) < 60, torch.Generator().manual_seed(0)
    model = models.initialize(ModelSpec("resnet-rp", SHAPE, 10, OPTIONS), 0)
    place = ResidualPerturbation(gamma=1.0).execution().noise_location(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        normals = torch.randn(60, *place.normals_shape(model, SHAPE), generator=rng)
        optimizer.zero_grad()
        cross_entropy(place.logits(model, x[:60], normals), y[:60]).mean().backward()
        optimizer.step()
    place.attach(model)
    aucs = []
    for passes in (1, 10, 100):
        answers = [expected_log_scores(model, x, passes, str(seed)).numpy() for seed in range(2)]
        rocs = [Roc.from_scores(log_odds(answer, y.numpy()), member) for answer in answers]
        aucs.append(float(np.mean([roc.auc.value for roc in rocs])))
    assert aucs[1] > aucs[0] + 0.04 and aucs[2] > aucs[1] + 0.005, aucs


def test_theorem_three_holds_by_a_constant_that_a_classifier_does_not_notice() -> None:
    """y(T) = exp(-g^2 T / 2 + g B) x(T) solves dy = U y dt + g y dB for any U, circulant or not, so
    E y^p = exp(-p (1 - p) g^2 T / 2) x(T)^p for every input: the complexity shrinks by that factor.
    The printed proof takes (exp(UT) x)^p for exp(p U T) x^p, which it is not. d = 3, N = 4."""
    gamma, time, power = 1.3, 0.7, 0.4
    rng = np.random.default_rng(0)
    inputs = rng.random((4, 3)) + 0.1
    shifts = [np.roll(np.eye(3), k, axis=1) for k in range(3)]
    matrices = [sum(c * s for c, s in zip(rng.random(3), shifts, strict=True)) for _ in range(50)]
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    paths = np.exp(-(gamma**2) * time / 2 + gamma * np.sqrt(time) * nodes)
    weights = weights / weights.sum()
    ode = [np.stack([expm(u * time) @ x for x in inputs]) for u in matrices]
    plain = [x**power for x in ode]
    noisy = [np.einsum("k,kij->ij", weights, (paths[:, None, None] * x) ** power) for x in ode]
    signs = np.array(list(itertools.product((-1, 1), repeat=4)))

    def complexity(features: list[np.ndarray], most: float = 1.0) -> float:
        """The supremum over |w| <= most and the matrices, its mean over all signs."""
        norms = [np.linalg.norm(signs @ each, axis=1) for each in features]
        return float(most * np.max(norms, axis=0).mean() / len(inputs))

    factor = math.exp(-power * (1 - power) * gamma**2 * time / 2)
    assert complexity(noisy) == pytest.approx(factor * complexity(plain), rel=1e-9)
    assert complexity(noisy, 1 / factor) == pytest.approx(complexity(plain), rel=1e-9)
    printed = [np.stack([expm(power * u * time) @ x**power for x in inputs]) for u in matrices]
    apart = [np.abs(a - b).max() / np.abs(a).max() for a, b in zip(plain, printed, strict=True)]
    assert max(apart) > 0.05
