"""The user as the unit: records are drawn by key, their gradients added, and the sum clipped once.

The oracle works out a step in float64, one user at a time by autograd. A clip for each record is
seen by the same comparison that the step passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.networks import cross_entropy, small_layers
from torch import Tensor

import dpdist
from dpdist.data.protocol import UserRecords, Users
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, UserMembers
from dpdist.gradients.perturbations import (
    CropAndFlip,
    ModulePerturbation,
    ParameterPerturbation,
    Perturbation,
)
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.randomness.noise_location import ModuleNoise
from dpdist.training.private_step import PrivateStep, build_shards

KEY, CLIP, MOST = bytes(range(32)), 0.7, 3
SIZES = [1, 2, 3, 9, 1, 4, 30, 2, 1, 5, 7, 1, 3, 2, 6, 1, 1, 12, 2, 3]  # records of each user
RATE = 0.5
PLAN = PrivacyPlan(len(SIZES), (GaussianSteps(4, 1.3, RATE),), 1e-2, CLIP)


def units() -> list[int]:
    """Whom each record belongs to; records of a user do not lie together."""
    found = [user for user, size in enumerate(SIZES) for _ in range(size)]
    return [found[place] for place in np.random.default_rng(3).permutation(len(found))]


def records(kind: str = "points") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = sum(SIZES)
    if kind == "points":
        inputs = 3 * torch.randn(count, 5, generator=generator).double()
    else:
        inputs = torch.rand(count, 1, 8, 8, generator=generator)
        inputs[::3] *= 40
    return inputs, torch.randint(3, (count,), generator=generator)


def grouped(kind: str = "points", most: int = MOST) -> UserRecords:
    return UserRecords(dpdist.as_records(records(kind)), Users(np.array(units()), most))


# --- the records of a step --------------------------------------------------------------------


def test_users_hold_each_record_once():
    own = ["b", 7, "b", "a", 7, "b"]
    users = Users.from_values(own, 4)
    assert len(users) == 3 and users.codes.tolist() == [0, 1, 0, 2, 1, 0]
    positions, present = users.draw(np.array([2, 0, 1]), KEY)
    assert positions.tolist() == [[3, 3, 3, 3], [0, 2, 5, 0], [1, 4, 1, 1]]
    assert present.sum(1).tolist() == [1, 3, 2]
    assert users.draw(np.array([], dtype=np.int64), KEY)[0].shape == (0, 4)
    assert len(Users.from_values([], 2)) == 0


def test_a_large_user_s_records_are_a_uniform_subset_that_its_key_draws():
    users = Users.from_values([0] * 5 + [1] * 6 + [2], 2)
    seen: Counter[tuple[int, ...]] = Counter()
    rounds = 3000
    for step in range(rounds):
        positions, present = users.draw(np.array([1]), derive_key(KEY, "step", step))
        assert present.all() and positions[0, 0] < positions[0, 1]
        seen[tuple(positions[0] - 5)] += 1
    assert len(seen) == 15  # of 6 records, two
    expected = rounds / 15
    squares = sum((count - expected) ** 2 / expected for count in seen.values())
    assert squares < 43.8  # of chi-squared with 14 degrees of freedom, above with probability 6e-5
    twins = Users.from_values([0] * 20 + [1] * 20, 2)
    both = [twins.draw(np.array([0, 1]), derive_key(KEY, "step", step))[0] for step in range(20)]
    assert any((own[0] + 20 != own[1]).any() for own in both), "all users draw alike"
    assert users.draw(np.array([0, 1]), KEY)[0][1].tolist() == (
        users.draw(np.array([1]), KEY)[0][0].tolist()
    ), "another user has a say"


def test_other_users_or_another_step_are_drawn_anew():
    data, users = grouped().for_step(KEY), Users(np.array(units()), MOST)
    some, others = np.array([3, 6, 17]), np.array([3, 6, 18])
    for indices in (some, others, some, some[:2], np.array([], dtype=np.int64), some):
        for one, other in zip(data.members(indices), users.draw(indices, KEY), strict=True):
            np.testing.assert_array_equal(one, other)
    other_key = derive_key(KEY, "step", 1)
    again = data.for_step(other_key).members(some)[0]
    np.testing.assert_array_equal(again, users.draw(some, other_key)[0])
    assert (again != data.members(some)[0]).any()


# --- the oracle -------------------------------------------------------------------------------


def step_of(data: UserRecords, perturbation: Perturbation | None = None) -> PrivateStep:
    torch.manual_seed(0)
    engine = GradientEngine(
        torch.nn.Linear(5, 3).double(), cross_entropy, clipping=FlatClipping(CLIP),
        perturbation=perturbation,
    )  # fmt: skip
    return PrivateStep(engine, data, KEY, "7/nonce")


def drawn(step: int) -> list[list[int]]:
    """The records of each user that joins a step, worked out from the keys."""
    words = stream_words(derive_key(KEY, "sample", "7/nonce", step), 0, len(SIZES))
    users, key = Users(np.array(units()), MOST), derive_key(KEY, "data", "7/nonce", step)
    found = []
    for user in np.flatnonzero(words < np.uint64(2**63)):
        positions, present = users.draw(np.array([user]), key)
        found.append(positions[0][present[0]].tolist())
    return found


def noise_of(step: int, size: int) -> np.ndarray:
    pairs = stream_words(derive_key(KEY, "noise", "7/nonce", step), 0, 2 * (size // 2 + 1))
    uniform, turn = pairs.reshape(-1, 2).T
    length = np.sqrt(-2 * np.log(2.0**-64 + uniform.astype(float) * 2.0**-64))
    angle = 2 * np.pi * (turn >> np.uint64(11)).astype(float) * 2.0**-53
    both = np.stack([length * np.cos(angle), length * np.sin(angle)], 1)
    return np.asarray(both.reshape(-1)[:size])


def by_hand(step: int, *, clip_records: bool = False) -> np.ndarray:
    """The noisy gradient in float64, one user at a time by autograd."""
    torch.manual_seed(0)
    model, (inputs, labels) = torch.nn.Linear(5, 3).double(), records()
    total = np.zeros(18)
    for members in drawn(step):
        parts = []
        for i in members:
            loss = torch.nn.functional.cross_entropy(model(inputs[i]), labels[i])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            parts.append(torch.cat([grad.flatten() for grad in grads]).numpy())
        for own in parts if clip_records else [np.sum(parts, axis=0)]:
            total += own * min(1.0, CLIP / np.linalg.norm(own))
    return (total + 1.3 * CLIP * noise_of(step, 18)) / (len(SIZES) * RATE)


def test_a_step_is_one_clipped_sum_for_each_user():
    step, counts = step_of(grouped()), set()
    step.check_clip(CLIP)
    for number in range(PLAN.steps):
        gradient, seen, _ = step.gradient(number, PLAN.step(number))
        np.testing.assert_allclose(gradient.numpy(), by_hand(number), rtol=1e-7, atol=1e-7)
        assert seen.examples == len(drawn(number))
        counts.add(seen.examples)
        assert np.abs(gradient.numpy() - by_hand(number, clip_records=True)).max() > 1e-3
    assert len(counts) > 1, "batches of one size would be no Poisson sample"


@pytest.mark.parametrize("name", ["dplis for each", "modules", "isolated"])
def test_without_a_clip_a_user_s_sum_is_that_of_its_records(name: str):
    """Drawn noise and all: it is keyed by the record, and an empty place adds nothing."""
    kind, vmap = ("none", True) if name == "isolated" else (name, False)
    data = grouped("images")
    every = np.arange(len(data))
    positions, present = data.members(every)
    sums = []
    for by_user in (True, False):
        engine = GradientEngine(
            small_layers(), cross_entropy, clipping=FlatClipping(1e6),
            perturbation=PERTURBATIONS[kind](), vmap=vmap, micro_batch=4,
        )  # fmt: skip
        engine.augmentation = CropAndFlip(1, True)
        inputs, targets = data.batch(every), data.targets(every)
        if by_user:
            engine.records_per_example = MOST
            members = UserMembers(torch.from_numpy(positions), torch.from_numpy(present).float())
            ids = torch.from_numpy(every)
            found = engine.clipped_sum(
                inputs, targets, draw_key=KEY, record_ids=ids, members=members
            )
        else:
            ids = torch.from_numpy(positions[present])
            found = engine.clipped_sum(
                inputs[present], targets[present], draw_key=KEY, record_ids=ids
            )
        sums.append(found.flat)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-3, atol=1e-4)


def test_private_losses_are_means_over_the_records_that_count():
    step = step_of(grouped())
    seen = step.gradient(0, PLAN.step(0))[1]
    torch.manual_seed(0)
    model, (inputs, labels) = torch.nn.Linear(5, 3).double(), records()
    losses = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
    wanted = sum(losses[members].mean().item() for members in drawn(0))
    assert seen.loss_sum == pytest.approx(wanted, rel=1e-9)


# --- neighbors -------------------------------------------------------------------------------


PERTURBATIONS: dict[str, Callable[[], Perturbation | None]] = {
    "none": lambda: None,
    "dplis for each": lambda: ParameterPerturbation(2, 0.05, per_example=True),
    "modules": lambda: ModulePerturbation(2, ModuleNoise({"0": 0.2}, input_std=0.1)),
}


def clipped(data: UserRecords, name: str, *, vmap: bool = False) -> tuple[Tensor, Tensor]:
    """The sum of a step without its noise, and which users joined."""
    torch.manual_seed(4)
    engine = GradientEngine(
        small_layers(), cross_entropy, clipping=FlatClipping(CLIP),
        perturbation=PERTURBATIONS[name](), vmap=vmap,
    )  # fmt: skip
    step = PrivateStep(engine, data, KEY, "7/nonce")
    step.shards = build_shards(len(data), len(SIZES), step.reducer, False, nominal=False)
    sample = derive_key(KEY, "sample", "7/nonce", 1)
    joined = step.members(sample, 0, len(data), PLAN.step(1))
    return step._clipped_sums(1, PLAN.step(1))[0].sum(0), torch.from_numpy(joined)


def without_one_user(most: int) -> Iterator[tuple[UserRecords, UserRecords]]:
    """Data with and without all records of one user, for some users.

    Its records come last, and so does the user: no other record or user changes its position.
    """
    own, (inputs, labels) = np.array(units()), records("images")
    for gone in (0, 3, 4, 6, 17):
        order = np.argsort(own == gone, kind="stable")
        codes, last = own[order], len(SIZES) - 1
        swapped = np.where(codes == gone, last, np.where(codes == last, gone, codes))
        left = len(own) - SIZES[gone]
        yield (
            UserRecords(dpdist.as_records((inputs[order], labels[order])), Users(swapped, most)),
            UserRecords(
                dpdist.as_records((inputs[order[:left]], labels[order[:left]])),
                Users(swapped[:left], most),
            ),
        )


@pytest.mark.parametrize("name", ["none", "dplis for each", "modules", "isolated"])
def test_a_whole_user_changes_a_sum_by_the_clip_at_most(name: str):
    kind, vmap = ("none", True) if name == "isolated" else (name, False)
    changes = []
    for whole, fewer in without_one_user(MOST):
        one, joined = clipped(whole, kind, vmap=vmap)
        other, others = clipped(fewer, kind, vmap=vmap)
        assert torch.equal(joined[joined < len(fewer)], others), "another user's sampling changed"
        changes.append(float((one - other).norm()) / CLIP)
    assert 0.5 < max(changes) <= 1
    assert len(others) > 3 and len(fewer) in joined, "nothing was compared"


# --- sizes ------------------------------------------------------------------------------------


def test_dicts_are_grouped_too():
    inputs = {"a": torch.randn(5, 2), "b": torch.arange(5)[:, None]}

    class Fields(dpdist.Records):
        name = "fields"

        def __len__(self) -> int:
            return 5

        def batch(self, indices):
            return {name: each[indices] for name, each in inputs.items()}

        def targets(self, indices):
            return torch.arange(5)[indices]

    data = UserRecords(Fields(), Users.from_values([0, 1, 1, 0, 1], 2))
    found = data.batch(np.array([0, 1]))
    assert [found[name].shape[:2] for name in "ab"] == [(2, 2), (2, 2)]
    assert data.targets(slice(0, 1)).tolist() == [[0, 3]]
    assert len(data.examples(7)[1]) == 7


def test_a_fingerprint_knows_the_users():
    own, data = units(), dpdist.as_records(records())
    found = {
        UserRecords(data, Users.from_values(each, 2)).keyed_fingerprint(KEY)
        for each in (own, own[::-1], [*own[:-1], "another"])
    }
    assert len(found) == 3
    again = UserRecords(data, Users.from_values(own, 2)).keyed_fingerprint(KEY)
    assert (
        again in found
        and UserRecords(data, Users.from_values(own, 2)).keyed_fingerprint(bytes(32)) not in found
    )
