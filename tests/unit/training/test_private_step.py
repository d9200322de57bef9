"""`dpdist.PrivateStep` without a recipe or a run: a step, worked out by hand from its keys."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.training import ThreadReducer, run_thread_workers

from dpdist import UserError
from dpdist.config.training import CANONICAL_SHARDS
from dpdist.gradients import noise
from dpdist.gradients.clipping import FlatClipping, max_batch
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.privacy.ledger import ReplayConflict
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.training import private_step
from dpdist.training.collectives import LEAF, FlatOptimizer, Reducer, Shards
from dpdist.training.private_step import PrivateStep, build_shards

KEY, RECORDS, WIDTH, CLIP = bytes(range(32)), 60, 5, 0.7
PLAN = PrivacyPlan(RECORDS, (GaussianSteps(4, 1.3, 0.25),), 1e-3, CLIP)


class Rows:
    """All that a step asks of its data."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = 3 * torch.randn(RECORDS, WIDTH, generator=generator).double()
        self.labels = torch.randint(3, (RECORDS,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> torch.Tensor:
        return self.inputs[indices]

    def targets(self, indices: np.ndarray) -> torch.Tensor:
        return self.labels[indices]


def step_of(clip: float = CLIP, **options: object) -> PrivateStep:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 3).double()  # whose clip hardly needs room for rounding
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(clip))
    return PrivateStep(engine, Rows(), KEY, "7/nonce", **options)


def by_hand(step: int) -> tuple[np.ndarray, int]:
    """The noisy gradient in float64, one record at a time; and how many records joined."""
    torch.manual_seed(0)
    model, rows = torch.nn.Linear(WIDTH, 3).double(), Rows()
    sample = derive_key(KEY, "sample", "7/nonce", step)
    # a quarter of 2^64
    joined = np.flatnonzero(stream_words(sample, 0, RECORDS) < np.uint64(2**62))
    total = np.zeros(3 * WIDTH + 3)
    for i in joined:
        loss = torch.nn.functional.cross_entropy(model(rows.inputs[i]), rows.labels[i].clone())
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in parts]).numpy()
        total += gradient * min(1.0, CLIP / np.linalg.norm(gradient))
    pairs = stream_words(derive_key(KEY, "noise", "7/nonce", step), 0, 2 * (len(total) // 2 + 1))
    uniform, turn = pairs.reshape(-1, 2).T
    length = np.sqrt(-2 * np.log(2.0**-64 + uniform.astype(float) * 2.0**-64))
    angle = 2 * np.pi * (turn >> np.uint64(11)).astype(float) * 2.0**-53
    noise = np.stack([length * np.cos(angle), length * np.sin(angle)], 1).reshape(-1)
    return (total + 1.3 * CLIP * noise[: len(total)]) / (RECORDS / 4), len(joined)


def test_a_step_is_what_it_says():
    step, sizes = step_of(), set()
    step.check_clip(CLIP)
    for number in range(PLAN.steps):
        gradient, seen, flagged = step.gradient(number, PLAN.step(number))
        wanted, joined = by_hand(number)
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-7, atol=1e-7)
        assert seen.examples == joined and not flagged
        sizes.add(joined)
    assert len(sizes) > 1, "batches of one size would be no Poisson sample"


def test_another_attempt_or_key_is_another_step():
    one = step_of().gradient(1, PLAN.step(1))[0].clone()
    other = step_of()
    other.key = bytes(32)
    assert not torch.equal(one, other.gradient(1, PLAN.step(1))[0])
    replayed = step_of(announced=[(1, 2, "8/nonce")])
    other = step_of()
    other.attempt = "8/nonce"
    assert torch.equal(
        replayed.gradient(1, PLAN.step(1))[0], other.gradient(1, PLAN.step(1))[0].clone()
    )
    assert torch.equal(
        replayed.gradient(2, PLAN.step(2))[0].clone(), step_of().gradient(2, PLAN.step(2))[0]
    )


def test_without_a_ledger_another_sum_of_a_step_is_refused():
    """The difference of the two would be free of noise."""
    step = step_of()
    first = step.gradient(1, PLAN.step(1))[0].clone()
    assert torch.equal(step.gradient(1, PLAN.step(1))[0], first)
    with torch.no_grad():
        step.engine.parameters[0].add_(1.0)
    with pytest.raises(ReplayConflict):
        step.gradient(1, PLAN.step(1))
    step.gradient(2, PLAN.step(2))
    step.attempt = "8/nonce"
    assert not torch.equal(step.gradient(1, PLAN.step(1))[0], first)


def test_data_of_a_step_are_keyed_like_all_else():
    """Random transforms: another key in every step and attempt, the same one in a replay."""

    class Transformed(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.keys: list[bytes] = []

        def for_step(self, key: bytes) -> Rows:
            self.keys.append(key)
            return self

    data = Transformed()
    step = step_of(announced=[(2, 3, "9/nonce")])
    step.data = data
    for number in (0, 1, 2, 0):
        step.gradient(number, PLAN.step(number))
    step.attempt = "9/nonce"
    step.gradient(0, PLAN.step(0))
    step.announced = ()
    step.gradient(2, PLAN.step(2))
    assert (
        len(set(data.keys)) == 4 and data.keys[0] == data.keys[3] and data.keys[2] == data.keys[5]
    )
    assert data.keys[1] == derive_key(KEY, "data", "7/nonce", 1)


@pytest.mark.parametrize(("reproducible", "count"), [(False, 2), (True, CANONICAL_SHARDS)])
def test_each_shard_draws_random_numbers_of_its_own(monkeypatch, reproducible, count):
    """Blocks of two shards have the same names: without the shard's number, the same dropout."""
    numbers, real = [], GradientEngine.clipped_sum

    def numbered(self, *args, **options):
        numbers.append(self.shard)
        return real(self, *args, **options)

    def work(reducer):
        shards = build_shards(RECORDS, RECORDS, reducer, reproducible, nominal=False)
        step_of(reducer=reducer, shards=shards).gradient(0, PLAN.step(0))

    monkeypatch.setattr(GradientEngine, "clipped_sum", numbered)
    run_thread_workers(2, work)
    assert sorted(numbers) == list(range(count))


def test_a_clip_above_the_plan_s_is_refused():
    with pytest.raises(UserError, match="sensitivity exceeds"):
        step_of(2 * CLIP).check_clip(PLAN.clip_norm)


def test_a_batch_beyond_what_the_slack_covers_is_refused():
    engine = step_of(CLIP).engine
    limit = max_batch(engine.precision)
    private_step.check_clip(engine, CLIP, limit / 2)
    with pytest.raises(UserError, match=r"training\.batch_size"):
        private_step.check_clip(engine, CLIP, limit)


# --- made in the memory of the sums, piece by piece: the bits are those of whole vectors

STD, BATCH, STEPS = 1.7, 24.0, 3
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
