"""Ray's output goes to the run's log file. Otherwise a private search would print tracebacks of its
trials."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import ray_constants

from dpdist.cluster import session as module
from dpdist.cluster.session import Session, connect
from dpdist.core.errors import ClusterError
from dpdist.core.files import SESSION_FOLDER, TRAINING_FOLDER, temporary_folder
from dpdist.training import rendezvous

LINE = "Trial task failed for trial 7"


@pytest.fixture
def no_ray(monkeypatch):
    """`connect` without a cluster: `ray.init` takes all handlers away, as Ray's does (which is
    started in test_pool)."""
    monkeypatch.setattr(logging.getLogger("ray"), "handlers", [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: logging.getLogger("ray").handlers.clear())
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(module, "describe_session", lambda address: Session(address, 1, 0, 1))


def test_after_the_session_nothing_more_is_written(no_ray, tmp_path, capfd):
    log = tmp_path / "private" / "ray.log"
    with connect(log, cpus=1):
        logging.getLogger("ray.tune").error(LINE)
    before = log.read_text()
    assert LINE in before
    logging.getLogger("ray.tune").error("after the session")
    assert log.read_text() == before
    assert LINE not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("name", "value", "inside"),
    [
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1", "0"),
        ("RAY_AUTH_MODE", "disabled", "token"),
        ("RAY_REDIS_ADDRESS", "redis://:secret@elsewhere:6379", None),
    ],
)
def test_a_clusters_variables_open_no_local_session(
    no_ray, monkeypatch, capsys, name, value, inside
):
    """The first had Ray listen on all interfaces. What is there comes back."""
    monkeypatch.setenv(name, value)
    with connect(cpus=1):
        assert os.environ.get(name) == inside
        assert not ray_constants.ENABLE_RAY_CLUSTER
    assert os.environ[name] == value and value not in capsys.readouterr().err


def test_a_local_session_has_a_token_of_its_own(no_ray, monkeypatch):
    """A cluster's token is known to all who use the cluster."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a cluster's")
    tokens = []
    for _ in range(2):
        with connect(cpus=1):
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
    assert len({*tokens, "a cluster's"}) == 3 and os.environ["RAY_AUTH_TOKEN"] == "a cluster's"


def test_workers_of_a_local_session_meet_on_loopback(monkeypatch):
    """GLOO_SOCKET_IFNAME, set for a cluster, had them listen on the network."""
    monkeypatch.setattr(rendezvous, "_interface_of", lambda _: "lo")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for address in ("127.0.0.1", "::1"):
        for name in names:
            monkeypatch.setenv(name, "eth9")
        rendezvous._choose_interface(address)
        assert [os.environ[name] for name in names] == ["lo", "lo"]


def folders() -> set[Path]:
    return set(Path("/tmp").glob("dpdist-ray-*"))


def test_a_sessions_files_are_its_users_and_go_with_it(no_ray, monkeypatch):
    """Ray writes below /tmp/ray otherwise, for all to read, and leaves it there."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    seen, before = [], folders()

    def init(**options) -> None:
        place = Path(options["_temp_dir"])
        place.mkdir(mode=0o777)
        (place / "result.json").write_text("a private score")
        seen.extend((place.parent, stat.S_IMODE(place.parent.stat().st_mode)))

    monkeypatch.setattr(ray, "init", init)
    with connect(cpus=1):
        assert seen[0] in folders() - before
        assert os.environ[SESSION_FOLDER] == str(seen[0])  # where its workers put their own
        with temporary_folder(TRAINING_FOLDER) as training:
            assert training.parent == seen[0]
    assert SESSION_FOLDER not in os.environ
    assert seen[1] == 0o700 and not seen[0].exists()


def test_the_folder_of_a_killed_session_goes_with_the_next_start(no_ray, monkeypatch):
    """One that another process holds stays, and so does what is not a session's."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    left, held, link = (Path(tempfile.mkdtemp(prefix="dpdist-ray-", dir="/tmp")) for _ in range(3))
    for folder in (left, held):
        (folder / "held.lock").touch()
        (folder / "ray").mkdir()
    link.rmdir()
    link.symlink_to(held)
    try:
        with (held / "held.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with connect(cpus=1):
                assert not left.exists() and (held / "ray").is_dir() and link.is_symlink()
    finally:
        link.unlink()
        (held / "ray").rmdir()
        (held / "held.lock").unlink()
        held.rmdir()


def test_a_node_given_up_between_two_looks_is_noticed_on_leaving(no_ray, monkeypatch):
    """Ray's shutdown would never return."""
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "own", "Alive": False}])
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("Ray was shut down"))
    monkeypatch.setattr(module, "_keep_until_exit", lambda after: after.close())
    before = dict(os.environ)
    try:
        with pytest.raises(ClusterError, match="session"), connect(cpus=1):
            raise ValueError
    finally:
        os.environ.clear()
        os.environ.update(before)
        module.reload_ray_environment()
