"""`dpdist.PrivateTraining` in several processes: one training, and one refusal."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
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
from support.training import parameters, release_ids
from torch import nn
from torch.distributed.nn import functional
from training.own_loops import PRIVATE, WIDTH, Rows, begin, flat, net, rows, run_script

import dpdist
from dpdist import PrivateTraining, UserError
from dpdist.core.errors import ClusterError
from dpdist.core.script_errors import TrainingInterrupted
from dpdist.gradients.noise import add_noise
from dpdist.privacy.ledger import Ledger, LedgerError
from dpdist.private_training import RunBusyError
from dpdist.runs.folder import RunFolder
from dpdist.training import checkpoint, monitoring, private_score
from dpdist.training.collectives import Workers
from dpdist.training.rendezvous import destroy_process_group

STEPS = 6


def started(folder: Path, *, seed: int = 3, rate: float = 0.05, **given: Any) -> PrivateTraining:
    model = given.pop("model", None) or net(seed)
    given.setdefault("resources", {"checkpoint_seconds": 1e-6})
    return begin(folder, model, torch.optim.Adam(model.parameters(), lr=rate), **given)


# --- two processes that live as long as the tests


def _live(rank: int, count: int, store: str, asked: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(_watch_writes)  # for good, and slow: not in the process of other tests
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
        self.asked, self.answers = [context.Queue() for _ in range(count)], context.Queue()
        self.workers = [
            context.Process(
                target=_live, args=(rank, count, str(folder / "store"), asked, self.answers)
            )
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


def both(
    said: list[Any], kind: type[Exception] = UserError, first: type[Exception] | None = None
) -> list[str]:
    """Return the lines that both refused with. first: kind of worker 0's error, if another."""
    assert [type(each) for each in said] == [first or kind, kind], said
    lines = [str(each) for each in said]
    assert not any("\n" in line for line in lines)
    return lines


# --- one training


WRITES: list[str] = []  # of a worker's process


def _watch_writes(event: str, words: tuple[Any, ...]) -> None:
    opened = event == "open" and isinstance(words[2], int) and words[2] & (os.O_WRONLY | os.O_RDWR)
    if opened or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"):
        WRITES.append(str(words[0]))


