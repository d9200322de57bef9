"""The real thing in processes of its own: train, certify, report on Ray; kill, interrupt, resume.

Each command on Ray takes 20 s of processor time, most of it for imports: so there are few, and each
checks several things. What comes before and after them runs in this process.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from support.extension_examples import TOY
from support.local_execution import command, run_without_ray
from support.processes import (
    LOOPBACK,
    descendants,
    finish,
    listening_addresses,
    parameters,
    running_processes,
    slow_fsync_environment,
    start,
    steps_done,
    wait_for,
)
from support.recipes import write_recipe
from support.threads import one_thread

from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.training.monitoring import read_groups

pytestmark = pytest.mark.timeout(900)


def recipe(folder: Path, **sections) -> Path:
    raw = {
        "name": "small",
        "data": {"name": "digits"},
        "model": {"name": "small-cnn", "options": {"width": 4}},
        "privacy": {"epsilon": 3.0, "delta": 1e-4},
        "training": {"batch_size": 200, "steps": 10, "learning_rate": 0.5},
        "certify": {"sigma": 0.25, "n": 200, "max_inputs": 10, "radii": [0.1, 0.25]},
        "resources": {"workers": 2},
    }
    return write_recipe(folder, raw, **sections)


@pytest.fixture
def dpdist(monkeypatch, capsys):
    """`dpdist ARGUMENTS` in this process, without Ray, as a training worker of one CPU would."""

    def run(*arguments: object, cwd: Path) -> str:
        with monkeypatch.context() as patch:
            run_without_ray(patch)
            done = command(patch, capsys, cwd, *arguments)
        assert done.code == 0, done.out + done.err
        return done.out

    with one_thread():
        yield run


def opening_environment() -> dict[str, str]:
    """Return every variable by which Ray or gloo would listen on the network."""
    network = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(each.family == socket.AF_INET and each.address not in LOOPBACK for each in entries)
    ]
    gloo = (
        dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), network[0]) if network else {}
    )
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_AUTH_MODE": "disabled", **gloo}


def test_run_report_release_and_ports(tmp_path, dpdist):
    """One command does all, on loopback ports whatever the environment says, with a method of one's
    own from the working directory; a second call does nothing."""
    (tmp_path / "varied.py").write_text(TOY)
    asked = recipe(tmp_path, method={"name": "varied:Varied", "copies": 2})
    process = start("run", asked, cwd=tmp_path, **opening_environment())
    run = tmp_path / "runs" / "small"
    ports: set[str] = set()
    while process.poll() is None:
        if any(title.startswith("ray::") for title in descendants(process.pid).values()):
            ports |= listening_addresses(process.pid)
        time.sleep(1)  # looking takes processor time from what is looked at
    out, err = finish(process)
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in err
    assert ports and ports <= LOOPBACK
    assert (run / "private" / "teachers").exists()
    assert len(list((run / "private").glob("before-*"))) == 2
    assert len(list((run / "private").glob("after-*"))) == 2
    table = pq.read_table(run / "certificates" / "sigma-0.25-fixed-n-200" / "certificates.parquet")
    assert table.num_rows == 10

    def computed() -> dict[Path, int]:
        """When what training and certifying write was written."""
        places = [run / "private", run / "certificates"]
        paths = [p for place in places for p in place.rglob("*") if p.is_file()]
        return {p: p.stat().st_mtime_ns for p in paths if p.name != "ray.log"}

    before = computed()
    out_again = dpdist("run", asked, cwd=tmp_path)
    assert computed() == before, "a second call trains or certifies again"
    assert out_again == out

    dpdist("release", "small", cwd=tmp_path)
    card = json.loads((run / "release" / "privacy_card.json").read_text())
    assert 2.9 < card["guarantee"]["epsilon"] <= 3.0
    key = (run / "private" / "run.key").read_text()
    for path in [*(run / "release").iterdir(), run / "report" / "index.html"]:
        assert key.encode() not in path.read_bytes()


STEPS = 150
FAULTY = {
    "privacy": {"run_key": "7f" * 32},
    "training": {"steps": STEPS, "batch_size": 20, "learning_rate": 0.05},
    "resources": {"workers": 2, "checkpoint_seconds": 0.3},
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_training_in_one_process_that_is_ended_goes_on(tmp_path, dpdist, number):
    """A small training of one worker is the command's own process: killed or interrupted, the same
    command continues, and the ledger is whole."""
    faulty = FAULTY | {"resources": {"workers": 1, "checkpoint_seconds": 0.3}}
    dpdist("run", "--until", "train", recipe(tmp_path / "a", **faulty), cwd=tmp_path / "a")
    undisturbed = tmp_path / "a" / "runs" / "small"
    asked, run = recipe(tmp_path / "b", **faulty), tmp_path / "b" / "runs" / "small"
    process = start(
        "run", "--until", "train", asked, cwd=tmp_path / "b", **slow_fsync_environment(tmp_path)
    )
    wait_for(lambda: steps_done(run) >= 60, process=process)
    assert not descendants(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, out + err
        assert "interrupted" in err and "Traceback" not in err
    assert not (run / "private" / "trained.json").exists()
    before = Ledger.read(run / "private" / "ledger.jsonl").release_counts
    finish(start("run", "--until", "train", asked, cwd=tmp_path / "b"))
    last = read_groups(RunFolder(run))[-1]
    if number == signal.SIGTERM:  # a checkpoint between two steps: none is repeated
        assert last.step == len(before) and last.saved > 0
    else:
        assert last.saved == 0
    assert torch.equal(parameters(run), parameters(undisturbed))
    ours, theirs = (Ledger.read(r / "private" / "ledger.jsonl") for r in (run, undisturbed))
    assert ours.release_counts == theirs.release_counts == dict.fromkeys(range(STEPS), 1)
    assert ours.num_superseded == 0


def test_a_certification_ended_by_sigterm_continues(tmp_path, dpdist):
    """It is as clean as Ctrl-C: exit code 130, one line, no processes left behind, and the
    same command continues."""
    asked = recipe(tmp_path, certify={"n": 40_000}, resources={"workers": 1})
    dpdist("run", "--until", "train", asked, cwd=tmp_path)
    process = start("certify", "small", cwd=tmp_path, DPDIST_EXECUTOR="ray")
    place = tmp_path / "runs" / "small" / "certificates"
    wait_for(lambda: [p for p in place.rglob("*") if p.is_file()], process=process)
    left = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err and "received" not in err
    wait_for(lambda: not running_processes(left))
    dpdist("certify", "small", cwd=tmp_path)
    assert pq.read_table(next(place.rglob("certificates.parquet"))).num_rows == 10
