"""Sums and comparisons over real processes (gloo), as Ray's workers make them."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dpdist.training.collectives import (
    LEAF,
    ReduceDtype,
    Reducer,
    ShardedUpdate,
    Shards,
    leaf_digests,
)

pytestmark = pytest.mark.guarantee


def _work(rank: int, folder: str, answers) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    reducer = Reducer(rank, 2, torch.device("cpu"))
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]], dtype=torch.float64) * (rank + 1)
    total, flag = reducer.sum_rows(rows, rank == 1)
    # A leaf for the first, three entries for the second; of five entries the first has none.
    shards, sharing = Shards(1, 1, [(0, 0, 1)], [1, 1]), ShardedUpdate()
    row = (torch.arange(LEAF + 3.0, dtype=torch.float64) * (rank + 1))[None]
    own = sharing.local_slice(reducer, LEAF + 3)
    part, _ = sharing.sum_rows(reducer, row.clone(), shards, False)
    narrow, _ = ShardedUpdate(ReduceDtype("float32", 9.0)).sum_rows(reducer, row / 3, shards, False)
    rounded = (torch.arange(LEAF + 3.0, dtype=torch.float64) / 3).float().double()
    twice = (torch.arange(LEAF + 3.0, dtype=torch.float64) * 2 / 3).float().double()
    flat = torch.full((LEAF + 3,), float(rank))
    sharing.broadcast_updates(reducer, flat)
    digests = sharing.all_leaf_digests(reducer, "label", part.numpy(), LEAF + 3)
    answers.put(
        (
            rank,
            total.tolist(),
            flag,
            reducer.all_gather_text("zero" if rank == 0 else ""),
            reducer.broadcast_int(40 + rank),
            reducer.all_equal(torch.tensor([7])),
            reducer.all_equal(torch.tensor([rank])),
            torch.equal(part, 3 * torch.arange(LEAF + 3.0, dtype=torch.float64)[own]),
            flat[LEAF - 1 : LEAF + 1].tolist(),
            digests == leaf_digests("label", 3 * np.arange(LEAF + 3.0)),
            len(sharing.sum_rows(reducer, row[:, :5], shards, False)[0]),
            torch.equal(narrow, (rounded + twice)[own]),
        )
    )
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.long
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
        whole = (rank, [33.0, 66.0], True, ["zero", ""], 40, True, False)
        assert got[rank] == (*whole, True, [0.0, 1.0], True, [0, 5][rank], True)
