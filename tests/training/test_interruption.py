"""Workers that end between two steps, because a host goes or SIGTERM came: no step is repeated."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import make, parameters, release_ids, run_thread_workers, train

from dpdist.cluster.executor import Executor, LocalExecutor
from dpdist.cluster.work import WorkerGroup
from dpdist.core.errors import ClusterError
from dpdist.privacy.ledger import Ledger
from dpdist.runs.folder import RunFolder
from dpdist.training import monitoring, trainer, worker
from dpdist.training.job import TrainJob, prepare
from dpdist.training.monitoring import (
    WorkerChangeReporter,
    read_groups,
    request_stop,
    stopped_between_steps,
)

STEPS = 12
SELDOM = {"workers": 2, "checkpoint_seconds": 1e9}


@pytest.fixture(autouse=True)
def asks_at_every_step(monkeypatch):
    monkeypatch.setattr(monitoring, "_ASK_SECONDS", 0.0)


class Threads(Executor):
    """Two workers, threads here, which hear at question number `at` of a group that a host goes.

    questions: how often each worker of each group asked, as Ray counts them.
    """

    def __init__(self, *at: int) -> None:
        self.at, self.questions = iter(at), list[Counter[int]]()

    def run_workers(self, group: WorkerGroup) -> None:
        at, asked = next(self.at, STEPS + 1), Counter[int]()
        self.questions.append(asked)

        def work(reducer: Any) -> None:
            def ask() -> bool:
                asked[reducer.rank] += 1
                return asked[reducer.rank] >= at

            worker.run_training(group.argument["job"], reducer, None, ask)

        run_thread_workers(group.max_workers, work)


def prepared(tmp_path, name: str, **resources: Any) -> TrainJob:
    recipe, folder = make(tmp_path, name, model="linear", resources=SELDOM | resources)
    return prepare(recipe, folder, "test")


@pytest.mark.slow
def test_a_preemption_leads_to_a_checkpoint_and_repeats_nothing(tmp_path):
    undisturbed = train(*make(tmp_path, "a", model="linear", resources=SELDOM), 2)
    job, said, threads = prepared(tmp_path, "b"), list[str](), Threads(5, 3)
    reporter = WorkerChangeReporter(job.folder, said.append)
    trainer.fit(job, threads)
    reporter.poll()
    assert torch.equal(parameters(job.folder), undisturbed)
    assert [(g.step, g.saved, g.again) for g in read_groups(job.folder)] == [
        (0, 0, 0), (5, 5, 0), (8, 3, 0),
    ]  # fmt: skip
    assert threads.questions == [{0: 5, 1: 5}, {0: 3, 1: 3}, {0: 4, 1: 4}]
    assert said[0] == (
        "training: goes on with 2 workers from step 5: nothing is charged again; a checkpoint "
        "before the interruption saved 5 steps, which would have been repeated"
    )
    # Epsilon: each step once, in one attempt, as the plan says.
    ledger = Ledger.read(job.folder.ledger)
    assert ledger.release_counts == dict.fromkeys(range(STEPS), 1) and len(ledger.attempts) == 1
    assert ledger.guarantee(job.plan).epsilon == job.plan.guarantee().epsilon
    assert release_ids(job.folder) == release_ids(RunFolder(tmp_path / "a"))
    assert len(job.folder.metrics.read_text().splitlines()) == STEPS, "a step was repeated"
    assert not job.folder.interruption.exists() and job.folder.training_summary.exists()


def test_a_preemption_at_the_last_step_changes_nothing(tmp_path):
    job = prepared(tmp_path, "run")
    trainer.fit(job, Threads(STEPS))
    assert [g.step for g in read_groups(job.folder)] == [0]
    assert job.folder.training_summary.exists()


@pytest.mark.slow
def test_there_is_an_end_to_preemptions(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "MAX_PREEMPTIONS", 2)
    job = prepared(tmp_path, "run")
    with pytest.raises(ClusterError, match="3 times"):
        trainer.fit(job, Threads(*[1] * STEPS))
    assert [g.step for g in read_groups(job.folder)] == [0, 1, 2]
    trainer.fit(job, Threads())
    assert [g.step for g in read_groups(job.folder)] == [0, 1, 2, 3]


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


class Signaled(LocalExecutor):
    """Ends itself with SIGTERM once steps are taken; `times` as often."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def supervise(self, work: Callable[[], None], poll: Callable[[], None]) -> None:
        real = worker.Loop.save

        def signaled(loop: worker.Loop) -> None:
            real(loop)
            if loop.done == 3:
                for _ in range(self.times):
                    signal.raise_signal(signal.SIGTERM)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.Loop, "save", signaled)
            super().supervise(work, poll)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_one_sigterm_waits_for_a_checkpoint_and_two_do_not(tmp_path, times):
    undisturbed = train(*make(tmp_path, "a", resources={"checkpoint_seconds": 1e-6}))
    recipe, folder = make(tmp_path, "b", resources={"checkpoint_seconds": 1e-6})
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(prepare(recipe, folder, "test"), Signaled(times))
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not folder.stop_request.exists()
    assert len(Ledger.read(folder.ledger).release_counts) == (4 if times == 1 else 3)
    trainer.train(prepare(recipe, folder, "test"), LocalExecutor())
    assert read_groups(folder)[-1].step == (4 if times == 1 else 3)
    assert torch.equal(parameters(folder), undisturbed)


def test_sigterm_that_nobody_can_answer_is_ctrl_c(tmp_path):
    """Before the first step, and where a step takes more than a minute."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = RunFolder(tmp_path)
    folder.private.mkdir()
    try:
        with pytest.raises(KeyboardInterrupt), stopped_between_steps(folder):
            signal.raise_signal(signal.SIGTERM)
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(KeyboardInterrupt),
            stopped_between_steps(folder) as look_at_clock,
        ):
            folder.stop_request.write_bytes(b"")
            signal.raise_signal(signal.SIGTERM)
            look_at_clock()
            patch.setattr(monitoring, "_STOP_SECONDS", -1.0)
            look_at_clock()
            raise AssertionError("it waits for ever")
    finally:
        signal.signal(signal.SIGTERM, before)
