"""The device's generator is the CPU's: the same words, and the same noise for any shard."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpdist.core.errors import UserError
from dpdist.gradients import noise
from dpdist.gradients.noise import (
    add_device_noise,
    add_noise,
    device_standard_normal,
    standard_normal,
)
from dpdist.randomness import device_generators
from dpdist.randomness.keys import stream_words

KEY, CPU = bytes(range(32)), torch.device("cpu")


def blocks(key: bytes, first: int, count: int) -> np.ndarray:
    """Words as the stream has them: uint64 (8 * count,)."""
    made = device_generators.ChaChaBlocks(count, CPU).fill(key, first)
    return made.T.contiguous().numpy().view("<u8").reshape(-1)


def drawn(start: int, count: int, key: bytes = KEY) -> np.ndarray:
    return device_standard_normal(CPU, key, start, count).numpy()


# ---- words


@pytest.mark.parametrize("first", [0, 1, 2**31 - 9, 2**31, 2**32 - 17])
def test_words_are_the_cpu_s(first):
    """Also where the counter, as a signed number, changes its sign, and at the stream's end."""
    for key in (KEY, bytes(32), b"\xff" * 32):
        assert np.array_equal(blocks(key, first, 17), stream_words(key, 8 * first, 8 * 17))


def test_a_stream_does_not_begin_again():
    with pytest.raises(ValueError):
        blocks(KEY, 2**32 - 16, 17)
    with pytest.raises(ValueError):
        drawn(8 * 2**32, 1)
    with pytest.raises(ValueError):
        blocks(b"short", 0, 1)


def _rotated_with_sign(row, left, out):
    torch.bitwise_right_shift(row, 32 - left, out=out)
    return out.add_(row, alpha=1 << left)


@pytest.mark.parametrize(
    ("name", "value"),
    [("_DOUBLE_ROUNDS", 9), ("_COUNTER", 13), ("_SIGN", 1), ("_rotated", _rotated_with_sign)],
)
def test_a_device_that_computes_otherwise_is_refused(monkeypatch, name, value):
    device_generators.check_chacha20.__wrapped__(CPU)
    monkeypatch.setattr(device_generators, name, value)
    with pytest.raises(UserError):
        device_generators.check_chacha20.__wrapped__(CPU)


# ---- noise


@pytest.mark.parametrize(("piece", "size"), [(16, 2_501), (1 << 12, 40_101)])
def test_noise_is_the_cpu_s_to_the_bit_for_any_start_and_count(monkeypatch, piece, size):
    """Also across the pieces in which it is made, 128 entries each or 32,768."""
    monkeypatch.setattr(noise, "_DEVICE_PIECE_ON_CPU", piece)
    whole = standard_normal(KEY, 0, size)
    parts = [(0, 0), (1, 1), (2, 7), (33, 68), (127, 2), (size - 7_000 % size, 2), (5, size // 2)]
    for start, count in [*parts, *((number, size - number) for number in range(9))]:
        assert np.array_equal(drawn(start, count), whole[start : start + count])
    far = 2**33 + 11  # the block counter's upper half
    assert np.array_equal(drawn(far, 100), standard_normal(KEY, far, 100))


def test_shards_of_a_sum_get_the_noise_of_their_places_on_any_mixture_of_ways():
    total = np.linspace(-3, 3, 40_101)
    whole = add_noise(total, KEY, 1.5)
    for cuts in ([0, 40_101], [0, 1, 16_385, 40_101], [0, 20_000, 20_000, 33_333, 40_101]):
        parts = []
        for turn, (low, high) in enumerate(pairwise(cuts)):
            mine = torch.from_numpy(total[low:high].copy())
            there = add_device_noise(mine, KEY, 1.5, low)
            assert there.data_ptr() == mine.data_ptr()  # written over the sum
            parts.append(add_noise(total[low:high], KEY, 1.5, low) if turn % 2 else there.numpy())
        assert np.array_equal(np.concatenate(parts), whole)


def test_without_noise_a_sum_stays_what_it_is():
    total = torch.linspace(-1, 1, 50, dtype=torch.float64)
    assert torch.equal(add_device_noise(total.clone(), KEY, 0.0), total)


@pytest.mark.parametrize("std", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_is_released_from_a_sum_that_is_not_finite(std, bad):
    total = torch.zeros(40_000, dtype=torch.float64)
    total[3] = bad  # in the first of two pieces
    with pytest.raises(ValueError):
        add_device_noise(total, KEY, std)


def _planted(monkeypatch, first: int) -> None:
    """The first word of every pair, in both generators."""
    made = np.tile(np.array([first, 12345 << 40], dtype=np.uint64), (64, 1))
    in_blocks = torch.from_numpy(made.view("<i4").reshape(-1, 16)[:16].T.copy())
    monkeypatch.setattr(device_generators.ChaChaBlocks, "fill", lambda *_: in_blocks)
    reader = SimpleNamespace(read=lambda: made.reshape(-1).copy())
    monkeypatch.setattr(noise, "WordReader", lambda *_: reader)


@pytest.mark.parametrize("first", [0, 1, 2**32 - 1, 2**32, 2**63 + 1, 2**64 - 1])
def test_rare_words_are_continued_as_on_the_cpu(monkeypatch, first):
    _planted(monkeypatch, first)
    for start in (0, 8, 3):
        assert np.array_equal(drawn(start, 100), standard_normal(KEY, start - start % 8, 128)[
            start % 8 : start % 8 + 100
        ])  # fmt: skip
    if first == 0:  # 64 bits would end at 9.42
        assert np.hypot(*drawn(0, 2)) > 9.42 and len(np.unique(np.abs(drawn(0, 64)))) == 64


def test_a_device_whose_functions_are_too_coarse_is_refused(monkeypatch):
    noise.check_device_noise.__wrapped__(CPU)

    def in_float32(word, out):
        out.copy_(word.bitwise_xor(-(2**31)).float()).add_(2.0**31)

    monkeypatch.setattr(noise, "_unsigned", in_float32)
    with pytest.raises(UserError):
        noise.check_device_noise.__wrapped__(CPU)
