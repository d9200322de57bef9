"""`dpdist.PrivateTraining` in several processes: one training, and one refusal."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.training import ThreadReducer, parameters, release_ids, run_thread_workers
from torch import nn
from training.own_loops import PRIVATE, WIDTH, Rows, begin, flat, net, rows, run_script, shaken

import dpdist
from dpdist import PrivateTraining, UserError
from dpdist.core.errors import ClusterError
from dpdist.privacy.ledger import Ledger, LedgerError, ReplayConflict
from dpdist.runs.folder import RunFolder
from dpdist.training import monitoring
from dpdist.training.collectives import Workers

STEPS = 6


def started(folder: Path, *, seed: int = 3, rate: float = 0.05, **given: Any) -> PrivateTraining:
    model = given.pop("model", None) or net(seed)
    given.setdefault("resources", {"checkpoint_seconds": 1e-6})
    return begin(folder, model, torch.optim.Adam(model.parameters(), lr=rate), **given)


# --- two processes that live as long as the tests


def _live(rank: int, count: int, store: str, asked: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    while (question := asked.get()) is not None:
        scene, words = question
        try:
            answers.put((rank, scene(rank, *words)))
        except Exception as error:
            traceback.print_exc()
            answers.put((rank, error))


class Group:
    """Two workers with a process group, or one without."""

    def __init__(self, folder: Path, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.asked, self.answers = ([context.Queue() for _ in range(count)], context.Queue())
        given = count, str(folder / "store")
        self.workers = [
            context.Process(target=_live, args=(rank, *given, asked, self.answers))
            for rank, asked in enumerate(self.asked)
        ]
        for worker in self.workers:
            worker.start()

    def do(self, scene: Callable[..., Any], *words: Any) -> list[Any]:
        """Return what a scene returns on each, or raises; nobody may wait for ever."""
        for asked in self.asked:
            asked.put((scene, words))
        found = dict(self.answers.get(timeout=90) for _ in self.workers)
        return [found[rank] for rank in range(len(self.workers))]

    def end(self) -> None:
        for asked in self.asked:
            asked.put(None)
        for worker in self.workers:
            worker.join(30)
            worker.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    found = Group(tmp_path_factory.mktemp("pair"), 2)
    yield found
    found.end()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Group]:
    found = Group(tmp_path, 1)
    yield found
    found.end()


def both(said: list[Any]) -> list[str]:
    """Return the lines that both refused with."""
    assert [type(each) for each in said] == [UserError, UserError], said
    return [str(each) for each in said]


def counted(folder: Path) -> dict[int, int]:
    """Return how often each step is on the ledger of a run."""
    return Ledger.read(RunFolder(folder).ledger).release_counts


# --- one training


def whole(rank: int, folder: Path, given: dict[str, Any], until: int = STEPS) -> dict[str, Any]:
    t = started(folder, **given)
    reports = [t.step() for _ in range(until - (STEPS - t.remaining_steps))]
    found = {
        "parameters": flat(t.model).tolist(), "norms": [report.noisy_norm for report in reports],
        "epsilon": [report.epsilon for report in reports], "guarantee": str(t.guarantee),
        "left": t.remaining_steps,
        "examples": [(report.private or {}).get("examples") for report in reports],
    }  # fmt: skip
    t.close()
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("reproducible", [True, False])
def test_two_workers_are_one(tmp_path, pair, reproducible):
    given = {"reproducible": reproducible, "private_metrics": True}
    one = whole(0, tmp_path / "one", given)
    first, second = pair.do(whole, tmp_path / "two", given)
    assert first["parameters"] == second["parameters"] and first["norms"] == second["norms"]
    assert first["epsilon"] == second["epsilon"] == one["epsilon"]
    assert first["guarantee"] == second["guarantee"] == one["guarantee"]
    a, b = (RunFolder(tmp_path / name) for name in ("one", "two"))
    if reproducible:
        assert release_ids(a) == release_ids(b) and len(release_ids(a)) == STEPS
        assert torch.equal(parameters(a), parameters(b)) and one["norms"] == first["norms"]
    else:
        torch.testing.assert_close(parameters(a), parameters(b), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one["norms"], first["norms"], rtol=1e-6)
    # Each record is one worker's, and each worker has some.
    shares = np.array([first["examples"], second["examples"]])
    assert (shares.sum(0) == one["examples"]).all() and (shares.sum(1) > 0).all()
    assert counted(b.path) == dict.fromkeys(range(STEPS), 1)
    facts = dpdist.load_results(b)
    kind = facts.guarantee.kind
    assert facts.guarantee == replace(facts.plan.guarantee(), kind=kind)
    assert kind == "assumed: post-processing"  # by the private metrics


@pytest.mark.e2e
@pytest.mark.parametrize("reproducible", [True, False])
def test_another_number_of_workers_goes_on(tmp_path, pair, alone, reproducible):
    given = {"reproducible": reproducible, "resources": {"checkpoint_seconds": 1e6}}
    undisturbed = whole(0, tmp_path / "one", given)
    folder = tmp_path / "changing"
    pair.do(whole, folder, given, 2)
    (one,) = alone.do(whole, folder, given, 4)  # from the checkpoint before the first step
    assert one["left"] == 2
    first, second = pair.do(whole, folder, given)
    assert first["parameters"] == second["parameters"] and first["left"] == 0
    assert [g.workers for g in monitoring.read_groups(RunFolder(folder))] == [2, 1, 2]
    if reproducible:
        assert counted(folder) == dict.fromkeys(range(STEPS), 1)
        assert first["parameters"] == undisturbed["parameters"]
    else:  # as in a recipe: another order of sums is another attempt, which is charged
        assert counted(folder) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 1, 5: 1}
        assert first["guarantee"] == second["guarantee"] != undisturbed["guarantee"]


def shaken_run(rank: int, folder: Path, until: int) -> dict[str, Any]:
    given = {"data": shaken(), "resources": {"checkpoint_seconds": 1e6}}
    return whole(rank, folder, given, until)


@pytest.mark.e2e
def test_a_replay_with_another_sum_is_a_new_attempt_on_all(tmp_path, pair):
    folder = RunFolder(tmp_path / "own")
    pair.do(shaken_run, folder.path, 2)
    first, second = pair.do(shaken_run, folder.path, STEPS)
    assert first["parameters"] == second["parameters"] and first["left"] == second["left"] == 0
    assert counted(folder.path) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    assert len(set(release_ids(folder))) == 8


# --- one refusal


def refused(rank: int, folder: Path, others: dict[str, Any]) -> None:
    """Begin with what only worker 1 has in another way."""
    given = dict(others) if rank == 1 else {}
    if "moved" in given:
        inputs, labels = rows()
        inputs[given.pop("moved"), 2] += 1e-3
        given["data"] = inputs, labels
    with started(folder, **given) as t:
        t.step()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"seed": 4}, "model: "),
        ({"moved": 7}, "data: "),
        ({"privacy": {**PRIVATE, "noise_multiplier": 1.1}}, "privacy settings: "),
        ({"model": nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))}, "normalizes"),
    ],
)
def test_what_one_worker_refuses_all_refuse(tmp_path, pair, others, said):
    assert all(said in line for line in both(pair.do(refused, tmp_path / "own", others)))
    assert not (tmp_path / "own").exists()


@pytest.mark.e2e
def test_other_errors_tell_the_others_no_value(tmp_path, pair):
    first, second = pair.do(refused, tmp_path / "own", {"data": Broken(rows())})
    assert isinstance(second, ValueError) and "0.125" in str(second)
    assert isinstance(first, ClusterError) and "0.125" not in str(first)


class Broken(Rows):
    def batch(self, indices: Any) -> torch.Tensor:
        raise ValueError("a record of 0.125")

    targets = batch


def between(rank: int, folder: Path, whose: tuple[int, ...], what: str) -> dict[str, Any]:
    """Change something between two steps, on some of the workers."""
    t = started(folder)
    t.step()
    if rank in whose and what == "parameters":
        with torch.no_grad():
            t.model[0].weight.mul_(0.5)
    if rank in whose and what == "own draws":
        torch.manual_seed(rank)
        with torch.no_grad():
            t.model[0].weight.add_(torch.randn(5, WIDTH))
    if rank in whose and what == "rate":
        t.optimizer.param_groups[0]["lr"] = 0.01
    try:
        t.run_all()
        return {"parameters": flat(t.model).tolist(), "kind": t.guarantee.kind}
    finally:
        t.close()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("whose", "what", "said"),
    [
        ((1,), "parameters", "changes between steps: "),
        ((0, 1), "own draws", "parameters: "),
        ((1,), "rate", "optimizer settings: "),
    ],
)
def test_workers_that_drift_apart_are_refused(tmp_path, pair, whose, what, said):
    refusals = both(pair.do(between, tmp_path / "own", whose, what))
    assert all(said in line for line in refusals)
    assert counted(tmp_path / "own") == {0: 1}


@pytest.mark.e2e
def test_a_change_on_all_workers_is_on_the_card(tmp_path, pair):
    first, second = pair.do(between, tmp_path / "own", (0, 1), "parameters")
    assert first["kind"] == second["kind"] == "assumed: post-processing"
    assert first["parameters"] == second["parameters"]


def unwritten(rank: int, folder: Path) -> tuple[str, int, bool]:
    """Take a second step that worker 0 cannot put on record."""
    t = started(folder)
    t.step()
    before, kept = flat(t.model), Ledger.record

    def full(*_: Any) -> Any:
        raise LedgerError("no space left")

    if rank == 0:
        Ledger.record = full  # type: ignore[method-assign]
    try:
        t.step()
    except (LedgerError, ClusterError) as error:
        return str(error), t.remaining_steps, torch.equal(flat(t.model), before)
    finally:
        Ledger.record = kept  # type: ignore[method-assign]
        t.close()
    return "", 0, False


@pytest.mark.e2e
def test_no_worker_goes_on_where_the_first_cannot_write(tmp_path, pair):
    """And none has a gradient that is not on record."""
    first, second = pair.do(unwritten, tmp_path / "own")
    assert first == ("no space left", STEPS - 1, True)
    assert second[0].startswith("worker 0") and second[1:] == (STEPS - 1, True)
    assert counted(tmp_path / "own") == {0: 1}


def told(work: Callable[[Workers], Any]) -> list[Any]:
    """Return what two workers, threads of this process, return or raise."""
    found: list[Any] = [None, None]

    def one(reducer: ThreadReducer) -> None:
        try:
            found[reducer.rank] = work(Workers(reducer))
        except Exception as error:
            found[reducer.rank] = error

    run_thread_workers(2, one)
    return found


def test_a_conflict_of_the_first_worker_lets_no_other_draw_the_noise():
    def announce() -> None:
        raise ReplayConflict("another sum")

    found = told(lambda workers: workers.announcing(announce))
    assert [type(each) for each in found] == [ReplayConflict, ReplayConflict]


def test_every_step_waits_for_the_first_worker_s_announcement(tmp_path, monkeypatch):
    waited, real = [], Workers.announcing

    def announcing(self: Workers, announce: Callable[[], None]) -> None:
        real(self, announce)
        waited.append(counted(tmp_path / "own"))

    monkeypatch.setattr(Workers, "announcing", announcing)
    started(tmp_path / "own").run_all()
    assert waited == [dict.fromkeys(range(step + 1), 1) for step in range(STEPS)]


def test_the_text_of_an_error_stays_with_its_worker():
    def broken(workers: Workers) -> None:
        with workers.sharing_errors():
            if not workers.first:
                raise ValueError("a record of 0.125")
            workers.agree()

    first, second = told(broken)
    assert isinstance(first, ClusterError) and "0.125" not in str(first)
    assert isinstance(second, ValueError)


# --- scores on held-out private records


def half_right(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return a value that is no whole number."""
    return module(batch[0]).softmax(1)[:, 1]


