"""A container's CPU quota bounds what a machine is said to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpdist.cluster import session
from dpdist.core.errors import UserError

UNLIMITED = 1e6


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "sys/fs/cgroup/"
V1 = "sys/fs/cgroup/cpu/"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, UNLIMITED),
        ({V2 + "cpu.max": "100000 100000\n"}, 1.0),
        ({V2 + "cpu.max": "250000 100000\n"}, 2.5),
        ({V2 + "cpu.max": "max 100000\n"}, UNLIMITED),
        ({V2 + "cpu.max": "no numbers"}, UNLIMITED),
        # Outside of a container: the group's own files, and those above.
        ({"proc/self/cgroup": "0::/a/b\n", V2 + "a/b/cpu.max": "max 100000",
          V2 + "a/cpu.max": "300000 100000"}, 3.0),
        ({"proc/self/cgroup": "0::/a/b\n", V2 + "c/cpu.max": "100000 100000"}, UNLIMITED),
        ({V1 + "cpu.cfs_quota_us": "150000", V1 + "cpu.cfs_period_us": "100000",
          "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/docker/x\n"}, 1.5),
        ({V1 + "cpu.cfs_quota_us": "-1", V1 + "cpu.cfs_period_us": "100000",
          "proc/self/cgroup": "2:cpu:/\n"}, UNLIMITED),
        ({"sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "100000",
          "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "50000",
          "proc/self/cgroup": "2:cpu,cpuacct:/docker/x\n"}, 2.0),
        ({"proc/self/cgroup": "4:memory:/m\n", "sys/fs/cgroup/memory/m/cpu.max": "100000 100000"},
         UNLIMITED),
    ],
)  # fmt: skip
def test_the_quota_is_the_least_of_all_groups_above(tmp_path, files, quota):
    assert session.cpu_quota(tree(tmp_path, files)) == pytest.approx(quota)


@pytest.mark.parametrize(("quota", "cpus"), [(1.0, 1), (0.5, 1), (2.5, 2), (UNLIMITED, 192)])
def test_a_quota_bounds_what_is_counted_started_and_refused(monkeypatch, quota, cpus):
    monkeypatch.setattr(session.os, "sched_getaffinity", lambda _: set(range(192)))
    monkeypatch.setattr(session, "cpu_quota", lambda: quota)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert session.count_local_cpus() == cpus
    assert session._options(None, None, None)["num_cpus"] == cpus
    if cpus > 1:
        session.require_workers(cpus, 1)
    with pytest.raises(UserError, match=r"^resources\.workers: "):
        session.require_workers(cpus + 1, 1)
