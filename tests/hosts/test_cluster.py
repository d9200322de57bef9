"""On three real hosts: the cluster comes up closed, a submitted recipe trains on workers of
different hosts, is certified, and its report comes home."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.timeout(900)

RECIPE = {
    "name": "job",
    "data": {"name": "digits"},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "privacy": {"epsilon": 3.0, "delta": 1e-4},
    "training": {"batch_size": 200, "steps": 400, "learning_rate": 0.5},
    "certify": {"sigma": 0.25, "n": 500, "max_inputs": 40, "radii": [0.1]},
    "resources": {"workers": 2},
}


@pytest.fixture(scope="module")
def project(cluster):
    """A user's directory on the laptop, with things in it that must not travel."""
    folder = cluster.project("project", RECIPE)
    (folder / "private").mkdir()
    (folder / "private" / "notes.txt").write_text("secret-of-the-laptop")
    (folder / ".env").write_text("TOKEN=secret-of-the-laptop")
    return folder


def test_the_cluster_is_closed(cluster):
    """No dashboard on the hosts' own addresses, and nothing without the right token."""
    for host in (cluster.head, *cluster.workers):
        listening = host.run("ss", "-ltnH").stdout
        assert ":8265" not in re.sub(r"127\.0\.0\.1:8265", "", listening), listening
    wrong = cluster.dpdist("cluster", "status", check=False, token="0" * 64)
    assert wrong.returncode == 2 and "refuses this machine's token" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert cluster.dpdist("cluster", "status").stdout == ""


def test_a_submitted_recipe_trains_on_both_hosts_and_its_report_comes_home(cluster, project):
    said = cluster.dpdist("cluster", "submit", "job.yaml", "--no-follow", cwd=project).stderr
    job = re.search(r"job (job-[0-9a-f]{8}) is submitted", said)[1]

    for host in cluster.workers:
        cluster.wait_for(lambda host=host: host.processes("RayTrainWorker"))
    assert cluster.state(job)[0] in ("RUNNING", "SUCCEEDED")
    done = cluster.dpdist("cluster", "status", job, "--follow", cwd=project, timeout=400)

    home = project / "fetched" / "job"
    assert done.stdout.strip().endswith("report/index.html")
    assert not (home / "private").exists() and not (home / "run.json").exists()
    assert (cluster.runs / "job" / "private" / "ledger.jsonl").exists()
    for host in (cluster.head, *cluster.workers):
        found = host.run("grep", "-rl", "secret-of-the-laptop", "/tmp/ray", check=False).stdout
        assert found == "", f"private files of the laptop reached {host.name}: {found}"


def test_a_folder_that_hosts_do_not_share_is_refused_at_the_start(cluster, project):
    """Before the first step, with the host that does not see it."""
    done = cluster.dpdist(
        "cluster", "submit", "job.yaml", "--set", "name=apart", "--runs", "/tmp/own-runs",
        cwd=project, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.search(r"node 10\.77\.0\.1[12]\b.* /tmp/own-runs", done.stderr), done.stderr
    assert "training: " in done.stderr and "of 400 steps" not in done.stderr
