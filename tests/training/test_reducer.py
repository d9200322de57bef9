"""Sums and comparisons over real processes (gloo), as Ray's workers make them."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dpdist.training.collectives import Reducer


def _work(rank: int, folder: str, answers) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    reducer = Reducer(rank, 2, torch.device("cpu"))
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]], dtype=torch.float64) * (rank + 1)
    total, flag = reducer.sum_rows(rows, rank == 1)
    answers.put(
        (
            rank,
            total.tolist(),
            flag,
            reducer.all_gather_text("zero" if rank == 0 else ""),
            reducer.broadcast_int(40 + rank),
        )
    )
    dist.destroy_process_group()


@pytest.mark.e2e
def test_two_processes(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [
        context.Process(target=_work, args=(rank, str(tmp_path), answers)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    got = sorted(answers.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(60)
    for rank in range(2):
        assert got[rank] == (rank, [33.0, 66.0], True, ["zero", ""], 40)
