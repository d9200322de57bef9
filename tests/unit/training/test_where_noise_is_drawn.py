"""Noise drawn where the sums lie is the same noise, under the same rules."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.training import Interrupt, make, train

from dpdist.audits import mechanism
from dpdist.audits.target import Target
from dpdist.config.sections import MechanismAudit
from dpdist.core.errors import UserError
from dpdist.gradients import noise
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import StepPlan
from dpdist.training import collectives, private_step, worker
from dpdist.training.job import prepare

STEPS = 6
THERE = {"resources__noise": "device"}


def small(tmp_path, name: str, **more: Any):
    base = {
        "model": "linear", "training__steps": STEPS, "resources__checkpoint_seconds": 1e9
    }  # fmt: skip
    return make(tmp_path, name, **(base | more))


def kept_from(patch: pytest.MonkeyPatch, name: str) -> None:
    """One of the two ways raises."""

    def never(*_: Any) -> Any:
        raise AssertionError(f"{name} was asked for noise")

    patch.setattr(*((private_step, name) if name == "add_noise" else (noise, name)), never)


@pytest.mark.parametrize(("workers", "more"), [(1, {}), (3, {"training__reproducible": True})])
def test_parameters_and_ledger_are_those_of_the_cpu_s_noise(tmp_path, monkeypatch, workers, more):
    """And only the way that was asked for is taken."""
    monkeypatch.setattr(collectives, "LEAF", 64)
    found = []
    for name, other, where in (
        ("host", "add_device_noise", {}), ("device", "add_noise", THERE)
    ):  # fmt: skip
        recipe, folder = small(tmp_path, name, **more, **where)
        with monkeypatch.context() as patch:
            kept_from(patch, other)
            found.append((train(recipe, folder, workers), Ledger.read(folder.ledger)))
    assert torch.equal(found[0][0], found[1][0])
    for _, ledger in found:
        assert ledger.release_counts == dict.fromkeys(range(STEPS), 1)


def dying(recipe, folder, patch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Let the run die after the ledger's entry of step `at`: how many entries the disk had
    whenever noise was asked for."""
    known: list[int] = []
    real = noise.add_device_noise

    def dies(*arguments: Any) -> Any:
        known.append(len(Ledger.read(folder.ledger).release_counts))
        if len(known) == at + 1:
            raise Interrupt
        return real(*arguments)

    with patch.context() as inner:
        inner.setattr(noise, "add_device_noise", dies)
        with pytest.raises(Interrupt):
            train(recipe, folder)
    return known


def test_a_crash_is_replayed_exactly_and_the_ledger_knows_first(tmp_path, monkeypatch):
    undisturbed = train(*small(tmp_path, "a", **THERE))
    recipe, folder = small(tmp_path, "b", **THERE)
    assert dying(recipe, folder, monkeypatch, 3) == [1, 2, 3, 4]
    assert torch.equal(train(recipe, folder), undisturbed)
    assert Ledger.read(folder.ledger).num_superseded == 0


def test_another_place_of_the_noise_is_a_new_attempt_and_is_charged(tmp_path, monkeypatch):
    recipe, folder = small(tmp_path, "b", **THERE)
    dying(recipe, folder, monkeypatch, 3)
    train(*small(tmp_path, "b"))
    ledger = Ledger.read(folder.ledger)
    assert ledger.num_superseded == 4
    assert [attempt["identity"].get("noise") for attempt in ledger.attempts] == ["device", None]


def test_devices_of_two_kinds_make_no_noise_together(tmp_path, monkeypatch):
    def kind(device: torch.device) -> str:
        last = threading.current_thread().name.endswith("1")
        return "cuda/A/100" if last else "cuda/H/100"

    monkeypatch.setattr(worker, "_device", kind)
    recipe, folder = small(tmp_path, "there", **THERE)
    with pytest.raises(UserError, match=r"noise: .*cuda/A/100 and cuda/H"):
        train(recipe, folder, 2)
    assert not folder.ledger.exists()
    train(*small(tmp_path, "here"), 2)


def test_a_device_that_makes_other_noise_releases_nothing(tmp_path, monkeypatch):
    real = noise.device_standard_normal
    monkeypatch.setattr(noise, "device_standard_normal", lambda *a: 1.001 * real(*a))
    noise.check_device_noise.cache_clear()
    recipe, folder = small(tmp_path, "run", **THERE)
    with pytest.raises(UserError, match=r"resources\.noise"):
        train(recipe, folder)
    assert not folder.ledger.exists()


def test_the_mechanism_s_audit_drives_the_generator_that_the_recipe_asks_for(tmp_path, monkeypatch):
    class Seen(Exception):
        pass

    def plays(pieces: Any, *_: Any) -> Any:
        raise Seen(pieces)

    monkeypatch.setattr(mechanism, "run_scenarios", plays)
    released = []
    for other, where in (("add_device_noise", {}), ("add_noise", THERE)):
        recipe, folder = small(tmp_path, other, **where)
        plan = prepare(recipe, folder, "test").plan
        target = Target(recipe, plan, plan.guarantee())
        with pytest.raises(Seen) as seen:
            mechanism.audit_mechanism(
                MechanismAudit(), target, tmp_path / "audit", lambda done, total: None
            )
        driven = seen.value.args[0](StepPlan(1.0, 0.5, 32.0, 1.0, None))
        with monkeypatch.context() as patch:
            kept_from(patch, other)
            released.append(driven.run_step(np.arange(64), 3))
    assert np.array_equal(*released)