def whole(rank: int, folder: Path, given: dict[str, Any], until: int = STEPS) -> dict[str, Any]:
    WRITES.clear()
    t = started(folder, **given)
    reports = [t.step() for _ in range(until - (STEPS - t.remaining_steps))]
    found = {
        "parameters": flat(t.model).tolist(), "norms": [report.noisy_norm for report in reports],
        "epsilon": [report.epsilon for report in reports], "guarantee": str(t.guarantee),
        "writes": [name for name in WRITES if str(folder) in name], "left": t.remaining_steps,
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
    assert Ledger.read(b.ledger).release_counts == dict.fromkeys(range(STEPS), 1)
    assert first["writes"] and second["writes"] == []
    assert [group.workers for group in monitoring.read_groups(b)] == [2]
    facts = dpdist.load_results(b)
    kind = facts.guarantee.kind
    assert facts.guarantee == replace(facts.plan.guarantee(), kind=kind)
    assert kind == "assumed: post-processing"  # by the private metrics
    assert b.read_recipe().resources.workers == 2


class Interrupting(nn.Sequential):
    """It gets Ctrl-C in the next forward pass of a step, once `soon`."""

    soon = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and Interrupting.soon:
            Interrupting.soon = False
            signal.raise_signal(signal.SIGINT)
        return super().forward(inputs)


def interrupted(rank: int, folder: Path) -> tuple[int, str, int, list[float]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resources = {"checkpoint_seconds": 3600}
    t = started(folder, model=Interrupting(*net()), resources=resources)
    t.step()
    Interrupting.soon = rank == 1
    taken, said = 1, ""
    try:
        while t.remaining_steps:
            t.step()
            taken += 1
    except TrainingInterrupted as error:
        said = str(error)
    kept = t._loop.kept
    t.close()
    t = started(folder, model=Interrupting(*net()), resources=resources)
    t.run_all()
    return taken, said, kept, flat(t.model).tolist()


@pytest.mark.e2e
def test_ctrl_c_of_one_worker_ends_both_after_one_step(tmp_path, pair):
    (taken, said, kept, at_end), other = pair.do(interrupted, tmp_path / "stopped")
    assert taken == other[0] == kept - 1 and other[1] == ""
    assert kept in (2, 3) and f"interrupted at step {kept}" in said
    through, _ = pair.do(whole, tmp_path / "through", {})
    assert at_end == other[3] == through["parameters"]


def ended(rank: int, folder: Path) -> tuple[list[float], int, int, str]:
    t = started(folder)
    if t.remaining_steps:  # else the second process finds it ended
        t.step()
        t.finish()
    return flat(t.model).tolist(), t.remaining_steps, t.steps_taken, str(t.guarantee)


@pytest.mark.e2e
def test_an_early_end_is_one_end_of_all_workers(tmp_path, pair):
    first, second = pair.do(ended, tmp_path / "run")
    assert first == second and first[1:3] == (0, 1)
    assert pair.do(ended, tmp_path / "run") == [first, second]
    facts = dpdist.load_results(RunFolder(tmp_path / "run"))
    assert facts.ledger.release_counts == dict.fromkeys(range(STEPS), 1)
    assert str(facts.guarantee) == first[3] and facts.guarantee == facts.plan.guarantee()


@pytest.mark.e2e
@pytest.mark.parametrize("reproducible", [True, False])
def test_another_number_of_workers_goes_on(tmp_path, pair, alone, reproducible):
    given = {"reproducible": reproducible, "resources": {"checkpoint_seconds": 1e6}}
    undisturbed = whole(0, tmp_path / "one", given)
    folder = tmp_path / "changing"
    pair.do(whole, folder, given, 2)
    assert (
        alone.do(whole, folder, given, 4)[0]["left"] == 2
    )  # from the checkpoint before the first step
    first, second = pair.do(whole, folder, given)
    assert first["parameters"] == second["parameters"] and first["left"] == 0
    ledger = Ledger.read(folder / "private" / "ledger.jsonl")
    assert [g.workers for g in monitoring.read_groups(RunFolder(folder))] == [2, 1, 2]
    if reproducible:
        assert ledger.release_counts == dict.fromkeys(range(STEPS), 1)
        assert first["parameters"] == undisturbed["parameters"]
    else:  # as in a recipe: another order of sums is another attempt, which is charged
        assert ledger.release_counts == {0: 3, 1: 3, 2: 2, 3: 2, 4: 1, 5: 1}
        assert first["guarantee"] == second["guarantee"] != undisturbed["guarantee"]


def test_a_group_of_one_is_no_user(tmp_path):
    alone = whole(0, tmp_path / "alone", {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert whole(0, tmp_path / "group", {})["parameters"] == alone["parameters"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["own loop", "recipe"])
def test_a_groups_threads_end_with_it(how):
    """Else they abort, now and then, a process that ends well."""

    def threads():
        names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
        return sum("gloo" in name for name in names)

    before = threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    importlib.reload(functional)  # as an optimizer does that is the first of its process
    held, end = dist.group.WORLD in functional.broadcast.__defaults__, time.monotonic() + 20
    while (begun := threads()) == before and time.monotonic() < end:
        time.sleep(0.01)  # a thread names itself as it begins
    if how == "own loop":
        Workers.of_this_process()
        dist.destroy_process_group()
    else:
        destroy_process_group()
    assert held and begun > before == threads()


class Shaken(torch.utils.data.Dataset):
    """Draws from `os.urandom`, so that no step can be replayed."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, labels = rows()
        shake = int.from_bytes(os.urandom(4), "little") / 2**32
        return inputs[index] * (0.5 + shake), int(labels[index])


def unshaken(index: int) -> tuple[torch.Tensor, int]:
    inputs, labels = rows()
    return inputs[index], int(labels[index])


def shaken(rank: int, folder: Path, until: int) -> dict[str, Any]:
    data = dpdist.as_records(Shaken(), target=None, before_transform=unshaken)
    return whole(rank, folder, {"data": data, "resources": {"checkpoint_seconds": 1e6}}, until)


@pytest.mark.e2e
def test_a_replay_with_another_sum_is_a_new_attempt_on_all(tmp_path, pair):
    folder = RunFolder(tmp_path / "own")
    pair.do(shaken, folder.path, 2)
    first, second = pair.do(shaken, folder.path, STEPS)
    assert first["parameters"] == second["parameters"] and first["left"] == second["left"] == 0
    assert Ledger.read(folder.ledger).release_counts == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
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
        ({"seed": 4}, "model: must be the same on all workers, got another on worker 1"),
        ({"moved": 7}, "data: must be the same on all workers"),
        ({"batch_size": 20}, "training settings: must be the same on all workers"),
        (
            {"privacy": {**PRIVATE, "noise_multiplier": 1.1}},
            "privacy settings: must be the same on all",
        ),
        ({"rate": 0.06}, "optimizer settings: must be the same on all workers"),
        ({"batch_size": 200}, "training.batch_size: must be <= the 80"),
        ({"model": nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))}, "normalizes"),
    ],
)
def test_what_one_worker_refuses_all_refuse(tmp_path, pair, others, said):
    for line in both(pair.do(refused, tmp_path / "own", others)):
        assert said in line, line
    assert not (tmp_path / "own").exists()


@pytest.mark.e2e
def test_other_errors_tell_the_others_no_value(tmp_path, pair):
    first, second = pair.do(refused, tmp_path / "own", {"data": Broken(rows())})
    assert isinstance(second, ValueError) and "0.125" in str(second)
    assert isinstance(first, ClusterError) and str(first) == "worker 1: failed with ValueError"


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
    if rank in whose and what == "freeze":
        t.model[0].weight.requires_grad_(False)
    try:
        t.run_all()
        return {"parameters": flat(t.model).tolist(), "kind": t.guarantee.kind}
    finally:
        t.close()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("whose", "what", "said"),
    [
        ((1,), "parameters", "changes between steps: must be the same on all workers"),
        ((0, 1), "own draws", "parameters: must be the same on all workers"),
        ((1,), "rate", "optimizer settings: must be the same on all workers"),
        ((1,), "freeze", "model: must stay as it is checked"),
    ],
)
def test_workers_that_drift_apart_are_refused(tmp_path, pair, whose, what, said):
    for line in both(pair.do(between, tmp_path / "own", whose, what)):
        assert said in line, line
    assert Ledger.read(tmp_path / "own" / "private" / "ledger.jsonl").release_counts == {0: 1}


def told_alone(rank: int, folder: Path) -> None:
    """Keep the training on one worker, while the other takes the next step."""
    t = started(folder, resources={"checkpoint_seconds": 1e6})
    t.step()
    try:
        t.checkpoint() if rank else t.step()
    finally:
        t.close()


@pytest.mark.e2e
def test_a_checkpoint_of_one_worker_alone_is_refused_by_all(tmp_path, pair):
    """As where one hears of SIGTERM a step before the other: both waited, for different sums."""
    for line in both(pair.do(told_alone, tmp_path / "own")):
        assert line.startswith("call: must be the same on all workers, got another on worker 1")
        assert line.endswith("so that all of them call checkpoint() after the same step")
    assert Ledger.read(tmp_path / "own" / "private" / "ledger.jsonl").release_counts == {0: 1}


@pytest.mark.e2e
def test_a_change_on_all_workers_is_on_the_card(tmp_path, pair):
    first, second = pair.do(between, tmp_path / "own", (0, 1), "parameters")
    assert first["kind"] == second["kind"] == "assumed: post-processing"
    assert first["parameters"] == second["parameters"]


def unwritten(rank: int, folder: Path, what: str) -> tuple[str, int, bool]:
    """Take a second step of which worker 0 cannot write something."""
    t = started(folder)
    t.step()
    before, kept = flat(t.model), (Ledger.record, Ledger.note_changes, checkpoint.save)

    def full(*_: Any) -> None:
        raise LedgerError("no space left")

    if what == "changes":
        with torch.no_grad():
            t.model[0].weight.mul_(0.5)
        before = flat(t.model)
    if rank == 0:
        holder, name = {
            "step": (Ledger, "record"), "changes": (Ledger, "note_changes"),
            "checkpoint": (checkpoint, "save"),
        }[what]  # fmt: skip
        setattr(holder, name, full)
    try:
        t.step()
    except (LedgerError, ClusterError) as error:
        return str(error), t.remaining_steps, torch.equal(flat(t.model), before)
    finally:
        Ledger.record, Ledger.note_changes, checkpoint.save = kept  # type: ignore[method-assign]
        t.close()
    return "", 0, False


@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "changes", "checkpoint"])
def test_no_worker_goes_on_where_the_first_cannot_write(tmp_path, pair, what):
    """And none has a gradient that is not on record."""
    first, second = pair.do(unwritten, tmp_path / "own", what)
    assert first == ("no space left", STEPS - 1, True)
    assert second[0].startswith("worker 0") and second[1:] == (STEPS - 1, True)
    assert Ledger.read(tmp_path / "own" / "private" / "ledger.jsonl").release_counts == {0: 1}


# --- scores on held-out private records


WHOM = [
    place // 3 for place in range(25)
]  # of held-out records: eight persons of three, one of one
BY_PERSON = {**PRIVATE, "unit": "user", "max_records_per_user": 2}


def private_eval_data(shift: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = rows()
    return inputs[:25] + shift, labels[:25]


def half_right(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return a value that is no whole number."""
    return module(batch[0]).softmax(1)[:, 1]


def scored(
    rank: int, folder: Path, given: dict[str, Any], declared: dict[str, Any], until: int = STEPS
) -> dict[str, Any]:
    WRITES.clear()
    given, declared = dict(given), {"every": 2, "noise": 3.0, **declared}
    data = declared.pop("data", private_eval_data())
    if given.get("privacy") == BY_PERSON:
        given["data"] = dpdist.as_records(rows(), unit=[100 + k // 2 for k in range(80)])
        data = dpdist.as_records(data, unit=WHOM)
    with started(folder, **given) as t:
        t.score(data, **declared)
        passes = 0
        kept = t._scored._value_at

        def counted(*words: Any) -> float:
            nonlocal passes
            passes += 1
            return kept(*words)

        t._scored._value_at = counted
        seen = [t.step().score for _ in range(until - (STEPS - t.remaining_steps))]
        return {
            "scores": seen, "parameters": flat(t.model).tolist(), "guarantee": str(t.guarantee),
            "passes": passes, "writes": [name for name in WRITES if str(folder) in name],
        }  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("given", "declared"),
    [
        ({}, {}),
        ({}, {"value": half_right}),
        ({"privacy": BY_PERSON, "batch_size": 8}, {}),
        ({"privacy": BY_PERSON, "batch_size": 8}, {"value": half_right}),
    ],
)
def test_two_workers_score_as_one_to_the_bit(tmp_path, pair, given, declared):
    """The sum is one of whole numbers, its noise is drawn once and charged once."""
    given = {**given, "reproducible": True}
    one = scored(0, tmp_path / "one", given, declared)
    first, second = pair.do(scored, tmp_path / "two", given, declared)
    assert first["scores"] == second["scores"] == one["scores"]
    assert [score is None for score in one["scores"]] == [True, False] * 3
    assert first["parameters"] == second["parameters"] == one["parameters"]
    assert first["guarantee"] == second["guarantee"] == one["guarantee"]
    ledgers = [Ledger.read(tmp_path / name / "private" / "ledger.jsonl") for name in ("one", "two")]
    assert [ledger.num_queries for ledger in ledgers] == [3, 3]
    assert second["writes"] == [] and first["writes"]
    passes = [each["passes"] for each in (first, second)]
    assert sum(passes) == one["passes"] == 3 * 25 and min(passes) > 25, "a worker is idle"


@pytest.mark.e2e
def test_a_run_with_scores_goes_on_with_other_workers(tmp_path, pair, alone):
    """Alone, then by two, then alone: the scores are those of an undisturbed run."""
    given = {"reproducible": True}
    (whole,) = alone.do(scored, tmp_path / "whole", given, {})
    (begun,) = alone.do(scored, tmp_path / "own", given, {}, 2)
    first, second = pair.do(scored, tmp_path / "own", given, {}, 4)
    (ended,) = alone.do(scored, tmp_path / "own", given, {})
    found = [score for each in (begun, first, ended) for score in each["scores"]]
    assert list(dict.fromkeys(score for score in found if score)) == [
        score for score in whole["scores"] if score
    ]
    assert first["scores"] == second["scores"]
    assert Ledger.read(tmp_path / "own" / "private" / "ledger.jsonl").num_queries == 3


def otherwise(rank: int, folder: Path, other: dict[str, Any]) -> None:
    """Declare scores, worker 1 in another way."""
    terms = {"data": private_eval_data(), "every": 2, "noise": 3.0, **(other if rank == 1 else {})}
    with started(folder) as t:
        t.score(terms.pop("data"), **terms)
        t.step()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"noise": 3.5},
            "score settings: must be the same on all workers, got another on worker 1",
        ),
        ({"data": private_eval_data(2.0)}, "held-out records: must be the same on all workers"),
        ({"data": rows()}, "held-out records must not be in data, got 80 in common"),
    ],
)
def test_workers_that_score_otherwise_are_refused(tmp_path, pair, other, said):
    for line in both(pair.do(otherwise, tmp_path / "own", other)):
        assert said in line, line
    assert not (tmp_path / "own").exists()


def drifting(rank: int, folder: Path) -> None:
    """Take a step behind which each worker has a model of its own, as other hardware could."""
    with started(folder) as t:
        t.score(private_eval_data(), every=1, noise=3.0)
        kept = t.optimizer.step

        def step() -> None:
            kept()
            with torch.no_grad():
                t.model[0].weight.add_(1e-6 * rank)

        t.optimizer.step = step
        t.step()


def test_workers_whose_models_drift_apart_are_not_scored(tmp_path, pair):
    for line in both(pair.do(drifting, tmp_path / "own")):
        assert "parameters: must be the same on all workers, got another on worker 1" in line
    assert Ledger.read(tmp_path / "own" / "private" / "ledger.jsonl").num_queries == 0


def unpaid(rank: int, folder: Path, what: str) -> tuple[str, list[bytes]]:
    """Take two steps, the second with a score that worker 0 cannot put on record."""
    with started(folder) as t:
        t.score(private_eval_data(), every=2, noise=3.0)
        kept, drawn = (Ledger.record_query, Ledger.record_answer), list[bytes]()

        def full(*_: Any) -> Any:
            raise LedgerError("no space left")

        def noted(total: Any, key: bytes, std: float) -> Any:
            drawn.append(key)
            return add_noise(total, key, std)

        private_score.add_noise = noted
        if rank == 0:
            setattr(Ledger, what, full)
        try:
            t.run_all()
        except (LedgerError, ClusterError) as error:
            return str(error), drawn
        finally:
            Ledger.record_query, Ledger.record_answer = kept
            private_score.add_noise = add_noise
    return "", []


@pytest.mark.e2e
@pytest.mark.parametrize("what", ["record_query", "record_answer"])
def test_no_worker_has_a_score_that_is_not_on_record(tmp_path, pair, what):
    first, second = pair.do(unpaid, tmp_path / "own", what)
    assert first[0] == "no space left" and "worker 0: failed with" in second[0]
    assert second[1] == [], "a worker beside the first drew noise"
    assert len(first[1]) == (what == "record_answer")
    assert Ledger.read(tmp_path / "own" / "private" / "ledger.jsonl").num_queries == len(first[1])


def busy(rank: int, folder: Path) -> None:
    started(folder).close()


@pytest.mark.e2e
def test_a_run_that_another_process_trains_is_refused_by_all(tmp_path, pair):
    held = started(tmp_path / "own")
    held.step()  # begins the run
    try:
        for line in both(pair.do(busy, tmp_path / "own"), first=RunBusyError):
            assert "another process trains this run" in line
    finally:
        held.close()


# --- one script: alone, under torchrun, on Ray


def test_processes_without_a_group_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="init_process_group"):
        started(tmp_path / "own")
    assert not (tmp_path / "own").exists()


