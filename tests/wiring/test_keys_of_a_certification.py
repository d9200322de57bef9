"""Which random units a real certification uses: no draw serves two ends, each depends on all that
it is named by; and the table is what those draws say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from support import certificates
from support.certificates import Data, with_changes
from support.key_recorder import Stream, record_keys
from support.local_execution import run_without_ray
from support.networks import save_small_cnn

from dpdist import models
from dpdist.certification import job, table
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import ExpectedScores
from dpdist.certification.predict import Predictor
from dpdist.certification.worker import CLEAN_DRAWS
from dpdist.randomness.keys import AesWords, StreamKeys

N, N0, BATCH, COUNT = 250, 30, 100, 4
SETTINGS = Cohen(sigma=0.5, n0=N0, n=N, batch=BATCH, seed="5", backend="eager")


Images = partial(Data, count=COUNT, fingerprint="these")


@pytest.fixture
def certify(tmp_path, monkeypatch):
    """Certify without Ray; the units that were used, without those of the check batch."""
    run_without_ray(monkeypatch)
    made = iter(range(100))

    def run(
        settings: Any = SETTINGS, seed: int = 3, noisy: bool = False, **data: Any
    ) -> tuple[list[Stream], Path]:
        noise = 0.3 if noisy else None
        folder = save_small_cnn(tmp_path / f"model-{seed}-{noisy}", seed, noise=noise)
        output = tmp_path / f"certificates-{next(made)}"
        with monkeypatch.context() as patch:
            seen = record_keys(patch)
            certificates.certify(folder, Images(**data), settings, output)
        return [s for s in seen.streams if s.caller == "units"], output

    return run


def counted(units: list[Stream]) -> set[bytes]:
    return {s.key for s in units if not s.kind.startswith("check")}


def test_selecting_estimating_and_checking_never_share_a_draw(certify):
    units, _ = certify()
    names = {s.kind for s in units}
    selecting = {f"select/{i}/0" for i in range(COUNT)}
    estimating = {f"estimate/{i}/{b}" for i in range(COUNT) for b in range(3)}
    assert names == selecting | estimating | {"check/None/0"}
    by_name: dict[str, set[bytes]] = {}
    for unit in units:
        by_name.setdefault(unit.kind, set()).add(unit.key)
    assert all(len(keys) == 1 for keys in by_name.values())
    assert len(set().union(*by_name.values())) == len(names), "two units share a stream"


@pytest.mark.parametrize("mode", ["target-radius", "anytime"])
def test_the_sequential_modes_select_by_draws_of_their_own(certify, mode):
    units, _ = certify(with_changes(SETTINGS, mode=mode, radii=(0.1,)))
    selecting = {s.key for s in units if s.kind.startswith("select")}
    estimating = {s.key for s in units if s.kind.startswith("estimate")}
    assert len(selecting) == COUNT and not selecting & estimating
    assert len(estimating) == len({s.kind for s in units if s.kind.startswith("estimate")})


@pytest.mark.parametrize(("n", "batch"), [(N, BATCH), (5, 2)])  # two batches of clean answers
def test_expected_scores_select_by_draws_of_their_own(certify, n, batch):
    settings = ExpectedScores(n=n, n0=N0, batch=batch, seed="5", backend="eager")
    units, _ = certify(settings, noisy=True)
    selecting = {s.key for s in units if s.kind.startswith("select")}
    estimating = {s.key for s in units if s.kind.startswith("estimate")}
    # Clean answers draw the model's own noise by keys of their own.
    assert (len(selecting), len(estimating)) == (COUNT, (3 + CLEAN_DRAWS) * COUNT)
    assert not selecting & estimating
    assert not (selecting | estimating) & {s.key for s in units if s.kind.startswith("check")}


def test_draws_depend_on_seed_model_data_and_noise(certify):
    units, _ = certify()
    again, _ = certify()
    assert counted(again) == counted(units)
    others = {
        "seed": certify(with_changes(SETTINGS, seed="6")),
        "sigma": certify(with_changes(SETTINGS, sigma=0.25)),
        "noise": certify(with_changes(SETTINGS, noise="laplace")),
        "model": certify(seed=4),
        "data": certify(fingerprint="those"),
    }
    for name, (other, _) in others.items():
        assert not counted(other) & counted(units), f"another {name}, and some draws are the same"


def test_a_secret_seed_is_drawn_for_every_certification(certify):
    """After the model is frozen, from the system's generator, and it is on record."""
    settings = with_changes(SETTINGS, seed=None)
    (first, a), (second, b) = certify(settings), certify(settings)
    assert not counted(first) & counted(second)
    seeds = [json.loads((o / "settings.json").read_text())["seed"] for o in (a, b)]
    assert seeds[0] != seeds[1] and all(len(bytes.fromhex(s)) >= 16 for s in seeds)


def test_predictions_draw_fresh_secret_noise(tmp_path, monkeypatch):
    """Never the certification's, never the same twice, whatever seed the settings have."""
    model = models.load(save_small_cnn(tmp_path / "model")).eval()
    x = Images().batch(slice(0, 1))[0]
    seen = record_keys(monkeypatch)
    used = []
    for _ in range(2):
        seen.clear()
        predictor = Predictor(model, SETTINGS, 3, (1, 6, 6))
        predictor.certify(x)
        predictor.certify(x)
        predictor.predict(x)
        units = [s for s in seen.streams if s.caller == "units"]
        asked = [s.key for s in units if not s.kind.startswith("check")]
        assert len(asked) == len(set(asked)) == 3 * 3 + 2
        used.append(set(asked))
    assert not used[0] & used[1]


def test_the_table_is_what_the_draws_say(certify, tmp_path):
    """Every count again: the unit's stream, Gaussian noise from it, the model, Clopper-Pearson."""
    _, output = certify(with_changes(SETTINGS, alpha=0.01))
    model = models.load(tmp_path / "model-3-False").eval()
    model_hash = models.model_hash(tmp_path / "model-3-False")
    source = StreamKeys("certify", "5", model_hash, "these", "gaussian", 0.5)

    def votes(index: int, stage: str, block: int, rows: int, draws: int) -> np.ndarray:
        words = AesWords().fill(source.key(index, stage, block), rows * 36)
        noise = torch.empty(rows, 1, 6, 6)
        SETTINGS.smoothing_noise.draw(words, noise.numpy().ravel())
        with torch.inference_mode():
            answers = model(Images().batch(slice(index, index + 1)) + noise).argmax(1)[:draws]
        return np.bincount(answers.numpy(), minlength=3)

    for row in table.read(output / job.TABLE).to_pylist():
        i = row["index"]
        histogram = sum(votes(i, "estimate", b, BATCH, min(BATCH, N - b * BATCH)) for b in range(3))
        assert row["histogram"] == histogram.tolist() and row["n"] == N
        assert row["selected"] == votes(i, "select", 0, N0, N0).argmax()
        k = histogram[row["selected"]]
        lower = stats.beta.ppf(0.01, k, N - k + 1) if k else 0.0
        assert row["k"] == k and row["p_lower"] == pytest.approx(lower, rel=1e-9)
        right = lower > 0.5
        assert row["prediction"] == (row["selected"] if right else -1)
        radius = 0.5 * stats.norm.ppf(lower) if right else 0.0
        assert row["radius"] == pytest.approx(radius, rel=1e-9) and row["radius"] <= radius
        assert (row["label"], row["alpha"], row["sigma"]) == (i % 3, 0.01, 0.5)
