"""Where work runs: the same results in this process and on Ray, small work without Ray, and errors
that are the same under both."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.local_execution import command
from support.recipes import write_recipe
from support.settings import sets
from support.threads import new_settings_after
from support.training import prepare_job as job_of

from dpdist import pipeline
from dpdist.cluster import executor as module
from dpdist.cluster.executor import (
    SMALL_TRAINING,
    AutoExecutor,
    Executor,
    LocalExecutor,
    RayExecutor,
    current_executor,
    open_executor,
)
from dpdist.cluster.session import Session
from dpdist.cluster.work import Chunk, ChunkJob, PoolSettings, TrialPass, WorkerGroup, WorkerPlace
from dpdist.core.errors import ClusterError, DiskFullError, UserError
from dpdist.privacy.ledger import LedgerError
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training import trainer, worker
from dpdist.training.job import prepare
from dpdist.training.loop import TrainingDiverged


def doubler(shared: int) -> Callable[[int], int]:
    return lambda payload: shared * payload


def chunks(count: int) -> list[Chunk]:
    return [Chunk(f"c{i}", i, float(-i)) for i in range(count)]


def done_by(executor: Executor, work: Any = None, **settings: Any) -> list[tuple[str, Any]]:
    """Keys and results in the order in which they came."""
    found: list[tuple[str, Any]] = []
    work = chunks(5) if work is None else work
    pool = PoolSettings(**settings)
    executor.run_chunks(ChunkJob(doubler, 2, work, lambda *one: found.append(one), pool))
    return found


class Remote(LocalExecutor):
    """In place of a session of Ray."""

    gpus = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.checked: list[Any] = []
        self.chunks: list[str] = []

    def check_nodes(self, *asked: Any) -> None:
        self.checked.append(asked)

    def run_chunks(self, job: ChunkJob) -> None:
        chunks = list(job.chunks)
        self.chunks += [chunk.key for chunk in chunks]
        super().run_chunks(replace(job, chunks=chunks))


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> Iterator[AutoExecutor]:
    """An executor whose session counts how often it is opened and closed."""
    opened = []

    @contextmanager
    def session() -> Iterator[Session]:
        opened.append("opened")
        yield Session(None, 2, 0, 1)
        opened.append("closed")

    monkeypatch.setattr(module, "RayExecutor", lambda session: Remote())
    executor = AutoExecutor(session)
    executor.opened = opened  # type: ignore[attr-defined]
    yield executor
    executor.close()


# --- in this process --------------------------------------------------------------------------


def test_chunks_are_done_by_priority_in_this_process():
    assert done_by(LocalExecutor()) == [(f"c{i}", 2 * i) for i in (4, 3, 2, 1, 0)]
    stream = iter(chunks(3))  # which has its own order
    assert [key for key, _ in done_by(LocalExecutor(), stream)] == ["c0", "c1", "c2"]


def test_shuffled_answers_come_from_several_workers_in_another_order():
    asked = done_by(LocalExecutor(shuffle=True), actors=2)
    assert [key for key, _ in asked] == ["c3", "c4", "c1", "c2", "c0"]
    assert dict(asked) == dict(done_by(LocalExecutor()))
    made: list[int] = []

    def make_worker(shared: int) -> Callable[[int], int]:
        made.append(shared)
        return lambda payload: payload

    job = ChunkJob(make_worker, 7, chunks(5), lambda *_: None, PoolSettings(actors=3))
    LocalExecutor(shuffle=True).run_chunks(job)
    assert made == [7, 7, 7]
    made.clear()
    LocalExecutor().run_chunks(job)
    assert made == [7]


def test_threads_of_torch_are_as_they_were(tmp_path):
    """Workers take one for themselves; what comes after them in the process has its own."""

    def single(_: Any, place: Any = None) -> Any:
        torch.set_num_threads(1)
        return lambda payload: torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found: list[int] = []
        job = ChunkJob(single, None, chunks(1), lambda key, it: found.append(it))
        LocalExecutor().run_chunks(job)
        assert found == [1] and torch.get_num_threads() == 3
        LocalExecutor().run_once(single, None, "failed")
        assert torch.get_num_threads() == 3
        LocalExecutor().run_workers(group_of(single, tmp_path))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_work_computes_as_in_a_new_process(tmp_path):
    """On Ray it does: what a script or a notebook set in torch must change no bit of it here."""

    def now(*_: Any) -> tuple[Any, ...]:
        ones = torch.ones(2, 2)
        return (
            (ones @ ones).dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.matmul.fp32_precision,
        )  # fmt: skip

    def found() -> list[Any]:
        seen = [LocalExecutor().run_once(now, None, "failed")]
        job = ChunkJob(lambda _: now, None, chunks(1), lambda key, it: seen.append(it))
        LocalExecutor().run_chunks(job)
        LocalExecutor().run_workers(group_of(lambda *_: seen.append(now()), tmp_path))
        return seen

    new = now()
    assert found() == [new] * 3
    with new_settings_after():
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.backends.mkldnn.enabled = False
        torch.backends.cudnn.benchmark = True
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            own = now()
            assert all(a != b for a, b in zip(own, new, strict=True))
            assert found() == [new] * 3
            assert now() == own  # the program goes on as it was
            with pytest.raises(UserError):
                LocalExecutor().run_once(raising(ZeroDivisionError()), None, "failed")
            assert now() == own
    assert now() == new


def test_what_work_sets_in_torch_ends_with_it():
    """As a certification on a GPU does: it makes the process' kernels deterministic."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn

    def now() -> tuple[Any, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
            torch.get_float32_matmul_precision(), mkldnn.matmul.fp32_precision,
            cudnn.benchmark, cudnn.allow_tf32, mkldnn.conv.fp32_precision,
        )  # fmt: skip

    def sets(_: Any) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        cudnn.benchmark, cudnn.allow_tf32, mkldnn.conv.fp32_precision = True, False, "bf16"

    before = now()
    assert before == (False, torch.float32, "highest", "none", False, True, "none")
    LocalExecutor().run_once(sets, None, "failed")
    assert now() == before


