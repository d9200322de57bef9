"""Whole commands without Ray, by the executor that does everything in this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from typer.testing import CliRunner, Result

import dpdist.cli.main
from dpdist.cli.main import app
from dpdist.cluster import executor
from dpdist.cluster.executor import LocalExecutor
from dpdist.cluster.work import Host, WorkerGroup
from support.training import execute


class TestExecutor(LocalExecutor):
    """Do all work in this process, as strangely as a cluster may: workers of a group are threads,
    each worker gets its own copy of what it is sent, and the last one asked answers first."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__(shuffle=True)

    def hosts(self) -> list[Host]:
        return [Host(8.0, 0.0)]

    def transfer(self, value: Any) -> Any:
        """As through the object store: arrays beside the rest, to which nobody may write."""
        arrays: list[Any] = []
        rest = cloudpickle.dumps(value, protocol=5, buffer_callback=arrays.append)
        return cloudpickle.loads(rest, buffers=[array.raw().tobytes() for array in arrays])

    def run_workers(self, group: WorkerGroup) -> None:
        job = group.argument["job"]
        with executor._torch_as_in_a_new_process():
            execute(job, job.recipe.resources.workers, group.argument["until"])


class JobRecorder(LocalExecutor):
    """Note which job a group of training workers would get, and start none."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Any] = []

    def run_workers(self, group: WorkerGroup) -> None:
        self.jobs.append(group.argument["job"])


def run_without_ray(patch: pytest.MonkeyPatch) -> None:
    """From now on all work goes to a `TestExecutor`; ends with the monkeypatch."""
    patch.setattr(executor, "_open_executors", [*executor._open_executors, TestExecutor()])


@dataclass
class Done:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def call(*arguments: object) -> Result:
    """`dpdist ARGUMENTS` by typer's own runner: the result holds a mistake as an exception."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def command(
    patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cwd: Path, *arguments: object
) -> Done:
    """`dpdist ARGUMENTS` in this process, in a working directory."""
    with patch.context() as inner:
        inner.setattr(sys, "argv", ["dpdist", *map(str, arguments)])
        inner.setattr(sys, "path", list(sys.path))
        inner.chdir(cwd)
        capsys.readouterr()
        code = 0
        try:
            dpdist.cli.main.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
    return Done(code, captured.out, captured.err)
