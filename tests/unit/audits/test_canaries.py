"""Canaries in training: who joins what, what is kept, and what coins guessed in one run refute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.key_recorder import NOISE, SAMPLING, record_keys
from support.recipes import write_recipe
from support.settings import sets
from support.training import execute, prepare_job, train_and_crash

from dpdist import pipeline
from dpdist.audits import canaries
from dpdist.audits.canaries import audited_recipe
from dpdist.audits.target import target_of_recipe
from dpdist.config.sections import CanaryAudit
from dpdist.core.errors import UserError
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.sampling import poisson_sample
from dpdist.privacy.audit_bounds import (
    OneRunGuesses,
    _epsilon,
    largest_rejected_epsilon,
    log_likelihood_ratio,
)
from dpdist.privacy.card import AuditFinding
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import parse_recipe
from dpdist.training import checkpoint, private_step
from dpdist.training.canaries import SLOT, DatasetWithCanaries, canary_coordinates, draw_coins
from dpdist.training.job import TrainJob
from dpdist.training.records import training_records

STEPS, CANARIES, CLIP, NOISE_STD = 4, 300, 0.5, 1.5
PRIVACY = {
    "noise_multiplier": NOISE_STD / CLIP, "clip_norm": CLIP, "delta": 1e-5, "run_key": "5a" * 32,
}  # fmt: skip


def job_of(tmp: Path, name: str = "run", canary: str = "gradient", **changes: Any) -> TrainJob:
    base: dict[str, Any] = {
        "data": {"name": "digits", "max_train": 120},
        "model": {"name": "linear"},
        "privacy": PRIVACY,
        "training__batch_size": 100,
        "training__steps": STEPS,
        "resources__checkpoint_seconds": 1e9,
        "audit": {"kind": "canaries", "canaries": CANARIES, "canary": canary},
    }  # fmt: skip
    return prepare_job(tmp, name, **(base | changes))


class Watched:
    """What a training did: ids of the records whose gradients were computed, their sums, and the
    sums that were released, before their noise and with it; step by step."""

    def __init__(self, job: TrainJob, patch: pytest.MonkeyPatch, workers: int = 1) -> None:
        self.parts: list[Any] = []
        self.before: dict[bytes, np.ndarray] = {}
        self.noisy: dict[bytes, np.ndarray] = {}
        clipped_sum, add_noise = GradientEngine.clipped_sum, private_step.add_noise

        def summing(engine: GradientEngine, *given: Any, **named: Any) -> Any:
            found = clipped_sum(engine, *given, **named)
            self.parts.append(
                (named["draw_key"], named["record_ids"].numpy(), found.flat.numpy().copy())
            )
            return found

        def noising(summed: np.ndarray, key: bytes, *given: Any) -> np.ndarray:
            self.before[key] = summed.copy()
            noisy = add_noise(summed, key, *given)
            self.noisy[key] = noisy.copy()
            return noisy

        with patch.context() as inner:
            self.keys = record_keys(inner)
            inner.setattr(GradientEngine, "clipped_sum", summing)
            inner.setattr(private_step, "add_noise", noising)
            execute(job, workers)

    def steps(self) -> list[tuple[bytes, set[int], np.ndarray, np.ndarray, np.ndarray]]:
        """Sampling key, ids, their sum, the released sum before and after its noise."""
        found = []
        draws = list(dict.fromkeys(key for key, _, _ in self.parts))
        noise = list(self.before)
        for sampling, draw, key in zip(
            self.keys.keys_opened_by(SAMPLING), draws, noise, strict=True
        ):
            mine = [(ids, flat) for of, ids, flat in self.parts if of == draw]
            ids = {int(i) for ids, _ in mine for i in ids}
            total = np.sum([flat for _, flat in mine], axis=0)
            found.append((sampling, ids, total, self.before[key], self.noisy[key]))
        return found


def scores_of(job: TrainJob) -> np.ndarray:
    state = checkpoint.load_latest(job.folder.checkpoints)
    assert state is not None and state.step == job.plan.steps
    return state.slots[SLOT].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "adjacency"), [(2, "add-or-remove-one"), (1, "replace-one")])
def test_gradient_canaries_join_as_records_do(tmp_path, monkeypatch, workers, adjacency):
    """Sampled at the plan's rate over N + m positions, each adds the clip along its coordinate
    when it is in, and nothing (its opposite, under replace-one) when it is out."""
    job = job_of(tmp_path, privacy={**PRIVACY, "adjacency": adjacency})
    records = len(training_records(job.recipe, job.source))
    assert job.plan.records == records + CANARIES
    watched = Watched(job, monkeypatch, workers)
    present = draw_coins(job.folder.read_run_key(), CANARIES)
    where = canary_coordinates(CANARIES, 650)
    assert len(set(where)) == CANARIES and 100 < present.sum() < 200
    scores, joined = np.zeros(CANARIES), 0
    for key, ids, own, before, noisy in watched.steps():
        members = poisson_sample(key, 0, records + CANARIES, job.plan.step(0).sample_rate)
        assert ids == set(members[members < records].tolist())
        sampled = members[members >= records] - records
        added = np.zeros(650)
        signs = np.where(present, 1.0, -1.0 if adjacency == "replace-one" else 0.0)
        added[where[sampled]] = CLIP * signs[sampled]
        assert np.allclose(before - own, added, atol=1e-12)
        left, noise = (noisy - own)[where] / CLIP, NOISE_STD / CLIP
        scores += log_likelihood_ratio(left, noise, job.plan.step(0).sample_rate)
        if adjacency == "replace-one":
            scores -= log_likelihood_ratio(-left, noise, job.plan.step(0).sample_rate)
        joined += len(sampled)
    assert np.allclose(scores_of(job), scores, atol=1e-9)
    assert joined > 200


@pytest.mark.slow
@pytest.mark.parametrize("canary", ["mislabeled", "blank"])
def test_canaries_that_are_records(tmp_path, monkeypatch, canary):
    """Those that are in train the model; those that are out are dropped once sampled."""
    job = job_of(tmp_path, canary=canary, training__reproducible=True)
    dataset = job.records()
    assert isinstance(dataset, DatasetWithCanaries)
    records = training_records(job.recipe, job.source)
    present = np.concatenate([np.ones(len(records), bool), draw_coins(b"\x5a" * 32, CANARIES)])
    fed = set()
    for key, ids, *_ in Watched(job, monkeypatch, 2).steps():
        members = poisson_sample(key, 0, len(dataset), job.plan.step(0).sample_rate)
        assert ids == set(members[present[members]].tolist())
        fed |= ids
    assert len(fed) > len(records) + 50
    assert len(dataset) == len(records) + CANARIES == job.plan.records
    assert (dataset.hashes == records.hashes).all() and len(dataset.labels) == len(records)
    assert dataset.fingerprint != records.fingerprint
    ends = np.array([len(records) - 1, len(records), len(dataset) - 1])
    inputs, labels = dataset.batch(ends), dataset.targets(ends)
    assert torch.equal(inputs[0], records.batch(ends[:1])[0])
    if canary == "blank":
        assert inputs[1].unique().tolist() == [0.0] and inputs[2].unique().tolist() == [1.0]
        assert labels[1:].tolist() == [0, 299 % 10]
    else:
        public = dataset.public_records
        rows = public.batch(slice(0, len(public)))
        for image, label in zip(*dataset.canary_records, strict=True):
            (place,) = (rows == image).flatten(1).all(1).nonzero()[:1].flatten().tolist()
            assert public.labels[place] != label


def test_the_coins_have_a_key_of_their_own(tmp_path, monkeypatch):
    job = job_of(tmp_path)
    seen = Watched(job, monkeypatch).keys
    (made,) = [d for d in seen.derived if d.purpose == "audit coin"]
    assert made.parent == job.folder.read_run_key()
    assert [(s.caller, s.start, s.count) for s in seen.streams if s.key == made.key] == [
        ("draw_coins", 0, CANARIES)
    ]
    assert made.key not in {d.parent for d in seen.derived}
    assert made.key not in {*seen.keys_opened_by(SAMPLING), *seen.keys_opened_by(NOISE)}
    other = draw_coins(b"\x5b" * 32, CANARIES)
    assert 100 < (other != draw_coins(b"\x5a" * 32, CANARIES)).sum() < 200


def test_a_restart_counts_every_step_once(tmp_path, monkeypatch):
    whole = job_of(tmp_path, "whole")
    execute(whole)
    job = job_of(tmp_path, resources__checkpoint_seconds=1e-6)
    train_and_crash(job.recipe, job.folder, monkeypatch, 3)
    execute(job)
    assert np.array_equal(scores_of(job), scores_of(whole))


def test_epsilon_of_a_full_batch_is_that_of_the_gaussian_mechanism():
    plan = PrivacyPlan.dp_sgd(
        records=1000, batch_size=1000, noise_multiplier=4.0, steps=8, delta=1e-5
    )
    for right in (290, 330):
        run = OneRunGuesses(5000, 400, right)
        exact = run.gaussian_epsilon(1e-5)
        assert 0.98 * exact <= largest_rejected_epsilon(run, plan) <= 1.002 * exact
    assert largest_rejected_epsilon(OneRunGuesses(5000, 400, 200), plan) == 0
    # More than the plan allows: beyond it in the same family.
    assert largest_rejected_epsilon(OneRunGuesses(5000, 400, 390), plan) > plan.guarantee().epsilon
    assert not OneRunGuesses(5000, 400, 330).rejects(lambda x: 0 * x)


def test_more_noise_than_the_plans_never_exceeds_it():
    """Where epsilon is smaller than what coarser accounting rounds up by."""
    plan = PrivacyPlan.dp_sgd(
        records=1000, batch_size=10, noise_multiplier=20.0, steps=10, delta=1e-5
    )
    assert _epsilon(plan, 1) < plan.guarantee().epsilon


def test_a_run_beside_the_recipes_has_no_place_in_its_archive():
    recipe = parse_recipe({**RECIPE, "resources": {"archive": "file:///somewhere"}}, "test")
    options = CanaryAudit(canaries=600)
    planted = audited_recipe(recipe, options, "test")
    assert planted.name == "small-canaries" and planted.resources.archive is None
    own = parse_recipe({**recipe.model_dump(mode="json"), "audit": options.model_dump()}, "test")
    assert audited_recipe(own, options, "test").resources.archive == "file:///somewhere"


RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits", "max_train": 200},
    "model": "linear",
    "privacy": {"noise_multiplier": 3.0, "delta": 1e-4, "run_key": "5a" * 32},
    "training": {"batch_size": 400, "steps": 5, "learning_rate": 0.1},
    "resources": {"workers": 2},
}


def write(tmp_path: Path, **more: Any) -> str:
    return str(write_recipe(tmp_path, {**RECIPE, **more}, "small.yaml"))


def audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: Any, asked: Any, steps: int = 5
) -> Any:
    """The audit of a run trained with canaries as fixed, whose model gives every coin away."""
    key = bytes(32)
    recipe = audited_recipe(parse_recipe(RECIPE, "test"), fixed, "test")
    target = target_of_recipe(recipe, "test")
    folder = SimpleNamespace(
        read_run_key=lambda: key, read_plan=lambda: target.plan, checkpoints=tmp_path
    )
    ledger = SimpleNamespace(released_phases=lambda plan: plan.phases)
    released = SimpleNamespace(plan=target.plan, ledger=ledger)
    monkeypatch.setattr(canaries, "read_verified_ledger", lambda of: released)
    coins = draw_coins(key, 600) + np.linspace(0, 0.1, 600)
    state = SimpleNamespace(step=steps, slots={SLOT: torch.from_numpy(coins)})
    monkeypatch.setattr(checkpoint, "load_latest", lambda of: state)
    monkeypatch.setattr(canaries, "_scores_of_final_model", lambda *_: coins)
    target = replace(target, folder=folder)
    return canaries.audit_canaries(asked, target, tmp_path, lambda done, total: None)


@pytest.mark.parametrize(
    ("fixed", "asked", "key"),
    [
        ({}, {"view": "final"}, "view"),
        ({"audits": 2}, {"audits": 2, "view": "final"}, None),
        ({}, {"view": "final", "exploratory": True}, None),
        ({}, {"guesses": 100}, "guesses"),
        ({}, {"audits": 2}, "audits"),
        ({"audits": 2}, {"alpha": 0.1, "audits": 2}, "alpha"),
    ],
)
def test_what_was_fixed_before_the_training_stays(tmp_path, monkeypatch, fixed, asked, key):
    options = [CanaryAudit(canaries=600, **given) for given in (fixed, asked)]
    if key is None:
        assert audited(tmp_path, monkeypatch, *options).trials == 48
    else:
        with pytest.raises(UserError, match=f"audit.{key}"):
            audited(tmp_path, monkeypatch, *options)


def test_audits_of_one_run_share_the_error(tmp_path, monkeypatch):
    options = CanaryAudit(canaries=600, audits=2, alpha=0.1)
    found = audited(tmp_path, monkeypatch, options, options)
    run = OneRunGuesses(600, 48, 48, 0.05)
    assert found.alpha == 0.05 and found.details["right"] == found.trials == 48
    assert found.details["epsilon_by_counting"] == run.epsilon(1e-4) > 0


def test_scores_of_an_unfinished_training_are_not_audited(tmp_path, monkeypatch):
    options = CanaryAudit(canaries=600)
    with pytest.raises(UserError):
        audited(tmp_path, monkeypatch, options, options, steps=4)


@pytest.mark.slow
def test_of_a_recipe(dpdist_without_ray, tmp_path, monkeypatch):
    recipe = write(tmp_path)
    words = ("audit", recipe, "--kind", "canaries", *sets("audit", "canaries=600", "audits=2"))
    done = dpdist_without_ray(*words)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "small-canaries"
    assert not (tmp_path / "runs" / "small").exists()
    path = run / "audit" / "canaries-every-step" / "audit.json"
    found = AuditFinding.read(path)
    assert 0 < found.epsilon < found.proved and found.alpha == 0.025 and found.trials == 48
    assert found.details["right"] > 24
    assert "canaries-every-step" not in (run / "report" / "index.html").read_text()
    monkeypatch.setattr(pipeline, "report_stage", lambda *_, **__: None)
    # The second view was counted beforehand; what was fixed stays fixed.
    assert dpdist_without_ray("audit", "small-canaries", "--set", "audit.view=final").code == 0
    assert len(list((run / "audit").glob("*/audit.json"))) == 2
    done = dpdist_without_ray("audit", "small-canaries", "--set", "audit.guesses=100")
    assert done.code == 2 and "audit.guesses" in done.err
    done = dpdist_without_ray("release", "small-canaries", "--not-private")
    assert done.code == 2 and not (run / "release").exists()
    asked = yaml.safe_load((run / "recipe.yaml").read_text())
    for changed in (None, {**asked["audit"], "guesses": 100}):
        write_recipe(run, {**asked, "audit": changed}, "recipe.yaml")
        done = dpdist_without_ray("release", "small-canaries")
        assert done.code == 2 and "audit" in done.err, done.err


@pytest.mark.slow
def test_noise_that_is_too_small_is_found(dpdist_without_ray, tmp_path, monkeypatch):
    real = private_step.add_noise
    monkeypatch.setattr(
        private_step, "add_noise", lambda summed, key, std, *given: real(summed, key, 0.3 * std)
    )
    done = dpdist_without_ray(
        "audit", write(tmp_path), "--kind", "canaries", "--set", "audit.canaries=600"
    )
    assert done.code == 1
