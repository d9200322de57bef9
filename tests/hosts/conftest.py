"""One real cluster for all tests here: three hosts over SSH, started by `ray up`."""

from __future__ import annotations

import os

import pytest
import rooms
from over_ssh import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    # Ray gives a host 30 s to start, which a busy machine does not keep: not part of every run.
    reason = rooms.why_not() if os.environ.get("DPDIST_HOSTS") else "set DPDIST_HOSTS=1"
    if reason:
        pytest.skip(reason)
    with rooms.room(tmp_path_factory.mktemp("room")) as room:
        made = Cluster(room)
        made.up()
        yield made
