"""The template for SLURM under a real slurmctld and two real slurmds: a lost node, a requeue, and
the bits of a run that nothing disturbed."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rooms
import torch
import yaml
from faults import releases, train_here
from over_ssh import Cluster
from support.methods import GATED
from support.processes import parameters, steps_done

from dpdist.cluster.cluster_file import templates
from dpdist.core.files import write_atomic
from dpdist.runs.folder import RunFolder
from dpdist.training.monitoring import is_stop_requested, read_groups

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1200)]

STEPS = 12
RECIPE = {
    "name": "small",
    "data": {"name": "digits"},
    "model": {"name": "linear"},
    "method": {"name": "gated:Gated"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "3c" * 32},
    "training": {
        "batch_size": 40, "steps": STEPS, "learning_rate": 0.05, "reproducible": True,
    },
    "resources": {"workers": 2, "checkpoint_seconds": 1e9},
}  # fmt: skip
CONF = """\
ClusterName=rooms
SlurmctldHost=laptop({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket,cred_expire=5
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=5
KillWait=20
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=UNLIMITED
"""
# A plugin must be named, and is not used: TaskPlugin and ProctrackType do without it.
CGROUP = "CgroupPlugin=cgroup/v1\n"


class Slurm:
    """A controller in the room, which submits too, and a node on each of two hosts."""

    def __init__(self, room: rooms.Room) -> None:
        self.room = room
        self.nodes = [room.add("one"), room.add("two")]
        self.key = room.folder / "munge.key"
        self.key.write_bytes(bytes(range(128)))
        self.conf = CONF.format(
            controller=room.address,
            nodes="\n".join(f"NodeName={n.name} NodeAddr={n.address} CPUs=1" for n in self.nodes),
        )
        self.names = "127.0.0.1 localhost\n" + "".join(
            f"{host.address} {host.name}\n" for host in (room, *self.nodes)
        )
        self._prepare(room, "slurmctld", "-L", "/run/slurm/log")
        for node in self.nodes:
            self.start(node)

    def start(self, node: rooms.Host) -> None:
        self._prepare(node, "slurmd", "-N", node.name, "-L", "/run/slurm/log")

    def replace(self, node: rooms.Host) -> None:
        """Bring a lost node back, empty, with another network card."""
        self.room.replace(node)
        for host in (self.room, *self.nodes):
            host.run("ip", "neighbor", "flush", "all")
        self.start(node)

    def _prepare(self, host: rooms.Host, *daemon: str) -> None:
        """Start munge and a daemon of SLURM, which have all their files on the host's own disk."""
        host.run("mkdir", "-p", "-m", "755", "/run/munge", "/run/slurm/state", "/run/slurm/spool")
        for name, text in {
            "slurm/slurm.conf": self.conf, "slurm/cgroup.conf": CGROUP, "hosts": self.names,
        }.items():  # fmt: skip
            host.run("sh", "-c", f"printf %s '{text}' > /run/{name}")
        host.run("mount", "--bind", "/run/hosts", "/etc/hosts")
        at = f"/proc/{host.pid}/root/run/munge/key"
        shutil.copy(self.key, at)
        host.run("chmod", "600", "/run/munge/key")
        host.run(
            "munged", "--force", "--key-file=/run/munge/key", "--socket=/run/munge/socket",
            "--pid-file=/run/munge/pid", "--log-file=/run/munge/log", "--seed-file=/run/munge/seed",
        )  # fmt: skip
        host.run("env", "SLURM_CONF=/run/slurm/slurm.conf", *daemon)

    def ask(self, line: str, **options) -> str:
        return self.room.shell(f"export SLURM_CONF=/run/slurm/slurm.conf; {line}", **options)

    def failed(self, job: str) -> bool:
        return self.state(job) in ("FAILED", "CANCELLED", "TIMEOUT")

    def state(self, job: str) -> str:
        return re.search(r"JobState=(\S+)", self.ask(f"scontrol show job {job}"))[1]


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    Cluster.wait_for(condition, seconds, every=0.5)


def why_not() -> str | None:
    for tool in ("slurmctld", "slurmd", "munged", "sbatch"):
        if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            return f"needs {tool} (Debian: slurm-wlm, munge)"
    return rooms.why_not()


@pytest.fixture
def slurm(tmp_path) -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    with rooms.room(tmp_path) as room:
        yield Slurm(room)


def test_a_lost_node_and_a_requeue_change_nothing(slurm, tmp_path, monkeypatch):
    room = slurm.room
    project = room.shared / "project"
    project.mkdir()
    (project / "gated.py").write_text(GATED)
    monkeypatch.syspath_prepend(str(project))
    (project / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    there = f"{rooms.SHARED}/project"
    filled = {
        "FILL-IN-RECIPE": "small", "FILL-IN-ENVIRONMENT/bin": str(Path(sys.executable).parent),
        "/FILL-IN-SHARED": there, "cpus-per-task=8": "cpus-per-task=1",
        "(ray start": "(ray start --object-store-memory=100000000",
    }  # fmt: skip
    text = templates()["slurm"]
    for old, new in filled.items():
        assert old in text
        text = text.replace(old, new)
    (room.folder / "slurm.sbatch").write_text(text)
    limit, run = project / "limit", project / "runs" / "small"
    limit.write_text("4")
    job = slurm.ask(
        f"export PYTHONPATH=$PYTHONPATH:{there}; sbatch --chdir={there} {room.folder}/slurm.sbatch"
    ).split()[-1]
    log = project / f"dpdist-{job}.log"

    def trains(steps: int) -> None:
        """Wait until a group of workers has gone so far; the job must not fail meanwhile."""
        wait_for(lambda: steps_done(run) >= steps or slurm.failed(job), 400)
        if "timed out during startup" in log.read_text():
            pytest.skip("three times, Ray could not start a node within the 30 s that it allows")
        assert steps_done(run) >= steps, log.read_text()

    trains(4)
    one, two = slurm.nodes
    assert one.run("stat", "-c", "%a", f"/tmp/dpdist-{job}").stdout == "700\n"
    assert {line.split()[3] for line in one.run("ss", "-tlnH").stdout.splitlines()
            if line.split()[3].endswith(":8265")} == {"127.0.0.1:8265"}  # fmt: skip
    two.kill()
    wait_for(lambda: slurm.state(job) == "PENDING", 60)  # SLURM has missed the node
    slurm.replace(two)
    write_atomic(limit, "8")
    wait_for(lambda: len(read_groups(RunFolder(run))) == 2 or slurm.failed(job), 400)
    trains(8)
    # As --signal=B:TERM does: the script ends the command and puts the job back into the queue.
    slurm.ask(f"scancel --batch --signal=TERM {job}")
    wait_for(lambda: is_stop_requested(RunFolder(run)), 60)
    time.sleep(1.5)  # workers look for the word at most once a second, and steps are faster here
    write_atomic(limit, "11")  # beyond the step at which both must end
    wait_for(RunFolder(run).interruption.exists, 60)
    limit.unlink()
    wait_for(lambda: slurm.state(job) == "COMPLETED" or slurm.failed(job), 400)
    assert slurm.state(job) == "COMPLETED", log.read_text()
    first, second, third = read_groups(RunFolder(run))
    assert (first.step, second.step, third.saved) == (0, 0, third.step) and third.step in (9, 10)
    assert f"before the interruption saved {third.step} steps" in log.read_text()
    undisturbed = train_here(RECIPE, tmp_path / "undisturbed")
    assert torch.equal(parameters(run), parameters(undisturbed))
    assert releases(run) == releases(undisturbed), "a step was released twice, or another sum was"
    for node in slurm.nodes:
        for word in (f"/tmp/dpdist-{job}", "ray::", "raylet", "gcs_server"):
            assert not node.processes(word), node.run("ps", "-ww", "-eo", "pid,args").stdout
        assert node.run("ls", "-d", f"/tmp/dpdist-{job}", check=False).returncode
