"""The flagship benchmark: every row is a valid recipe, and its table says what the runs say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.benchmarks import load as load_benchmark
from support.local_execution import run_without_ray

from dpdist.cluster import session


@pytest.fixture
def flagship(monkeypatch):
    return load_benchmark("papers/dp-cert/run", monkeypatch)


@pytest.mark.slow
def test_a_row_behind_a_denoiser_runs(flagship, tmp_path, monkeypatch):
    run_without_ray(monkeypatch)
    monkeypatch.setattr(flagship, "connect", session.connect)
    flagship.main(["--quick", "--out", str(tmp_path), "--only", "denoised-1.0-0"])
    line = json.loads((tmp_path / "results.jsonl").read_text())
    assert line["row"] == "denoised-1.0" and line["certified"].keys() == {"0", "0.5", "1", "1.5"}
    described = json.loads((tmp_path / "runs/denoised-1.0-0/private/model/model.json").read_text())
    assert described["denoiser"]["name"] == "unet"


def certified(folder: Path, mode: str, every: int, radius: float = 0.3) -> float:
    """From the file itself: the share that is right and certified at the radius."""
    of = "" if mode == "fixed" else f"-r-{radius:g}-"
    (path,) = folder.glob(f"certificates/*{mode}{of}*/certificates.parquet")
    table = pq.read_table(path).to_pylist()
    assert {row["mode"] for row in table} == {mode}
    assert {row["index"] % every for row in table} == {0} and len(table) > 100 / every
    return np.mean([row["prediction"] == row["label"] and row["radius"] >= radius for row in table])
