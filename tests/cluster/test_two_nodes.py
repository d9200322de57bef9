"""A cluster of two nodes at RAY_ADDRESS: a pool grows onto the second, a run uses both, and goes on
with one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import processes
from support.local_execution import command, run_without_ray
from support.methods import GATED
from support.processes import (
    finish,
    parameters,
    start,
    steps_done,
    training_workers,
    wait_for,
)
from support.threads import one_thread

from dpdist.core.files import write_atomic
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder, complete_checkpoints
from dpdist.training.monitoring import read_groups

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Starts the first node, at each line "add" the second, which "kill" ends; "drain" announces its
# pre-emption, a minute before. All end with the input.
NODES = """
import contextlib, sys, time
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
PREEMPTION = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
with contextlib.redirect_stdout(sys.stderr):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
print(cluster.address, flush=True)
for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
        if line.strip() == "add":
            second = cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
        elif line.strip() == "drain":
            accepted, reason = GcsClient(address=cluster.address).drain_node(
                second.node_id, PREEMPTION, "spot", int(1000 * (time.time() + 60))
            )
            assert accepted, reason
        else:
            cluster.remove_node(second, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""
POOL = """
import os, sys, time
import ray
from dpdist.cluster.actor_pool import run_chunks
from dpdist.cluster.work import Chunk, ChunkJob

ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False)

def factory(shared):
    def work(payload):
        time.sleep(0.1)
        return os.getpid()
    return work

pids, until = set(), time.monotonic() + 120

def stream():
    number = 0
    while len(pids) < 2 and time.monotonic() < until:
        yield Chunk(f"c{number}", number)
        number += 1

def on_result(key, pid):
    if not pids:
        print("begun", flush=True)
    pids.add(pid)

run_chunks(ChunkJob(factory, None, stream(), on_result))
print(len(pids), flush=True)
"""
RECIPE = {
    "name": "small",
    "data": {"name": "digits"},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    "training": {"batch_size": 200, "steps": 10, "learning_rate": 0.5},
    "certify": {"sigma": 0.25, "n": 200, "max_inputs": 10, "radii": [0.1]},
    "resources": {"workers": 2},
}


@pytest.fixture
def nodes(tmp_path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", NODES],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    )
    yield process
    process.communicate(timeout=60)


def tell(nodes: subprocess.Popen, word: str) -> None:
    nodes.stdin.write(f"{word}\n")
    nodes.stdin.flush()
    assert nodes.stdout.readline() == "done\n"


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_pool_grows_and_a_recipe_runs_unchanged(nodes, tmp_path):
    """The pool begins on one node and goes on with the second; the workers of a run lie on both."""
    address = wait_for(nodes.stdout.readline).strip()
    pool = subprocess.Popen(
        [sys.executable, "-c", POOL, address],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert pool.stdout.readline() == "begun\n"
    tell(nodes, "add")
    assert pool.communicate(timeout=240)[0] == "2\n"

    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    process = start("run", path, cwd=tmp_path, RAY_ADDRESS=address, **ENVIRONMENT)
    out, err = finish(process)
    assert "2 nodes" in err
    assert "Certified accuracy" in out


ELASTIC = RECIPE | {
    "model": {"name": "mlp", "options": {"hidden": [1100]}},
    "method": {"name": "gated:Gated"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "5a" * 32},
    "training": {
        "batch_size": 200, "steps": 300, "learning_rate": 0.1, "momentum": 0.5,
        "reproducible": True,
    },
    "resources": {"workers": {"min": 1, "max": 2}, "checkpoint_seconds": 0.05},
}  # fmt: skip


class Training:
    """A training on the nodes that takes no step beyond what it is let."""

    def __init__(self, command: str, path: Path, address: str) -> None:
        self.limit = path.with_name("limit")
        self.limit.write_text("0")
        environment = ENVIRONMENT | {"RAY_ADDRESS": address, "PYTHONPATH": str(path.parent)}
        self.process = start(command, path, cwd=path.parent, **environment)
        self.run = path.parent / "runs" / "small"

    def begins(self, number: int) -> None:
        """Wait for the group of this number; let it make 40 steps and a checkpoint of its own."""
        self._wait(lambda: len(read_groups(RunFolder(self.run))) == number)
        # Of the group before: where it was held.
        reached = steps_done(self.run)
        write_atomic(self.limit, str(reached + 40))
        self._wait(lambda: steps_done(self.run) >= reached + 40)
        kept = self.run / "private" / "checkpoints"  # without one the next begins where it did
        self._wait(lambda: any(at(found) > reached for found in complete_checkpoints(kept)))

    def reaches(self, steps: int) -> None:
        """Let the workers make so many steps, and hold them there."""
        write_atomic(self.limit, str(steps))
        self._wait(lambda: steps_done(self.run) >= steps)

    def ends(self) -> tuple[str, str]:
        self.limit.unlink()
        return finish(self.process, 600)

    def _wait(self, condition: Callable[[], Any]) -> None:
        wait_for(condition, 300, self.process)


def at(checkpoint: Any) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@pytest.fixture
def gated(tmp_path, monkeypatch) -> Path:
    """The recipe's path, beside its method, which this process finds, too."""
    (tmp_path / "gated.py").write_text(GATED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "gated", raising=False)
    yield tmp_path / "r.yaml"
    sys.modules.pop("gated", None)


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_lost_workers_and_a_lost_node_change_nothing(nodes, gated, tmp_path, monkeypatch, capsys):
    """First a worker is killed, then a node, and a worker with
    it: the bits of one undisturbed process, each step on the ledger once."""
    gated.write_text(yaml.safe_dump(ELASTIC))
    address = wait_for(nodes.stdout.readline).strip()
    tell(nodes, "add")
    training = Training("run", gated, address)
    training.begins(1)
    os.kill(training_workers(nodes.pid)[0], signal.SIGKILL)
    training.begins(2)
    tell(nodes, "kill")
    training.begins(3)
    out, err = training.ends()
    assert "Certified accuracy" in out
    run = training.run
    groups = read_groups(RunFolder(run))
    assert [(g.workers, g.backend, g.again) for g in groups] == [(n, "gloo", 0) for n in (2, 2, 1)]
    assert 0 < groups[1].step < groups[2].step < 300
    assert "1 worker" in err
    check_bits_of_one(run, ELASTIC, gated, tmp_path, monkeypatch, capsys)


def check_bits_of_one(run, raw, path, tmp_path, monkeypatch, capsys) -> None:
    """Each step is on the ledger once, and the parameters are those of one worker in this process,
    which nothing disturbed."""
    ledger = Ledger.read(run / "private" / "ledger.jsonl")
    assert ledger.release_counts == dict.fromkeys(range(300), 1)
    resources = raw["resources"] | {"workers": 1}
    path.write_text(yaml.safe_dump(raw | {"resources": resources, "certify": None}))
    (tmp_path / "alone").mkdir()
    with one_thread(), monkeypatch.context() as patch:
        run_without_ray(patch)
        done = command(patch, capsys, tmp_path / "alone", "run", "--until", "train", path)
    assert done.code == 0, done.err
    assert torch.equal(parameters(run), parameters(tmp_path / "alone" / "runs" / "small"))


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_announced_preemption_costs_no_step(nodes, gated, tmp_path, monkeypatch, capsys):
    """Ray says that the second node goes: both workers end after a checkpoint, and the other node
    goes on there, long before the node's end. The bits of one undisturbed process."""
    raw = ELASTIC | {"certify": None}
    raw["resources"] = raw["resources"] | {"checkpoint_seconds": 1e9}
    gated.write_text(yaml.safe_dump(raw))
    address = wait_for(nodes.stdout.readline).strip()
    tell(nodes, "add")
    monkeypatch.setitem(ENVIRONMENT, "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    training = Training("train", gated, address)
    training.reaches(40)
    tell(nodes, "drain")
    time.sleep(5)  # until Ray has told the workers, which are held
    _, err = training.ends()
    run = training.run
    first, second = read_groups(RunFolder(run))
    assert (first.workers, second.workers, second.again) == (2, 1, 0)
    assert 40 < second.step < 50 and second.saved == second.step
    assert f"before the interruption saved {second.step} steps" in err
    assert not (run / "private" / "interrupted.json").exists()
    assert len(Ledger.read(run / "private" / "ledger.jsonl").attempts) == 1
    starts = [json.loads(x)["step"] for x in (run / "private" / "metrics.jsonl").open()]
    assert starts == list(range(300)), "a step was repeated"
    check_bits_of_one(run, raw, gated, tmp_path, monkeypatch, capsys)


# Ray looks once a minute whether more workers fit; here every two seconds.
SOON = """
import functools, ray.train
ray.train.ScalingConfig = functools.partial(
    ray.train.ScalingConfig, elastic_resize_monitor_interval_s=2.0
)
from dpdist.cli.main import main
main()
"""


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_group_shrinks_and_grows_again(nodes, gated, tmp_path, monkeypatch, capsys):
    """Two workers, one when a node is lost, two when another comes: the bits of one
    undisturbed worker, each step on the ledger once."""
    raw = ELASTIC | {"certify": None}
    gated.write_text(yaml.safe_dump(raw))
    address = wait_for(nodes.stdout.readline).strip()
    tell(nodes, "add")
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", SOON])
    training = Training("train", gated, address)
    training.begins(1)
    tell(nodes, "kill")
    training.begins(2)
    tell(nodes, "add")
    training.begins(3)
    _, err = training.ends()
    run = training.run
    groups = read_groups(RunFolder(run))
    assert [(g.workers, g.backend, g.again) for g in groups] == [(n, "gloo", 0) for n in (2, 1, 2)]
    assert 0 < groups[1].step < groups[2].step < 300
    assert "2 workers" in err
    check_bits_of_one(run, raw, gated, tmp_path, monkeypatch, capsys)