def scored(rank: int, folder: Path, grouped: bool, declared: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {"reproducible": True}
    data: Any = rows(25, seed=2)
    if grouped:
        given["data"] = dpdist.as_records(rows(), unit=[100 + k // 2 for k in range(80)])
        given["privacy"] = {**PRIVATE, "unit": "user", "max_records_per_user": 2}
        given["batch_size"] = 8
        data = dpdist.as_records(data, unit=[k // 3 for k in range(25)])
    with started(folder, **given) as t:
        t.score(data, every=2, noise=3.0, **declared)
        seen = [t.step().score for _ in range(STEPS)]
        return {
            "scores": seen, "parameters": flat(t.model).tolist(), "guarantee": str(t.guarantee),
        }  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize(("grouped", "declared"), [(False, {}), (True, {"value": half_right})])
def test_two_workers_score_as_one_to_the_bit(tmp_path, pair, grouped, declared):
    """The sum is one of whole numbers, its noise is drawn once and charged once."""
    one = scored(0, tmp_path / "one", grouped, declared)
    assert pair.do(scored, tmp_path / "two", grouped, declared) == [one, one]
    assert [score is None for score in one["scores"]] == [True, False] * 3
    assert Ledger.read(tmp_path / "two" / "private" / "ledger.jsonl").num_queries == 3


# --- one script: alone, under torchrun, on Ray


def test_processes_without_a_group_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="init_process_group"):
        started(tmp_path / "own")
    assert not (tmp_path / "own").exists()


@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["torchrun", pytest.param("ray", marks=pytest.mark.nightly)])
def test_one_script_alone_and_with_workers(tmp_path, how):
    """Also after `kill -9` of a worker: by the same command again, or by Ray."""
    given = {"kill": (7, 1), "reproducible": True, "scored": True}
    done = run_script(tmp_path / "alone", **given)
    assert done.returncode == 0, done.stderr
    if how == "torchrun":
        assert run_script(tmp_path / "own", how, **given).returncode
        assert len(release_ids(RunFolder(tmp_path / "own"))) == 7
    done = run_script(tmp_path / "own", how, **given)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own.killed-7").exists()
    one, two = (RunFolder(tmp_path / name) for name in ("alone", "own"))
    assert torch.equal(parameters(one), parameters(two))
    assert release_ids(one) == release_ids(two)
    assert Ledger.read(two.ledger).release_counts == dict.fromkeys(range(12), 1)
    said = {(tmp_path / name).read_text() for name in ("alone.0", "own.0", "own.1")}
    assert len(said) == 1 and "-DP" in said.pop()
