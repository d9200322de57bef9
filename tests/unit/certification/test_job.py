from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from scipy import stats
from support import certificates
from support.certificates import Data, with_changes
from support.networks import save_small_cnn

from dpdist.certification import job, table
from dpdist.certification.cohen import Cohen
from dpdist.core.errors import UserError

FakeData = partial(Data, count=12)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_cnn(tmp_path_factory.mktemp("model"))


SETTINGS = Cohen(sigma=0.5, n0=50, n=1130, batch=100, seed="5")


def raw(output: Path) -> bytes:
    return (output / job.TABLE).read_bytes()


@pytest.fixture(scope="module")
def reference(here: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference")
    certificates.certify(model_folder, FakeData(), SETTINGS, output, actors=1)
    return output


def test_the_table_is_cohens_procedure(reference: Path, model_folder: Path) -> None:
    rows = table.read(reference / job.TABLE).to_pylist()
    assert [row["index"] for row in rows] == list(range(12))
    assert any(row["prediction"] >= 0 for row in rows)
    for row in rows:
        assert sum(row["histogram"]) == row["n"] == 1130
        assert row["k"] == row["histogram"][row["selected"]]
        p = stats.beta.ppf(0.001, row["k"], 1130 - row["k"] + 1) if row["k"] else 0.0
        assert row["p_lower"] == pytest.approx(p, rel=1e-9)
        if p > 0.5:
            assert row["prediction"] == row["selected"]
            assert row["radius"] == pytest.approx(0.5 * stats.norm.ppf(p), rel=1e-9)
        else:
            assert (row["prediction"], row["radius"]) == (-1, 0.0)


def test_workers_and_chunks_change_no_byte(
    reference: Path, model_folder: Path, tmp_path: Path
) -> None:
    certificates.certify(model_folder, FakeData(), SETTINGS, tmp_path, actors=2, chunk_seconds=1e-3)
    assert raw(tmp_path) == raw(reference)


def test_an_interrupted_job_computes_only_what_is_missing(
    reference: Path, model_folder: Path, tmp_path: Path
) -> None:
    def stop_midway(done: int, total: int, rate: float) -> None:
        if done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certificates.certify(
            model_folder, FakeData(), SETTINGS, tmp_path, actors=2, progress=stop_midway,
            chunk_seconds=1e-3,
        )  # fmt: skip
    journal = tmp_path / "journal.jsonl"
    before = journal.read_bytes()
    assert before and not (tmp_path / job.TABLE).exists()
    # Another chunk size than before: the gaps are filled whatever they look like.
    certificates.certify(model_folder, FakeData(), SETTINGS, tmp_path, actors=1, chunk_seconds=0.02)
    assert journal.read_bytes().startswith(before)
    assert raw(tmp_path) == raw(reference)


def test_a_secret_seed_is_stored_and_kept(here: None, model_folder: Path, tmp_path: Path) -> None:
    settings = with_changes(SETTINGS, seed=None, max_inputs=2)
    first = certificates.certify(model_folder, FakeData(), settings, tmp_path, actors=1)
    (tmp_path / job.TABLE).unlink()
    (tmp_path / "journal.jsonl").unlink()
    again = certificates.certify(model_folder, FakeData(), settings, tmp_path, actors=1)
    assert again.equals(first)
    assert len(table.read_job_record(first)["seed"]) == 32


@pytest.mark.parametrize("key", ["sigma", "n", "seed", "data", "model"])
def test_results_of_another_certification_are_not_mixed(
    reference: Path, model_folder: Path, tmp_path: Path, key: str
) -> None:
    model, data, settings = model_folder, FakeData(), SETTINGS
    if key == "data":
        data = FakeData(fingerprint="other")
    elif key == "model":
        model = save_small_cnn(tmp_path, 4)
    else:
        settings = with_changes(SETTINGS, **{key: {"sigma": 0.25, "n": 1000, "seed": "7"}[key]})
    with pytest.raises(UserError, match=f"{key} was"):
        certificates.certify(model, data, settings, reference, actors=1)


@pytest.mark.parametrize("mode", ["target-radius", "anytime"])
def test_sequential_modes_are_independent_of_workers_too(
    here: None, model_folder: Path, tmp_path: Path, mode: str
) -> None:
    settings = with_changes(SETTINGS, n=3000, mode=mode, radii=(0.0, 0.25, 0.5))
    one = certificates.certify(model_folder, FakeData(), settings, tmp_path / "1", actors=1)
    certificates.certify(
        model_folder, FakeData(), settings, tmp_path / "2", actors=2, chunk_seconds=1e-3
    )
    assert raw(tmp_path / "1") == raw(tmp_path / "2")
    rows = one.to_pylist()
    assert any(row["n"] < 3000 for row in rows)
    for row in rows:
        assert row["k"] <= row["n"] <= 3000 == row["cap"]
        assert (row["prediction"] == -1) == (row["radius"] == 0.0 and row["p_lower"] <= 0.5)
        if mode == "target-radius" and row["prediction"] >= 0:
            assert row["radius"] in settings.radii and row["radius"] == row["target"]
            assert row["p_lower"] == pytest.approx(stats.norm.cdf(row["radius"] / 0.5))
        if mode == "anytime" and row["n"] < 3000 and row["k"] > 0.95 * row["n"]:
            assert row["radius"] >= 0.5
