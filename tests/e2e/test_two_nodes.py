"""A cluster of two nodes at RAY_ADDRESS: a run uses both, and goes on with one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.local_execution import command, run_without_ray
from support.methods import GATED
from support.processes import (
    finish,
    parameters,
    start,
    steps_done,
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
    # A node that is gone is noticed after 2 s, not 25, and not waited for.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
}
# Starts the first node, at the line "add" the second, which "kill" ends. All end with the input.
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
STEPS = 120
RECIPE = {
    "name": "small",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "options": {"hidden": [1100]}},
    "method": {"name": "gated:Gated"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "5a" * 32},
    "training": {
        "batch_size": 200, "steps": STEPS, "learning_rate": 0.1, "momentum": 0.5,
        "reproducible": True,
    },
    "resources": {"workers": {"min": 1, "max": 2}, "checkpoint_seconds": 0.05},
}  # fmt: skip


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


class Training:
    """A training on the nodes that takes no step beyond what it is let."""

    def __init__(self, path: Path, address: str) -> None:
        self.limit = path.with_name("limit")
        self.limit.write_text("0")
        environment = ENVIRONMENT | {"RAY_ADDRESS": address, "PYTHONPATH": str(path.parent)}
        self.process = start("run", "--until", "train", path, cwd=path.parent, **environment)
        self.run = path.parent / "runs" / "small"

    def begins(self, number: int) -> None:
        """Wait for the group of this number; let it make 20 steps and a checkpoint of its own."""
        self._wait(lambda: len(read_groups(RunFolder(self.run))) == number)
        # Of the group before: where it was held.
        reached = steps_done(self.run)
        write_atomic(self.limit, str(reached + 20))
        self._wait(lambda: steps_done(self.run) >= reached + 20)
        kept = self.run / "private" / "checkpoints"  # without one the next begins where it did
        self._wait(lambda: any(at(found) > reached for found in complete_checkpoints(kept)))

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


@pytest.mark.timeout(900)
def test_a_lost_node_changes_nothing(nodes, gated, tmp_path, monkeypatch, capsys):
    """A node is killed, and a worker with it: the bits of one worker in this process, which nothing
    disturbed, each step on the ledger once."""
    gated.write_text(yaml.safe_dump(RECIPE))
    address = wait_for(nodes.stdout.readline).strip()
    tell(nodes, "add")
    training = Training(gated, address)
    training.begins(1)
    tell(nodes, "kill")
    training.begins(2)
    training.ends()
    run = RunFolder(training.run)
    groups = read_groups(run)
    assert [(g.workers, g.backend, g.again) for g in groups] == [(2, "gloo", 0), (1, "gloo", 0)]
    assert 0 < groups[1].step < STEPS
    assert Ledger.read(run.ledger).release_counts == dict.fromkeys(range(STEPS), 1)

    gated.write_text(yaml.safe_dump(RECIPE | {"resources": {**RECIPE["resources"], "workers": 1}}))
    (tmp_path / "alone").mkdir()
    with one_thread(), monkeypatch.context() as patch:
        run_without_ray(patch)
        done = command(patch, capsys, tmp_path / "alone", "run", "--until", "train", gated)
    assert done.code == 0, done.err
    assert torch.equal(parameters(run.path), parameters(tmp_path / "alone" / "runs" / "small"))
