"""Workers and scripts that end between two steps, by a signal or with a host: none is repeated."""

from __future__ import annotations

import runpy
import signal
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from support.own_loops import WIDTH, begin, run_script
from support.training import make, parameters, release_ids, run_thread_workers, train
from torch import nn

from dpdist.cluster.executor import Executor
from dpdist.cluster.work import WorkerGroup
from dpdist.core.errors import ExitCode, Interrupted, UserError
from dpdist.core.script_errors import TrainingInterrupted, install_error_hooks, unfinished
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.training import monitoring, trainer, worker
from dpdist.training.checkpoint import load_latest
from dpdist.training.job import TrainJob, prepare
from dpdist.training.monitoring import read_groups, request_stop

STEPS = 12
SELDOM = {"workers": 2, "checkpoint_seconds": 1e9}


@pytest.fixture(autouse=True)
def asks_at_every_step(monkeypatch):
    monkeypatch.setattr(monitoring, "_ASK_SECONDS", 0.0)


class Threads(Executor):
    """Two workers, threads here, which hear at question number `at` of a group that a host goes."""

    def __init__(self, *at: int) -> None:
        self.at = iter(at)

    def run_workers(self, group: WorkerGroup) -> None:
        at, asked = next(self.at, STEPS + 1), Counter[int]()

        def work(reducer: Any) -> None:
            def ask() -> bool:
                asked[reducer.rank] += 1
                return asked[reducer.rank] >= at

            worker.run_training(group.argument["job"], reducer, None, ask)

        run_thread_workers(group.max_workers, work)


def prepared(tmp_path, name: str) -> TrainJob:
    return prepare(*make(tmp_path, name, model="linear", resources=SELDOM), "test")


def test_a_preemption_leads_to_a_checkpoint_and_repeats_nothing(tmp_path):
    undisturbed = train(*make(tmp_path, "a", model="linear", resources=SELDOM), 2)
    job = prepared(tmp_path, "b")
    trainer.fit(job, Threads(5, 3))
    assert torch.equal(parameters(job.folder), undisturbed)
    assert [(g.step, g.saved, g.again) for g in read_groups(job.folder)] == [
        (0, 0, 0), (5, 5, 0), (8, 3, 0),
    ]  # fmt: skip
    # Epsilon: each step once, in one attempt, as the plan says.
    ledger = Ledger.read(job.folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(STEPS), 1) and len(ledger.attempts) == 1
    assert ledger.guarantee(job.plan).epsilon == job.plan.guarantee().epsilon
    assert release_ids(job.folder) == release_ids(RunFolder(tmp_path / "a"))
    assert len(job.folder.metrics.read_text().splitlines()) == STEPS, "a step was repeated"
    assert not job.folder.interruption.exists() and job.folder.training_summary.exists()


def test_sigterm_ends_both_workers_after_a_checkpoint(tmp_path):
    undisturbed = train(*make(tmp_path, "a", model="linear", resources=SELDOM), 2)
    job = prepared(tmp_path, "b")

    class Told(Threads):
        def run_workers(self, group: WorkerGroup) -> None:
            def work(reducer: Any) -> None:
                def ask() -> bool:
                    asked.append(reducer.rank)
                    if len(asked) == 8:
                        assert request_stop(job.folder)
                    return False

                worker.run_training(group.argument["job"], reducer, None, ask)

            asked: list[int] = []
            run_thread_workers(2, work)

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(job, Told())
    job.folder.stop_request.unlink()
    trainer.fit(job, Threads())
    first, second = read_groups(job.folder)
    assert second.step == second.saved == 5 and (first.again, second.again) == (0, 0)
    assert torch.equal(parameters(job.folder), undisturbed)
    assert release_ids(job.folder) == release_ids(RunFolder(tmp_path / "a"))
    assert len(job.folder.metrics.read_text().splitlines()) == STEPS, "a step was repeated"


@pytest.mark.e2e
def test_an_interrupted_script_resumes(tmp_path):
    """Ctrl-C ends it in one line, and the same command goes on."""
    stopped = run_script(tmp_path / "own", kill=(4, 0), signal=signal.SIGINT)
    assert stopped.returncode == 130 and "Traceback" not in stopped.stderr
    assert load_latest(RunFolder(tmp_path / "own").checkpoints).step == 4
    assert run_script(tmp_path / "own", seconds=1e6).returncode == 0


def test_an_error_of_a_script_is_one_line_that_names_its_own(tmp_path, capsys, monkeypatch):
    """Also where a library of Python's calls what raises; and Ctrl-C in a search exits with 130."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install_error_hooks()
    (tmp_path / "own.py").write_text(
        "import contextlib\nimport dpdist\n\nwith contextlib.ExitStack() as stack:\n"
        "    stack.callback(dpdist.load_results, 'nowhere')\n"
    )
    with pytest.raises(UserError) as raised:
        runpy.run_path(str(tmp_path / "own.py"))
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err.startswith("own.py:4: ")
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(Interrupted, Interrupted("stopped"), None)
    assert ended.value.code == ExitCode.INTERRUPTED and capsys.readouterr().err == "stopped\n"


class _SlowOnce(nn.Linear):
    """It gets Ctrl-C in a forward pass."""

    at = -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and _SlowOnce.at == 0:
            signal.raise_signal(signal.SIGINT)
            _SlowOnce.at = -1
        return super().forward(inputs)


def test_an_interrupted_step_leaves_a_training_that_continues(tmp_path):
    training = begin(tmp_path / "run", _SlowOnce(WIDTH, 2), steps=4)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        training.step()
        _SlowOnce.at = 0
        with pytest.raises(TrainingInterrupted, match="interrupted at step 2"):
            training.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    state = load_latest(training.run.checkpoints)
    assert state is not None and state.step == 2 and training in unfinished
    assert training.run_all().training_summary.exists()
    assert training.keep_interrupted() is None