def test_one_that_ends_leaves_the_settings_of_the_others():
    """Two threads work at once; the program around them has a number format of its own."""
    entered, left = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other(_: Any) -> None:
        entered.set()
        assert left.wait(30)
        seen.append(torch.get_default_dtype())

    try:
        torch.set_default_dtype(torch.float64)
        thread = threading.Thread(target=lambda: LocalExecutor().run_once(other, None, "failed"))
        first = LocalExecutor().run_once(
            lambda _: (thread.start(), entered.wait(30)), None, "failed"
        )
        assert first[1] and torch.get_default_dtype() == torch.float32  # while the other works
        left.set()
        thread.join()
        assert seen == [torch.float32] and torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def group_of(work: Callable[[Any, WorkerPlace], Any], storage: Path, **more: Any) -> WorkerGroup:
    given = {"workers": 1, "cpus": 1, "gpus": 0} | more
    return WorkerGroup(work, "it", storage=storage, torch_config=lambda: None, **given)


def test_the_only_worker_of_a_group_is_this_process(tmp_path):
    seen: list[Any] = []
    LocalExecutor().run_workers(group_of(lambda *one: seen.append(one), tmp_path))
    assert seen == [("it", WorkerPlace(0, 1, "cpu", in_process=True))]
    for workers in (2, (1, 2)):
        with pytest.raises(UserError, match=r"^resources\.workers: "):
            LocalExecutor().run_workers(group_of(lambda *_: None, tmp_path, workers=workers))


@pytest.mark.slow
def test_work_is_polled_meanwhile_and_after_it():
    main, threads = threading.current_thread(), []
    polled = threading.Event()

    def poll() -> None:
        threads.append(threading.current_thread())
        polled.set()

    def work() -> None:
        assert threading.current_thread() is main  # Ctrl-C must reach it
        assert polled.wait(30)

    LocalExecutor().supervise(work, poll)
    assert threads[0] is not main and threads[-1] is main
    with pytest.raises(KeyboardInterrupt):
        LocalExecutor().supervise(raising(KeyboardInterrupt()), poll)
    with pytest.raises(ZeroDivisionError):  # of a poll: the archive's, for instance
        LocalExecutor().supervise(lambda: None, raising(ZeroDivisionError()))


@pytest.mark.slow
@pytest.mark.parametrize("sigint", [signal.default_int_handler, signal.SIG_IGN])
def test_a_poll_that_fails_ends_work_which_waits_for_it(sigint):
    """As on Ray: a training would wait half an hour for the permit of an archive that is gone. A
    shell's background has SIGINT ignored, which Ctrl-C of others stays."""
    before = signal.signal(signal.SIGINT, sigint)
    try:
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            LocalExecutor().supervise(lambda: time.sleep(30), raising(ZeroDivisionError()))
        assert time.monotonic() - began < 15
        assert signal.getsignal(signal.SIGINT) is sigint
        if sigint is signal.SIG_IGN:
            LocalExecutor().supervise(lambda: signal.raise_signal(signal.SIGINT), lambda: None)
    finally:
        signal.signal(signal.SIGINT, before)

    failed = threading.Event()

    def poll() -> None:
        failed.set()
        raise ZeroDivisionError

    def work() -> None:
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            raise ClusterError("no answer") from None

    with pytest.raises(ZeroDivisionError):  # why the work ended
        LocalExecutor().supervise(work, poll)
    assert failed.is_set()


