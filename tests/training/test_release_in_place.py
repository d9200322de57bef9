"""A release is made in the sums' own memory, piece by piece: the bits are those of whole vectors,
and nothing of their length is made beside them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.training import ThreadReducer, run_thread_workers

from dpdist.gradients import noise
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.training.collectives import LEAF, FlatOptimizer, Reducer, Shards
from dpdist.training.private_step import PrivateStep

KEY, STD, BATCH, STEPS = bytes(range(32)), 1.7, 24.0, 3
PIECE = 2 * noise._PIECE
TRAINING = SimpleNamespace(
    optimizer="adam", momentum=0.0, ema=None, weight_decay=0.01, learning_rate=0.1,
    schedule="constant", factor=1.0, milestones=(),
)  # fmt: skip


def sums(rank: int, step: int, rows: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=(rows, size))


class Release(PrivateStep):
    """A step that is handed its sums. rows: so many are this worker's."""

    def __init__(self, reducer: Reducer, rows: int, size: int) -> None:
        mine, self.size = [(row, 0, 0) for row in range(rows)], size
        super().__init__(None, (), KEY, "a", reducer=reducer, shards=Shards(rows, 1, mine))

    def _clipped_sums(self, step, step_plan):
        rows = self.reducer.zero_rows(self.shards.num_rows, self.size)
        assert not rows.any()
        rows += torch.from_numpy(sums(self.reducer.rank, step, *rows.shape))
        return rows, None


def trained(reducer: Reducer, rows: int, size: int) -> tuple[torch.Tensor, list[int]]:
    """Parameters after the steps, and where each step's gradient lay."""
    release, flat, places = Release(reducer, rows, size), torch.zeros(size), []
    optimizer = FlatOptimizer(TRAINING, STEPS, flat)
    for step in range(STEPS):
        step_plan = SimpleNamespace(noise_std=STD, expected_batch=BATCH)
        gradient, *_ = release.gradient(step, step_plan)
        optimizer.update(flat, gradient, step)
        places.append(gradient.data_ptr())
    return flat, places


def oracle(workers: int, rows: int, size: int) -> torch.Tensor:
    """The same by whole vectors, and noise by numpy's functions of the key's words."""
    flat, optimizer = torch.zeros(size), FlatOptimizer(TRAINING, STEPS, torch.zeros(size))
    for step in range(STEPS):
        total = np.zeros(size)
        stacks = [sums(rank, step, rows, size) for rank in range(workers)]
        for row in sum(stacks[1:], stacks[0]) if rows > 1 else np.concatenate(stacks):
            total = total + row
        key = derive_key(KEY, "noise", "a", step)
        bits = stream_words(key, 0, 2 * (size // 2 + 1)).reshape(-1, 2)
        length = np.sqrt(-2 * STD**2 * np.log(2.0**-64 + 2.0**-64 * bits[:, 0].astype(float)))
        angle = (bits[:, 1] >> np.uint64(11)).astype(float) * (2.0**-53 * 2.0 * np.pi)
        pairs = np.stack([length * np.cos(angle), length * np.sin(angle)], 1)
        noisy = np.rint((total + pairs.reshape(-1)[:size]) * 2.0**24) * 2.0**-24
        gradient = torch.from_numpy((noisy / BATCH).astype(np.float32))
        optimizer._update(flat, gradient, optimizer.slots, step)
    return flat


@pytest.mark.parametrize(
    ("size", "rows"),
    [(1, 1), (2, 2), (PIECE - 1, 1), (PIECE, 1), (PIECE + 1, 3), (LEAF - 1, 1), (LEAF + 1, 1),
     (2 * LEAF + 3, 2)],
)  # fmt: skip
def test_the_bits_are_those_of_whole_vectors(size, rows):
    found, places = trained(Reducer(0, 1, torch.device("cpu")), rows, size)
    assert torch.equal(found, oracle(1, rows, size))
    assert len(set(places)) == 1 or rows > 1


def test_two_workers_do_it_alike():
    size, found = 3 * LEAF + 5, {}

    def work(reducer: ThreadReducer) -> None:
        found[reducer.rank], _ = trained(reducer, 1, size)

    run_thread_workers(2, work)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], oracle(2, 1, size))
