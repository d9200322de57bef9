from __future__ import annotations

import hashlib
from typing import ClassVar

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from torch import nn

from dpdist import models
from dpdist.certification import job, worker
from dpdist.certification.inference import (
    ExecutedClassifier,
    Philox,
    choose_backend,
    differing_rows,
)
from dpdist.certification.noise import NOISES, Noise
from dpdist.certification.registry import settings_of
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.subject import Subject
from dpdist.certification.worker import HiddenNoiseCounter, InputNoiseCounter
from dpdist.certifying import test_inputs as inputs_with_labels
from dpdist.randomness import keys as units
from dpdist.randomness.keys import AesWords, StreamKeys

SOURCE = StreamKeys("test", "seed", "model", "data", "gaussian", 0.5)
DISTRIBUTIONS = {
    "gaussian": lambda s: stats.norm(scale=s),
    "laplace": lambda s: stats.laplace(scale=s / np.sqrt(2)),
    "uniform": lambda s: stats.uniform(-s * np.sqrt(3), 2 * s * np.sqrt(3)),
}


def draw(noise: Noise, count: int, key: bytes = b"k" * 32) -> np.ndarray:
    out = np.empty(count, np.float32)
    noise.draw(AesWords().fill(key, count + count % 2), out)
    return out


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("stream", ["aes", "philox"])
def test_noise_has_its_distribution_and_no_other(name: str, stream: str) -> None:
    # Kolmogorov-Smirnov on seeded draws: false failure 1e-4.
    values = draw(NOISES[name](0.5), 100_000)
    if stream == "philox":
        values = Philox().fill(NOISES[name](0.5), b"k" * 32, torch.empty(100_001)).numpy()
    assert stats.kstest(values, DISTRIBUTIONS[name](0.5).cdf).pvalue > 1e-4
    for wrong in (0.5 * 2 / 3, 0.5 * 1.04):
        assert stats.kstest(values, DISTRIBUTIONS[name](wrong).cdf).pvalue < 1e-4


@pytest.mark.parametrize("index", [None, 0, 12])
def test_the_key_of_a_unit_is_the_digest_of_its_name(index: int | None) -> None:
    """Tables that were begun go on with the same draws, and `verify --redraw` makes them again."""
    digest = hashlib.blake2b(digest_size=32, person=b"dpdist.certify.1")
    place = "bank" if index is None else str(index)
    parts = ("test", "seed", "model", "data", "gaussian", (0.5).hex(), place, "estimate", "3")
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part.encode())
    assert SOURCE.key(index, units.ESTIMATE, 3) == digest.digest()


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("count", [1, 2, 33, 32769, 100_001])
def test_pieces_are_those_of_the_whole(name: str, count: int) -> None:
    """Words of one stream from its beginning, and every number from its own words."""
    key, even = b"k" * 32, count + count % 2
    cipher = Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor()
    words = np.frombuffer(cipher.update(bytes(4 * even)), dtype="<i4")
    filled = AesWords()
    filled.fill(b"x" * 32, 3 * even)  # a longer one before leaves nothing behind
    assert np.array_equal(filled.fill(key, even), words)
    u = ((words & 0x7FFFFFFF).astype(np.float64) + 0.5) * 2.0**-31
    if name == "gaussian":
        length, angle = np.split(u, 2)[0], np.pi * np.split(words, 2)[1] * 2.0**-31
        length = np.sqrt(-2 * np.log(length)) * 0.5
        exact = np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count]
    elif name == "laplace":
        exact = np.where(words < 0, 1, -1) * np.log(u) * 0.5 / np.sqrt(2)
    else:
        exact = words * (0.5 * np.sqrt(3) * 2.0**-31)
    np.testing.assert_allclose(draw(NOISES[name](0.5), count), exact[:count], rtol=0, atol=3e-6)


class Threshold(nn.Module):
    """Class 1 where the first pixel exceeds a threshold: its probability is known exactly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = x.flatten(1)[:, :1] - 0.5
        return torch.cat([-score, score], 1)


def sampler(sigma: float, rows: int = 500) -> InputNoiseCounter:
    classify = ExecutedClassifier(Threshold(), "eager", [(rows, 1, 4, 4)])
    source = StreamKeys("test", "seed", "model", "data", "gaussian", sigma)
    return InputNoiseCounter(classify, NOISES["gaussian"](sigma), source, 2, (1, 4, 4))


def test_a_partial_block_is_the_beginning_of_the_whole_one() -> None:
    x = torch.rand(1, 4, 4)
    it = sampler(0.5)
    whole = it.histogram(x, 0, units.ESTIMATE, 7, 500, 500)
    part = it.histogram(x, 0, units.ESTIMATE, 7, 500, 120)
    assert whole.sum() == 500 and part.sum() == 120 and (part <= whole).all()
    assert (sampler(0.5).histogram(x, 0, units.ESTIMATE, 7, 500, 500) == whole).all()


class Moody(nn.Module):
    """Says something else when traced: the check must notice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x.flatten(1)[:, :3]
        return -logits if torch.jit.is_tracing() else logits


