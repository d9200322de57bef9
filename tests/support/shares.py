"""Two pytest processes share the files of one run (tests/both.py starts them, tests/conftest.py
calls this)."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import pytest

FOLDER, CHECK = "DPDIST_TESTS_SHARED", "DPDIST_TESTS_CHECK"  # set by tests/both.py
MOST = 4.0  # seconds of processor time that a test of `make check` may take
_ORDER = "order.json"

# Of files whose tests run whole commands, trainings or benchmarks, or start Ray or another process.
_WHOLE = re.compile(
    r"import subprocess|import ray\b|import connect\b|\bhere: None|RAY_|data_root|CliRunner"
    r"|support\.(here|training|wheel|extending|oracle)|from (harness|rooms|faults|over_ssh)\b"
    r"|\brun_trials\b|import .*\b(loop|pipeline|pretrain)\b|os\.fork|\"benchmarks\""
)


def quick(path: Path) -> bool:
    """Whether none of a file's tests is whole work, by what it imports."""
    return _WHOLE.search(path.read_text()) is None


@dataclass
class Found:
    """Of each test: seconds, and what came out."""

    seconds: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, str] = field(default_factory=dict)

    def add(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed" or report.when == "call":
            self.outcomes[report.nodeid] = report.outcome

    def write(self, folder: Path) -> None:
        path = folder / f"found-{os.getpid()}.json"
        path.write_text(json.dumps([self.seconds, self.outcomes]))


def prepare(folder: Path, last: Path) -> None:
    """last: seconds of each file in the last run, if there was one."""
    if last.exists():
        (folder / _ORDER).write_bytes(last.read_bytes())


def collect(folder: Path, last: Path) -> Found:
    """What both processes found; the seconds of their files are kept for the next run."""
    found = Found()
    for path in folder.glob("found-*.json"):
        seconds, outcomes = json.loads(path.read_text())
        found.seconds.update(seconds)
        found.outcomes.update(outcomes)
    files = json.loads(last.read_text()) if last.exists() else {}
    fresh: Counter[str] = Counter()
    for name, seconds in found.seconds.items():
        fresh[name.split("::")[0]] += seconds
    last.parent.mkdir(exist_ok=True)
    last.write_text(json.dumps(files | fresh))
    return found


def loop(session: pytest.Session, folder: Path) -> None:
    """Run the tests of the files that this process is the first to take."""
    mine = _mine(session.items, folder)
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following


def _mine(items: list[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    order = folder / _ORDER
    seconds = json.loads(order.read_text()) if order.exists() else {}
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0], []).append(item)
    # A file that was never timed, and may be long, comes first; of these one that is whole work.
    for name in sorted(
        files, key=lambda name: (-seconds.get(name, 1e9), quick(files[name][0].path), name)
    ):
        try:
            taken = folder / blake2b(name.encode(), digest_size=8).hexdigest()
            os.close(os.open(taken, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield from files[name]


def within_limit(began: float) -> None:
    """Fail a test of `make check` that took too long, in processor time since `began`."""
    if (took := time.process_time() - began) > MOST:
        pytest.fail(f"{took:.1f} s of processor time: mark it `slow` (pyproject.toml)")
