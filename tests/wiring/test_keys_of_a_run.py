"""Which key serves what in a real training: nothing is drawn twice, everything depends on what it
must.

A fixed run key makes runs comparable; what a fresh one adds (the attempt's nonce) is tested too.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.datasets import write_split
from support.key_recorder import DRAWS, NOISE, SAMPLING, KeyRecorder, record_keys
from support.training import Interrupt, execute, prepare_job, release_ids, train_and_crash

from dpdist.core.errors import ClusterError, UserError
from dpdist.gradients.engine import GradientEngine
from dpdist.privacy.ledger import Ledger, ReplayConflict
from dpdist.training import private_step, worker
from dpdist.training.job import TrainJob

STEPS = 5
DRAWING = {"name": "input-noise", "sigma": 0.2, "augmentations": 2}
NET = {"name": "hgm-cnn", "options": {"filters": [3], "kernels": [3], "strides": [2], "dense": 6}}


def job_of(tmp: Path, name: str = "run", **changes: Any) -> TrainJob:
    base: dict[str, Any] = {
        "data": {"name": "digits", "max_train": 120},
        "model": {"name": "linear"},
        "method": DRAWING,
        "privacy__delta": 1e-3,
        "training__batch_size": 12,
        "training__steps": STEPS,
        "resources__checkpoint_seconds": 1e9,
    }
    return prepare_job(tmp, name, **(base | changes))


def recorded(
    job: TrainJob, patch: pytest.MonkeyPatch, workers: int = 1, until: int | None = None
) -> KeyRecorder:
    with patch.context() as inner:
        seen = record_keys(inner)
        execute(job, workers, until)
    return seen


def secrets(seen: KeyRecorder) -> dict[str, list[bytes]]:
    """Keys by purpose: of samples, noise, perturbations and the blocks of a sum."""
    blocks = {d.key for d in seen.derived if d.purpose == "blocks"}
    draws = [d.parent for d in seen.derived if d.purpose.startswith("draws/")]
    return {
        "sample": seen.keys_opened_by(SAMPLING),
        "noise": seen.keys_opened_by(NOISE),
        "draw": list(dict.fromkeys(draws)),
        "blocks": [s.key for s in seen.streams if s.key in blocks],
    }


def all_keys(seen: KeyRecorder) -> set[bytes]:
    return {key for found in secrets(seen).values() for key in found} | set(
        seen.keys_opened_by(DRAWS)
    )


def check_disjoint(seen: KeyRecorder, steps: int) -> None:
    """One key for each purpose and step; no stream is read for two ends, none is also a parent."""
    found = secrets(seen)
    for purpose, of in found.items():
        assert len(set(of)) == steps, f"{len(set(of))} {purpose} keys for {steps} steps"
    everything = {key for of in found.values() for key in of}
    assert len(everything) == len(found) * steps, "a key serves two purposes or two steps"
    opened = {s.key for s in seen.streams if s.kind == "words"}
    assert opened == everything - set(found["draw"])
    assert not opened & {d.parent for d in seen.derived}, "a stream's key is derived from as well"
    # Two callers never read the same words.
    by_caller: dict[bytes, set[str]] = {}
    for stream in seen.streams:
        by_caller.setdefault(stream.key, set()).add(stream.caller)
    assert all(len(callers) == 1 for callers in by_caller.values())
    streams = [(s.key, s.start) for s in seen.streams if s.caller == DRAWS]
    assert len({key for key, _ in streams}) == 2 * steps, "each of the two draws has its own stream"


def test_every_step_and_purpose_has_a_key_of_its_own(tmp_path, monkeypatch):
    job = job_of(tmp_path)
    seen = recorded(job, monkeypatch)
    check_disjoint(seen, STEPS)
    run_key = job.folder.read_run_key()
    fingerprint = job.records().fingerprint
    found = secrets(seen)
    for purpose, of in found.items():
        for step, key in enumerate(dict.fromkeys(of)):
            assert run_key in seen.ancestors(key), f"{purpose} does not descend from the run key"
            told = seen.labels(key)
            assert {str(step), "0/", job.plan.fingerprint(), fingerprint} <= told, purpose
    noise = [s for s in seen.streams if s.caller == NOISE]
    size = sum(p.numel() for p in torch.nn.Linear(64, 10).parameters())
    assert {(s.start, s.count) for s in noise} == {(0, size)}, "each entry has its own noise"


def test_every_worker_uses_the_same_keys(tmp_path, monkeypatch):
    """All draw the same noise, and their own records' words of the same stream."""
    seen = recorded(job_of(tmp_path, model={"name": "linear"}), monkeypatch, workers=3)
    check_disjoint(seen, STEPS)
    for key in seen.keys_opened_by(SAMPLING):
        parts = sorted((s.start, s.count) for s in seen.streams if s.key == key)
        assert parts == [(0, 36), (36, 36), (72, 36)], "each record is drawn once"
    for key in seen.keys_opened_by(NOISE):
        assert [(s.start, s.count) for s in seen.streams if s.key == key] == [(0, 650)] * 3


