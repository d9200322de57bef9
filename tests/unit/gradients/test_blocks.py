"""Keyed blocks: who runs with whom, and that rounding stays within the sensitivity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hypothesis_settings import hypothesis_settings
from support.networks import Of, cross_entropy, small_layers
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import (
    FlatClipping,
    assumed_move,
    max_run_length,
    rounding_slack,
    sum_slack,
)
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.passes import labeled_passes, rows_per_batch, rows_per_pass
from dpdist.gradients.perturbations import Perturbation
from dpdist.gradients.sampling import MAX_BLOCK_RECORDS, Blocks

KEY = bytes(range(32))


# ---- who runs with whom


def groups(blocks: Blocks, ids: np.ndarray, key: bytes = KEY) -> set[tuple[int, ...]]:
    """The blocks as tuples of record ids, in the order in which they run."""
    return {tuple(int(i) for i in ids[block]) for _, block in blocks.labeled(key, ids)}


@hypothesis_settings(100)
@given(
    st.sets(st.integers(0, 2**40), min_size=1, max_size=80), st.integers(1, 5), st.integers(1, 20),
    st.binary(min_size=32, max_size=32), st.randoms(use_true_random=False),
)  # fmt: skip
def test_one_record_changes_its_own_block_and_no_other(members, count, capacity, key, random):
    blocks, ids = Blocks(count, capacity), list(members)
    random.shuffle(ids)
    whole = groups(blocks, np.array(ids), key)
    assert sorted(i for block in whole for i in block) == sorted(ids)
    assert max(map(len, whole)) <= capacity
    gone = ids.pop(random.randrange(len(ids)))
    random.shuffle(ids)  # nor does the order of the records matter
    rest = groups(blocks, np.array(ids, dtype=np.int64), key)
    changed = {i for block in whole - rest for i in block}
    assert gone in changed and len(changed) <= capacity + 1
    assert {i for block in rest - whole for i in block} == changed - {gone}


@hypothesis_settings(60)
@given(
    st.sets(st.integers(0, 2**40), min_size=1, max_size=80), st.integers(1, 5), st.integers(1, 20),
    st.integers(1, 9), st.binary(min_size=32, max_size=32), st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_fixed_row_is_that_of_the_id_and_the_key(members, count, capacity, rows, key, random):
    """Other records do not change the row of a record."""
    blocks, ids = Blocks(count, capacity), list(members)
    random.shuffle(ids)

    def places(some: list[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        given = np.array(some, dtype=np.int64)
        for _, chosen, real in labeled_passes(blocks, key, given, rows, "fixed-row"):
            assert len(chosen) == rows
            for row in np.arange(rows)[real]:
                assert found.setdefault(some[chosen[row]], int(row)) == row
        return found

    whole = places(ids)
    assert sorted(whole) == sorted(ids)
    gone = ids.pop(random.randrange(len(ids)))
    random.shuffle(ids)
    assert places(ids) == {each: row for each, row in whole.items() if each != gone}


def rounds_by_row() -> nn.Module:
    """A gate that opens in every second row for a record on its edge."""

    def run(model: nn.Module, inputs: Tensor) -> Tensor:
        bits = 2e-7 * (torch.arange(len(inputs)) % 2)
        return model.last((inputs[:, :1].detach() + bits[:, None] > 0).float() * torch.ones(8))

    return Of(run, last=nn.Linear(8, 2))


def test_fixed_rows_need_no_bound_on_how_rows_round():
    """Rows that round apart, and every second record of a pass on the edge: without the first one
    all of them lie where the gate opens."""
    blocks, ids, moved = Blocks(1, 60), torch.arange(60), []
    ((_, order),) = blocks.labeled(KEY, ids.numpy())
    inputs = torch.full((60, 1), -1.0)
    inputs[order[::2]] = 0.0
    targets, rest = torch.ones(60, dtype=torch.int64), ids[ids != order[0]]
    for rounding in ("standard", "fixed-row"):
        engine = GradientEngine(
            rounds_by_row(),
            cross_entropy,
            clipping=FlatClipping(0.5),
            blocks=blocks,
            micro_batch=60,
        )
        engine._checked, engine.rounding = True, rounding
        whole, without = (
            engine.clipped_sum(inputs[some], targets[some], draw_key=KEY, record_ids=some).flat
            for some in (ids, rest)
        )
        moved.append(float((whole - without).norm()) / engine.sensitivity)
    assert moved[1] <= 1 < 5 < moved[0]


def test_what_a_move_changes_is_measured():
    """A gate on its edge opens in every second row, so that a move changes a whole gradient; the
    rounding of a small network changes a last bit."""
    inputs, targets, _ = images(64)
    for model, some, low, high in (
        (rounds_by_row(), torch.zeros(64, 1), 0.9, 2.0), (small_layers(), inputs, 0.0, 2.0**-20),
    ):  # fmt: skip
        engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(1e-3), micro_batch=20)
        engine.prepare(some, targets % 2)
        found = engine.measure_moves(some, targets % 2, Blocks(1, 60))
        assert low <= found <= high


def test_blocks_are_no_larger_than_the_bound_allows():
    for records, rate in ((10**6, 0.5), (65_500, 1.0), (2000, 1.0), (1000, 1.0), (10, 0.01)):
        found = Blocks.for_batches(records, rate)
        assert 1 <= found.capacity <= MAX_BLOCK_RECORDS
        assert found.count * found.capacity >= records * rate
    assert Blocks.for_batches(1000, 1.0) == Blocks(1, 1000)  # a full batch needs no room
    assert Blocks.for_batches(1000, 0.5, batch_cap=40).capacity <= 40


def test_passes_have_one_shape_but_the_last_of_a_block():
    blocks, ids = Blocks(1, 100), np.arange(60)
    assert [rows_per_pass(blocks, rows) for rows in (1000, 99, 30)] == [100, 50, 25]
    seen = [(rows, real) for _, rows, real in labeled_passes(blocks, KEY, ids, 25)]
    assert [(len(rows), real.stop) for rows, real in seen] == [(25, 25), (25, 25), (10, 10)]
    assert sorted(np.concatenate([rows for rows, _ in seen])) == ids.tolist()
    assert rows_per_batch(blocks, 60, 25) == 60


# ---- the engine in blocks


def images(size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.rand(size, 1, 8, 8, generator=generator)
    return inputs, torch.arange(size) % 3, torch.randperm(1000, generator=generator)[:size]


def test_a_pass_of_one_record_gives_the_same_sum():
    """torch's InstanceNorm gives a single record in channels-last format a wrong gradient."""
    inputs, targets, ids = images(7)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 3, 6),
        nn.Flatten(),
    )  # fmt: skip
    whole, alone = (
        GradientEngine(model, cross_entropy, clipping=FlatClipping(9.0), micro_batch=rows)
        .clipped_sum(inputs, targets, draw_key=KEY, record_ids=ids).flat
        for rows in (7, 1)
    )  # fmt: skip
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-5)


