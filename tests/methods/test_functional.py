"""Method functional: what one record moves, what is released, and what is made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.here import command, without_ray
from support.training import execute, interrupted, make, parameters, train
from torch import Tensor, nn

from dpdist import models
from dpdist.base.errors import UserError
from dpdist.methods.functional import Functional
from dpdist.methods.functional_sums import Sums, clipped_to, packed, unpacked
from dpdist.models import ModelSpec
from dpdist.privacy import mechanisms
from dpdist.privacy.ledger import Ledger
from dpdist.runs.recipe import parse
from dpdist.runs.released import read_released
from dpdist.training import loop
from dpdist.training.checkpoint import latest
from dpdist.training.job import prepare

SHAPE, CLASSES, RECORDS = (1, 8, 8), 10, 24
MODEL = {"name": "scattering", "options": {"widths": [1.0], "stride": 1, "cosines": 3}}
METHOD = {"name": "functional"}


def network(**options: object) -> nn.Module:
    return models.initialise(
        ModelSpec("scattering", SHAPE, CLASSES, {**MODEL["options"], **options}), 0
    )


def sums(method: Functional | None = None, model: nn.Module | None = None) -> Sums:
    return Sums(method or Functional(), model or network(), torch.rand(4, *SHAPE), RECORDS)


def job_of(tmp: Path, name: str = "run", **more: Any) -> Any:
    recipe, folder = make(tmp, name, **{"model": MODEL, "method": METHOD, **more})
    return prepare(recipe, folder, "test")


# ---- what one record moves


def records(rng: np.random.Generator) -> Tensor:
    """Images, and what an adversary would put in their place."""
    x = torch.from_numpy(rng.random((RECORDS, *SHAPE)))
    x[0], x[1], x[2] = 0.0, 1.0, 1e6
    x[3] = torch.eye(8) * 1e-9
    x[4] = float("nan")
    x[5, 0, 3] = float("inf")
    x[6] = -x[7]
    return x


@pytest.mark.parametrize(
    "method",
    [Functional(), Functional(radius=2.0, labels=0.9, constant=0.9), Functional(radius=0.05)],
    ids=["default", "loose", "tight"],
)
def test_one_record_moves_each_sum_by_at_most_one(method: Functional) -> None:
    rng, made = np.random.default_rng(0), sums(method)
    x, y = records(rng), torch.from_numpy(rng.integers(0, CLASSES, RECORDS))
    centre = clipped_to(torch.from_numpy(rng.normal(size=(1, made.features))), 1.0)[0] * 0.3
    largest = [0.0, 0.0]
    for step in (0, 1):
        whole = made.shard(step, [(x, y, 1.0)], centre)
        assert whole.shape == (made.sizes[step],) and whole.isfinite().all()
        for left in range(RECORDS):
            keep = torch.arange(RECORDS) != left
            rest = made.shard(step, [(x[keep], y[keep], 1.0)], centre)
            largest[step] = max(largest[step], float((whole - rest).norm()))
    assert max(largest) <= 1.0
    assert largest[0] > 0.99  # the sensitivity is not overstated either
    assert largest[1] > (0.99 if method.radius < 1 else 0.5)


def test_noisy_copies_of_a_record_move_no_more() -> None:
    rng, made = np.random.default_rng(1), sums()
    x, y = torch.from_numpy(rng.random((1, *SHAPE))), torch.tensor([3])
    centre = torch.zeros(made.features, dtype=torch.float64)
    copies = [(x + rng.normal(size=x.shape), y, 1 / 3) for _ in range(3)]
    for step in (0, 1):
        assert 0.2 < float(made.shard(step, copies, centre).norm()) <= 1.0


def test_a_record_at_the_centre_is_the_constant_alone() -> None:
    made = sums()
    x = torch.rand(1, *SHAPE, dtype=torch.float64)
    at = made.of_centre(x)[0]
    h = made.directions(x, at)
    assert torch.equal(h[0, :-1], torch.zeros(made.features, dtype=torch.float64))
    assert h[0, -1] == Functional().constant
    # ... and nothing jumps there: h moves by no more than the feature does, in units of the radius.
    near = made.directions(x, at + 1e-9)
    assert float((near - h).norm()) <= 1e-9 * math.sqrt(made.features) / Functional().radius


def test_a_symmetric_matrix_keeps_its_norm() -> None:
    a = torch.rand(5, 5, dtype=torch.float64)
    a = a + a.T
    assert float(packed(a).norm()) == pytest.approx(float(a.norm()))
    assert torch.allclose(unpacked(packed(a), 5), a)


def test_models_that_will_not_do() -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) - x.flatten(1).mean(0)

    with pytest.raises(UserError, match="mixes records"):
        sums(model=nn.Sequential(Mixes(), nn.Linear(64, CLASSES)))
    with pytest.raises(UserError, match="must end in"):
        sums(model=nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), nn.Tanh()))
    with pytest.raises(UserError, match="must end in"):
        sums(model=nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES, bias=False)))


# ---- what is made of the sums


def test_the_head_minimises_the_expansion() -> None:
    method = Functional(radius=10.0, constant=0.5)  # nothing is clipped
    made, rng = sums(method), np.random.default_rng(2)
    x = torch.from_numpy(rng.random((300, *SHAPE)))
    y = torch.from_numpy(rng.integers(0, CLASSES, 300))
    centre = made.of_centre(x).mean(0)
    noise = 0.5
    vector = made.shard(1, [(x, y, 1.0)], centre)
    weight, bias = made.head(vector, centre, noise, 300)
    h = made.directions(x, centre)
    size = made.features + 1
    ridge = method.ridge * noise / math.sqrt(1 - method.labels) * math.sqrt(2 * size) + 3e-7
    w = torch.zeros(size, CLASSES, dtype=torch.float64, requires_grad=True)
    hot = nn.functional.one_hot(y, CLASSES).double()
    squares = h.T @ h
    solved = 4 * torch.linalg.solve(
        squares + ridge * torch.eye(size), h.T @ hot - squares[:, -1:] / (2 * method.constant)
    )
    logits = made.of_centre(x) @ weight.T + bias
    assert torch.allclose(logits, h @ solved, atol=1e-6)
    z = h @ w  # the expansion of log(1 + e^z) - y z at 0, and the ridge
    (z * (0.5 - hot) + z**2 / 8).sum().add(ridge * (w**2).sum() / 8).backward()
    assert w.grad is not None
    first = w.grad.clone()
    w.data.copy_(solved)
    w.grad = None
    z = h @ w
    (z * (0.5 - hot) + z**2 / 8).sum().add(ridge * (w**2).sum() / 8).backward()
    assert float(w.grad.norm()) < 1e-5 * float(first.norm())


# ---- what a training releases


class Released:
    """Wraps the loop's noise: the sums, and what was released of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[np.ndarray, np.ndarray, bytes, float]] = []
        real = loop.add_noise

        def watched(total: np.ndarray, key: bytes, std: float) -> np.ndarray:
            noisy = real(total, key, std)
            self.found.append((total.copy(), noisy, key, std))
            return noisy

        patch.setattr(loop, "add_noise", watched)


