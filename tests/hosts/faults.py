"""What can go wrong on a cluster, done on purpose; and what a run must look like afterwards."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from over_ssh import Cluster
from rooms import Host

asked_for = pytest.mark.skipif(
    not os.environ.get("DPDIST_FAULTS"), reason="minutes long; set DPDIST_FAULTS=1"
)

# What Ray keeps on a host between jobs: anything else with its name has outlived its job.
_STAYS = (
    "ray::IDLE",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "ray::_AutoscalingCoordinatorActor",  # one per cluster, made by the first training
)


class Faults:
    """Each method does its damage to one host or job, and mends on leaving what an operator would.

    worker: what the command lines of the job's worker processes hold.
    """

    def __init__(self, cluster: Cluster, worker: str) -> None:
        self.cluster, self.worker = cluster, worker
        # Work may lie on one host only: that one is hit.
        busy = [host for host in reversed(cluster.workers) if host.processes(worker)]
        assert busy, f"no host runs {worker}"
        self.victim: Host = busy[0]

    @contextmanager
    def kill_worker(self, job: str) -> Iterator[None]:
        self.victim.kill_processes(self.worker, "KILL")
        yield

    @contextmanager
    def stop_host(self, job: str) -> Iterator[None]:
        self.victim.shell("ray stop --force", check=False)
        yield
        self.cluster.restart(self.victim)

    @contextmanager
    def spot_interruption(self, job: str) -> Iterator[None]:
        self.victim.kill_processes("raylet/raylet", "TERM")
        yield
        # The provider takes the machine away after it; another one comes.
        self.cluster.wait_for(lambda: not self.victim.processes("raylet/raylet"))
        self.victim.shell("ray stop --force", check=False)
        self.cluster.restart(self.victim)

    @contextmanager
    def cut_network(self, job: str) -> Iterator[None]:
        """Short enough for Ray not to give the host up."""
        self.cluster.laptop.cut(self.victim)
        yield
        time.sleep(15)
        self.cluster.laptop.plug(self.victim)

    @contextmanager
    def cut_off(self, job: str) -> Iterator[None]:
        """Long enough for Ray to give the host up, and for the host's own Ray to end."""
        self.cluster.laptop.cut(self.victim)
        yield
        time.sleep(120)
        self.cluster.laptop.plug(self.victim)
        self.victim.shell("ray stop --force", check=False)
        self.cluster.restart(self.victim)

    @contextmanager
    def fill_disk(self, job: str) -> Iterator[None]:
        """The host's own disk, where Ray keeps its session."""
        self.victim.run("sh", "-c", "cat /dev/zero > /tmp/filler", check=False)
        for pid in self.victim.processes(self.worker):  # its successor starts on a full disk
            self.victim.run("kill", "-KILL", str(pid), check=False)
        yield
        time.sleep(15)
        self.victim.run("rm", "/tmp/filler")

    @contextmanager
    def kill_driver(self, job: str) -> Iterator[None]:
        self.cluster.head.kill_processes("bin/dpdist", "KILL")
        yield

    @contextmanager
    def restart_head(self, job: str) -> Iterator[None]:
        """All processes of the head die; its disk stays."""
        self.cluster.head.shell("ray stop --force", check=False)
        for pid in self.cluster.head.processes("bin/dpdist"):  # dies a little after Ray
            self.cluster.head.run("kill", "-KILL", str(pid), check=False)
        yield
        self.cluster.up()

    @contextmanager
    def lose_head(self, job: str) -> Iterator[None]:
        """The head's machine is gone, and with it the driver, the job and Ray's tables."""
        self.cluster.laptop.replace(self.cluster.head)
        yield
        self.cluster.down()  # else `ray up` takes the new machine for the one it has set up
        self.cluster.up()

    @contextmanager
    def stop_job(self, job: str) -> Iterator[None]:
        assert "stopping" in self.cluster.dpdist("cluster", "stop", job).stdout
        assert self.cluster.end_of(job) == "STOPPED"
        yield
        no_orphans(self.cluster)


def fill(disk: Path) -> Path:
    """Leave no room on a disk, not even a page; the file to remove afterwards."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def run_through(
    cluster: Cluster, job: str, again: Callable[[], str], seconds: float = 600
) -> tuple[str, int]:
    """Wait for the end of a job, submitting it again as a user would; (last job, how often)."""
    for number in range(3):
        if cluster.end_of(job, seconds) == "SUCCEEDED":
            return job, number
        cluster.wait_for_nodes(1 + len(cluster.workers))
        job = again()
    raise AssertionError("submitted again twice, and it failed each time")


def no_orphans(cluster: Cluster, seconds: float = 90) -> None:
    """Nothing of a job is left on any host."""

    def left() -> list[str]:
        found = []
        for host in (cluster.head, *cluster.workers):
            for line in host.run("ps", "-ww", "-eo", "args=").stdout.splitlines():
                of_a_job = line.startswith("ray::") and not line.startswith(_STAYS)
                if of_a_job or "bin/dpdist" in line:
                    found.append(f"{host.name}: {line}")
        return found

    try:
        cluster.wait_for(lambda: not left(), seconds, every=1)
    except AssertionError:
        raise AssertionError(f"left over: {left()}") from None


def train_here(recipe: dict, runs: Path) -> Path:
    """The training of a recipe in this process, without Ray and without a second host; its run
    folder under `runs`."""
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import parse_recipe
    from dpdist.training import worker
    from dpdist.training.collectives import Reducer
    from dpdist.training.job import prepare

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = RunFolder(runs / recipe["name"])
    worker.run_training(
        prepare(parse_recipe(recipe, "r"), folder, "r"), Reducer(0, 1, torch.device("cpu"))
    )
    torch.set_num_threads(threads)
    return folder.path


def releases(run: Path) -> list[tuple[int, int, str]]:
    """(epoch, step, id) of every release on record; the id covers key, step and sum."""
    records = [json.loads(x)["record"] for x in (run / "private/ledger.jsonl").open()]
    return [(r["epoch"], r["step"], r["id"]) for r in records if r["kind"] == "release"]
