"""A killed command leaves neither Ray's processes nor the session's folder behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from support.processes import wait_for

from dpdist.cluster.reaper import find_processes_using, reap_on_exit

# A command in a session of its own, which says when its reaper is there and waits to be killed.
COMMAND = """
import sys, time
from pathlib import Path
from dpdist.cluster.reaper import reap_on_exit
with reap_on_exit(Path(sys.argv[1])):
    print("here", flush=True)
    time.sleep(600)
"""


def sleeper(log: Path) -> subprocess.Popen:
    """A process that outlives whoever started it, with its log open, as Ray's agents do."""
    with log.open("w") as file:
        return subprocess.Popen(["sleep", "600"], stdout=file, start_new_session=True)


def test_a_killed_command_takes_its_session_along(tmp_path):
    """And nothing else: what has no file of this session open stays."""
    folder, other = tmp_path / "session", tmp_path / "session-2"
    folder.mkdir(), other.mkdir()
    ours, theirs = sleeper(folder / "log"), sleeper(other / "log")
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert command.stdout is not None and command.stdout.readline() == "here\n"
        command.kill()
        assert ours.wait(60) == -signal.SIGKILL
        wait_for(lambda: not folder.exists())
        assert theirs.poll() is None and (other / "log").exists()
    finally:
        for process in (command, ours, theirs):
            process.kill()
            process.communicate()


def test_a_command_that_ends_by_itself_removes_the_folder_and_kills_nobody(tmp_path):
    folder = tmp_path / "session"
    folder.mkdir()
    reader = sleeper(folder / "log")  # somebody who reads the log, for instance
    try:
        with reap_on_exit(folder):
            assert find_processes_using(folder) == [reader.pid]
        assert not folder.exists() and reader.poll() is None
    finally:
        reader.kill()
        reader.communicate()
