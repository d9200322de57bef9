"""Noisy records: one draw for each record, whose cost is that of one release; the rest is free."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2, norm
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe
from support.training import execute, make, train

from dpdist.core.errors import UserError
from dpdist.methods.noisy_records import NoisyDataset, NoisyRecordsMethod
from dpdist.papers.residual.claims import residual_input_guarantee
from dpdist.privacy.phases import GaussianSteps, NoisyRecords
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training.job import prepare

CLASSES = 4
RAW: dict[str, Any] = {
    "name": "x",
    "data": {"name": "digits"},
    "model": "linear",
    "method": {"name": "noisy-records", "input_norm": 4.0, "label_epsilon": 3.0},
    "privacy": {"noise_multiplier": 0.5, "delta": 1e-4, "adjacency": "replace-one"},
    "training": {"batch_size": 100, "steps": 3, "learning_rate": 0.5},
}


class Records:
    """Of one input, many times, one of them broken."""

    name, classes, input_shape = "made", CLASSES, (1, 2, 3)

    def __init__(self, count: int) -> None:
        self.inputs = torch.ones(count, 1, 2, 3)
        self.inputs[1] = torch.tensor(math.nan)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Any) -> torch.Tensor:
        return self.inputs[indices]

    def targets(self, indices: Any) -> torch.Tensor:
        return (torch.arange(len(self)) % CLASSES)[indices]


def noised(count: int, **more: Any) -> NoisyDataset:
    given = {"norm": 1.0, "std": 2.0, "label_epsilon": 1.0} | more
    return NoisyDataset(Records(count), b"k" * 32, **given)


def test_each_input_is_clipped_and_noised_once() -> None:
    every = slice(None)
    quiet = noised(4, std=0.0).batch(every)
    assert quiet.shape == (4, 1, 2, 3) and quiet.dtype == torch.float32
    assert torch.allclose(quiet[0].norm(), torch.tensor(1.0)) and (quiet[1] == 0).all()
    assert torch.allclose(noised(4, std=0.0, norm=9.0).batch(every)[0], torch.ones(1, 2, 3))
    records = noised(2000)
    found = records.batch(every)
    noise = (found - noised(2000, std=0.0).batch(every)).double().numpy()
    total = (noise**2).sum() / 2.0**2  # wrong about the right one with probability 1e-6
    low, high = chi2.ppf(5e-7, noise.size), chi2.ppf(1 - 5e-7, noise.size)
    assert low <= total <= high
    assert not low <= total * 0.95**2 <= high and not low <= total * 1.05**2 <= high
    # Whoever asks, in whatever order; and equal records have noise of their own.
    some = np.array([7, 3, 1999])
    assert torch.equal(records.batch(some), found[some])
    assert torch.equal(noised(2000).batch(slice(3, 9)), found[3:9])
    assert len(np.unique(noise[:, 0, 0, 0])) == 2000


def test_labels_are_kept_as_often_as_they_may_be() -> None:
    count, epsilon = 40_000, 0.5
    records = noised(count, label_epsilon=epsilon)
    moved = (records.targets(slice(None)) - Records(count).targets(slice(None))) % CLASSES
    seen = np.bincount(moved.numpy(), minlength=CLASSES)
    kept = math.exp(epsilon) / (math.exp(epsilon) + CLASSES - 1)
    for number, share in enumerate([kept, *[(1 - kept) / (CLASSES - 1)] * (CLASSES - 1)]):
        low, high = binom.ppf([1e-7, 1 - 1e-7], count, share)
        assert low <= seen[number] <= high
    assert torch.equal(records.targets(np.array([5, 2])), records.targets(slice(None))[[5, 2]])


# ---- what it costs


def delta_of(mu: float, label: float, epsilon: float) -> float:
    """Of a Gaussian (Balle and Wang 2018) beside randomized response on one bit."""

    def gaussian(at: float) -> float:
        return norm.cdf(mu / 2 - at / mu) - math.exp(at + norm.logcdf(-at / mu - mu / 2))

    told = 1 / (1 + math.exp(-label))
    return told * gaussian(epsilon - label) + (1 - told) * gaussian(epsilon + label)


@pytest.mark.parametrize(("noise", "label"), [(2.0, 1.0), (2.25 / 30, 3.0)])
def test_epsilon_is_that_of_one_release(noise: float, label: float) -> None:
    method = NoisyRecordsMethod(input_norm=30, label_epsilon=label)
    phases = method.cost(GaussianSteps(500, noise, 0.1))
    plan = PrivacyPlan(1000, phases, 1e-5, math.inf, "replace-one")
    assert method.noise_std(plan) == pytest.approx(30 * noise)
    found, mu = plan.guarantee().epsilon, 2 / noise
    assert delta_of(mu, label, found) <= 1e-5 * (1 + 1e-6)
    assert delta_of(mu, label, found * (1 - 2e-3)) > 1e-5
    # The pass is paid for once: as much after no step, and after all of them twice.
    assert plan.steps == 500 and plan.guarantee(0).epsilon == found
    assert plan.executed_phases([1000]) == phases and PrivacyPlan.from_dict(plan.to_dict()) == plan
    alone = residual_input_guarantee(noise, 1, 1).epsilon
    assert alone < found < alone + label
    with pytest.raises(ValueError):  # the number of records is no secret of it
        PrivacyPlan(1000, (NoisyRecords(1.0, 1.0, 5, 0.1),), 1e-5)


# ---- the whole


@pytest.mark.slow
def test_a_run_is_trained_on_them_and_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_without_ray(monkeypatch)
    write_recipe(tmp_path, RAW, "x.yaml")
    for asked, code in (("run", "x.yaml"), 0), (("release", "x"), 0), (("audit", "x.yaml"), 2):
        assert command(monkeypatch, capsys, tmp_path, *asked).code == code
    card = json.loads((tmp_path / "runs/x/release/privacy_card.json").read_text())
    assert card["private"] and card["mechanism"][0].startswith("every record released once")
    assert card["guarantee"]["adjacency"] == "replace-one" and card["clip_norm"] == "none"


@pytest.mark.slow
def test_the_steps_see_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are all but nothing, labels are coins: nothing else of a record reaches a step."""
    method = {"name": "noisy-records", "input_norm": 1e-6, "label_epsilon": 1e-9}
    more: dict[str, Any] = {"method": method, "data": RAW["data"]}
    privacy = RAW["privacy"] | {"run_key": "5a" * 32, "clipping": "none"}
    recipe, folder = make(tmp_path, "a", **more, privacy=privacy, model="linear")
    seen: list[float] = []
    real = NoisyDataset.batch

    def watched(self: NoisyDataset, indices: Any) -> torch.Tensor:
        inputs = real(self, indices)
        seen.append(float(inputs.abs().max()))
        return inputs

    monkeypatch.setattr(NoisyDataset, "batch", watched)
    found = train(recipe, folder)
    assert len(seen) == 12 and max(seen) < 1e-5
    ledger, plan = read_verified_ledger(folder).ledger, folder.read_plan()
    assert len(ledger.release_counts) == 12 and ledger.guarantee(plan) == plan.guarantee(0)
    two = train(recipe, make(tmp_path, "b", **more, privacy=privacy, model="linear")[1], 2)
    assert torch.allclose(found, two, atol=1e-5)  # the same noise on any worker


