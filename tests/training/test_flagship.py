"""The flagship benchmark: every row is a valid recipe, and its table says what the runs say."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.benchmarks import PAPERS
from support.benchmarks import load as load_benchmark
from support.local_execution import run_without_ray

from dpdist.cluster import session
from dpdist.core.errors import ClusterError
from dpdist.runs.recipe import load_recipe
from dpdist.tuning.search import NoModelError

pytestmark = pytest.mark.whole


@pytest.fixture
def flagship(monkeypatch):
    return load_benchmark("papers/dp-cert/run", monkeypatch)


@pytest.mark.long
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


@pytest.mark.long
def test_a_row_behind_a_denoiser_runs(flagship, tmp_path, monkeypatch):
    run_without_ray(monkeypatch)
    monkeypatch.setattr(flagship, "connect", session.connect)
    flagship.main(["--quick", "--out", str(tmp_path), "--only", "denoised-1.0-0"])
    line = json.loads((tmp_path / "results.jsonl").read_text())
    assert line["row"] == "denoised-1.0" and line["certified"].keys() == {"0", "0.5", "1", "1.5"}
    described = json.loads((tmp_path / "runs/denoised-1.0-0/private/model/model.json").read_text())
    assert described["denoiser"]["name"] == "unet"


@pytest.mark.long
@pytest.mark.nightly
def test_a_row_of_another_network_runs(flagship, tmp_path, monkeypatch):
    run_without_ray(monkeypatch)
    monkeypatch.setattr(flagship, "connect", session.connect)
    flagship.main(["--quick", "--out", str(tmp_path), "--only", "widest-0", "--all"])
    text = (tmp_path / "table.md").read_text()
    # Among the evenly spaced images, and among all, though both are certified in one mode.
    assert text.count("| noise 1.0, what clears the noise is trained too, epsilon 2.9 |") == 2
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    assert [line["row"] for line in lines] == ["widest"] * 2 and lines[0]["n"] < lines[1]["n"]
    assert all(line["certified"].keys() == {"0", "0.5", "1", "1.5"} for line in lines)


@pytest.mark.long
def test_the_table_shows_the_runs_beside_what_is_published(flagship, tmp_path, monkeypatch):
    run_without_ray(monkeypatch)
    monkeypatch.setattr(flagship, "connect", session.connect)
    arguments = ["--quick", "--out", str(tmp_path), "--only", "flagship-0", "--all"]
    flagship.main(arguments)
    text = (tmp_path / "table.md").read_text()
    spaced, whole, *_ = (
        [line.split(" | ") for line in part.splitlines()] for part in text.strip().split("\n\n")
    )
    folder = tmp_path / "runs" / "flagship-0"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    published, ours = spaced[2:]
    assert published[1:4] == ["2.9", "1e-6", ""] and ours[0] == "| public weights"
    assert ours[3] == f"{100 * evaluation['accuracy']:.1f}"
    assert ours[5] == f"{100 * certified(folder, 'fixed', every=30):.1f}"
    assert whole[0][0] == "| MNIST, sigma 0.25, all images"
    published, ours = whole[2:]
    assert published[3:] == ["98.0", "95.6", "92.8", "87.4 |"] and ours[1:3] == spaced[3][1:3]
    assert ours[3] == f"{100 * certified(folder, 'target', every=1, radius=0.001):.1f}"
    assert ours[4] == f"{100 * certified(folder, 'target', every=1):.1f}"
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    assert [line["certified"]["0.3"] for line in lines] == pytest.approx(
        [certified(folder, "fixed", every=30), certified(folder, "target", every=1)]
    )
    # What is done is not done again.
    files = [folder / "private" / "ledger.jsonl", *folder.glob("certificates/*/*.parquet")]
    before = [path.stat().st_mtime_ns for path in files]
    flagship.main(arguments)
    assert [path.stat().st_mtime_ns for path in files] == before
    assert (tmp_path / "table.md").read_text() == text


@pytest.mark.long
@pytest.mark.nightly
def test_all_images_are_of_every_run_that_is_named(flagship, tmp_path, monkeypatch):
    run_without_ray(monkeypatch)
    monkeypatch.setattr(flagship, "connect", session.connect)
    quick = ["--quick", "--out", str(tmp_path), "--only"]
    flagship.main([*quick, "strokes-0", "strokes-1"])
    flagship.main([*quick, "strokes-1", "--all"])
    title = "one answer for an image, no consistency, epsilon 2.9"
    text = (tmp_path / "table.md").read_text()
    assert text.count(f"| {title} |") == 1 and text.count(f"| {title}, 1 of 2 runs |") == 1
    flagship.main([*quick, "strokes-0", "strokes-1", "--all"])
    text = (tmp_path / "table.md").read_text()
    assert text.count(f"| {title} |") == 2
    folders = [tmp_path / "runs" / f"strokes-{k}" for k in (0, 1)]
    shares = [100 * certified(folder, "target", every=1) for folder in folders]
    row = text.rsplit(f"| {title} | ", 1)[1].splitlines()[0].split(" | ")
    assert row[3] == f"{np.mean(shares):.1f} ({min(shares):.1f} to {max(shares):.1f})"


def certified(folder: Path, mode: str, every: int, radius: float = 0.3) -> float:
    """From the file itself: the share that is right and certified at the radius."""
    of = "" if mode == "fixed" else f"-r-{radius:g}-"
    (path,) = folder.glob(f"certificates/*{mode}{of}*/certificates.parquet")
    table = pq.read_table(path).to_pylist()
    assert {row["mode"] for row in table} == {mode}
    assert {row["index"] % every for row in table} == {0} and len(table) > 100 / every
    return np.mean([row["prediction"] == row["label"] and row["radius"] >= radius for row in table])


@pytest.mark.parametrize(
    "error",
    [NoModelError("the search ended without a model"), ClusterError("2 workers need 2 CPUs")],
)
def test_a_row_that_fails_stops_no_other(flagship, tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr(flagship, "connect", lambda *_, **__: contextlib.nullcontext())
    made = []

    def make(bench, row, name):
        made.append(name)
        if name == "searched-0":
            raise error

    monkeypatch.setattr(flagship.Bench, "make", make)
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    words = ["--out", str(tmp_path), "--data-root", str(tmp_path / "data")]
    with pytest.raises(SystemExit):
        flagship.main([*words, "--only", "searched-0", "flagship-0"])
    assert made == ["searched-0", "flagship-0"]
    assert f"searched-0: {error}" in capsys.readouterr().err


def test_the_figure_draws_the_committed_results(flagship, tmp_path):
    flagship.main(["--figure", str(tmp_path / "figure.svg")])
    drawn = (tmp_path / "figure.svg").read_text()
    assert drawn == (PAPERS / "dp-cert" / "pictures" / "flagship.svg").read_text()
    line = next(x for x in map(json.loads, flagship.RESULTS.open()) if x["row"] == "epsilon-1")
    assert f"{100 * (1 - line['certified']['0.5']):.1f} % at {line['epsilon']:g}" in drawn
    lines = [{**line, "certified": {"0.5": 0.71}}]
    assert ">30</text>" in flagship.figure(lines)  # nothing is drawn lower than it is
