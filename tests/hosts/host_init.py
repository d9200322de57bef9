"""Process 1 of a made-up host: sets the host up, reaps orphans, ends when its standard input does.

Started by rooms.py inside fresh namespaces (network, mounts, processes, host name). One JSON line
on standard input says what the host is; "ready" on standard output says that it stands. When the
tests die, standard input closes, process 1 ends, and the kernel kills everything on the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

_MS_BIND, _MS_REC = 4096, 16384
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    """mount(2): mount(8) would resolve /proc/self/fd links to names that are hidden by now."""
    arguments = [None if x is None else x.encode() for x in (source, target, kind)]
    if _libc.mount(*arguments, flags, data.encode() or None):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")


def separate_files(hide: dict[str, str], keep: dict[str, str]) -> None:
    """Give the host folders of its own.

    hide: folder -> size of the empty memory disk put there. keep: path on the host -> the test
    machine's path that is seen there, hidden or not.
    """
    held = {target: os.open(source, os.O_PATH) for target, source in keep.items()}
    for folder, size in hide.items():
        if not os.path.isdir(folder):
            os.makedirs(folder)
        mount("tmpfs", folder, "tmpfs", 0, f"size={size},mode={'1777' if 'tmp' in folder else 755}")
    for target, descriptor in held.items():
        os.makedirs(target, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", target, None, _MS_BIND | _MS_REC)
        os.close(descriptor)


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def network(address: str, gateway: str, bridge: bool) -> None:
    """The room has the bridge; a host waits for its cable, which the room plugs in."""
    run("ip", "link", "set", "lo", "up")
    if bridge:
        run("ip", "link", "add", "br0", "type", "bridge")
        device = "br0"
    else:
        device = "eth0"
        deadline = time.monotonic() + 30
        # Not /sys/class/net: that is the test machine's, whose eth0 is another.
        while device not in _links():
            if time.monotonic() > deadline:
                raise TimeoutError("no eth0 after 30 s")
            time.sleep(0.02)
    run("ip", "address", "add", f"{address}/24", "dev", device)
    run("ip", "link", "set", device, "up")
    if not bridge:
        run("ip", "route", "add", "default", "via", gateway)


def _links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout


def login(address: str, public_key: str, home: str, profile: str) -> None:
    """An SSH server on this host's own address that lets the test's key in."""
    folder = Path(home) / ".ssh"
    folder.mkdir(mode=0o700)
    (folder / "authorized_keys").write_text(public_key)
    (Path(home) / ".bashrc").write_text(profile)
    os.makedirs("/run/sshd", exist_ok=True)
    key = "/run/host_key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    config = Path("/run/sshd_config")
    config.write_text(
        f"ListenAddress {address}\nHostKey {key}\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nStrictModes no\nUseDNS no\nPrintMotd no\n"
        "PidFile /run/sshd.pid\nMaxStartups 100\n"
    )
    run("/usr/sbin/sshd", "-f", str(config), "-E", "/run/sshd.log")


def main() -> None:
    about = json.loads(sys.stdin.readline())
    separate_files(about["hide"], about["keep"])
    os.chdir("/")
    run("hostname", about["name"])
    print("here", flush=True)  # in its own namespaces: the cable may be plugged in
    network(about["address"], about["gateway"], about["bridge"])
    if about["public_key"]:
        login(about["address"], about["public_key"], about["home"], about["profile"])
    print("ready", flush=True)

    def end_with_input() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


main()