def test_keys_depend_on_all_that_they_must(tmp_path, monkeypatch):
    """Plan, data and run key; the same everything gives the same keys."""
    changes: dict[str, dict[str, Any]] = {
        "noise": {"privacy__noise_multiplier": 1.1},
        "clip": {"privacy__clip_norm": 0.9},
        "steps": {"training__steps": STEPS + 1},
        "batch": {"training__batch_size": 13},
        "delta": {"privacy__delta": 1e-4},
        "adjacency": {"privacy__adjacency": "replace-one"},
        "records": {"data": {"name": "digits", "max_train": 120, "private_eval_fraction": 0.1}},
        "key": {"privacy__run_key": "5b" * 32},
    }
    reference = all_keys(recorded(job_of(tmp_path, "a"), monkeypatch))
    assert all_keys(recorded(job_of(tmp_path, "again"), monkeypatch)) == reference
    for name, change in changes.items():
        other = all_keys(recorded(job_of(tmp_path, name, **change), monkeypatch))
        assert not other & reference, f"another {name}, and some keys are the same"


def test_other_records_of_the_same_number_have_other_keys(tmp_path, monkeypatch):
    """One label differs; the plan is the same. With the same noise the difference of the two
    models would be free of noise."""
    seen = []
    for name in ("a", "b"):
        rng = np.random.default_rng(0)
        features, labels = rng.random((120, 64)), rng.integers(0, 10, 120)
        labels[0] = 3 if name == "a" else 4
        folder = tmp_path / name / "mine"
        write_split(folder, x=features, label=labels)
        write_split(folder, "test", x=rng.random((30, 64)), label=np.arange(30) % 10)
        data = {"name": "mine", "root": str(tmp_path / name), "columns": {"features": ["x"]}}
        seen.append(all_keys(recorded(job_of(tmp_path, f"run-{name}", data=data), monkeypatch)))
    assert not seen[0] & seen[1]


def test_a_replay_uses_the_same_keys_and_a_new_attempt_others(tmp_path, monkeypatch):
    """After a crash: the same workers replay, another number of workers draws all afresh."""
    job = job_of(tmp_path)
    with monkeypatch.context() as patch:
        first = record_keys(patch)
        train_and_crash(job.recipe, job.folder, patch, 3)
    again = recorded(job, monkeypatch, until=4)
    assert secrets(again)["noise"][:3] == secrets(first)["noise"]
    assert secrets(again)["sample"] == secrets(first)["sample"]
    other = recorded(job, monkeypatch, workers=2)
    assert Ledger.read(job.folder.ledger).epoch == 1
    assert not all_keys(other) & all_keys(again)
    found = secrets(other)
    for key in (*found["sample"], *found["noise"], found["draw"][0]):
        assert "1/" in other.labels(key)


