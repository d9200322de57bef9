"""What is said of a training whose workers failed for good."""

from __future__ import annotations

import pytest
from support.training import make

from dpdist.cluster.executor import Executor, LocalExecutor
from dpdist.cluster.work import WorkersFailedError
from dpdist.core.errors import ClusterError
from dpdist.privacy.ledger import JournalBusy, Ledger
from dpdist.training.job import prepare
from dpdist.training.trainer import RunBusy, fit, train


def test_a_run_that_another_process_trains_is_said_to_be_one(tmp_path, monkeypatch):
    """Not that it failed so many times, and nothing is left in the other's folder."""
    recipe, folder = make(tmp_path)
    job = prepare(recipe, folder, "test")
    monkeypatch.setattr("dpdist.training.trainer._SHUTDOWN_SECONDS", 0.01)
    monkeypatch.setattr("dpdist.privacy.ledger._LOCK_SECONDS", 0.01)

    class Failing(Executor):
        def run_workers(self, group):
            try:
                Ledger.open(folder.ledger, job.plan.fingerprint())
            except JournalBusy as error:
                said = f"...\ndpdist.privacy.journal.{type(error).__name__}: {error}"
                raise WorkersFailedError(said) from error
            raise WorkersFailedError("RuntimeError: a secret, no JournalBusy")

    held = Ledger.open(folder.ledger, job.plan.fingerprint())
    with held, pytest.raises(RunBusy):
        fit(job, Failing())
    assert not folder.errors.exists()
    with pytest.raises(ClusterError, match="4 times") as error:
        fit(job, Failing())
    assert "secret" not in str(error.value) and "secret" in folder.errors.read_text()


def test_a_second_command_ends_before_the_workers_of_the_first_have_started(tmp_path, monkeypatch):
    recipe, folder = make(tmp_path)
    job = prepare(recipe, folder, "test")
    monkeypatch.setattr("dpdist.training.trainer._SHUTDOWN_SECONDS", 0.01)

    class Waiting(Executor):
        def supervise(self, work, poll):
            with pytest.raises(RunBusy):
                train(job, LocalExecutor())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(job, Waiting())
    assert train(job, LocalExecutor())["steps"] == job.plan.steps