def test_two_sums_with_the_plans_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, seen = job_of(tmp_path, privacy__noise_multiplier=3.0), Released(monkeypatch)
    execute(job)
    assert [len(total) for total, *_ in seen.found] == list(sums().sizes)
    for (total, noisy, _, std), part in zip(seen.found, (0.05, 0.95), strict=True):
        assert std == pytest.approx(3.0 / math.sqrt(part))
        # 5 standard deviations of the estimate: 6e-7; 3/2 and 2/3 of the noise are far beyond.
        measured = float(np.std(noisy - total)) / (3.0 / math.sqrt(part))
        wide = 5 / math.sqrt(2 * len(total))
        assert abs(measured - 1) < wide < 1 / 3 or len(total) < 120
    assert len({key for _, _, key, _ in seen.found}) == 2
    assert Ledger.read(job.folder.ledger).releases == {0: 1, 1: 1}


def test_what_it_costs_is_the_exact_gaussian(tmp_path: Path) -> None:
    plan = job_of(tmp_path, method={**METHOD, "centre": 0.2}, privacy__noise_multiplier=2.5).plan
    noises = [plan.step(t).noise_multiplier for t in range(plan.steps)]
    mu = math.sqrt(sum(noise**-2 for noise in noises))
    assert mu == pytest.approx(1 / 2.5)
    exact = float(mechanisms.gaussian_epsilon(plan.delta, 1.0, mu))
    assert exact <= plan.guarantee().epsilon <= exact + 1e-3


