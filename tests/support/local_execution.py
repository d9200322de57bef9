"""Whole commands without Ray: training workers are threads, actors are calls, trials run one after
another. Everything else is what the command does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from typer.testing import CliRunner, Result

import dpdist.attacks.job
import dpdist.certification.job
import dpdist.certification.reexecution
import dpdist.cli.main
import dpdist.cluster.actor_pool
import dpdist.cluster.resumable_job
import dpdist.cluster.session
import dpdist.cluster.versions
import dpdist.pipeline
import dpdist.training.trainer as trainer
import dpdist.tuning.trial
from dpdist.cli.main import app
from dpdist.cluster.actor_pool import Chunk, PoolSettings
from dpdist.cluster.versions import package_fingerprints
from dpdist.core.errors import UserError
from dpdist.training.job import PACKAGES, TrainJob
from dpdist.tuning.manifest import read_trials
from dpdist.tuning.search import Search
from dpdist.tuning.searchers import ManifestSearcher
from dpdist.tuning.trial import run_trial
from support.key_recorder import replace_everywhere
from support.training import execute

SESSION = dpdist.cluster.session.Session(None, 8, 0, 1)


def run_without_ray(patch: pytest.MonkeyPatch) -> None:
    """From now on nothing starts Ray; ends with the monkeypatch."""
    replace_everywhere(patch, dpdist.cluster.session.connect, _connect)
    replace_everywhere(patch, dpdist.cluster.versions.check_nodes, lambda *_: None)
    replace_everywhere(patch, dpdist.cluster.actor_pool.run_chunks, run_chunks)
    replace_everywhere(patch, dpdist.cluster.actor_pool.run_once, run_once)
    # A process of their own for rows that are tried alone takes seconds: tests/certification/
    # test_fresh_process.py has one.
    patch.setattr(
        dpdist.certification.reexecution,
        "FreshProcess",
        lambda network, form, code: dpdist.certification.reexecution.SameProcess(network, form),
    )
    patch.setattr(trainer, "_fit_on_ray", _fit)
    patch.setattr(
        dpdist.tuning.trial,
        "_train_on_ray_train",
        lambda job, until: trainer.fit(job, stop_after=until),
    )
    replace_everywhere(
        patch, dpdist.tuning.trial.live_nodes, lambda: [dpdist.tuning.trial.Node(8.0, 0.0)]
    )
    patch.setattr(Search, "_run_pass", _round)
    patch.setattr(ray, "remote", lambda function=None, **_: _Remote(function))
    patch.setattr(ray, "get", lambda value, **_: value)
    patch.setattr(ray, "put", lambda value, **_: value)


@contextmanager
def _connect(*_: Any, **__: Any) -> Iterator[dpdist.cluster.session.Session]:
    yield SESSION


def run_chunks(
    factory: Callable[..., Callable[[Any], Any]],
    shared: Any,
    chunks: Iterable[Chunk],
    on_result: Callable[[str, Any], None],
    settings: PoolSettings | None = None,
) -> None:
    """As `dpdist.cluster.actor_pool.run_chunks`, in this process: as many workers as there would be
    actors, each with its own copy of what an actor is sent; the last one asked answers first."""
    packed = _packed((factory, shared))
    workers: list[Callable[[Any], Any]] = []
    ordered = sorted(chunks, key=lambda c: c.priority) if isinstance(chunks, Sequence) else chunks
    waiting = iter(ordered)
    while asked := list(islice(waiting, settings.actors or 1 if settings else 1)):
        while len(workers) < len(asked):
            build, given = _unpacked(*packed)
            workers.append(build(given))
        answers = [
            (chunk.key, _round_trip(worker(_round_trip(chunk.payload))))
            for worker, chunk in zip(workers, asked, strict=False)
        ]
        for key, answer in reversed(answers):
            on_result(key, answer)


def _packed(value: Any) -> tuple[bytes, list[bytes]]:
    """As into the object store: arrays beside the rest."""
    arrays: list[Any] = []
    rest = cloudpickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    return rest, [array.raw().tobytes() for array in arrays]


def _unpacked(rest: bytes, arrays: list[bytes]) -> Any:
    """As out of the object store: nobody may write to its arrays."""
    return cloudpickle.loads(rest, buffers=arrays)


def _round_trip(value: Any) -> Any:
    return _unpacked(*_packed(value))


def run_once(
    function: Callable[[Any], Any], argument: Any, failed: str, num_gpus: float = 0.0
) -> Any:
    """As `dpdist.cluster.actor_pool.run_once`, in this process."""
    try:
        return _round_trip(function(_round_trip(argument)))
    except Exception as error:
        raise UserError(f"{failed}: {error}") from error


def _fit(job: TrainJob, restarts: int, until: int | None, callbacks: Any) -> None:
    execute(job, job.recipe.resources.workers, until)


def _round(search: Search, concurrent: int) -> None:
    trials = read_trials(search.folder)
    searcher = ManifestSearcher(search.folder, trials, search.trial_noise_multiplier)
    for number in range(len(trials)):
        searcher.suggest(f"id-{number}")
        run_trial(
            search.folder.run.path, package_fingerprints(PACKAGES), number, lambda rung, score: None
        )


class _Remote:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **_: Any) -> _Remote:
        return self

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self._function(*arguments, **named)


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