@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("how", "seconds"),
    [("torchrun", 1e-6), pytest.param("torchrun", 1e6, marks=pytest.mark.nightly), ("ray", 1e-6)],
)
def test_one_script_alone_and_with_workers(tmp_path, how, seconds):
    """Also after `kill -9` of a worker: by the same command again, or by Ray."""
    given = {"kill": (7, 1), "seconds": seconds, "reproducible": True, "scored": True}
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


# --- a lost worker


LOST = """
import os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = {path!r}
from dpdist.training.collectives import ScriptReducer
from training import test_workers_of_a_script as here

torch.set_num_threads(1)
dist.init_process_group("gloo")
t = here.started(Path(sys.argv[1]))
reduce = ScriptReducer.all_reduce
def dying(self, buffer):
    if t.remaining_steps == here.STEPS - 2 and dist.get_rank() == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of a step
    reduce(self, buffer)
ScriptReducer.all_reduce = dying
t.run_all()
dist.destroy_process_group()  # else its threads may abort a process that ends
"""


def execute_all(script: Path, folder: Path, lost: int) -> list[tuple[int, str]]:
    """Run a script in two processes; return how each ended, and what it said."""
    port = str(29000 + os.getpid() % 2000)
    around = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, "-W", "ignore", str(script), str(folder), str(lost)]
    workers = [
        subprocess.Popen(
            command, env={**around, "RANK": f"{rank}"}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [worker.communicate(timeout=120)[1] for worker in workers]
    return [(worker.returncode, text) for worker, text in zip(workers, said, strict=True)]


@pytest.mark.e2e
@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_dies_ends_the_others_with_one_line(tmp_path, pair, lost):
    """Killed inside a step: the other one says who is gone, and the same command goes on."""
    script = tmp_path / "script.py"
    script.write_text(LOST.format(path=[str(Path(__file__).parents[1])]))
    pair.do(whole, tmp_path / "undisturbed", {})
    ended = execute_all(script, tmp_path / "own", lost)
    assert ended[lost] == (-9, "")
    code, said = ended[1 - lost]
    assert code == 1
    assert said == (
        f"worker {1 - lost}: lost worker {lost} (killed, cut off or silent), and ends; the same "
        "command continues from the newest checkpoint\n"
    )
    assert Ledger.read(tmp_path / "own" / "private" / "ledger.jsonl").release_counts == {0: 1, 1: 1}
    again = execute_all(script, tmp_path / "own", -1)
    assert [code for code, _ in again] == [0, 0], again
    run = RunFolder(tmp_path / "own")
    assert Ledger.read(run.ledger).release_counts == dict.fromkeys(range(STEPS), 1)
    assert torch.equal(parameters(run), parameters(RunFolder(tmp_path / "undisturbed")))
