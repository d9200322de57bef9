"""Real clusters over SSH for the tests here, started by `ray up`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import rooms
from over_ssh import Cluster, Slow


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A head and two workers, for tests that take minutes together."""
    if not (os.environ.get("DPDIST_HOSTS") or os.environ.get("DPDIST_FAULTS")):
        pytest.skip("minutes long; set DPDIST_HOSTS=1")
    reason = rooms.why_not()
    if reason:
        pytest.skip(reason)
    with rooms.room(tmp_path_factory.mktemp("room")) as room:
        made = Cluster(room, workers=2, head_cpus=0)
        try:
            made.up()
        except Slow:
            pytest.skip("three times, Ray could not start a host within the 30 s that it allows")
        yield made
