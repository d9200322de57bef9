"""DPAL as published: its equations, its predictions, and that nothing is proved of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe
from support.training import execute, make, train, train_and_crash
from torch import Tensor

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.papers.stobatch import dpal_training
from dpdist.papers.stobatch.dpal import DPAL
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.canaries import draw_coins
from dpdist.training.job import prepare

KEY = b"k" * 32
OPTIONS = {"filters": [4, 4], "dense": 16}
METHOD: dict[str, Any] = {
    "name": "dpal", "encoder_sensitivity": 450, "output_sensitivity": 32, "steps": 2, "images": 20,
    "augmentations": 20,
}  # fmt: skip
PRIVACY = {
    "noise_multiplier": 0, "clipping": "none", "delta": 1e-5, "adjacency": "replace-one",
    "run_key": "5a" * 32,
}  # fmt: skip
MODEL = {"name": "dpal-cnn", "options": OPTIONS, "mean": [0.5], "std": [0.5]}

TRAINING = {"batch_size": 50, "steps": 5, "learning_rate": 1e-3, "optimizer": "adam"}


def run(tmp: Path, name: str = "run", **more: Any) -> tuple[Any, Any]:
    base: dict[str, Any] = {
        "data": {"name": "digits", "max_train": 200}, "model": MODEL, "method": METHOD,
        "privacy": PRIVACY,
        "training": dict(TRAINING),
    }  # fmt: skip
    return make(tmp, name, **{**base, **more})


# ---- the equations


def test_what_the_expansions_leave_out_is_bounded() -> None:
    z = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    first, second = dpal_training.taylor_errors(z)
    assert (first >= -1e-12).all() and (first <= z**2 / 8 + 1e-12).all()
    assert (second >= -1e-12).all() and (second <= z**4 / 192 + 1e-12).all()
    assert float(second[2010]) == pytest.approx(float(z[2010] ** 4 / 192), rel=1e-3)


def test_noise_has_the_paper_s_scale() -> None:
    method = DPAL()  # MNIST
    gamma, gamma_x = method.gammas(2499)
    assert gamma_x == pytest.approx(1.98, abs=2e-3) and gamma == pytest.approx(2 * gamma_x)
    budget = method.encoder_budget(2499)
    assert method.noise_scale(2499) == pytest.approx(4950 / (2499 * budget))
    drawn = dpal_training.laplace(KEY, "chi_1", torch.Size((100_000,)), 2.0)
    # |Laplace(b)| has mean and deviation b: 6 standard deviations of the mean, 2e-9.
    assert abs(float(drawn.abs().mean()) - 2.0) < 6 * 2.0 / math.sqrt(100_000)
    assert abs(float(drawn.mean())) < 6 * 2.0 * math.sqrt(2 / 100_000)


# ---- a training


def test_one_noise_for_all_steps_and_attempts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(dpal_training, "_SAVED", 1)
    whole, folder = run(tmp_path, "whole")
    expected = train(whole, folder)
    recipe, again = run(tmp_path, "cut")
    train_and_crash(recipe, again, monkeypatch, 3)
    assert torch.equal(train(recipe, again), expected)
    scale = recipe.method.noise_scale(50)
    found = models.load(folder.model_folder).network
    first, second = found.input_noise, found.hidden_noise
    # The mean of so many absolute values is within half of the scale: 64 of them, beyond 1e-4.
    assert 0.5 < float(first.abs().mean()) / scale < 1.5
    assert 0.5 < float(second.abs().mean()) / (2 * scale) < 1.5
    kept = found.encoder.weight.abs().sum((1, 2, 3))
    assert float(kept.detach().max()) <= 1 + 1e-6


# ---- its epsilon


def test_a_pair_is_one_record_under_one_of_two_labels(tmp_path, monkeypatch) -> None:
    audit = {"kind": "canaries", "canary": "pair", "canaries": 40}
    recipe, folder = run(tmp_path, audit=audit, training__steps=6)
    job = prepare(recipe, folder, "test")
    dataset = job.records()

    seen: dict[int, int] = {}
    real = dpal_training.DPALSteps._gradient

    def watched(self: Any, step: int, noisy: Tensor, labels: Tensor, weight: float) -> Any:
        clean = ((noisy - self._network.input_noise + 1) / 2).round()
        for image, label in zip(clean, labels, strict=True):
            seen[hash(image.numpy().astype(np.int8).tobytes())] = int(label)
        return real(self, step, noisy, labels, weight)

    monkeypatch.setattr(dpal_training.DPALSteps, "_gradient", watched)
    execute(job)
    inputs, _ = dataset.canary_records
    present, found = draw_coins(folder.read_run_key(), 40), 0
    for image, first in zip(inputs, present, strict=True):
        mine = seen.get(hash(image.numpy().astype(np.int8).tobytes()))
        found += mine is not None
        assert mine in (None, 0 if first else 1)
    assert found > 20 and 5 < present.sum() < 35
    added = {**PRIVACY, "adjacency": "add-or-remove-one"}
    with pytest.raises(UserError, match="adjacency:"):
        parse_recipe({**recipe.model_dump(mode="json"), "privacy": added}, "x")


def test_it_is_not_released(tmp_path, monkeypatch, capsys) -> None:
    run_without_ray(monkeypatch)
    recipe, _ = run(tmp_path)
    raw = {**recipe.model_dump(mode="json"), "name": "d"}
    raw["privacy"] |= {"run_key": None}
    write_recipe(tmp_path, raw, "d.yaml")
    done = command(monkeypatch, capsys, tmp_path, "run", "d.yaml")
    assert done.code == 0, done.err
    facts = load_results(RunFolder(tmp_path / "runs/d"))
    assert facts.guarantee.epsilon == math.inf and facts.claim.verdict == "not sound"
    assert facts.claim.claimed.epsilon == pytest.approx(0.2) and facts.claim.claimed.delta == 0
    private = json.loads((tmp_path / "runs/d/private/dpal.json").read_text())
    assert 0 <= private["attacked"][0]["printed"] <= private["attacked"][0]["right"] <= 1
    done = command(monkeypatch, capsys, tmp_path, "release", "d")
    assert done.code == 2