def test_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(workers: int, **more: Any) -> tuple[Tensor, list[np.ndarray]]:
        with monkeypatch.context() as patch:
            seen = Released(patch)
            job = job_of(tmp_path, f"{workers}{len(more)}", resources__workers=workers, **more)
            execute(job, workers)
        return parameters(job.folder), [total for total, *_ in seen.found[::workers]]

    (one, sums_of_one), (two, sums_of_two) = run(1), run(2)
    assert np.abs(sums_of_one[0] - sums_of_two[0]).max() < 1e-9
    assert np.abs(sums_of_one[1] - sums_of_two[1]).max() < 1e-9
    assert float((one - two).norm() / one.norm()) < 1e-5
    exactly = {"training__reproducible": True}
    assert torch.equal(run(1, **exactly)[0], run(3, **exactly)[0])


def test_it_continues_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": MODEL, "method": {**METHOD, "sigma": 0.2, "draws": 2}}
    whole = train(*make(tmp_path, "whole", **given))
    for at in (0, 1):
        recipe, folder = make(tmp_path, f"cut-{at}", **given)
        interrupted(recipe, folder, monkeypatch, at)
        assert Ledger.read(folder.ledger).releases == dict.fromkeys(range(at + 1), 1)
        assert (latest(folder.checkpoints) is None) == (at == 0)
        assert torch.equal(train(recipe, folder), whole)
        assert read_released(folder).ledger.superseded == 0


def test_a_declared_number_of_records_divides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Released(monkeypatch)
    more = {"data": {"name": "digits"}, "privacy__nominal_records": 5000}
    job = job_of(tmp_path, **more)
    execute(job, until=1)
    state = latest(job.folder.checkpoints)
    assert state is not None
    assert np.allclose(state.slots["centre"].numpy(), seen.found[0][1] / 5000)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"privacy": {"clip_norm": 2.0}}, "leave out privacy.clipping, clip_norm"),
        ({"privacy": {"batch_cap": 50}}, "leave out privacy.clipping, clip_norm and batch_cap"),
        ({"training": {"ema": 0.5}}, "leave out training.ema, crop and flip"),
        ({"training": {"flip": True}}, "leave out training.ema, crop and flip"),
        ({"audit": {"kind": "canaries"}}, "must be mislabelled or blank"),
        ({"model": {**MODEL, "isolate": True}}, "runs records together"),
        ({"method": {**METHOD, "centre": 1.0}}, "method.centre"),
    ],
)
def test_what_it_refuses(more: dict[str, Any], message: str) -> None:
    raw: dict[str, Any] = {
        "name": "x", "data": {"name": "digits"}, "model": MODEL, "method": METHOD,
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 1, "steps": 1, "learning_rate": 1.0},
    }  # fmt: skip
    for key, value in more.items():
        raw[key] = {**raw.get(key, {}), **value}
    with pytest.raises(UserError, match=message):
        parse(raw, "test")


# ---- whole commands


@pytest.mark.slow
def test_all_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_ray(monkeypatch)

    def dpdist(*arguments: object, code: int = 0) -> str:
        done = command(monkeypatch, capsys, tmp_path, *arguments)
        assert done.code == code, done.err
        return done.out + done.err

    out = dpdist("run", "digits-functional", "--name", "f", "--workers", 2)
    assert "epsilon = 0.99" in out
    run = tmp_path / "runs" / "f"
    assert json.loads((run / "evaluation.json").read_text())["accuracy"] > 0.87
    np.save(tmp_path / "image.npy", np.zeros(SHAPE, np.float32))
    few = ("--max-inputs", 3)
    dpdist("predict", "f", "image.npy", "--sigma", 0.1, "--n", 100)
    dpdist("certify", "f", "--sigma", 0.1, "--n", 100, "--n0", 10, *few)
    dpdist("attack", "f", "--attacks", "pgd", "--steps", 2, *few)
    assert "releases no sums of clipped gradients" in dpdist("audit", "f", code=2)
    dpdist("release", "f")
    card = (run / "release" / "privacy_card.md").read_text()
    assert "noise multiplier 14.2" in card and "before its last layer" in card