def test_a_form_that_disagrees_is_refused_and_named() -> None:
    spec, classify = choose_backend(Moody(), torch.randn(64, 1, 2, 2))
    assert spec.backend != "frozen"
    assert any(note.startswith("frozen: argmax differs") for note in spec.notes)
    batch = torch.randn(10, 1, 2, 2)
    assert (classify(batch) == batch.flatten(1)[:, :3].argmax(1)).all()


def test_a_number_that_is_none_is_no_tie() -> None:
    logits = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    assert differing_rows(logits, torch.tensor([0, 1])) == 1
    assert differing_rows(logits, torch.tensor([1, 1])) == 1  # it has no class, not the second
    assert differing_rows(logits, torch.tensor([-1, 1])) == 0
    assert differing_rows(logits, torch.tensor([-1, -1])) == 1
    with pytest.raises(ValueError):  # one answer is none to several rows
        differing_rows(logits, torch.tensor([0]))


class OwnRows(nn.Module):
    """Flattens by the number of rows, which a trace takes for a constant."""

    def __init__(self, ones: bool = False) -> None:
        super().__init__()
        self.ones = ones  # the wrong rows are no error either

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(len(x), -1)
        return rows[:, :3] * 1.0 if self.ones else rows @ torch.eye(4)[:, :3]


@pytest.mark.parametrize("ones", [False, True])
def test_a_trace_of_one_batch_size_is_refused(ones: bool) -> None:
    model, batch = OwnRows(ones), torch.randn(64, 1, 2, 2)
    assert choose_backend(model, batch)[0].backend == "frozen"
    for rows in ((64, 256), (64, 1)):
        spec, classify = choose_backend(model, batch, "frozen", rows)
        assert spec.backend != "frozen"
        for count in rows:
            inputs = torch.randn(count, 1, 2, 2)
            assert torch.equal(classify(inputs), model(inputs).argmax(1))


class Large(nn.Module):
    """Counts its passes, and looks at its batch where it is told to."""

    rows: ClassVar[list[int]] = []
    mixes = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Large.rows.append(len(x))
        wide = x.flatten(1) @ torch.ones(12, 3, dtype=x.dtype)
        return wide + self.mixes * wide.mean(0) + torch.arange(3)


@pytest.mark.parametrize(
    ("n", "limit", "batch", "mixes"),
    [(100, 100, 1, 0.0), (100, 100, 1, 1.0), (100, 2**41, 2, 1.0), (10_000, 100, 8, 0.0)],
)
def test_beyond_a_limit_of_work_each_draw_is_executed_alone(monkeypatch, n, limit, batch, mixes):
    """A network that is not checked is taken to look at its batch: each draw is executed alone."""
    monkeypatch.setattr(worker, "_FLOPS", 0)
    monkeypatch.setattr(worker, "_CHECK_FLOPS", limit)
    data = np.random.default_rng(0).random((1, 3, 2, 2), dtype=np.float32), np.array([2])
    settings, model = settings_of({"sigma": 0.25, "n": n}), Large()
    model.mixes = mixes
    subject = Subject(model, "0" * 32, "large")
    work = job.CertificationJob(subject, inputs_with_labels(data), settings)
    Large.rows.clear()
    if mixes and batch > 1:
        with pytest.raises(ValueError, match="its batch"):
            worker.probe(work._assignment)
        return
    spec = worker.probe(work._assignment)
    assert spec.batch == batch
    if batch == 1:
        assert set(Large.rows) <= {1, settings.n0}  # the class alone is chosen in company
        Large.rows.clear()
        assert models.find_batch_dependence(model, torch.rand(1, 3, 2, 2), alone=True) is None
        assert len(Large.rows) < 10


class Soft(nn.Module):
    """Two classes: nearly certain of class 1 where the first hidden number exceeds 1."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        score = 1e4 * (h[:, :1] - 1)
        return torch.cat([-score, score], 1)


def test_hidden_noise_has_its_scale_per_component() -> None:
    scale = torch.tensor([0.5, 7.0])
    it = HiddenNoiseCounter(nn.Identity(), Soft(), scale, SOURCE)
    x = torch.tensor([1.4, 0.0])
    got = it.sample_block(x, 0, 0, 21_000, 20_050)
    assert got.histogram.sum() == got.draws == 20_050
    # Two-sided exact test, false failure 1e-4; scales wrong by 10 % are rejected.
    hits = int(got.histogram[1])
    assert stats.binomtest(hits, 20_050, stats.norm.cdf(0.4 / 0.5)).pvalue > 1e-4
    for wrong in (0.45, 0.55):
        assert stats.binomtest(hits, 20_050, stats.norm.cdf(0.4 / wrong)).pvalue < 1e-4
    assert got.sums / SCORE_UNIT == pytest.approx(got.histogram, abs=25)
    assert got.squares / SCORE_UNIT**2 == pytest.approx(got.histogram, abs=25)
    assert (it.sample_block(x, 1, 0, 21_000, 20_050).sums != got.sums).any()
    assert (it.sample_block(x, 0, 1, 21_000, 20_050).sums != got.sums).any()
    for bad in ([0.0, 0.0], [-0.1, 1.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError):
            HiddenNoiseCounter(nn.Identity(), Soft(), torch.tensor(bad), SOURCE)
