"""Results that are a mistake in units rather than a finding are named first."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.local_execution import call
from torch import nn

import dpdist
from dpdist.certification import statistics
from dpdist.certification.table import input_range, range_words
from dpdist.reports.summary import make_verdict
from dpdist.runs.folder import RunFolder

pytestmark = pytest.mark.whole


class Scaled(nn.Module):
    """A linear classifier of two features, on whatever scale they are."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0] - x[:, 1], x[:, 1] - x[:, 0]], 1) / self.scale


def points(scale: float) -> tuple[np.ndarray, np.ndarray]:
    x = scale * np.random.default_rng(0).random((30, 2), dtype=np.float32)
    return x, (x[:, 1] > x[:, 0]).astype(np.int64)


def certified(scale: float, tmp_path: Path, sigma: float = 0.25) -> dpdist.CertificateTable:
    # Of 30 fair coins one is certified by chance once in 30,000 times.
    settings = dpdist.Cohen(sigma=sigma, n=200, n0=20, alpha=1e-6, radii=(0.05, 0.1), seed="a")
    found = dpdist.certify(
        Scaled(scale), points(scale), settings, folder=tmp_path, executor="local"
    )
    assert isinstance(found, dpdist.CertificateTable)
    return found


def test_an_unscaled_table_is_doubted_and_a_scaled_one_is_not(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the same at all radii"):
        odd = certified(3000.0, tmp_path / "odd")
    (text,) = statistics.doubts(odd)
    assert "the same at all radii up to 0.1" in text
    assert not (odd.path.parent / "range.json").exists()  # held by nothing, so nowhere
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert statistics.doubts(certified(1.0, tmp_path / "fine", 0.1)) == []


def test_an_abstention_on_everything_is_doubted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="abstained on all 30 inputs"):
        drowned = certified(0.001, tmp_path, 5.0)
    (text,) = statistics.doubts(drowned)
    assert "abstained on all 30 inputs" in text and "sigma 5" in text


class _Inputs:
    def batch(self, rows: np.ndarray) -> torch.Tensor:
        return torch.arange(4000.0).reshape(2000, 2)[torch.from_numpy(rows)]


def test_the_range_is_that_of_the_chosen_inputs() -> None:
    assert input_range(_Inputs(), range(100, 200)) == (200.0, 399.0)
    assert input_range(_Inputs(), range(2000)) == (0.0, 3999.0)  # the last of many is looked at


def test_the_range_stands_beside_sigma() -> None:
    assert range_words(0, 1, 0.25) == "inputs lie in 0 to 1; sigma 0.25 is 25 % of that range"
    assert range_words(-1, 3, 1) == "inputs lie in -1 to 3; sigma 1 is 25 % of that range"
    assert range_words(0, 3234, None) == "inputs lie in 0 to 3234"


@pytest.mark.long
def test_a_report_begins_with_them(here: None, tmp_path: Path, monkeypatch) -> None:
    """A table of values to 3,000 and a model that always says one class, as a new user had it."""
    monkeypatch.chdir(tmp_path)
    x, y = points(3000.0)
    y[:] = np.arange(30) % 5 == 0
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "label": y}), "rows/test.parquet")
    torch.save({"1.weight": torch.zeros(2, 2), "1.bias": torch.tensor([1.0, -1.0])}, "net.pt")
    words = ("--model", "linear", "--weights", "net.pt", "--data", "rows")
    done = call("import", "odd", *words, "--sigma", "0.25")
    assert done.exit_code == 0, (done.output, done.exception)
    done = call("certify", "odd", "--n", "2000")
    assert done.exit_code == 0, (done.output, done.exception)
    (verdict,) = [line for line in done.stdout.splitlines()[2:3] if line.startswith("verdict")]
    assert "commonest class, 80.0 %" in verdict and "the same at all radii" in verdict
    words = range_words(float(x.min()), float(x.max()), 0.25)
    assert words in done.stdout and words in call("report", "odd").stdout
    pq.write_table(pa.table({"a": x[:, 0] + 7, "b": x[:, 1], "label": y}), "rows/test.parquet")
    again = call("report", "odd")  # other inputs lie there now: the table keeps those of its own
    assert again.exit_code == 0 and words in again.stdout
    facts = dpdist.read_facts(RunFolder(tmp_path / "runs" / "odd"))
    for shown in (again.stdout.splitlines()[2], str(facts).splitlines()[1]):
        assert "verdict" in shown and "commonest class, 80.0 %" in shown
    found = make_verdict(facts)
    assert found.severity == "caution"
    assert found.sentence.startswith("Certified accuracy is the same at all radii")
    assert "commonest class, 80.0 %" in found.sentence
