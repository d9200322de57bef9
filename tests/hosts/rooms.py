"""Several hosts on one machine: Linux namespaces joined by a bridge, each with its own address, SSH
server, processes, /tmp, home and shared memory. The real `ray up` logs in and starts Ray on them.

A room holds the bridge and plays the user's laptop; its hosts are inside it. Everything dies with
the test process. Needs root, iproute2, openssh-server and rsync.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("host_init.py")
HOME = os.path.expanduser("~")
SITE = f"{HOME}/dpdist/site"  # on the hosts of a cluster: the wheel of this checkout
SHARED = "/mnt/shared"
SMALL = "small"  # in the shared folder: a disk of its own, of this size
_SMALL_SIZE = "8m"
_LAPTOP = "10.77.0.1"
_NAMESPACES = ["--net", "--mount", "--uts", "--ipc", "--pid"]


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why this machine cannot play several hosts; None when it can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for tool in ("ip", "ss", "ps", "unshare", "nsenter", "ssh", "ssh-keygen", "rsync", "hostname"):
        if shutil.which(tool) is None:
            return f"needs {tool} (Debian: iproute2, procps, openssh-client, rsync, hostname)"
    if not os.path.exists("/usr/sbin/sshd"):
        return "needs /usr/sbin/sshd (Debian: openssh-server)"
    probe = (
        "ip link add br0 type bridge && ip link add cable0 type veth peer name cable1 "
        "&& mount -t tmpfs t /tmp"
    )
    done = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", probe],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"this machine cannot make namespaces: {done.stderr.strip()[:200]}"
    return None


@dataclass
class Host:
    """A running host. pid: its process 1, as seen from the test."""

    name: str
    address: str
    process: subprocess.Popen
    pid: int

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", "--target", str(self.pid), *_NAMESPACES, "--", *command]

    def run(
        self, *command: str, timeout: float = 120, check: bool = True, **options
    ) -> subprocess.CompletedProcess:
        done = subprocess.run(
            self.command(*command),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            **options,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: {' '.join(command)[:400]} gave {done.returncode}\n"
                f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            )
        return done

    def start(self, *command: str) -> subprocess.Popen:
        """A command that goes on by itself; it ends with the room."""
        return subprocess.Popen(
            self.command(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def shell(self, script: str, **options) -> str:
        """Standard output of a bash script with the login profile of this host."""
        return self.run("bash", "-c", f"source ~/.bashrc; {script}", **options).stdout

    def processes(self, word: str) -> list[int]:
        """This host's processes whose command line holds `word`, in its own count.

        Not those that have ended: process 1 of a host here collects none of them.
        """
        lines = self.run("ps", "-ww", "-eo", "pid=,args=").stdout.splitlines()
        return [int(line.split()[0]) for line in lines if word in line and "<defunct>" not in line]

    def kill_processes(self, word: str, name: str) -> None:
        """Send the signal to them; there must be one."""
        found = self.processes(word)
        assert found, f"{self.name}: no process with {word!r}"
        for pid in found:
            self.run("kill", f"-{name}", str(pid), check=False)

    def kill(self) -> None:
        """The machine is gone: process 1 ends with its input, and the kernel kills the others."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


class Room(Host):
    """The laptop and the bridge; `add` makes hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.key = folder / "key"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True
        )
        self.hosts: list[Host] = []
        self._start("laptop", _LAPTOP)
        # Before the hosts are made, so that they see it too. The tests see it through the room.
        small = self.shared / SMALL
        small.mkdir()
        self.run("mount", "-t", "tmpfs", "-o", f"size={_SMALL_SIZE}", "small", str(small))
        self.small = Path(f"/proc/{self.pid}/root") / small.relative_to("/")

    def _start(self, name: str, address: str) -> Host:
        laptop = name == "laptop"
        keep = {str(path): str(path) for path in _needed()}
        if laptop:
            keep[str(self.folder)] = str(self.folder)
        else:
            keep[SHARED] = str(self.shared)
        about = {
            "name": name,
            "address": address,
            "gateway": _LAPTOP,
            "bridge": laptop,
            "home": HOME,
            "hide": {"/tmp": "600m", HOME: "256m", "/dev/shm": "1g", "/run": "64m", "/mnt": "1g"},
            "keep": keep,
            "public_key": "" if laptop else self.key.with_suffix(".pub").read_text(),
            "profile": _PROFILE,
        }
        inside = [] if laptop else self.command()
        process = subprocess.Popen(
            [*inside, "unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-I", str(INIT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(about) + "\n")
        process.stdin.flush()
        _expect("here", process, name)
        if laptop:
            _expect("ready", process, name)
            super().__init__(name, address, process, _first_child(process.pid))
            self.profile()
            return self
        unshared = _first_child(process.pid)  # nsenter forks into the room's processes
        cable = _cable(address)
        peer = self._inside(unshared)
        # Of a machine that had this address: the kernel takes it away a little after its death.
        self.run("ip", "link", "delete", cable, check=False)
        self.run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", peer)
        self.run("ip", "link", "set", cable, "master", "br0")
        self.run("ip", "link", "set", cable, "up")
        _expect("ready", process, name)
        return Host(name, address, process, _first_child(unshared))

    def profile(self) -> None:
        self.run("sh", "-c", f"cat > {HOME}/.bashrc <<'END'\n{_PROFILE}END")

    def _inside(self, pid: int) -> str:
        """The number of a process in the room's own count."""
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1]
        raise AssertionError("no NSpid")

    def add(self, name: str) -> Host:
        """A new host with its cable in the bridge."""
        address = f"10.77.0.{10 + len(self.hosts)}"
        self.hosts.append(self._start(name, address))
        return self.hosts[-1]

    def replace(self, host: Host) -> None:
        """The machine is lost with its disk; an empty one of the same name and address comes."""
        host.kill()
        fresh = self._start(host.name, host.address)
        host.process, host.pid = fresh.process, fresh.pid

    def cut(self, host: Host) -> None:
        """Pull the host's cable."""
        self.run("ip", "link", "set", _cable(host.address), "down")

    def plug(self, host: Host) -> None:
        self.run("ip", "link", "set", _cable(host.address), "up")


_PROFILE = f"""\
export PATH={Path(sys.executable).parent}:$PATH
export PYTHONPATH={SITE}:{ROOT} PYTHONDONTWRITEBYTECODE=1
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
"""


@contextlib.contextmanager
def room(folder: Path) -> Iterator[Room]:
    """A room that is gone afterwards, with all that ran on its hosts."""
    made = Room(folder)
    try:
        yield made
    finally:
        made.kill()


def _needed() -> list[Path]:
    """What every host must see: the interpreter, the libraries, this checkout."""
    places = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    return sorted(path.resolve() for path in places)


def _cable(address: str) -> str:
    """The bridge's end of the cable to a host."""
    return f"v{address.rpartition('.')[2]}"


def _first_child(pid: int) -> int:
    for _ in range(500):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError(f"process {pid} has no child")


def _expect(word: str, process: subprocess.Popen, name: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    if line.strip() != word:
        process.kill()
        raise AssertionError(f"host {name} did not come up: {line!r}")
