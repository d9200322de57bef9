"""Faults while certifying on two hosts: the table equals the undisturbed one to the byte."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import Faults, asked_for, no_orphans, run_through, train_here
from over_ssh import Cluster

pytestmark = [pytest.mark.timeout(1800), asked_for]

RUNNER = "ray::Runner"
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
    ["kill_worker", "stop_host", "spot_interruption", "cut_network", "kill_driver", "lose_head"],
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
