"""Every step of a real run, entry by entry, against the same step worked out one example at a time.

new parameters = old parameters - optimizer's step of (sum of clipped gradients + keyed noise) / L.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.datasets import write_split
from support.key_recorder import record_keys
from support.oracle import ReferenceTraining, flatten
from support.selection import first_cases
from support.training import execute, parameters, prepare_job

from dpdist import models
from dpdist.config.training import ResourcesRecipe
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.passes import hash_rows
from dpdist.models import ModelSpec
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.training import checkpoint
from dpdist.training.job import TrainJob

STEPS = 4
NO_PRIVACY = {"noise_multiplier": 0, "clipping": "none", "delta": 1e-3}
NET = {"name": "hgm-cnn", "options": {"filters": [3], "kernels": [3], "strides": [2], "dense": 6}}


def job_of(tmp: Path, **changes: Any) -> TrainJob:
    base: dict[str, Any] = {
        "data": {"name": "digits", "max_train": 120},
        "model": {"name": "linear"},
        "privacy__delta": 1e-3,
        "training__batch_size": 12,
        "training__steps": STEPS,
        "training__momentum": 0.0,
        "training__learning_rate": 0.4,
    }
    return prepare_job(tmp, **(base | changes))


def follow(job: TrainJob, patch: pytest.MonkeyPatch, workers: int = 1) -> list[int]:
    """Execute a job step by step beside the oracle; the sizes of the batches.

    Each step is a run of its own, continued from the checkpoint: what a restart loses would show.
    """
    oracle, folder = ReferenceTraining(job), job.folder
    sizes = []
    seen = record_keys(patch)
    for t in range(job.plan.steps):
        seen.clear()
        execute(job, workers, until=t + 1)
        before = oracle.flat.clone()
        plan = job.plan.step(t)
        gradient = oracle.noisy_sum(seen, t) / plan.expected_batch
        sizes.append(len(oracle.members(seen, t)))
        oracle.step(seen, t, gradient)
        state = checkpoint.load_latest(folder.checkpoints)
        assert state is not None and state.step == t + 1
        close(state.parameters, oracle.flat, before, job.recipe.training.optimizer)
        if job.recipe.training.ema is not None:
            close(released(job), oracle.average, before, job.recipe.training.optimizer)
        else:
            assert torch.equal(released(job), state.parameters), "what is saved is what was trained"
        oracle.set_parameters(state.parameters)
    assert Ledger.read(folder.ledger).release_counts == dict.fromkeys(range(job.plan.steps), 1)
    return sizes


def close(
    found: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor, optimizer: str = "sgd"
) -> None:
    """Equal up to rounding and the room that the clip leaves for it: half a hundredth of the step's
    largest entry. Adam divides each entry by its own size, and with it the rounding."""
    step = (wanted - before).abs().max()
    error = (found.double() - wanted).abs().max()
    room = 5e-3 if optimizer == "sgd" else 2e-2
    assert error <= room * step, f"off by {float(error / step):.3g} of the largest entry"


def released(job: TrainJob) -> torch.Tensor:
    """The trained parameters of the saved model, in the order of the flat vector."""
    tensors = load_file(job.folder.model_folder / "model.safetensors")
    names = [n for n, p in ReferenceTraining(job).whole.named_parameters() if p.requires_grad]
    return flatten([tensors[name] for name in names])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "as-he-et-al": {  # with a decay that shows in one step
        "training__schedule": "step", "training__milestones": [0.5, 0.75],
        "training__momentum": 0.9, "training__weight_decay": 0.3,
    },
    "adamw": {  # with a decay that shows in one step
        "training__optimizer": "adamw", "training__learning_rate": 0.02,
        "training__weight_decay": 5.0, "training__schedule": "linear",
    },
    "ema-momentum-cosine": {
        "training__ema": 0.15, "training__momentum": 0.7, "training__schedule": "cosine",
    },
    "adam-weight-decay": {
        "training__optimizer": "adam", "training__learning_rate": 0.02,
        "training__weight_decay": 0.3,
    },
    "sgd": {},
    "adam-ema-linear": {
        "training__optimizer": "adam", "training__ema": 0.9, "training__schedule": "linear",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(tmp_path, monkeypatch, name):
    follow(job_of(tmp_path, **OPTIMIZERS[name]), monkeypatch)


TARGETS: dict[str, tuple[str, int, str]] = {
    "mse of several": ("number", 3, "mse"),
    "huber": ("number", 2, "huber"),
    "multi-label-bce": ("labels", 3, "multi-label-bce"),
    "own": ("number", 1, "support.losses:squared"),
}


@pytest.mark.parametrize("name", first_cases(TARGETS, 1))
def test_every_loss(tmp_path, monkeypatch, name):
    targets, count, loss = TARGETS[name]
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        x = rng.normal(size=(120, 5)).astype(np.float32)
        y = 2 * rng.normal(size=(120, count)) if targets == "number" else x[:, :count] > 0
        column = y[:, 0] if count == 1 else y.astype(float)
        write_split(tmp_path / "data" / "own", split, x=x, y=column)
    own = {
        "name": "own", "root": str(tmp_path / "data"), "targets": targets, "classes": count,
        "columns": {"features": ["x"], "label": "y"},
    }  # fmt: skip
    mlp = {"name": "mlp", "options": {"hidden": [4]}}
    job = job_of(tmp_path, data=own, model=mlp, training__loss=loss, training__learning_rate=0.1)
    follow(job, monkeypatch)


PRIVACIES: dict[str, dict[str, Any]] = {
    "clip-and-noise": {"privacy__clip_norm": 0.3, "privacy__noise_multiplier": 1.7},
    "capped": {"privacy__batch_cap": 12, "training__steps": 8},
    "automatic": {  # gradients about as large as what keeps the smallest ones small
        "privacy__clipping": "automatic",
        "privacy__clip_norm": 0.5,
        "method": {"name": "dp-sgd", "gradient_scale": 0.003},
    },
    "per-layer": {"privacy__clipping": "per-layer", "privacy__clip_norm": 0.5, "model": NET},
    "without-noise": {"privacy": NO_PRIVACY},
    "full-batches": {"data": {"name": "digits", "max_train": 20}, "training__batch_size": 20},
    "reproducible": {"training__reproducible": True},
    "micro-batches": {"resources__micro_batch": 5},
    "fixed-row": {"resources__rounding": "fixed-row"},
}


@pytest.mark.parametrize("name", first_cases(PRIVACIES, 4))
def test_every_clip_and_noise(tmp_path, monkeypatch, name):
    sizes = follow(job_of(tmp_path, **PRIVACIES[name]), monkeypatch)
    if name == "capped":
        assert max(sizes) == 12 and sizes.count(12) > 2, "the cap cuts batches"


def test_fixed_rows_reach_every_pass_of_a_run(tmp_path, monkeypatch):
    """A record lies where its id and the step's key say; and its training is another one."""
    real, right = GradientEngine._per_example_gradients, []

    def watched(self, inputs, targets, draw_key, ids, *rest):
        if ids is not None and len(set(ids.tolist())) > 1:
            own = hash_rows(draw_key, ids.numpy()) % np.uint64(len(ids))
            right.append(bool((ids[own.astype(np.int64)] == ids).all()))
        return real(self, inputs, targets, draw_key, ids, *rest)

    monkeypatch.setattr(GradientEngine, "_per_example_gradients", watched)
    own = job_of(tmp_path / "own", resources__rounding="fixed-row", training__steps=5)
    execute(own, until=4)
    assert len(right) > 4 and all(right)
    right.clear()
    execute(job_of(tmp_path / "other"), until=2)
    assert not all(right)
    described = dict(own.recipe.resources) | {"rounding": "standard"}
    again = dataclasses.replace(
        own, recipe=own.recipe.model_copy(update={"resources": ResourcesRecipe(**described)})
    )
    execute(again)
    assert Ledger.read(own.folder.ledger).epoch == 1, "what is released before is charged again"


