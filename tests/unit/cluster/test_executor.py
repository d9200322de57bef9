"""Where work runs: the same results in this process and on Ray, small work without Ray, and errors
that are the same under both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.threads import new_settings_after
from support.training import prepare_job as job_of

from dpdist.cluster import executor as module
from dpdist.cluster.executor import (
    AutoExecutor,
    Executor,
    LocalExecutor,
    RayExecutor,
    current_executor,
    open_executor,
)
from dpdist.cluster.session import Session
from dpdist.cluster.work import Chunk, ChunkJob, WorkerGroup, WorkerPlace
from dpdist.core.errors import ClusterError, DiskFullError, UserError
from dpdist.privacy.ledger import LedgerError
from dpdist.runs.folder import RunFolder
from dpdist.training import trainer, worker
from dpdist.training.loop import TrainingDiverged


def chunks(count: int) -> list[Chunk]:
    return [Chunk(f"c{i}", i, float(-i)) for i in range(count)]


def group_of(work: Callable[[Any, WorkerPlace], Any], storage: Path, **more: Any) -> WorkerGroup:
    given = {"workers": 1, "cpus": 1, "gpus": 0} | more
    return WorkerGroup(work, "it", storage=storage, torch_config=lambda: None, **given)


def raising(error: BaseException) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> None:
        raise error

    return work


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No session of Ray is there; names of what happens to those that are asked for."""
    seen: list[str] = []

    @contextmanager
    def connect(*_: Any, **__: Any) -> Iterator[Session]:
        seen.append("opened")
        try:
            yield Session(None, 2, 0, 1)
        finally:
            seen.append("closed")

    monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr(module, "_open_executors", [])
    monkeypatch.setattr(module, "_enclosing_executor", enclosing)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return seen


def enclosing() -> Executor | None:
    return module._open_executors[-1] if module._open_executors else None


def test_work_computes_as_in_a_new_process_and_leaves_nothing(tmp_path):
    """On Ray it does: what a script or a notebook set in torch must change no bit of it here, and
    what it sets itself, as a certification on a GPU does, ends with it."""

    def now(*_: Any) -> tuple[Any, ...]:
        ones = torch.ones(2, 2)
        return (
            (ones @ ones).dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.matmul.fp32_precision,
        )  # fmt: skip

    def change() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.backends.mkldnn.enabled = False
        torch.backends.cudnn.benchmark = True

    def now_and_change(*_: Any) -> tuple[Any, ...]:
        found = now()
        change()
        return found

    def found() -> list[Any]:
        seen = [LocalExecutor().run_once(now_and_change, None, "failed")]
        job = ChunkJob(lambda _: now_and_change, None, chunks(1), lambda key, it: seen.append(it))
        LocalExecutor().run_chunks(job)
        group = group_of(lambda *_: seen.append(now_and_change()), tmp_path)
        LocalExecutor().run_workers(group)
        return seen

    new = now()
    assert found() == [new] * 3 and now() == new
    with new_settings_after():
        change()
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            own = now()
            assert all(a != b for a, b in zip(own, new, strict=True))
            assert found() == [new] * 3 and now() == own  # the program goes on as it was
            with pytest.raises(UserError):
                LocalExecutor().run_once(raising(ZeroDivisionError()), None, "failed")
            assert now() == own
    assert now() == new


@pytest.mark.slow
def test_a_poll_that_fails_ends_work_which_waits_for_it():
    """As on Ray: a training would wait half an hour for the permit of an archive that is gone."""
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        LocalExecutor().supervise(lambda: time.sleep(30), raising(ZeroDivisionError()))
    assert time.monotonic() - began < 15


def test_the_executor_is_chosen_by_name_cluster_and_enclosing_block(started, monkeypatch):
    with open_executor() as outer:
        assert isinstance(outer, AutoExecutor) and current_executor() is outer
        with open_executor() as inner:
            assert inner is outer
        with open_executor("local") as inner:
            assert isinstance(inner, LocalExecutor) and current_executor() is inner
        assert current_executor() is outer and started == []
        with open_executor("ray") as inner:
            assert isinstance(inner, RayExecutor) and inner is outer.ray()
        assert started == ["opened"]  # and stays open for what follows
    assert started == ["opened", "closed"]
    with pytest.raises(RuntimeError, match="executor"):
        current_executor()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with open_executor() as outer:
        assert isinstance(outer, RayExecutor)
    assert started[2:] == ["opened", "closed"]


def train_with(
    tmp_path: Path, patch: pytest.MonkeyPatch, *errors: BaseException, **changes: Any
) -> list[int]:
    """Attempts of a training whose first ones end with these errors."""
    job, waiting, attempts = job_of(tmp_path, **changes), list(errors), [0]
    real = worker.run_training

    def run(*arguments: Any) -> None:
        attempts[0] += 1
        if waiting:
            raise waiting.pop(0)
        real(*arguments)

    patch.setattr(worker, "run_training", run)
    try:
        trainer.train(job, LocalExecutor())
    finally:
        assert not job.folder.failure.exists()
    return attempts


@pytest.mark.parametrize("error", [TrainingDiverged("diverged"), LedgerError("lacks records")])
def test_what_a_restart_would_repeat_ends_the_training(tmp_path, monkeypatch, error):
    with pytest.raises(UserError, match=str(error)):
        train_with(tmp_path, monkeypatch, error)


def test_a_training_in_this_process_has_the_threads_of_its_recipe(tmp_path, monkeypatch):
    """As a worker on Ray: the last bits of a sum, and so its replay, depend on them."""
    seen: list[int] = []
    monkeypatch.setattr(worker, "run_training", lambda *_: seen.append(torch.get_num_threads()))
    for cpus in (1, 3, 0.5):
        trainer.fit(job_of(tmp_path, f"{cpus}", resources__cpus_per_worker=cpus), LocalExecutor())
    assert seen == [1, 3, 1]


@pytest.mark.parametrize("kind", [OSError, LedgerError])
def test_a_full_disk_ends_the_training(tmp_path, monkeypatch, kind):
    full = OSError(28, "No space left on device")
    error = full if kind is OSError else kind(str(full))
    error.__cause__ = None if error is full else full
    with pytest.raises(DiskFullError, match="No space left"):
        train_with(tmp_path, monkeypatch, error)


def test_a_training_that_fails_again_and_again_says_where_the_details_lie(tmp_path, monkeypatch):
    """In the private folder: a model's own error may quote a record."""
    errors = [RuntimeError(f"secret {i}") for i in range(2)]
    with pytest.raises(ClusterError, match="2 times") as told:
        train_with(tmp_path, monkeypatch, *errors, resources__max_failures=1)
    assert "secret" not in str(told.value)
    assert "RuntimeError: secret 1" in RunFolder(tmp_path / "run").errors.read_text()