def test_rows_that_fill_up_count_for_nothing():
    """A block of one record, which is not finite: counted once, and the sum is exactly zero."""
    inputs, targets, ids = images(3)
    engine = GradientEngine(
        small_layers(), cross_entropy, clipping=FlatClipping(0.2), blocks=Blocks(1, 30)
    )
    inputs[0] = torch.nan
    one = engine.clipped_sum(inputs[:1], targets[:1], draw_key=KEY, record_ids=ids[:1])
    assert (one.nonfinite, one.loss_sum) == (1, 0.0) and not one.flat.any()
    both = engine.clipped_sum(inputs, targets, draw_key=KEY, record_ids=ids)
    rest = engine.clipped_sum(inputs[1:], targets[1:], draw_key=KEY, record_ids=ids[1:])
    assert both.nonfinite == 1 and torch.equal(both.flat, rest.flat)


def test_an_id_of_two_records_is_refused():
    """A block of one id alone cannot be halved, and both records would have one noise."""
    inputs, targets, ids = images(5)
    engine = GradientEngine(
        small_layers(), cross_entropy, clipping=FlatClipping(0.2), blocks=Blocks(1, 3)
    )
    ids[4] = ids[0]
    with pytest.raises(UserError):
        engine.clipped_sum(inputs, targets, draw_key=KEY, record_ids=ids)


# ---- rounding