QUICK = {"data": "digits", "steps": 2, "max_records": 20}
METHODS: dict[str, dict[str, Any]] = {
    "dplis-inputs": {
        "method": {"name": "dplis", "augmentations": 2, "sigma": 0.2},
        "training__schedule": "linear",
    },
    "crop-and-noise": {
        "method": {"name": "input-noise", "sigma": 0.3, "augmentations": 2, "consistency": 2.0},
        "training__crop": 1, "training__flip": True,
    },
    "secure-sgd-public": {
        "method": {"name": "secure-sgd", "redistribution": QUICK}, "model": NET,
        "data": {"name": "digits", "max_train": 240, "public": 0.5},
    },
    "dplis-per-example": {"method": {"name": "dplis", "augmentations": 2, "per_example": True}},
    "dplis": {"method": {"name": "dplis", "augmentations": 2}, "privacy__clip_norm": 0.4},
    "dplis-sum": {"method": {"name": "dplis", "augmentations": 3, "aggregate": "sum"}},
    "pixeldp": {"method": {"name": "pixeldp", "augmentations": 2}, "model": NET,
    "privacy": NO_PRIVACY},
    "hgm-pixeldp": {
        "method": {"name": "hgm-pixeldp", "redistribution": QUICK}, "model": NET,
        "privacy": NO_PRIVACY,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", first_cases(METHODS, 4))
def test_every_method(tmp_path, monkeypatch, name):
    follow(job_of(tmp_path, **METHODS[name]), monkeypatch)


@pytest.mark.slow
def test_a_denoiser_before_a_frozen_classifier(tmp_path, monkeypatch):
    spec = ModelSpec("small-cnn", (1, 8, 8), 10, {"width": 2})
    models.save(models.initialize(spec, 3), spec, tmp_path / "classifier")
    described: dict[str, Any] = {
        "method": {"name": "transdenoiser", "sigma": 0.25, "augmentations": 2},
        "model": {
            "name": "conv-autoencoder", "options": {"channels": [2]},
            "classifier": {"folder": str(tmp_path / "classifier"), "pretraining_data": "nothing"},
        },
        "training__learning_rate": 0.02,
    }  # fmt: skip
    job = job_of(tmp_path, **described)
    frozen = load_file(tmp_path / "classifier" / "model.safetensors")
    follow(job, monkeypatch)
    saved = load_file(job.folder.model_folder / "model.safetensors")
    for name, value in frozen.items():
        assert torch.equal(saved[f"classifier.{name}"], value), "the frozen part stays as it is"


def test_several_phases_each_with_its_own_rate_and_noise(tmp_path, monkeypatch):
    job = job_of(tmp_path, privacy__clip_norm=0.5)
    phases = (GaussianSteps(2, 0.7, 0.05), GaussianSteps(1, 3.0, 0.5), GaussianSteps(2, 1.5, 1.0))
    plan = PrivacyPlan(job.plan.records, phases, 1e-3, job.plan.clip_norm)
    sizes = follow(dataclasses.replace(job, plan=plan), monkeypatch)
    assert sizes[3] == sizes[4] == job.plan.records and sizes[2] > 30 and sizes[0] < 20


@pytest.mark.parametrize("method", ["dp-sgd", METHODS["crop-and-noise"]["method"]])
def test_an_empty_batch_is_a_step_like_any_other(tmp_path, monkeypatch, method):
    """Its noise is released and charged: skipping it would tell that nobody was drawn. Expected
    batch 1 of 60: a batch is empty with probability 0.36, none of 8 with 0.03; the key is fixed."""
    few = {"name": "digits", "max_train": 60}
    more = {"training__batch_size": 1, "training__steps": 8}
    job = job_of(tmp_path, data=few, method=method, **more)
    assert 0 in follow(job, monkeypatch)


def test_several_workers(tmp_path, monkeypatch):
    """Expected batch 2 over 3 workers: some shares are empty."""
    follow(job_of(tmp_path, training__batch_size=2, training__momentum=0.5), monkeypatch, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"training__optimizer": "adam", "training__ema": 0.5, "privacy__clip_norm": 0.5},
        {
            "method": {"name": "dplis", "augmentations": 2, "sigma": 0.2},
            "training__schedule": "linear",
        },
    ],
    ids=["adam", "smoothing that follows a schedule"],
)
def test_one_run_equals_the_same_run_in_pieces(tmp_path, monkeypatch, changes):
    (tmp_path / "whole").mkdir()
    whole, pieces = job_of(tmp_path / "whole", **changes), job_of(tmp_path, **changes)
    execute(whole)
    for t in range(STEPS):
        execute(pieces, until=t + 1)
    assert torch.equal(parameters(whole.folder), parameters(pieces.folder))


def test_the_noise_on_the_sum_is_what_the_recipe_asks_for(tmp_path):
    """At least noise multiplier * clip norm, and not much above it: the guarantee counts on it."""
    job = job_of(tmp_path, privacy__clip_norm=0.25, privacy__noise_multiplier=2.0)
    plan = job.plan.step(0)
    assert 0.5 <= plan.noise_std <= 0.5 * 1.05
    assert (plan.sample_rate, plan.expected_batch) == (12 / 108, 12)
    (phase,) = job.plan.phases
    assert (phase.noise_multiplier, phase.steps, phase.sample_rate) == (2.0, STEPS, 12 / 108)
