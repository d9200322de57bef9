"""A cluster of two nodes at RAY_ADDRESS: a pool grows onto the second, a run uses both, and goes on
with one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from support import processes
from support.here import command, without_ray
from support.processes import (
    finish,
    parameters,
    start,
    steps_done,
    training_workers,
    wait_for,
)
from support.threads import one_thread

from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder, complete_checkpoints
from dpdist.training.groups import read

pytestmark = pytest.mark.whole

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Starts the first node, at each line "add" the second, which "kill" ends; all end with the input.
NODES = """
import contextlib, sys
from ray.cluster_utils import Cluster
with contextlib.redirect_stdout(sys.stderr):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
print(cluster.address, flush=True)
for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
        if line.strip() == "add":
            second = cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
        else:
            cluster.remove_node(second, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""
POOL = """
import os, sys, time
import ray
from dpdist.cluster.pool import Chunk, run_chunks

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

run_chunks(factory, None, stream(), on_result)
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
        env={**os.environ, **ENVIRONMENT},
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


@pytest.mark.long
@pytest.mark.timeout(600)
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
    assert "certified, sigma-0.25-fixed-n-200" in out


# Two leaves of parameters, so that each of two workers has a part of them.
ELASTIC = RECIPE | {
    "model": {"name": "mlp", "options": {"hidden": [1100]}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "5a" * 32},
    "training": {
        "batch_size": 200, "steps": 300, "learning_rate": 0.1, "momentum": 0.5,
        "reproducible": True,
    },
    "resources": {
        "workers": {"min": 1, "max": 2}, "release": "sharded", "checkpoint_seconds": 1.0,
    },
}  # fmt: skip
ALONE = {"resources": {"workers": 1}, "certify": None}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_lost_workers_and_a_lost_node_change_nothing(nodes, tmp_path, monkeypatch, capsys):
    """A sharded release from end to end. First a worker is killed, then a node, and a worker with
    it: the bits of one undisturbed process that releases whole, each step on the ledger once."""
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(ELASTIC))
    address = wait_for(nodes.stdout.readline).strip()
    tell(nodes, "add")
    process = start("run", path, cwd=tmp_path, RAY_ADDRESS=address, **ENVIRONMENT)
    run = tmp_path / "runs" / "small"
    parts = "checkpoints/step-*/part-0000?-of-00002.safetensors"
    wait_for(lambda: len(list((run / "private").glob(parts))) >= 2)
    wait_for(lambda: steps_done(run) >= 40)
    os.kill(training_workers(nodes.pid)[0], signal.SIGKILL)
    wait_for(lambda: len(read(RunFolder(run))) == 2)
    reached = steps_done(run)
    wait_for(lambda: steps_done(run) >= reached + 40)
    tell(nodes, "kill")
    out, err = finish(process, 600)
    assert "certified, sigma-0.25-fixed-n-200" in out
    groups = read(RunFolder(run))
    assert [(g.workers, g.backend, g.again) for g in groups] == [(n, "gloo", 0) for n in (2, 2, 1)]
    assert 0 < groups[1].step < groups[2].step < 300
    assert "goes on with 1 worker (before: 2)" in err and "nothing is charged again" in err
    assert Ledger.read(run / "private" / "ledger.jsonl").releases == dict.fromkeys(range(300), 1)

    path.write_text(yaml.safe_dump(ELASTIC | ALONE))
    alone(path, tmp_path, monkeypatch, capsys)
    assert torch.equal(parameters(run), parameters(tmp_path / "alone" / "runs" / "small"))


def alone(path, tmp_path, monkeypatch, capsys) -> None:
    """Train in this process, by one worker."""
    (tmp_path / "alone").mkdir()
    with one_thread(), monkeypatch.context() as patch:
        without_ray(patch)
        done = command(patch, capsys, tmp_path / "alone", "train", path)
    assert done.code == 0, done.err


# Ray looks once a minute whether more workers fit; here every two seconds.
SOON = """
import functools, ray.train
ray.train.ScalingConfig = functools.partial(
    ray.train.ScalingConfig, elastic_resize_monitor_interval_s=2.0
)
from dpdist.commands.cli import main
main()
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_group_shrinks_and_grows_again(nodes, tmp_path, monkeypatch, capsys):
    """Two workers, one when a node is lost, two when another comes, in float32 on the wire: the
    bits of one undisturbed worker, each step on the ledger once."""
    path = tmp_path / "r.yaml"
    raw = ELASTIC | {"certify": None}
    raw["training"] = raw["training"] | {"steps": 1500}
    raw["resources"] = raw["resources"] | {"wire": "float32"}
    path.write_text(yaml.safe_dump(raw))
    address = wait_for(nodes.stdout.readline).strip()
    tell(nodes, "add")
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", SOON])
    process = start("train", path, cwd=tmp_path, RAY_ADDRESS=address, **ENVIRONMENT)
    run = tmp_path / "runs" / "small"

    def changed(groups: int) -> None:
        """That so many groups were begun, and the last one trains."""
        wait_for(lambda: len(read(RunFolder(run))) == groups)
        reached = steps_done(run)
        wait_for(lambda: steps_done(run) >= reached + 40)
        kept = run / "private" / "checkpoints"  # a group without one begins where the last did
        wait_for(lambda: bool(found := complete_checkpoints(kept)) and at(found[-1]) > reached)

    def at(checkpoint: Any) -> int:
        return int(checkpoint.name.removeprefix("step-"))

    changed(1)
    tell(nodes, "kill")
    changed(2)
    tell(nodes, "add")
    changed(3)
    _, err = finish(process, 600)
    groups = read(RunFolder(run))
    assert [(g.workers, g.backend, g.again) for g in groups] == [(n, "gloo", 0) for n in (2, 1, 2)]
    assert 0 < groups[1].step < groups[2].step < 1500
    assert "goes on with 2 workers (before: 1)" in err and "charged again" in err
    assert Ledger.read(run / "private" / "ledger.jsonl").releases == dict.fromkeys(range(1500), 1)
    raw["resources"] = raw["resources"] | {"workers": 1}
    path.write_text(yaml.safe_dump(raw))
    alone(path, tmp_path, monkeypatch, capsys)
    assert torch.equal(parameters(run), parameters(tmp_path / "alone" / "runs" / "small"))
