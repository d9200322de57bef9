"""No command that starts processes lets anything beyond this machine connect to them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support.processes import LOOPBACK, descendants, listening_addresses, start
from support.recipes import write_recipe

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def place(golden, tmp_path_factory) -> Path:
    """A working directory with recipes, and runs/x, trained and not certified."""
    place = tmp_path_factory.mktemp("ports")
    folder = golden("release", place / "runs")
    shutil.rmtree(folder.certificates)
    recipe = folder.read_recipe()
    raw = recipe.model_dump(mode="json", exclude_none=True)
    write_recipe(place, raw | {"name": "new"}, "new.yaml")
    return place


def test_nothing_listens_beyond_loopback(place):
    """Other commands open what this one does."""
    _watch(start("certify", "x", cwd=place, DPDIST_EXECUTOR="ray"))


@pytest.mark.nightly
def test_an_environment_for_clusters_opens_nothing(place):
    """Two workers, with every variable by which Ray or gloo would listen on the network."""
    network = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(each.family == socket.AF_INET and each.address != "127.0.0.1" for each in entries)
    ]
    if not network:
        pytest.skip("needs a network interface beside loopback")
    environment = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_AUTH_MODE": "disabled",
        "GLOO_SOCKET_IFNAME": network[0], "NCCL_SOCKET_IFNAME": network[0],
    }  # fmt: skip
    arguments = (
        "run", "--until", "train", "new.yaml", "--name", "opened",
        "--set", "resources.workers=2",
    )  # fmt: skip
    err = _watch(start(*arguments, cwd=place, **environment))
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in err


def _watch(process: subprocess.Popen) -> str:
    """Assert that a command and all it starts listen on loopback alone; return its last words."""
    found: set[str] = set()
    looks = 0
    try:
        while process.poll() is None:
            found |= (now := listening_addresses(process.pid))
            working = any(title.startswith("ray::") for title in descendants(process.pid).values())
            looks += bool(working and now)
            time.sleep(0.1)  # looking takes processor time from what is looked at
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    assert looks and found and found <= LOOPBACK
    return err