def raising(error: BaseException) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> None:
        raise error

    return work


def test_trials_are_run_in_turn_and_an_interrupted_one_is_left_for_the_next_pass(tmp_path):
    class Searcher:
        told: ClassVar[list[Any]] = []

        def suggest(self, name: str) -> dict[str, int]:
            return {"trial": int(name.rpartition("-")[2])}

        def on_trial_complete(self, name: str, result: Any = None, error: bool = False) -> None:
            self.told.append((name, result, error))

    def run(number: int, report: Any) -> None:
        report({"score": 0.5 * number, "reached": 1})
        if number == 1:
            raise OSError("lost")

    asked = TrialPass(run, 3, Searcher, None, 2, {"CPU": 1.0}, tmp_path, "pass")
    LocalExecutor().run_trials(asked)
    assert Searcher.told == [
        ("trial-0", {"score": 0.0, "reached": 1}, False),
        ("trial-1", None, True),
        ("trial-2", {"score": 1.0, "reached": 1}, False),
    ]
    asked = TrialPass(run, 3, Searcher, list, 2, {"CPU": 1.0}, tmp_path, "pass")
    with pytest.raises(UserError, match=r"^tune\.asha: "):
        LocalExecutor().run_trials(asked)


# --- by the size of the work ------------------------------------------------------------------


def test_small_work_opens_no_session(auto):
    assert auto.gpus == 0 and auto.run_once(abs, -1, "failed") == 1
    assert len(done_by(auto.place(True))) == 5
    assert auto.opened == [] and str(auto) == "this process"


def test_other_work_opens_one_session_for_all_that_follows(auto):
    auto.check_nodes(["dpdist"], Path("early"))
    ray = auto.place(False)
    assert ray is auto.place(True) is auto.ray() and auto.opened == ["opened"]
    assert ray.checked == [(["dpdist"], Path("early"))]
    auto.check_nodes(["dpdist"], Path("late"))
    assert ray.checked[1:] == [(["dpdist"], Path("late"))]
    auto.close()
    assert auto.opened == ["opened", "closed"]


def test_work_within_small_work_is_asked_for_its_own_size(auto):
    """A training without steps is small, its teachers need not be."""
    small = auto.place(True)
    assert auto.opened == [] and small.place(True).place(True) is not auto.place(False)
    assert small.place(False) is auto.ray()


@pytest.mark.slow
def test_only_small_trainings_of_one_worker_stay_here(auto, tmp_path, monkeypatch):
    def stays(**changes: Any) -> bool:
        job = job_of(tmp_path, f"run {len(list(tmp_path.iterdir()))}", **changes)
        asked: list[bool] = []
        monkeypatch.setattr(auto, "place", asked.append)
        trainer.place_training(job, auto)
        return asked[0]

    steps = SMALL_TRAINING // 40
    assert stays() and stays(training__steps=steps)
    assert not stays(training__steps=steps + 1)
    assert not stays(resources__workers=2)
    assert not stays(resources__gpus_per_worker=0.5)


# --- the executor in use ----------------------------------------------------------------------


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


def test_the_executor_is_chosen_by_name_cluster_and_enclosing_block(started, monkeypatch):
    with open_executor() as outer:
        assert isinstance(outer, AutoExecutor) and current_executor() is outer
        with open_executor() as inner, open_executor("auto") as third:
            assert inner is third is outer
        with open_executor("local") as inner:
            assert isinstance(inner, LocalExecutor) and current_executor() is inner
            with open_executor("local") as third:
                assert third is inner
        assert current_executor() is outer and started == []
        with open_executor("ray") as inner:
            assert isinstance(inner, RayExecutor) and inner is outer.ray()
        assert started == ["opened"]  # and stays open for what follows
    assert started == ["opened", "closed"]
    with pytest.raises(RuntimeError, match="executor"):
        current_executor()
    with open_executor("ray"), pytest.raises(ZeroDivisionError), open_executor("local"):
        raise ZeroDivisionError
    assert started[2:] == ["opened", "closed"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with open_executor() as outer:
        assert isinstance(outer, RayExecutor)
    with open_executor("local") as outer:
        assert isinstance(outer, LocalExecutor)
    assert started[4:] == ["opened", "closed"]


def test_an_open_session_of_ray_is_used(monkeypatch):
    monkeypatch.setattr(module, "describe_session", lambda: Session(None, 4, 0, 1))
    monkeypatch.setitem(sys.modules, "ray", Initialized)
    with open_executor() as found:
        assert isinstance(found, RayExecutor) and str(found) == "this machine: 1 node, 4 CPUs"
    with open_executor("local") as found:
        assert isinstance(found, LocalExecutor)


class Initialized:
    @staticmethod
    def is_initialized() -> bool:
        return True


# --- errors of a training in this process -----------------------------------------------------


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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("training.loss: is no number"), "^training.loss: is no number$"),
        (TrainingDiverged("it diverged"), "it diverged"),
        (LedgerError("the ledger lacks records"), "^the ledger lacks records$"),
    ],
)
def test_what_a_restart_would_repeat_ends_the_training(tmp_path, monkeypatch, error, message):
    with pytest.raises(UserError, match=message):
        train_with(tmp_path, monkeypatch, error)