@pytest.mark.slow
def test_copies_of_a_run_noise_another_release_of_the_records_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of a record is drawn once: by each copy where both begin; where one had begun, it
    stays the same for the same recipe and is refused for another. With the noise of input norm 4
    on records clipped to 3, the difference of two releases would be the record itself."""
    seen: list[tuple[np.ndarray, torch.Tensor]] = []
    real = NoisyDataset.batch

    def watched(self: NoisyDataset, indices: Any) -> torch.Tensor:
        seen.append((np.asarray(indices), real(self, indices)))
        return seen[-1][1]

    monkeypatch.setattr(NoisyDataset, "batch", watched)

    def inputs(recipe: Recipe, folder: RunFolder, until: int | None = None) -> dict[int, bytes]:
        seen.clear()
        execute(prepare(recipe, folder, "test"), until=until)
        return {
            int(n): row.numpy().tobytes()
            for rows, found in seen for n, row in zip(rows, found, strict=True)
        }  # fmt: skip

    def shared(one: dict[int, bytes], other: dict[int, bytes]) -> set[bool]:
        both = one.keys() & other.keys()
        assert len(both) > 100
        return {one[n] == other[n] for n in both}

    training = RAW["training"] | {"batch_size": 1000}  # of 1,437: hundreds in common
    recipe = parse_recipe(RAW | {"training": training}, "test")
    folder, before, after = (RunFolder(tmp_path / name) for name in ("run", "before", "after"))
    prepare(recipe, folder, "test")
    shutil.copytree(folder.path, before.path)
    whole = inputs(recipe, folder, until=2)
    assert shared(whole, inputs(recipe, before, until=2)) == {False}
    shutil.copytree(folder.path, after.path)
    assert shared(whole, inputs(recipe, folder)) == {True}

    method = recipe.method.model_copy(update={"input_norm": 3.0})
    other = recipe.model_copy(update={"method": method})
    after.recipe_file.write_text(other.to_yaml())
    after.pin_recipe(other, 0.5)
    with pytest.raises(UserError):
        inputs(other, after)
