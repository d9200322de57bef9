"""Searches on Ray Tune: killed and resumed, several workers, adaptive. One is killed in a process
of its own; the others share a session of Ray, two CPUs, with this process as their driver."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from support.local_execution import Done, command, run_without_ray
from support.processes import descendants, kill, parameters, slow_fsync_environment, start, wait_for
from support.recipes import write_recipe

from dpdist.cluster.session import secure_staging_folder
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.tuning.manifest import SearchFolder, read_scores, read_trials

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def tune(session, monkeypatch, capsys):
    """`dpdist tune` in this process and on that session."""

    def run(path: Path, *more: str) -> Done:
        done = command(monkeypatch, capsys, path.parent, "tune", path, *more)
        assert done.code == 0, done.out + done.err
        return done

    return run


@pytest.mark.e2e
@pytest.mark.nightly
def test_a_killed_driver_is_resumed_to_the_same_winner(
    recipe, begin, run_trials, tmp_path, request
):
    """kill -9 of the driver and all it started, in the middle of trials two at a time."""
    asked = recipe(
        privacy={"run_key": "33" * 32},
        training={"batch_size": 20, "steps": 400},
        resources={"checkpoint_seconds": 0.3},
        tune={"num_trials": {"mean": 4.0}, "concurrent": 2},
    )
    path = write_recipe(tmp_path / "ray", asked)
    process = start("tune", path, cwd=path.parent, **slow_fsync_environment(tmp_path))
    run = RunFolder(path.parent / "runs" / "small")
    folder = SearchFolder(run)

    def in_the_middle() -> bool:
        metrics = folder.trial_folder(1).metrics
        return metrics.exists() and metrics.read_bytes().count(b"\n") > 100

    wait_for(in_the_middle, process=process)
    kill(process, list(descendants(process.pid)))
    manifest = folder.manifest.read_bytes()
    assert not run.training_summary.exists() and len(read_trials(folder)) == 3
    done = request.getfixturevalue("tune")(path)
    assert folder.manifest.read_bytes() == manifest
    assert "NOT PRIVATE: fixed run key" in done.out and "Chosen" in done.out
    assert "Traceback" not in done.err and "score" not in done.err

    here = begin(asked.model_copy(update={"name": "here"}))
    expected = run_trials(here)
    for number, report in enumerate(expected):
        assert read_scores(folder, number)["scores"] == pytest.approx([s for _, s in report])
        releases = Ledger.read(folder.trial_folder(number).ledger).release_counts
        assert releases == dict.fromkeys(range(400), 1)
    here._choose_winner()
    winner = json.loads(here.folder.outcome.read_text())["winner"]
    assert json.loads(folder.outcome.read_text())["winner"] == winner
    ours, theirs = (parameters(f.path) for f in (run, here.folder.trial_folder(winner)))
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.e2e
@pytest.mark.nightly
def test_trials_of_two_workers(recipe, tune, tmp_path):
    """Each trial a Ray Train job inside Ray Tune, on a session that has just their CPUs."""
    asked = recipe(
        resources={"workers": 2},
        tune={
            "num_trials": {"name": "fixed", "runs": 2, "mean": None},
            "score": {"public": {"name": "digits"}},
        },
    )
    path = write_recipe(tmp_path / "two", asked)
    out = tune(path).out
    assert "number of trials: fixed, 2 trials" in out and "public records (digits/test)" in out
    run = path.parent / "runs" / "small"
    shown = json.loads((run / "trials.json").read_text())
    assert len(shown) == 2 and all(len(row["scores"]) == 1 for row in shown)
    ledger = Ledger.read(run / "private" / "ledger.jsonl")
    assert ledger.attempts[0]["identity"]["world_size"] == "2" and ledger.num_superseded == 0
    # Tune staged K and the scores in Ray's session folder, 0644, and left them there.
    staged = secure_staging_folder()
    assert stat.S_IMODE(staged.stat().st_mode) == 0o700
    assert list(staged.glob("*/search-*")) == []
    assert [path for path in staged.rglob("*") if "result" in path.name] == []


def test_more_trials_at_once_than_fit_are_refused_at_once(recipe, tmp_path, monkeypatch, capsys):
    """One line, not a silent wait: without Ray there are eight CPUs."""
    num_trials = {"name": "fixed", "runs": 2, "mean": None}
    asked = recipe(
        name="many", resources={"workers": 2}, tune={"num_trials": num_trials, "concurrent": 5}
    )
    path = write_recipe(tmp_path / "many", asked)
    run_without_ray(monkeypatch)
    done = command(monkeypatch, capsys, path.parent, "tune", path)
    assert done.code == 2 and "do not fit" in done.err.splitlines()[-1]


@pytest.mark.e2e
@pytest.mark.nightly
def test_adaptive_searchers_see_paid_scores_only(recipe, tune, tmp_path):
    """Optuna's TPE and ASHA with a fixed number of trials: every score that they saw is charged."""
    pytest.importorskip("optuna")
    asked = recipe(
        training={"steps": 9},
        tune={
            "num_trials": {"name": "fixed", "runs": 4, "mean": None},
            "space": {
                "training.learning_rate": {"log_uniform": [0.01, 2.0]},
                "privacy.clip_norm": {"choice": [0.5, 1.0]},
                "training.momentum": {"uniform": [0.0, 0.9]},
            },
            "searcher": "optuna",
            "asha": {"rungs": 2, "reduction_factor": 3},
            "score": {"noise": 5.0},
        },
    )
    path = write_recipe(tmp_path / "adaptive", asked)
    assert "fixed, 4 trials" in tune(path).out
    run = path.parent / "runs" / "small"
    shown = json.loads((run / "trials.json").read_text())
    assert len(shown) == 4
    assert len({row["values"]["training.learning_rate"] for row in shown}) == 4
    finished = [row for row in shown if row["failed"] is None]
    assert finished and all(len(row["scores"]) == 2 for row in finished)
    for row in shown:
        assert row["failed"] in (None, "stopped early") and 1 <= len(row["scores"]) <= 2
    terms = json.loads((run / "private" / "search.json").read_text())
    training, scoring = terms["plan"]["phases"][0]["parts"]
    assert training[0]["steps"] == 4 * 9
    assert scoring[0]["count"] == 4 * 2 and scoring[0]["noise_multiplier"] == 5.0
