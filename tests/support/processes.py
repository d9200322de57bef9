"""`dpdist` commands in processes of their own, watched, interrupted and killed from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from support.networks import saved_parameters

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
COMMAND = [sys.executable, "-m", "dpdist"]


def start(*arguments: object, cwd: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background shell (and so perhaps CI) starts its children with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> tuple[str, str]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, f"{out}\n{err}"
    return out, err


def wait_for(
    condition: Callable[[], Any], seconds: float = 200, process: subprocess.Popen | None = None
) -> Any:
    """Return the first true value of `condition`.

    process: what is waited for is its doing: fail at once, with what it said, when it has ended.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = process is not None and process.poll() is not None
        if found := condition():
            return found
        if process is not None and ended:
            said = "\n".join(part or "" for part in process.communicate())
            raise AssertionError(f"it ended with {process.returncode} before that: {said}")
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def slow_fsync_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which each release takes 30 ms, so that a kill comes in mid-run."""
    place = folder / "slow"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import os, time\n"
        "real = os.fsync\n"
        "def slow(descriptor):\n"
        "    time.sleep(0.03)\n"
        "    return real(descriptor)\n"
        "os.fsync = slow\n"
    )
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def descendants(root: int) -> dict[int, str]:
    """Process id -> command line of everything that `root` started."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found, grown = {root}, True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(children)
        found |= children
    return {pid: titles.get(pid, "") for pid in found - {root}}


def listening_addresses(root: int) -> set[str]:
    """Return the addresses that a process and all it started accept connections on."""
    found = set()
    for pid in (root, *descendants(root)):
        with suppress(psutil.NoSuchProcess):
            found |= {
                each.laddr.ip
                for each in psutil.Process(pid).net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            }
    return found


def running_processes(pids: dict[int, str]) -> list[str]:
    """Which of these processes still run under the command line they had."""
    found = []
    for pid, title in pids.items():
        try:
            now = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if now and now.split("\0")[0] == title.split("\0")[0]:
            found.append(title)
    return found


def kill(process: subprocess.Popen, beside: Sequence[int] = ()) -> str:
    """kill -9 of a driver, and of these of its processes with it; returns what it had said once
    nothing that it started is left."""
    left = descendants(process.pid)
    for pid in (process.pid, *beside):
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate()
    wait_for(lambda: not running_processes(left))
    return err


def steps_done(run: Path) -> int:
    """Steps that worker 0 has made, from the line it writes at each (progress lags behind)."""
    try:
        lines = (run / "private" / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"] + 1
    except (OSError, ValueError, IndexError):
        return 0


def parameters(run: Path) -> torch.Tensor:
    """The trained model of a run folder, as one vector."""
    return saved_parameters(run / "private" / "model")
