"""Faults while training on two hosts. After each, the job finishes or is submitted again, and
parameters and ledger equal those of one undisturbed process.

With DPDIST_HOSTS=1 the two commonest; each kind by itself with DPDIST_FAULTS=1 too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import rooms
import torch
from faults import (
    Faults,
    asked_for,
    fill,
    no_orphans,
    releases,
    run_through,
    train_here,
)  # fmt: skip
from support.processes import parameters, steps_done

pytestmark = pytest.mark.timeout(1800)

STEPS, LONG = 400, 2500
RECIPE = {
    "name": "fault",
    "data": {"name": "digits"},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "7f" * 32},
    "training": {
        "batch_size": 40, "steps": STEPS, "learning_rate": 0.05, "reproducible": True,
    },
    "resources": {"workers": 2, "checkpoint_seconds": 0.5, "max_failures": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train_here(RECIPE, tmp_path_factory.mktemp("undisturbed"))


def same(run: Path, undisturbed: Path, steps: int = STEPS) -> None:
    assert torch.equal(parameters(run), parameters(undisturbed))
    ours, theirs = releases(run), releases(undisturbed)
    assert len({step for _, step, _ in ours}) == steps
    assert ours == theirs, "a step was released twice, or with another sum"


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory):
    return train_here(_recipe("fault", LONG), tmp_path_factory.mktemp("undisturbed"))


def _recipe(name: str, steps: int) -> dict:
    return {**RECIPE, "name": name, "training": {**RECIPE["training"], "steps": steps}}


def _set(*names: str, always: bool = False):
    return pytest.param(names, id="+".join(names), marks=() if always else (asked_for,))


@pytest.mark.parametrize(
    "faults",
    [
        _set("kill_worker", "stop_host", always=True),
        _set("spot_interruption"),
        _set("cut_network"),
        _set("cut_off"),
        _set("fill_disk"),
        _set("kill_driver"),
        _set("stop_job"),
    ],
)
def test_training_survives(cluster, undisturbed, faults):
    name = "-".join(faults).replace("_", "")
    project = cluster.project(name, _recipe(name, STEPS))
    run = cluster.runs / name

    def submit() -> str:
        return cluster.submit(f"{name}.yaml", project)

    job = submit()
    for number, fault in enumerate(faults):
        cluster.wait_for(lambda number=number: steps_done(run) >= 40 + 80 * number)
        with getattr(Faults(cluster, "RayTrainWorker"), fault)(job):
            assert steps_done(run) < STEPS, "the training was over before the fault"
    _, again = run_through(cluster, job, submit)
    same(run, undisturbed)
    no_orphans(cluster)
    print(f"{name}: submitted again {again} times; the same parameters and ledger")


@asked_for
@pytest.mark.parametrize("fault", ["restart_head", "lose_head"])
def test_training_survives_its_head(cluster, undisturbed_long, fault):
    """The workers go on without a head until their own Ray ends: long enough to be cut off too."""
    name = fault.replace("_", "")
    project = cluster.project(name, _recipe(name, LONG))
    run = cluster.runs / name

    def submit() -> str:
        return cluster.submit(f"{name}.yaml", project)

    job = submit()
    cluster.wait_for(lambda: steps_done(run) >= 40)
    before = steps_done(run)
    with getattr(Faults(cluster, "RayTrainWorker"), fault)(job):
        pass
    after = steps_done(run)
    assert after < LONG, "the training was over before the fault"
    _, again = run_through(cluster, job, submit)
    assert again == 1
    same(run, undisturbed_long, LONG)
    no_orphans(cluster)
    print(f"{name}: {before} steps before, {after} when a head was there again; the same ledger")


@asked_for
def test_full_storage_stops_the_run_with_a_clear_error(cluster, undisturbed):
    """The disk that all hosts share is full; with space again the same recipe goes on."""
    project = cluster.project("full", {**RECIPE, "name": "full"})
    small = cluster.laptop.small
    run = small / "runs" / "full"

    def submit() -> str:
        return cluster.submit("full.yaml", project, "--runs", f"{rooms.SHARED}/{rooms.SMALL}/runs")

    job = submit()
    cluster.wait_for(lambda: steps_done(run) >= 40)
    filler = fill(small)
    assert steps_done(run) < STEPS, "the training was over before the disk was full"
    assert cluster.end_of(job) == "FAILED"
    log = cluster.said(job)
    assert "No space left on device" in log and "Traceback" not in log, log
    no_orphans(cluster)
    filler.unlink()
    _, again = run_through(cluster, submit(), submit)
    assert again == 0
    same(run, undisturbed)
