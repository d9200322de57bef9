"""What Ray says goes to the run's log file: a private search would print tracebacks of its trials
otherwise."""

from __future__ import annotations

import logging

import pytest

from dpdist.cluster.session import _LogFile, connect


@pytest.fixture
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_what_ray_says_goes_to_the_file_and_nowhere_else(no_cluster, tmp_path, capfd):
    log = tmp_path / "private" / "ray.log"
    with connect(log, cpus=1):
        logging.getLogger("ray.tune").error("Trial task failed for trial 7")
    assert "ray.tune ERROR Trial task failed for trial 7" in log.read_text()
    said = capfd.readouterr()
    assert "Trial task" not in said.out + said.err
    before = log.read_text()
    logging.getLogger("ray.tune").error("after the session")
    assert log.read_text() == before


def test_without_a_file_it_is_lost(no_cluster, capfd):
    with connect(cpus=1):
        logging.getLogger("ray.tune").error("Trial task failed for trial 7")
    said = capfd.readouterr()
    assert "Trial task" not in said.out + said.err


def test_a_full_disk_is_not_a_traceback_for_each_line(capsys):
    record = logging.LogRecord("ray", logging.ERROR, __file__, 1, "lost", None, None)
    for kind, silent in ((_LogFile, True), (logging.FileHandler, False)):
        handler = kind("/dev/full")
        handler.emit(record)
        assert (capsys.readouterr().err == "") == silent
        with pytest.raises(OSError, match="No space"):
            handler.close()