def test_the_slack_covers_its_bound():
    """What `sum_slack` states, over all sizes of a block and both sums."""
    for rows in range(1, MAX_BLOCK_RECORDS + 2):
        run = max_run_length(rows)
        assert run * rows <= 2**13 and run >= 4
        positions = rows * (rows + 2) * 2.0**-31
        sums = 2 * (run + 2) * 2.0**-24 * rows + positions + 2 * 2.0**38 * 2.0**-53
        moved = rows * assumed_move(torch.float32)
        # One record more: its own clipped gradient, the others' moves, both sums' rounding.
        slack = sum_slack(torch.float32) + rounding_slack(torch.float32)
        assert (1 + 2.0**-16 + sums) / (1 + slack) + moved <= 1
        wide = rows * assumed_move(torch.float64) + 2 * 2.0**26 * 2.0**-53
        assert (1 + 2.0**-40) / (1 + sum_slack(torch.float64) + 2.0**-40) + wide <= 1
    assert max_run_length(65_500) == 1


def climbing(records: int, width: int, up: float, down: float) -> Tensor:
    """Gradients (records, width) that fill a float32 sum to just below a power of two, where a last
    bit is worth half as much as just above, and then nearly cancel in pairs: one record more
    lifts the sum over the edge, and every later addition is rounded otherwise. up, down: the pair,
    found by search."""
    edge = 2.0 ** (np.floor(np.log2(records)) - 1)
    if records > 10_000:
        edge /= 2
    climb = int(edge / 0.99)
    gradients = torch.zeros(records, width)
    gradients[:climb, 0] = (edge - 1.6) / climb
    gradients[climb::2, 0] = up
    gradients[climb + 1 :: 2, 0] = -down
    return gradients


def sum_of(gradients: Tensor, blocks: Blocks | None, first: int = 0) -> Tensor:
    """The engine's sum of these gradients at clip norm 1: a bias's gradient is the target here.
    first: the id of the first record."""
    model = nn.Linear(1, gradients.shape[1])
    model.weight.requires_grad_(False)
    engine = GradientEngine(
        model, lambda out, target: (out * target).sum(1), clipping=FlatClipping(1.0), blocks=blocks
    )
    ids = torch.arange(first, first + len(gradients))
    zeros = torch.zeros(len(gradients), 1)
    return engine.clipped_sum(zeros, gradients, draw_key=KEY, record_ids=ids).flat.double()


@pytest.mark.parametrize(
    ("records", "width", "up", "down"),
    [
        (2048, 2, 0.6742027878761292, 0.6737940653743668),
        (65_500, 16, 0.7434514880180358, 0.7432373832210344),
    ],
)
def test_one_record_changes_the_executed_sum_by_at_most_c(records, width, up, down):
    """In float32 the change was 1.03 C and 6.3 C. The new record is the first, so that by
    position it moves all others."""
    gradients = climbing(records, width, up, down)
    new = torch.zeros(1, width)
    new[0, 0] = 0.9999
    both = torch.cat([new, gradients])
    assert float((sum_of(both, None) - sum_of(gradients, None)).norm()) <= 1.0
    blocks = Blocks.for_batches(records, 1.0)
    # In blocks the records keep their ids.
    change = float((sum_of(both, blocks) - sum_of(gradients, blocks, first=1)).norm())
    assert 0.9999 - 2 * sum_slack(torch.float32) <= change <= 1.0


# ---- norms that underflow


@pytest.mark.parametrize("positions", [0, 2])
@pytest.mark.parametrize("tiny", [1e-22, 1e-32])
def test_a_norm_that_underflows_does_not_escape_the_clip(tiny, positions):
    """Squares of tiny gradients are zero in float32; a gradient scale makes them large again."""
    torch.manual_seed(0)
    inputs = tiny * torch.randn(5, 6) if not positions else tiny * torch.randn(5, positions, 6)
    for model in (nn.Linear(6, 4, bias=False), nn.Sequential(nn.Linear(6, 4), nn.Tanh())):
        engine = GradientEngine(
            model, lambda out, target: out.flatten(1).sum(1), clipping=FlatClipping(1.0),
            perturbation=Perturbation(gradient_scale=1e30), micro_batch=5,
        )  # fmt: skip
        for i in range(5):
            one = engine.clipped_sum(inputs[i : i + 1], torch.zeros(1)).flat
            assert float(one.norm()) <= 1.0
