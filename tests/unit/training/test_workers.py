"""Workers of a script as threads: who waits for whom, and what stays with a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.own_loops import begin, net
from support.training import ThreadReducer, run_thread_workers

from dpdist.core.errors import ClusterError
from dpdist.privacy.ledger import Ledger, ReplayConflict
from dpdist.runs.folder import RunFolder
from dpdist.training.collectives import Workers

STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*run_key")


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
        waited.append(Ledger.read(RunFolder(tmp_path / "own").ledger).release_counts)

    monkeypatch.setattr(Workers, "announcing", announcing)
    model = net(3)
    begin(tmp_path / "own", model, torch.optim.Adam(model.parameters())).run_all()
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
