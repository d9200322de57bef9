"""The real thing in processes of its own: train, certify, report on Ray; kill, resume, two nodes.

Each command on Ray takes 20 s of processor time, most of it for imports: so there are few, and each
checks several things. What comes before and after them runs in this process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from support.extending import TOY
from support.here import command, without_ray
from support.processes import (
    descendants,
    finish,
    parameters,
    start,
    steps_done,
    still_there,
    training_workers,
    wait_for,
)

from dpdist.privacy.ledger import Ledger

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
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    folder.mkdir(exist_ok=True)
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture
def dpdist(monkeypatch, capsys):
    """`dpdist ARGUMENTS` in this process, without Ray, as a training worker of one CPU would."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*arguments: object, cwd: Path) -> str:
        with monkeypatch.context() as patch:
            without_ray(patch)
            done = command(patch, capsys, cwd, *arguments)
        assert done.code == 0, done.out + done.err
        return done.out

    yield run
    torch.set_num_threads(threads)


def open_ports(root: int) -> list[str]:
    """Listening addresses of a process and all it started, loopback left out."""
    pids = {root, *descendants(root)}
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout.splitlines()
    ours = [
        line.split()[3]
        for line in lines
        if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
    ]
    assert ours, "ss showed no port of a running Ray"
    return [address for address in ours if "127.0.0.1" not in address and "[::1]" not in address]


def test_run_report_release_and_ports(tmp_path, dpdist):
    """One command does all, on loopback ports, quietly, with a method of one's own from the working
    directory; a second call does nothing."""
    (tmp_path / "varied.py").write_text(TOY)
    asked = recipe(tmp_path, method={"name": "varied:Varied", "copies": 2})
    process = start("run", asked, cwd=tmp_path)
    run = tmp_path / "runs" / "small"
    ports: list[str] = []
    seen = 0
    while process.poll() is None:
        if training_workers(process.pid):
            ports += open_ports(process.pid)
            seen += 1
        time.sleep(0.5)
    out, err = finish(process)
    assert seen > 0 and ports == []
    for word in (
        "epsilon = ",
        "add-or-remove-one",
        "delta = 0.0001",
        "clean accuracy",
        "certified",
    ):
        assert word in out
    for line in err.splitlines():
        assert line.startswith(("training", "certifying")), f"chatter on the terminal: {line}"
    assert (run / "private" / "teachers").exists()
    assert len(list((run / "private").glob("learnt-*"))) == 2
    page = (run / "report" / "index.html").read_text()
    assert "data:image/png;base64," in page and "http://" not in page and "https://" not in page
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
    released = {p.name for p in (run / "release").iterdir()}
    assert released == {
        "model.safetensors", "model.json", "privacy_card.json", "privacy_card.md",
    }  # fmt: skip
    card = json.loads((run / "release" / "privacy_card.json").read_text())
    assert 2.9 < card["guarantee"]["epsilon"] <= 3.0
    key = (run / "private" / "run.key").read_text()
    for path in [*(run / "release").iterdir(), run / "report" / "index.html"]:
        assert key.encode() not in path.read_bytes()


FAULTY = {
    "privacy": {"run_key": "7f" * 32},
    "training": {"steps": 600, "batch_size": 20, "learning_rate": 0.05},
    "resources": {"workers": 2, "checkpoint_seconds": 0.5},
}


def test_killed_workers_and_a_killed_driver_change_nothing(tmp_path):
    """kill -9 a worker twice and the driver once: same parameters, same ledger as undisturbed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    finish(start("train", recipe(tmp_path / "a", **FAULTY), cwd=tmp_path / "a"))
    undisturbed = tmp_path / "a" / "runs" / "small"

    run = tmp_path / "b" / "runs" / "small"
    process = start("train", recipe(tmp_path / "b", **FAULTY), cwd=tmp_path / "b")
    for target in (80, 200):
        wait_for(lambda target=target: steps_done(run) >= target)
        os.kill(training_workers(process.pid)[0], signal.SIGKILL)
    wait_for(lambda: steps_done(run) >= 320)
    # Stopped at once, for the rest of the run is a second's work and must not be done.
    workers = training_workers(process.pid)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    left = descendants(process.pid)
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not still_there(left))
    assert not (run / "private" / "trained.json").exists()
    out, _ = finish(start("train", recipe(tmp_path / "b", **FAULTY), cwd=tmp_path / "b"))
    assert "NOT PRIVATE: fixed run key" in out

    assert torch.equal(parameters(run), parameters(undisturbed))
    ours, theirs = (Ledger.read(r / "private" / "ledger.jsonl") for r in (run, undisturbed))
    assert ours.releases == theirs.releases == dict.fromkeys(range(600), 1)
    assert ours.superseded == 0


def test_interrupt_is_clean(tmp_path):
    """Ctrl-C in the middle: exit code 130, one line, no processes left behind."""
    path = recipe(tmp_path, training={"steps": 5000})
    process = start("train", path, cwd=tmp_path)
    wait_for(lambda: steps_done(tmp_path / "runs" / "small") >= 5)
    left = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the same command continues" in err and "Traceback" not in err
    wait_for(lambda: not still_there(left))


def test_two_nodes(tmp_path):
    """The same recipe unchanged on a two-node cluster at RAY_ADDRESS: a worker on each node."""
    environment = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    nodes = subprocess.Popen(
        [sys.executable, "-c", _TWO_NODES],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    )
    try:
        address = wait_for(lambda: nodes.stdout.readline()).strip()
        path = recipe(tmp_path, training={"steps": 10})
        process = start("run", path, cwd=tmp_path, RAY_ADDRESS=address, **environment)
        out, err = finish(process)
        assert "2 nodes" in err
        assert "certified, sigma-0.25-fixed-n-200" in out
    finally:
        nodes.communicate("\n", timeout=60)


_TWO_NODES = """
import contextlib, sys
from ray.cluster_utils import Cluster
with contextlib.redirect_stdout(sys.stderr):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""
