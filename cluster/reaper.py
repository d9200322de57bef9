"""End the processes of a local Ray session, and remove its folder, however its command ended.

Ray's own agents outlive a killed command by a minute: they wait for a server that died with it. So
a session has a small process beside it (this file, run as a program) that waits on a pipe. The
pipe ends with the command; every process that then still has a file of the session open is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROUNDS = 100  # at most; two rounds in a row that find nothing end it
_ROUND_SECONDS = 0.1  # seconds
_CLEAN_EXIT = b"done"  # what the pipe brings when the command ended by itself


@contextmanager
def reap_on_exit(folder: Path) -> Iterator[None]:
    """Remove the session's `folder` at the end, and end who still uses it if this process dies."""
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C and a hang-up of the terminal are not for it
    )
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(BrokenPipeError):  # the reaper was killed
            watching.communicate(_CLEAN_EXIT)


def find_processes_using(folder: Path) -> list[int]:
    """Return the processes of this user that have a file below `folder` open, but for this one."""
    below = f"{folder}/"
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        number = int(entry.name)
        with suppress(OSError):  # ended meanwhile, or another user's
            opened = [os.readlink(each) for each in (entry / "fd").iterdir()]
            if number != os.getpid() and any(path.startswith(below) for path in opened):
                found.append(number)
    return found


def kill_processes_using(folder: Path) -> None:
    """Kill the processes that use `folder` until none is left, then remove it."""
    quiet = 0
    for _ in range(_ROUNDS):
        left = find_processes_using(folder)
        quiet = 0 if left else quiet + 1
        for number in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        if quiet == 2:
            break
        time.sleep(_ROUND_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    # which returns when the command ends, however it does
    if sys.stdin.buffer.read() != _CLEAN_EXIT:
        kill_processes_using(Path(sys.argv[1]))
