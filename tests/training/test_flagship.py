"""The flagship benchmark: every row is a valid recipe, and its table says what the runs say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.benchmarks import load as load_benchmark
from support.local_execution import run_without_ray

from dpdist.cluster import session
from dpdist.runs.recipe import load_recipe


@pytest.fixture
def flagship(monkeypatch):
    return load_benchmark("papers/dp-cert/run", monkeypatch)


@pytest.mark.slow
def test_every_row_changes_what_it_says(flagship, tmp_path):
    bench = flagship.Bench(tmp_path, None, quick=False)
    names = [name for row in flagship.ROWS for name in row.runs()]
    assert len(set(names)) == len(names)
    found = {row.name: load_recipe(bench.recipe(row, row.runs()[0])) for row in flagship.ROWS}
    whole = found["flagship"]
    assert whole.model.initial is not None and whole.certify.n == 10_000
    assert found["flagship-0.5"].certify.sigma == 0.5
    for row in flagship.ROWS:
        recipe = found[row.name]
        assert recipe.certify.sigma == row.sigma and recipe.privacy.delta == 1e-6
        assert set(flagship.PUBLISHED[row.task]) == {0.0, *recipe.certify.radii}
        if row.changes:
            unchanged = dataclasses.replace(row, changes={})
            differ = recipe.differing_keys(load_recipe(bench.recipe(unchanged, "other")))
            assert {key.split(".")[0] for key in row.changes} <= {k.split(".")[0] for k in differ}
    behind, plain = found["denoised-0.5"], found["shifts-0.5"]
    assert behind.public.denoiser.name == "unet" and plain.public.denoiser is None
    assert behind.model.initial.folder.name == "denoised-strokes-sigma-0.5"
    assert plain.model.initial.folder.name == "strokes-sigma-0.5"
    scenes, unwhitened = found["scenes"], found["scenes-plain"]
    assert scenes.model.initial.folder.name == "scenes-white-sigma-0.25" and scenes.model.mirrored
    assert unwhitened.model.initial.folder.name == "scenes-sigma-0.25"
    assert scenes.model.options["whiten"] and "whiten" not in unwhitened.model.options
    assert scenes.method.sigma == scenes.public.sigma == scenes.certify.sigma == 0.25
    assert found["no-public"].model.initial is None and found["no-public"].public is None


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
