"""Keys, keyed sampling and keyed noise against exact distributions, and the traps they avoid."""

from __future__ import annotations

import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from dpdist.gradients.noise import add_noise, extend_rare_word, standard_normal
from dpdist.gradients.sampling import poisson_sample, worker_range
from dpdist.randomness.keys import WordReader, derive_key, key_id, new_run_key, stream_words

KEY = bytes(range(32))
FIRST = [-0.30008795403628297, 1.2928748160919075, -0.6054132183873209, -0.2889656753624945]


def test_stream_can_be_entered_anywhere():
    whole = stream_words(KEY, 0, 1000)
    for start, count in [(0, 1), (7, 9), (8, 8), (513, 200), (999, 1)]:
        assert np.array_equal(stream_words(KEY, start, count), whole[start : start + count])


def test_words_are_read_in_order():
    for start, count, most in [(0, 1000, 1000), (7, 300, 64), (8, 128, 64), (513, 5, 9)]:
        reader = WordReader(KEY, start, count, most)
        parts = [reader.read().copy() for _ in range(-(-count // most))]
        assert np.array_equal(np.concatenate(parts), stream_words(KEY, start, count))


def test_stream_is_chacha20():
    """RFC 8439, A.1: the first block of the all-zero key and nonce."""
    assert stream_words(bytes(32), 0, 2).tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_labels_are_separated():
    """Each group reads the same when one part of a label's encoding is left out: its length, its
    kind, the border between labels, the key."""
    other = bytes(reversed(KEY))
    groups = [
        [(KEY, "a", "b"), (KEY, "asb"), (KEY, "ab"), (KEY, "b", "a")],
        [(KEY, "a", 1), (KEY, "ai1"), (KEY, "a", "1"), (KEY, "a1")],
        [(KEY, "sample", 1, 2), (KEY, "sample", 12), (KEY, "sample", 1, "2"), (KEY, "sample", 2)],
        [(KEY, "a", ""), (KEY, "a"), (KEY, "", "a"), (KEY, "a", "", "")],
        [(KEY, "noise", 1), (KEY, "sample", 1), (other, "noise", 1), (KEY, "noise", -1)],
    ]  # fmt: skip
    for group in groups:
        assert len({derive_key(*labels) for labels in group}) == len(group)
    assert derive_key(KEY, "a", "b") == derive_key(KEY, "a", "b")


def test_a_derived_key_is_a_keyed_digest_of_its_labels():
    """A run that is continued, or replayed from its ledger, derives the keys that it had."""
    mac = hashlib.blake2b(key=KEY, digest_size=32, person=b"dpdist.derive")
    for kind, raw in ((b"s", b"noise"), (b"i", b"-1"), (b"s", b""), (b"i", b"300")):
        mac.update(kind + len(raw).to_bytes(8, "little") + raw)
    assert derive_key(KEY, "noise", -1, "", 300) == mac.digest()


def test_run_keys_are_fresh_and_their_ids_hide_them():
    keys = {new_run_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key_id(key) not in key.hex() for key in keys)


def test_the_id_of_a_key_is_a_short_digest_of_its_own():
    """Ledgers name keys by it, and are read after years."""
    wanted = hashlib.blake2b(KEY, digest_size=8, person=b"dpdist.keyid").hexdigest()
    assert key_id(KEY) == wanted and len(wanted) == 16
    assert key_id(bytes(32)) != wanted


def test_wrong_key_length_is_refused():
    with pytest.raises(ValueError):
        derive_key(b"short", "sample")


@pytest.mark.parametrize("given", [{}, {"batch_cap": 90, "records": 1000}], ids=["all", "cap"])
def test_batch_is_the_same_for_any_number_of_workers(given):
    whole = poisson_sample(KEY, 0, 1000, 0.1, **given)
    parts = [poisson_sample(KEY, *worker_range(1000, rank, 3), 0.1, **given) for rank in range(3)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert len(whole) == given.get("batch_cap", len(whole)) > 0


def test_batches_are_poisson():
    """Batch sizes over 4,000 keys follow Binomial(1000, 0.05), by chi-squared on six bins; each
    test fails falsely with probability 1e-4. The shuffled alternative (constant size) must be
    rejected."""
    sizes = np.array(
        [len(poisson_sample(derive_key(KEY, "s", t), 0, 1000, 0.05)) for t in range(4000)]
    )
    assert _binomial_p_value(sizes) > 1e-4
    assert _binomial_p_value(np.full(4000, 50)) < 1e-12
    # One seed for two ranks' own samplers: both halves get the same mask, and the variance doubles.
    halves = np.array(
        [2 * len(poisson_sample(derive_key(KEY, "t", t), 0, 500, 0.05)) for t in range(4000)]
    )
    assert _binomial_p_value(halves) < 1e-12


def _binomial_p_value(sizes: np.ndarray) -> float:
    edges = [0, 42, 46, 50, 54, 58, 1001]
    counts = np.histogram(sizes, bins=edges)[0]
    num_trials = stats.binom(1000, 0.05)
    probabilities = np.diff(num_trials.cdf(np.array(edges) - 1))
    return float(stats.chisquare(counts, probabilities * len(sizes)).pvalue)


def test_records_join_independently_of_each_other():
    """Over 4,000 keys no pair among 20 records is correlated: the largest of 190 correlations
    exceeds 0.08 with probability below 1e-4 (normal approximation, union bound)."""
    joins = np.zeros((4000, 20))
    for t in range(4000):
        joins[t, poisson_sample(derive_key(KEY, "p", t), 0, 20, 0.3)] = 1
    correlation = np.corrcoef(joins.T) - np.eye(20)
    assert np.abs(correlation).max() < 0.08


def test_cap_cuts_to_a_uniform_subset():
    """Each of 30 records is in 20 of 30: 3,000 keys, every frequency within 5 standard deviations
    (false failure below 2e-5)."""
    counts = np.zeros(30)
    for t in range(3000):
        batch = poisson_sample(derive_key(KEY, "c", t), 0, 30, 1.0, batch_cap=20, records=30)
        assert len(batch) == 20
        counts[batch] += 1
    assert np.abs(counts / 3000 - 2 / 3).max() < 5 * np.sqrt(2 / 9 / 3000)


@pytest.mark.parametrize("rate", [0.0, 1.1])
def test_bad_rate_is_refused(rate):
    with pytest.raises(ValueError):
        poisson_sample(KEY, 0, 10, rate)


def _accepts(noise: np.ndarray, std: float) -> bool:
    """Kolmogorov-Smirnov against N(0, std^2) at level 1e-6."""
    return stats.kstest(noise, "norm", args=(0, std)).pvalue > 1e-6


def test_noise_has_its_standard_deviation_and_no_other():
    """200,000 draws at std 1.7: accepted (false failure 1e-6), while 2/3 and 3/2 of it, and
    1/sqrt(2) of it (one of two ranks' shares missing), are rejected."""
    noise = add_noise(np.zeros(200_000), KEY, 1.7)
    assert _accepts(noise, 1.7)
    for wrong in (2 / 3, 3 / 2, 2**-0.5, 0.97):
        assert not _accepts(noise, 1.7 * wrong)


def test_noise_stream_can_be_entered_anywhere():
    """Also across the pieces in which it is drawn, 16,384 entries each, which begin where it is
    entered; and where processors transform a few numbers at the end by other instructions."""
    whole = standard_normal(KEY, 0, 40_101)
    parts = [(0, 101), (2, 7), (16_383, 2), (5, 16_384), (4_099, 32_770)]
    for start, count in [*parts, *((number, 40_101 - number) for number in range(1, 30))]:
        assert np.array_equal(standard_normal(KEY, start, count), whole[start : start + count])


def test_noise_is_box_muller_of_the_key_s_words():
    """Entry by entry from the words themselves, by another library's functions, up to their last
    bits; and the first of the key's numbers, so that an old run's noise stays what it was."""
    drawn = standard_normal(KEY, 3, 20_000)
    for place in (0, 1, 2, 8_191, 16_380, 16_381, 19_999):
        pair, sine = divmod(3 + place, 2)
        first, second = stream_words(KEY, 2 * pair, 2).tolist()
        length = math.sqrt(-2 * math.log((first + 1) / 2**64))
        turn = 2 * math.pi * (second // 2**11) / 2**53
        expected = length * (math.sin(turn) if sine else math.cos(turn))
        assert drawn[place] == pytest.approx(expected, rel=1e-13, abs=1e-15)
    assert standard_normal(KEY, 0, 4) == pytest.approx(FIRST, rel=1e-13)


def test_the_tail_reaches_beyond_what_any_delta_would_notice(monkeypatch):
    """The smallest first words, put into the stream: without a continuation of 64 bits the largest
    draw would be 9.4, and with 53 bits 8.57. The distribution of rare words is continuous at the
    edge."""

    def planted(first: int, tail: int):
        planted_words = np.array([first, 0], dtype=np.uint64)
        reader = SimpleNamespace(read=lambda: planted_words)
        monkeypatch.setattr("dpdist.gradients.noise.WordReader", lambda *_: reader)
        monkeypatch.setattr(
            "dpdist.gradients.noise.stream_words", lambda *_: np.array([tail], dtype=np.uint64)
        )
        return float(standard_normal(KEY, 0, 1)[0])

    assert planted(0, 0) == pytest.approx(np.sqrt(2 * 128 * np.log(2)))
    assert planted(0, 2**64 - 1) == pytest.approx(np.sqrt(2 * 64 * np.log(2)))
    assert 2 * stats.norm.sf(planted(0, 0)) < 1e-39
    assert planted(2**32 - 1, 2**63) == pytest.approx(planted(2**32, 0), rel=1e-9)
    assert planted(2**64 - 1, 0) == 0.0


def test_the_continuation_of_a_rare_word_has_a_key_of_its_own():
    """Words of the noise's own stream would depend on the pairs that they belong to."""
    for pair in (0, 7, 2**31):
        (more,) = stream_words(derive_key(KEY, "tail"), pair, 1).tolist()
        wanted = (5 + (more + 1) / 2**64) / 2**64
        assert extend_rare_word(5, KEY, pair) == pytest.approx(wanted, rel=1e-15, abs=0)


def test_no_entries_are_no_noise():
    assert standard_normal(KEY, 3, 0).shape == (0,)
    for count in (0, -1):
        words = stream_words(KEY, 3, count)
        assert words.dtype == np.uint64 and words.shape == (0,)
    assert add_noise(np.empty(0), KEY, 1.0).shape == (0,)


@pytest.mark.parametrize("std", [0.0, 1.5])
def test_a_noisy_sum_has_the_shape_of_the_sum_in_float64(std):
    total = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    noisy = add_noise(total, KEY, std)
    assert noisy.shape == (3, 4) and noisy.dtype == np.float64
    wanted = total.astype(np.float64) + std * standard_normal(KEY, 0, 12).reshape(3, 4)
    assert np.abs(noisy - wanted).max() <= (2.0**-24 if std else 0.0)
    with pytest.raises(ValueError):
        add_noise(np.array([1.0, np.nan]), KEY, std)


def test_sum_is_on_the_grid_and_close():
    total = np.linspace(-3, 3, 1001)
    noisy = add_noise(total, KEY, 1.5)
    grid = 2.0**-24
    assert np.array_equal(noisy / grid, np.round(noisy / grid))
    assert np.abs(noisy - total - 1.5 * standard_normal(KEY, 0, 1001)).max() <= grid
