"""The short proof on two hosts: `ray up`, a submitted recipe that trains on both and certifies, its
report fetched, nothing left behind."""

from __future__ import annotations

import json
import subprocess

import pytest
from faults import no_orphans, releases

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]

STEPS = 300
RECIPE = {
    "name": "two",
    "data": {"name": "digits"},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "privacy": {"epsilon": 3.0, "delta": 1e-4},
    "training": {"batch_size": 200, "steps": STEPS, "learning_rate": 0.5},
    "certify": {"sigma": 0.25, "n": 200, "max_inputs": 20, "radii": [0.1]},
    "resources": {"workers": 2},
}


def test_two_hosts(pair):
    project = pair.project("project", RECIPE)
    process = subprocess.Popen(
        pair.command("cluster", "submit", "two.yaml", cwd=project),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    hosts = (pair.head, *pair.workers)
    pids = {}

    def trains_on_both() -> bool:
        assert process.poll() is None, process.communicate()
        for host in hosts:
            pids[host.name] = host.processes("RayTrainWorker")
        return all(pids.values())

    pair.wait_for(trains_on_both)
    # Gloo must take the hosts' own addresses: a connection of the one worker to the other host.
    head, one = hosts
    pair.wait_for(
        lambda: any(
            f"pid={pids['one'][0]}," in line
            and line.split()[3].startswith(f"{one.address}:")
            and line.split()[4].startswith(f"{head.address}:")
            for line in one.run("ss", "-tnpH").stdout.splitlines()
        )
    )
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "2 nodes" in err and out.strip().endswith("report/index.html")
    home = project / "fetched" / "two"
    assert (home / "report" / "index.html").stat().st_size > 10_000
    assert json.loads((home / "evaluation.json").read_text())["inputs"] > 100
    assert (home / "certificates" / "sigma-0.25-fixed-n-200" / "certificates.parquet").exists()
    assert not (home / "private").exists()
    assert [step for _, step, _ in releases(pair.runs / "two")] == list(range(STEPS))
    no_orphans(pair)
