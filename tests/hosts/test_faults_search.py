"""Faults during a private search on two hosts: the same trials, ledgers and winner as in one
undisturbed process; a trial that was hit is replayed, never drawn again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from faults import (
    Faults,
    asked_for,
    fill,
    no_orphans,
    releases,
    run_through,
)  # fmt: skip
from over_ssh import Cluster
from rooms import SHARED, SMALL
from support.processes import parameters, steps_done

pytestmark = [pytest.mark.timeout(1800), asked_for]

TRIAL = "ray::ImplicitFunc"
STEPS = 1000
RECIPE = {
    "name": "search",
    "data": {"name": "digits"},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    # The distribution gives this key three trials: on two workers, one trial waits.
    "privacy": {"noise_multiplier": 4.0, "delta": 1e-4, "run_key": "33" * 32},
    "training": {"batch_size": 60, "steps": STEPS, "learning_rate": 0.1},
    "tune": {
        "space": {"training.learning_rate": {"log_uniform": [0.01, 1.0]}},
        "num_trials": {"name": "geometric", "mean": 4.0},
        "concurrent": 2,
    },
    "resources": {"workers": 1, "checkpoint_seconds": 0.5, "max_failures": 8},
}
TRIALS = 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same search in this process: one trial after the other, without Ray."""
    from dpdist.cluster.versions import PACKAGES, package_fingerprints
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import parse_recipe
    from dpdist.tuning.manifest import read_trials
    from dpdist.tuning.search import prepare_search
    from dpdist.tuning.searchers import ManifestSearcher
    from dpdist.tuning.trial import continue_recipe_trial, run_trial

    threads = torch.get_num_threads()
    folder = RunFolder(tmp_path_factory.mktemp("undisturbed") / "search")
    search = prepare_search(parse_recipe(RECIPE, "r"), folder, "r")
    trials = read_trials(search.folder)
    assert len(trials) == TRIALS
    searcher = ManifestSearcher(search.folder, trials, search.trial_noise_multiplier)
    for trial in trials:
        searcher.suggest(f"id-{trial.number}")
        run_trial(
            folder.path.resolve(),
            package_fingerprints(PACKAGES),
            trial.number,
            lambda *_: None,
            continue_recipe_trial,
        )
    search._choose_winner()
    search._promote_winner(json.loads(search.folder.outcome.read_text())["winner"])
    torch.set_num_threads(threads)
    return folder.path


def same(run: Path, undisturbed: Path) -> None:
    ours, theirs = (path / "private" / "search" for path in (run, undisturbed))
    for name in ("manifest.json", "outcome.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    for trial in (f"{number:05d}" for number in range(TRIALS)):
        found = releases(ours / "trials" / trial)
        assert len(found) == STEPS
        assert found == releases(theirs / "trials" / trial), f"trial {trial}: another release"
        scores = f"scores/{trial}.json"
        assert json.loads((ours / scores).read_text()) == json.loads((theirs / scores).read_text())
    assert releases(run) == releases(undisturbed)
    assert torch.equal(parameters(run), parameters(undisturbed))


def start(cluster: Cluster, name: str, *more: str) -> str:
    """Begin the search `name`, or go on with it; the job."""
    (cluster.laptop.shared / f"{name}.yaml").write_text(yaml.safe_dump({**RECIPE, "name": name}))
    return cluster.entrypoint(shlex.join(["dpdist", "tune", f"{SHARED}/{name}.yaml", *more]))


def deepest(run: Path) -> int:
    """Steps of the trial that has made most."""
    trials = run / "private" / "search" / "trials"
    return max(steps_done(trials / f"{n:05d}") for n in range(TRIALS))


@pytest.mark.parametrize(
    "fault",
    [
        "kill_worker",
        "stop_host",
        "spot_interruption",
        "cut_network",
        "cut_off",
        "fill_disk",
        "kill_driver",
        "stop_job",
        "restart_head",
        "lose_head",
    ],
)
def test_search_survives(cluster, undisturbed, fault):
    name = f"search-{fault.replace('_', '')}"
    run = cluster.runs / name
    job = start(cluster, name)
    cluster.wait_for(lambda: deepest(run) >= 60)
    with getattr(Faults(cluster, TRIAL), fault)(job):
        assert not (run / "private" / "trained.json").exists(), "over before the fault"
    _, again = run_through(cluster, job, lambda: start(cluster, name))
    same(run, undisturbed)
    no_orphans(cluster)
    print(f"{name}: submitted again {again} times; the same trials, ledgers and winner")


def test_full_storage_stops_the_search_with_a_clear_error(cluster, undisturbed):
    """The disk that all hosts share is full: no trial has failed, and with space again the same
    search goes on."""
    name, there = "search-full", ("--runs", f"{SHARED}/{SMALL}/runs")
    run = cluster.laptop.small / "runs" / name
    job = start(cluster, name, *there)
    cluster.wait_for(lambda: deepest(run) >= 60)
    filler = fill(cluster.laptop.small)
    assert not (run / "private" / "trained.json").exists(), "over before the disk was full"
    assert cluster.end_of(job) == "FAILED"
    log = cluster.said(job)
    assert "No space left on device" in log and "Traceback" not in log, log
    no_orphans(cluster)
    filler.unlink()
    assert cluster.end_of(start(cluster, name, *there)) == "SUCCEEDED"
    same(run, undisturbed)
