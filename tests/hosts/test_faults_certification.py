"""Faults while certifying on two hosts: the table equals the undisturbed one to the byte."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import Faults, asked_for, fill, no_orphans, run_through, train_here
from over_ssh import Cluster
from rooms import SHARED, SMALL, Host

pytestmark = [pytest.mark.timeout(1800), asked_for]

RUNNER = "ray::Runner"
FULL = "full"
RECIPE = {
    "name": "certified",
    "data": {"name": "digits"},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": "7f" * 32},
    "training": {"batch_size": 200, "steps": 20, "learning_rate": 0.5},
    "resources": {"workers": 1},
}


@dataclass
class Certified:
    """A trained run on the cluster, and its certification that nothing disturbed."""

    cluster: Cluster
    folder: Path

    def place(self, case: str) -> tuple[Path, str]:
        """The folder of a case, as the tests and as the hosts see it."""
        if case == FULL:  # on a small disk
            return self.cluster.laptop.small / case, f"{SHARED}/{SMALL}/{case}"
        return self.folder / case, f"{self.cluster.there}/certified/certificates/{case}"

    def start(self, case: str) -> str:
        """Begin the certification `case`, or go on with it; the job."""
        return self.cluster.entrypoint(
            "dpdist certify certified --sigma 0.25 --n 10000 --set certify.max_inputs=240 "
            f"--output {self.place(case)[1]}"
        )

    def begin(self, case: str) -> str:
        """The same, with the seed and the classifier of the undisturbed one."""
        own, _ = self.place(case)
        own.mkdir()
        for pinned in ("settings.json", "rate.json"):
            shutil.copy(self.folder / "quiet" / pinned, own / pinned)
        return self.start(case)

    def blocks(self, case: str) -> int:
        journal = self.place(case)[0] / "journal.jsonl"
        return len(journal.read_bytes().splitlines()) if journal.exists() else 0

    def wait_for_blocks(self, case: str, more: int) -> None:
        wanted = self.blocks(case) + more
        self.cluster.wait_for(lambda: self.blocks(case) >= wanted)

    def done(self, case: str) -> bool:
        return (self.place(case)[0] / "certificates.parquet").exists()

    def same(self, case: str) -> None:
        ours, theirs = (
            (self.place(name)[0] / "certificates.parquet").read_bytes() for name in (case, "quiet")
        )
        assert ours == theirs


@pytest.fixture(scope="module")
def certified(cluster):
    made = Certified(cluster, train_here(RECIPE, cluster.runs) / "certificates")
    assert cluster.end_of(made.start("quiet")) == "SUCCEEDED"
    return made


@pytest.mark.parametrize(
    "fault",
    [
        "kill_worker",
        "stop_host",
        "spot_interruption",
        "cut_network",
        "fill_disk",
        "kill_driver",
        "stop_job",
        "restart_head",
        "lose_head",
    ],
)
def test_certification_survives(cluster, certified, fault):
    job = certified.begin(fault)
    certified.wait_for_blocks(fault, 20)
    with getattr(Faults(cluster, RUNNER), fault)(job):
        assert not certified.done(fault), "the certification was over before the fault"
    _, again = run_through(cluster, job, lambda: certified.start(fault))
    certified.same(fault)
    no_orphans(cluster)
    print(f"{fault}: submitted again {again} times; the same table")


def test_a_host_that_is_cut_off_is_done_without(cluster, certified):
    """The other host finishes while the network is cut; afterwards the host comes back."""
    job = certified.begin("cut")
    certified.wait_for_blocks("cut", 20)
    victim = Faults(cluster, RUNNER).victim
    cluster.laptop.cut(victim)
    try:
        assert not certified.done("cut"), "the certification was over before the fault"
        assert cluster.end_of(job) == "SUCCEEDED"
    finally:
        cluster.laptop.plug(victim)
    certified.same("cut")
    # Ray may have given the host up, or not: an operator starts it again.
    victim.shell("ray stop --force", check=False)
    cluster.restart(victim)
    cluster.wait_for_nodes(1 + len(cluster.workers))
    no_orphans(cluster)


def test_full_storage_stops_the_certification_with_a_clear_error(cluster, certified):
    """The disk that all hosts share is full; with space again the same command goes on."""
    job = certified.begin(FULL)
    certified.wait_for_blocks(FULL, 20)
    filler = fill(cluster.laptop.small)
    assert not certified.done(FULL), "the certification was over before the disk was full"
    assert cluster.end_of(job) == "FAILED"
    log = cluster.said(job)
    assert "No space left on device" in log and "Traceback" not in log, log
    no_orphans(cluster)
    filler.unlink()
    assert cluster.end_of(certified.start(FULL)) == "SUCCEEDED"
    certified.same(FULL)


def test_a_late_host_is_used(cluster, certified):
    """The workers on both hosts hang; one on a host that joins goes on alone."""
    job = certified.begin("late")
    certified.wait_for_blocks("late", 20)

    def send(signal: str) -> None:
        for host in cluster.workers:
            for pid in host.processes(RUNNER):
                host.run("kill", f"-{signal}", str(pid), check=False)

    send("STOP")
    late = cluster.laptop.add("late")
    try:
        cluster.join(late)
        cluster.wait_for(lambda: late.processes(RUNNER))
        send("STOP")  # to those that replaced them, if that took a minute
        assert not certified.done("late"), "the certification was over before the host joined"
        certified.wait_for_blocks("late", 40)  # more than was on its way
        send("CONT")
        assert cluster.end_of(job) == "SUCCEEDED"
        certified.same("late")
        no_orphans(cluster)
        cluster.wait_for(lambda: not late.processes(RUNNER))
    finally:
        cluster.leave(late)


def test_a_slow_host_holds_nothing_back(cluster, certified):
    """A worker that is stopped most of the time gets fewer chunks; the other one gets the rest."""
    job = certified.begin("slow")
    certified.wait_for_blocks("slow", 20)
    slow, fast = ((host, host.processes(RUNNER)[0]) for host in cluster.workers)

    def cpu(host: Host, pid: int) -> float | None:
        """CPU seconds of a process, to the hundredth; None when it has ended."""
        said = host.run("cat", f"/proc/{pid}/stat", check=False).stdout
        used = said.rpartition(")")[2].split()[11:13]  # utime and stime, after the name
        return sum(map(int, used)) / os.sysconf("SC_CLK_TCK") if used else None

    before = used = cpu(*slow), cpu(*fast)
    host, pid = slow
    host.start("sh", "-c", f"while kill -STOP {pid}; do sleep 1; kill -CONT {pid}; sleep 0.1; done")
    while not certified.done("slow"):
        time.sleep(0.5)
        now = cpu(*slow), cpu(*fast)
        used = used if None in now else now
    assert cluster.end_of(job) == "SUCCEEDED"
    certified.same("slow")
    by_slow, by_fast = (after - first for after, first in zip(used, before, strict=True))
    print(f"CPU seconds of the slow worker {by_slow:.2f}, of the other one {by_fast:.2f}")
    # Equal shares would have cost them equal CPU time.
    assert by_fast > 2 * by_slow
    no_orphans(cluster)
