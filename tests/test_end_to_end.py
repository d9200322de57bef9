"""The real thing in processes of its own: train, certify, report on Ray; kill, resume, two nodes.

Each test starts Ray (10 s here), so there are few, and each checks several things.
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
from safetensors.torch import load_file

from dpdist.privacy.ledger import Ledger

pytestmark = pytest.mark.timeout(900)
COMMAND = [sys.executable, "-c", "from dpdist.commands.cli import main; main()"]


def recipe(tmp_path: Path, **sections) -> Path:
    raw = {
        "name": "small",
        "data": {"name": "digits"},
        "model": {"name": "small-cnn", "options": {"width": 4}},
        "privacy": {"epsilon": 3.0, "delta": 1e-4},
        "training": {"batch_size": 200, "steps": 30, "learning_rate": 0.5},
        "certify": {"sigma": 0.25, "n": 500, "max_inputs": 40, "radii": [0.1, 0.25]},
        "resources": {"workers": 2},
    }
    for section, values in sections.items():
        raw[section] = {**raw[section], **values}
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def start(*arguments: object, cwd: Path, **environment: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background shell (and so perhaps CI) starts its children with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> tuple[str, str]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, f"{out}\n{err}"
    return out, err


def wait_for(condition, seconds: float = 200):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def descendants(root: int) -> dict[int, str]:
    """Process id -> command line of everything that `root` started."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found, grown = {root}, True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(children)
        found |= children
    return {pid: titles.get(pid, "") for pid in found - {root}}


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


def steps_done(run: Path) -> int:
    """Steps that worker 0 has made, from the line it writes at each (progress lags behind)."""
    try:
        lines = (run / "private" / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"] + 1
    except (OSError, ValueError, IndexError):
        return 0


def training_workers(root: int) -> list[int]:
    """Process ids of the training workers that `root` started."""
    return [
        pid
        for pid, title in descendants(root).items()
        if title.startswith("ray::") and "RayTrainWorker" in title
    ]


def still_there(pids: dict[int, str]) -> list[str]:
    """Which of these processes still run under the command line they had."""
    found = []
    for pid, title in pids.items():
        try:
            now = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if now and now.split("\0")[0] == title.split("\0")[0]:
            found.append(title)
    return found


def parameters(run: Path) -> torch.Tensor:
    tensors = load_file(run / "private" / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_run_report_release_and_ports(tmp_path):
    """One command does all, on loopback ports, quietly; a second call does nothing."""
    process = start("run", recipe(tmp_path), cwd=tmp_path)
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
    page = (run / "report" / "index.html").read_text()
    assert "data:image/png;base64," in page and "http://" not in page and "https://" not in page
    table = pq.read_table(run / "certificates" / "sigma-0.25-fixed-n-500" / "certificates.parquet")
    assert table.num_rows == 40

    def computed() -> dict[Path, int]:
        """When what training and certifying write was written."""
        places = [run / "private", run / "certificates"]
        paths = [p for place in places for p in place.rglob("*") if p.is_file()]
        return {p: p.stat().st_mtime_ns for p in paths if p.name != "ray.log"}

    before = computed()
    out_again, _ = finish(start("run", recipe(tmp_path), cwd=tmp_path))
    assert computed() == before, "a second call trains or certifies again"
    assert out_again == out

    finish(start("release", "small", cwd=tmp_path))
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
        assert "certified, sigma-0.25-fixed-n-500" in out
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
