"""A cluster of two nodes at RAY_ADDRESS: a pool grows onto the second, and a run uses both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from support.processes import finish, start, wait_for

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Starts the first node; the second at the first line it reads; ends at the second line.
NODES = """
import contextlib, sys
from ray.cluster_utils import Cluster
with contextlib.redirect_stdout(sys.stderr):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
print(cluster.address, flush=True)
sys.stdin.readline()
with contextlib.redirect_stdout(sys.stderr):
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
sys.stdin.readline()
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
    process.communicate("\n\n", timeout=60)


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
    nodes.stdin.write("\n")
    nodes.stdin.flush()
    assert pool.communicate(timeout=240)[0] == "2\n"

    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    process = start("run", path, cwd=tmp_path, RAY_ADDRESS=address, **ENVIRONMENT)
    out, err = finish(process)
    assert "2 nodes" in err
    assert "certified, sigma-0.25-fixed-n-200" in out
