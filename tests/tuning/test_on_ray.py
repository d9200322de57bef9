"""Searches on Ray Tune in processes of their own: killed and resumed, several workers, adaptive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from dpdist.privacy.ledger import Ledger
from dpdist.tuning.manifest import SearchFolder, read_trials
from dpdist.tuning.trial import scores_of

pytestmark = pytest.mark.timeout(1800)
COMMAND = [sys.executable, "-c", "from dpdist.commands.cli import main; main()"]


def start(path: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, "tune", str(path), *more],
        cwd=path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=700)
    assert process.returncode == 0, f"{out}\n{err}"
    return out, err


def write(folder: Path, asked) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(asked.model_dump(mode="json", exclude_none=True)))
    return path


def wait_for(condition, seconds: float = 600):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def processes_of(root: int) -> list[int]:
    """What `root` started, itself included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return sorted(found)


def parameters(folder) -> torch.Tensor:
    tensors = load_file(folder.model / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_a_killed_driver_is_resumed_to_the_same_winner(recipe, begin, run_trials, tmp_path):
    """kill -9 of the driver and all it started, in the middle of trials two at a time."""
    asked = recipe(
        privacy={"run_key": "33" * 32},
        training={"batch_size": 20, "steps": 600},
        resources={"checkpoint_seconds": 0.5},
        tune={"law": {"mean": 4.0}, "concurrent": 2},
    )
    path = write(tmp_path / "ray", asked)
    process = start(path)
    from dpdist.runs.folder import RunFolder

    run = RunFolder(path.parent / "runs" / "small")
    folder = SearchFolder(run)

    def in_the_middle() -> bool:
        metrics = folder.trial(1).metrics
        return metrics.exists() and metrics.read_bytes().count(b"\n") > 100

    wait_for(in_the_middle)
    for pid in processes_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    manifest = folder.manifest.read_bytes()
    assert not run.trained.exists() and len(read_trials(folder)) == 3
    out, err = finish(start(path, "--resume"))
    assert folder.manifest.read_bytes() == manifest
    assert "NOT PRIVATE: fixed run key" in out and "private search" in out
    assert "Traceback" not in err and "score" not in err

    here = begin(asked.model_copy(update={"name": "here"}))
    expected = run_trials(here)
    for number, report in enumerate(expected):
        assert scores_of(folder, number)["scores"] == pytest.approx([s for _, s in report])
        releases = Ledger.read(folder.trial(number).ledger).releases
        assert releases == dict.fromkeys(range(600), 1)
    here._decide()
    winner = json.loads(here.folder.outcome.read_text())["winner"]
    assert json.loads(folder.outcome.read_text())["winner"] == winner
    assert torch.allclose(parameters(run), parameters(here.folder.trial(winner)), atol=1e-5)


def test_trials_of_two_workers_and_what_does_not_fit(recipe, tmp_path):
    """Each trial a Ray Train job inside Ray Tune, on a session that has just their CPUs; more at
    once than fit is one line within seconds of the start, not a silent wait."""
    law = {"name": "fixed", "runs": 2, "mean": None}
    asked = recipe(
        resources={"workers": 2}, tune={"law": law, "score": {"public": {"name": "digits"}}}
    )
    path = write(tmp_path / "two", asked)
    out, _ = finish(start(path))
    assert "number of trials: fixed, 2 trials" in out and "public records (digits/test)" in out
    run = path.parent / "runs" / "small"
    shown = json.loads((run / "trials.json").read_text())
    assert len(shown) == 2 and all(len(row["scores"]) == 1 for row in shown)
    ledger = Ledger.read(run / "private" / "ledger.jsonl")
    assert ledger.attempts[0]["identity"]["world_size"] == "2" and ledger.superseded == 0

    many = os.cpu_count() or 1
    asked = recipe(name="many", resources={"workers": 2}, tune={"law": law, "concurrent": many + 1})
    process = start(write(tmp_path / "many", asked))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "do not fit" in err.splitlines()[-1]


def test_adaptive_searchers_see_paid_scores_only(recipe, tmp_path):
    """Optuna's TPE and ASHA with a fixed number of trials: every score that they saw is charged."""
    pytest.importorskip("optuna")
    asked = recipe(
        training={"steps": 9},
        tune={
            "law": {"name": "fixed", "runs": 5, "mean": None},
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
    path = write(tmp_path / "adaptive", asked)
    out, _ = finish(start(path))
    assert "fixed, 5 trials" in out
    run = path.parent / "runs" / "small"
    shown = json.loads((run / "trials.json").read_text())
    assert len(shown) == 5
    assert len({row["values"]["training.learning_rate"] for row in shown}) == 5
    finished = [row for row in shown if row["failed"] is None]
    assert finished and all(len(row["scores"]) == 2 for row in finished)
    for row in shown:
        assert row["failed"] in (None, "stopped early") and 1 <= len(row["scores"]) <= 2
    terms = json.loads((run / "private" / "search.json").read_text())
    training, scoring = terms["plan"]["phases"][0]["parts"]
    assert training[0]["steps"] == 5 * 9
    assert scoring[0]["count"] == 5 * 2 and scoring[0]["noise_multiplier"] == 5.0