def test_a_training_in_this_process_has_the_threads_of_its_recipe(tmp_path, monkeypatch):
    """As a worker on Ray: the last bits of a sum, and so its replay, depend on them."""
    seen: list[int] = []
    monkeypatch.setattr(worker, "run_training", lambda *_: seen.append(torch.get_num_threads()))
    for cpus in (1, 3, 0.5):
        trainer.fit(job_of(tmp_path, f"{cpus}", resources__cpus_per_worker=cpus), LocalExecutor())
    assert seen == [1, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model.name", "method.name", "training.loss"])
def test_own_code_that_was_edited_since_its_import_is_not_executed(key, tmp_path, monkeypatch):
    """On Ray a worker would import the new one: the same call would give other bits."""
    name = f"edited_{key.replace('.', '_')}"
    code = tmp_path / f"{name}.py"
    code.write_text(OWN_CODE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    value = {"model.name": "net", "method.name": "Own", "training.loss": "loss"}[key]
    section, _, last = key.partition(".")
    raw: dict[str, Any] = {
        "name": "own", "data": {"name": "digits", "max_train": 100}, "model": {"name": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4}, "method": {"name": "dp-sgd"},
        "training": {"batch_size": 20, "steps": 1, "learning_rate": 0.1},
    }  # fmt: skip
    raw[section][last] = f"{name}:{value}"
    recipe = Recipe.model_validate(raw)
    job = prepare(recipe, RunFolder(tmp_path / "own"), "test")
    assert trainer.train(job, LocalExecutor())["steps"] == 1
    code.write_text(OWN_CODE + "# edited\n")
    job = prepare(recipe, RunFolder(tmp_path / "again"), "test")
    with pytest.raises(UserError, match=f"{name}:{value}"):
        trainer.train(job, LocalExecutor())
    assert not job.folder.ledger.exists()
    code.write_text(OWN_CODE)
    assert trainer.train(job, LocalExecutor())["steps"] == 1


OWN_CODE = """
import torch
from dpdist.methods.base import Method

def net(input_shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))

def loss(model, batch):
    inputs, targets = batch
    return torch.nn.functional.cross_entropy(model(inputs), targets, reduction="none")

class Own(Method):
    name: str = "own"
"""


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


@pytest.mark.slow
def test_ctrl_c_goes_through_and_the_same_command_continues(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        train_with(tmp_path, patch, KeyboardInterrupt())
    assert train_with(tmp_path, monkeypatch) == [1]


# --- $DPDIST_EXECUTOR of every command --------------------------------------------------------


@pytest.fixture(scope="module")
def place(golden: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with runs/x, trained and released, and a recipe."""
    place = tmp_path_factory.mktemp("commands")
    recipe = golden("release", place / "runs").read_recipe()
    raw = recipe.model_dump(mode="json", exclude_none=True) | {"name": "new"}
    write_recipe(place, raw, "new.yaml")
    search = {
        "space": {"training.learning_rate": {"choice": [0.5]}},
        "num_trials": {"name": "fixed", "runs": 2},
    }
    write_recipe(place, raw | {"name": "searched", "tune": search}, "searched.yaml")
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "new.yaml"),
        ("certify", "x"),
        ("attack", "x", "--set", "attack.sizes=[0.1]"),
        ("audit", "new.yaml", "--kind", "poison", *sets("poison", "models=4", "select=1")),
    ],
    ids=" ".join,
)
def test_every_command_says_where_its_work_runs(place, tmp_path, monkeypatch, capsys, arguments):
    def refuse(name: str | None = None, **_: Any) -> None:
        raise UserError(f"asked for {name}")

    own = tmp_path / "place"
    shutil.copytree(place, own)
    monkeypatch.setattr(pipeline, "open_executor", refuse)
    for asked in ("local", "ray", None):
        monkeypatch.setenv("DPDIST_EXECUTOR", asked or "")
        done = command(monkeypatch, capsys, own, *arguments)
        assert done.code == 2 and done.err.endswith(f"dpdist: asked for {asked}\n"), done.err
