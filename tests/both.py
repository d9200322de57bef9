"""Lint, types and tests in three processes at once.

    python tests/both.py [--check] [PYTEST OPTIONS]

Two processes share the tests: each takes the next file that nobody has, the longest of the last run
first (`support/shares.py`). The second's output follows the first's; a fault found by lint or types
stops both. The exit code is the worst of all. With a path among the options pytest runs alone.

--check: what one wants to know every few minutes (`make check`): no test that runs a whole command
or training, starts a process or is marked `slow` or `long`. A test that takes more than a few
seconds of processor time fails there, and has to be marked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support import cases, shares

TESTS = Path(__file__).resolve().parent
LAST = TESTS.parent / ".pytest_cache" / "dpdist-seconds.json"
LINT = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"])


def pytest(*options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "--durations=0", "--durations-min=10000", *options]


def lint() -> None:
    """In a process of its own: the three, until one finds something."""
    for command in LINT:
        done = subprocess.run([sys.executable, "-m", *command], cwd=TESTS.parent)
        if done.returncode:
            sys.exit(f"{command[0]}: exit code {done.returncode}")


def main(options: list[str]) -> int:
    began, environment = time.monotonic(), os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        environment[shares.FOLDER] = folder
        if "--check" in options:
            options.remove("--check")
            environment[shares.CHECK] = "1"
            options += ["-m", "not slow and not long"]
            options += map(str, filter(shares.quick, sorted(TESTS.rglob("test_*.py"))))
        elif any(Path(option.split("::")[0]).exists() for option in options):
            return subprocess.run([sys.executable, "-m", "pytest", *options]).returncode
        if "not long" not in " ".join(options):
            environment[cases.ALL] = "1"
        shares.prepare(Path(folder), LAST)
        linting = subprocess.Popen([sys.executable, __file__, "--lint"])
        first = subprocess.Popen(pytest(*options), env=environment)
        second = subprocess.Popen(
            pytest("-p", "no:cacheprovider", *options),
            stdout=out, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        running = [linting, first, second]
        try:
            while any(process.poll() is None for process in running):
                if linting.poll() or ("-x" in options and (first.poll() or second.poll())):
                    break
                time.sleep(0.1)
        except KeyboardInterrupt:  # they were told, too
            for process in running:
                process.wait()
            return 130
        finally:
            for process in running:
                process.kill()
        codes = [process.wait() for process in running]
        if codes[0] > 0:
            print("the tests were stopped", flush=True)
            return 1
        out.seek(0)
        print(out.read().decode(errors="replace"), flush=True)
        found = shares.collect(Path(folder), LAST)
    print("slowest 15:")
    for name, seconds in found.seconds.most_common(15):
        print(f"{seconds:7.1f} s  {name}")
    counts = Counter(found.outcomes.values())
    said = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"lint and types: passed; tests: {said}; {time.monotonic() - began:.0f} s", flush=True)
    # 5: no test was left for one of the two.
    return max(code if code != 5 or not counts else 0 for code in codes)


if __name__ == "__main__":
    sys.exit(lint() if sys.argv[1:] == ["--lint"] else main(sys.argv[1:]))