def test_an_attempt_forced_by_another_sum_has_other_keys(tmp_path, monkeypatch):
    """The same epoch never adds its noise to two sums; the epoch after it shares nothing."""
    job = job_of(tmp_path)
    with monkeypatch.context() as patch:
        before = record_keys(patch)
        train_and_crash(job.recipe, job.folder, patch, 2)
    real = GradientEngine.clipped_sum

    def shifted(self: GradientEngine, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        found.flat[0] += 1.0
        return found

    monkeypatch.setattr(GradientEngine, "clipped_sum", shifted)
    with pytest.raises(ReplayConflict):
        execute(job)
    after = recorded(job, monkeypatch)
    assert not all_keys(after) & all_keys(before)


def test_a_secret_attempt_has_a_nonce(tmp_path, monkeypatch):
    """Without a fixed key every key depends on a random label of the attempt as well."""
    job = job_of(tmp_path, privacy__run_key=None)
    seen = recorded(job, monkeypatch)
    check_disjoint(seen, STEPS)
    nonce = Ledger.read(job.folder.ledger).attempts[-1]["nonce"]
    assert len(bytes.fromhex(nonce)) >= 16
    for of in secrets(seen).values():
        for key in of:
            assert f"0/{nonce}" in seen.labels(key)
    other = job_of(tmp_path, "other", privacy__run_key=None)
    assert other.folder.read_run_key() != job.folder.read_run_key()
    assert not all_keys(recorded(other, monkeypatch)) & all_keys(seen)


def test_one_noise_for_a_whole_run_is_not_the_training_s(tmp_path, monkeypatch):
    """Secure-SGD as published repeats one hidden noise; its key serves nothing else."""
    method = {"name": "secure-sgd", "sigma": 0.2, "redistribution": None, "paper_faithful": True}
    seen = recorded(job_of(tmp_path, method=method, model=NET), monkeypatch)
    hidden = secrets(seen)["draw"]
    assert len(hidden) == 1
    below = {d.purpose for d in seen.derived if d.parent in hidden}
    assert below == {"draws/one-hidden"}, "what is drawn from that key is that noise alone"
    assert not set(hidden) & {*seen.keys_opened_by(SAMPLING), *seen.keys_opened_by(NOISE)}
    assert len(seen.keys_opened_by(SAMPLING)) == len(seen.keys_opened_by(NOISE)) == STEPS


def test_a_paid_redistribution_has_keys_of_its_own(tmp_path, monkeypatch):
    """Its sample and its noise are not those of any training step."""
    section = {"source": "paid", "sample_rate": 0.5}
    method = {"name": "secure-sgd", "redistribution": section}
    job = job_of(tmp_path, method=method, model=NET)
    seen = recorded(job, monkeypatch)
    assert len(seen.keys_opened_by(SAMPLING)) == len(seen.keys_opened_by(NOISE)) == STEPS + 1
    above_noise = {above for key in seen.keys_opened_by(NOISE) for above in seen.ancestors(key)}
    assert not set(seen.keys_opened_by(SAMPLING)) & (set(seen.keys_opened_by(NOISE)) | above_noise)
    run_key = job.folder.read_run_key()
    for key in (*seen.keys_opened_by(SAMPLING), *seen.keys_opened_by(NOISE)):
        assert run_key in seen.ancestors(key)
    # With a secret run key that sum's noise is fresh, and descends from no stored key.
    secret = job_of(tmp_path, "secret", method=method, model=NET, privacy__run_key=None)
    again = recorded(secret, monkeypatch)
    run_key = secret.folder.read_run_key()
    assert sum(run_key not in again.ancestors(k) for k in again.keys_opened_by(NOISE)) == 1


def test_a_released_sum_is_named_by_its_bits(tmp_path, monkeypatch):
    """Ids in the ledger: one for every step, none without the sum."""
    first, second = job_of(tmp_path, "a"), job_of(tmp_path, "b")
    execute(first)
    execute(second)
    ids = release_ids(first.folder)
    assert ids == release_ids(second.folder) and len(set(ids)) == STEPS
    real = GradientEngine.clipped_sum

    def other(self: GradientEngine, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        found.flat[-1] = torch.nextafter(found.flat[-1], torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(GradientEngine, "clipped_sum", other)
    third = job_of(tmp_path, "c")
    execute(third, until=1)
    assert release_ids(third.folder)[0] != ids[0]


def test_the_ledger_knows_of_a_release_before_its_noise_is_drawn(tmp_path, monkeypatch):
    """Write-ahead: when the step's noise stream is opened, its entry is on the disk."""
    job = job_of(tmp_path)
    known = []
    real = private_step.add_noise

    def looking(*args: Any) -> Any:
        known.append(len(Ledger.read(job.folder.ledger).release_counts))
        return real(*args)

    monkeypatch.setattr(private_step, "add_noise", looking)
    execute(job)
    assert known == [1, 2, 3, 4, 5]


def test_no_step_is_released_without_the_archive_s_leave(tmp_path, monkeypatch):
    """A private archive has given leave for two steps: the third is neither recorded nor noised."""
    job = job_of(tmp_path)
    job.folder.archive.write_text(json.dumps({"private": True}))
    job.folder.permit.write_text(json.dumps({"epoch": 0, "step": 0, "steps": 2}))
    monkeypatch.setattr(worker, "_PERMIT_TIMEOUT", 0.2)
    with monkeypatch.context() as patch:
        seen = record_keys(patch)
        with pytest.raises(ClusterError):
            execute(job)
    assert Ledger.read(job.folder.ledger).release_counts == {0: 1, 1: 1}
    assert len(seen.keys_opened_by(NOISE)) == 2


def test_a_clip_that_exceeds_the_plan_s_is_not_executed(tmp_path):
    """The noise is that of the plan's clip norm, so the engine may not let more through."""
    job = job_of(tmp_path)
    plan = dataclasses.replace(job.plan, clip_norm=0.99 * job.plan.clip_norm)
    with pytest.raises(UserError):
        execute(dataclasses.replace(job, plan=plan))
    assert not job.folder.ledger.exists()


def test_a_step_that_is_not_recorded_is_not_released(tmp_path, monkeypatch):
    """The ledger cannot be written: no noise is drawn and no parameter moves."""
    job = job_of(tmp_path)

    def full(self: Ledger, *args: Any) -> Any:
        raise Interrupt

    monkeypatch.setattr(Ledger, "record", full)
    with monkeypatch.context() as patch:
        seen = record_keys(patch)
        with pytest.raises(Interrupt):
            execute(job)
    assert seen.keys_opened_by(NOISE) == [] and not job.folder.checkpoints.exists()
