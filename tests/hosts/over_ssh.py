"""A real cluster on made-up hosts: started by `ray up` over SSH, used from outside it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import rooms
import yaml
from support.wheel import INSTALL, build_wheel


class Slow(Exception):
    """This machine is too busy for Ray to start a host in the time that Ray allows."""


class Cluster:
    """A head and some workers that share a folder; `laptop` is outside and has the token.

    head_cpus: 0 leaves the head to the driver alone.
    """

    def __init__(self, room: rooms.Room, workers: int = 2, head_cpus: int = 0) -> None:
        self.laptop, self.head_cpus = room, head_cpus
        self.head = room.add("head")
        self.workers = [room.add(name) for name in ("one", "two", "three")[:workers]]
        self.there = f"{rooms.SHARED}/runs"  # as the hosts see it
        self.runs = room.shared / "runs"  # as the tests see it
        self.wheel = build_wheel(room.folder / "wheel")
        self.install = shlex.join([sys.executable, *INSTALL, "--upgrade", "--target", rooms.SITE])
        room.shell(f"{self.install} {self.wheel}")
        self.path = self.file()

    def file(self) -> Path:
        """The template for one's own hosts, filled in. What would be downloaded is there already,
        so only our wheel is installed; and the shared folder has another name."""
        text = (rooms.ROOT / "cluster" / "templates" / "local.yaml").read_text()
        text = text.replace("/mnt/dpdist", rooms.SHARED).replace("FILL-IN-USER", "root")
        raw = yaml.safe_load(text)
        raw["provider"] |= {"head_ip": self.head.address,
                            "worker_ips": [host.address for host in self.workers]}  # fmt: skip
        raw["auth"]["ssh_private_key"] = str(self.laptop.key)
        raw["file_mounts"] = {k: v for k, v in raw["file_mounts"].items() if "token" in k}
        there = f"~/dpdist/{self.wheel.name}"
        raw["file_mounts"][there] = str(self.wheel)
        raw["setup_commands"] = [c for c in raw["setup_commands"] if "mountpoint" in c]
        raw["setup_commands"].append(f"{self.install} {there}")
        small = "--object-store-memory=100000000"
        for side, more in (("head", ""), ("worker", "--num-cpus=1 ")):
            key = f"{side}_start_ray_commands"
            raw[key] = [
                c.replace("ray start ", f"ray start {more}{small} ").replace(
                    "--num-cpus=0", f"--num-cpus={self.head_cpus}"
                )
                for c in raw[key]
            ]
        path = self.laptop.folder / "local.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    def up(self) -> None:
        """`ray up`, repeated on a machine too busy for the 30 seconds that Ray gives the head to
        start. Raises Slow when that was the reason each time."""
        self.token = self.laptop.shell("ray get-auth-token --generate").split()[-1]
        line = f"RAY_UP_enable_autoscaler_v2=0 ray up -y {self.path} 2>&1 && echo it is up"
        for _ in range(3):
            said = self.laptop.shell(line, timeout=400, check=False)
            if "it is up" in said:
                break
        else:
            raise Slow if _TOO_SLOW in said else AssertionError(said[-4000:])
        self.dig_tunnel()
        self.wait_for_nodes(1 + len(self.workers))
        for host in (self.laptop, self.head, *self.workers):
            place = host.shell("cd / && python -c 'import dpdist; print(dpdist.__file__)'")
            assert place.startswith(rooms.SITE), place

    def down(self) -> None:
        said = self.laptop.shell(f"ray down -y {self.path} 2>&1", timeout=200)
        assert "No nodes remaining" in said, said[-4000:]

    def dig_tunnel(self) -> None:
        """What `ray dashboard` does: the laptop's port 8265 leads to the head's."""
        way = "8265:127.0.0.1:8265"
        for pid in self.laptop.processes(way):  # to a head that is gone
            self.laptop.run("kill", str(pid), check=False)
        self.laptop.start(
            "ssh", "-N", "-i", str(self.laptop.key), "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "ExitOnForwardFailure=yes", "-L", way,
            f"root@{self.head.address}",
        )  # fmt: skip

    def wait_for_nodes(self, count: int, seconds: float = 300) -> None:
        """Until so many hosts have joined."""

        def joined() -> bool:
            found = self.ask("nodes?view=summary")
            nodes = found["data"]["summary"] if found else []
            return sum(node["raylet"].get("state") == "ALIVE" for node in nodes) >= count

        self.wait_for(joined, seconds, every=1)

    def ask(self, what: str) -> dict | None:
        """What the head's dashboard answers, {} for what it does not know; None while it does not
        answer."""
        done = self.laptop.run(sys.executable, "-I", "-c", _ASK, what, self.token, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def command(self, *arguments: str, cwd: Path | None = None, token: str = "") -> list[str]:
        """The command line of dpdist on the laptop, as started from outside."""
        line = shlex.join(["python", "-c", "from dpdist.cli.main import main; main()", *arguments])
        script = f"source ~/.bashrc; cd {cwd or self.laptop.folder}; "
        script += f"export RAY_AUTH_TOKEN={token}; " if token else ""
        return self.laptop.command("bash", "-c", f"{script} exec {line}")

    def dpdist(self, *arguments: str, cwd=None, token: str = "", check=True, timeout=300):
        """Run dpdist on the laptop to its end."""
        done = subprocess.run(
            self.command(*arguments, cwd=cwd, token=token),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not (check and done.returncode), f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done

    def project(self, name: str, recipe: dict) -> Path:
        """A directory of the user's with this recipe in it."""
        folder = self.laptop.folder / "projects" / name
        folder.mkdir(parents=True)
        (folder / f"{recipe['name']}.yaml").write_text(yaml.safe_dump(recipe))
        return folder

    def submit(self, recipe: str, project: Path, *more: str) -> str:
        """The name of the job."""
        said = self.dpdist("cluster", "submit", recipe, "--no-follow", *more, cwd=project).stderr
        return re.search(r"job (\S+) is submitted", said)[1]

    def entrypoint(self, command: str) -> str:
        """Submit any command with Ray's own client; the name of the job."""
        said = self.laptop.shell(
            f"export RAY_AUTH_MODE=token; ray job submit --no-wait "
            f"--address http://127.0.0.1:8265 -- {command}"
        )
        return re.search(r"raysubmit_\w+", said)[0]

    def said(self, job: str) -> str:
        """All that a job has printed."""
        return self.ask(f"api/jobs/{job}/logs")["logs"]

    def state(self, job: str) -> tuple[str, str]:
        """(state, message) of a job, straight from the job server: this is asked often. LOST: a
        new head does not know it."""
        found = self.ask(f"api/jobs/{job}")
        assert found is not None, f"no answer about {job}"
        return (found["status"], found["message"] or "") if found else ("LOST", "")

    def end_of(self, job: str, seconds: float = 900) -> str:
        """The state in which a job ends."""

        def ended() -> str | None:
            state, message = self.state(job)
            if state == "FAILED":
                print(f"{job}: {message}")
            return state if state in ("SUCCEEDED", "FAILED", "STOPPED", "LOST") else None

        return self.wait_for(ended, seconds, every=1)

    @staticmethod
    def wait_for(condition, seconds: float = 400, every: float = 0.1):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(every)
        raise AssertionError("waited in vain")

    def restart(self, host: rooms.Host) -> None:
        """Start Ray on a host again, with the command of the cluster file. The autoscaler on the
        head does the same after a while, and may be faster: then this start is refused."""
        command = yaml.safe_load(self.path.read_text())["worker_start_ray_commands"][-1]
        host.shell(f"export RAY_HEAD_IP={self.head.address}; {command}", check=False)
        self.wait_for(lambda: host.processes("raylet/raylet"), every=1)


_TOO_SLOW = "The current node timed out during startup"
_ASK = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(
    f"http://127.0.0.1:8265/{sys.argv[1]}", headers={"Authorization": f"Bearer {sys.argv[2]}"}
)
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    if error.code != 404:
        raise
    print("{}")
"""
