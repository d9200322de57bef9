"""`dpdist.PrivateStep` without a recipe or a run: a step, worked out by hand from its keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpdist import UserError
from dpdist.gradients.clipping import FlatClipping, max_batch
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.privacy.ledger import Ledger, ReplayConflict
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.training import private_step
from dpdist.training.private_step import PrivateStep

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
    assert torch.equal(one, step_of().gradient(1, PLAN.step(1))[0])
    other = step_of()
    other.attempt = "8/nonce"
    assert not torch.equal(one, other.gradient(1, PLAN.step(1))[0])
    other.attempt, other.key = "7/nonce", bytes(32)
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


def test_the_release_is_on_record_before_its_noise(tmp_path, monkeypatch):
    at: list[dict[int, int]] = []
    real = private_step.add_noise

    def noising(*given: object) -> np.ndarray:
        at.append(dict(Ledger.read(tmp_path / "ledger.jsonl").release_counts))
        return real(*given)

    monkeypatch.setattr(private_step, "add_noise", noising)
    asked: list[int] = []
    with Ledger.open(tmp_path / "ledger.jsonl", PLAN.fingerprint()) as ledger:
        ledger.begin_attempt({"data": "rows"})
        step = step_of(ledger=ledger, permit=asked.append)
        for number in range(2):
            step.gradient(number, PLAN.step(number))
    assert asked == [0, 1] and at == [{0: 1}, {0: 1, 1: 1}]


def test_a_clip_above_the_plan_s_is_refused():
    with pytest.raises(UserError, match="sensitivity exceeds"):
        step_of(2 * CLIP).check_clip(PLAN.clip_norm)


def test_a_batch_beyond_what_the_slack_covers_is_refused():
    engine = step_of(CLIP).engine
    limit = max_batch(engine.precision)
    private_step.check_clip(engine, CLIP, limit / 2)
    with pytest.raises(UserError, match=r"training\.batch_size"):
        private_step.check_clip(engine, CLIP, limit)
