"""A run with noise of its own on the command line: certify, re-bound, predict, compare, release."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.local_execution import call as invoked
from support.threads import one_thread
from typer.testing import Result

from dpdist import pipeline
from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.worker import run_training

RECIPE = {
    "data": {"name": "digits", "public": 0.2},
    "model": {
        "name": "hgm-cnn",
        "options": {"filters": [8], "kernels": [3], "strides": [2], "dense": 16},
    },
    "training": {"batch_size": 100, "steps": 60, "learning_rate": 0.3, "momentum": 0.9},
    "certify": {"n": 400, "n0": 50, "alpha": 0.05, "max_inputs": 10, "radii": [0.02, 0.1]},
    "resources": {"certify_actors": 2},
}
# Fixed: what ten inputs show of a model depends on how its training went.
KEY = "5a" * 32
METHOD = {"name": "pixeldp"}
PRIVACY = {"noise_multiplier": 0, "clipping": "none", "delta": 1e-4, "run_key": KEY}


@pytest.fixture(scope="module")
def runs(here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recipe = parse_recipe(
        {**RECIPE, "name": "noisy", "method": METHOD, "privacy": PRIVACY}, "recipe"
    )
    at = RunFolder(folder / "noisy")
    with one_thread():
        run_training(prepare(recipe, at, "recipe"), Reducer(0, 1, torch.device("cpu")))
        pipeline.evaluate_stage(recipe, at)
    return folder


def call(*arguments: object) -> Result:
    result = invoked(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow
def test_a_run_is_certified_under_its_own_noise(runs: Path, tmp_path: Path) -> None:
    shown = call("certify", "noisy", "--runs", runs).output
    assert "as printed (claimed, does not hold)" in shown
    path = runs / "noisy/certificates/scores-hoeffding-l2-n-400-eta-0.95/certificates.parquet"
    got = tables.read(path)
    assert got.num_rows == 10 and set(got["mode"].to_pylist()) == {"scores"}
    # 0.3 or 0.4 with twelve seeds: three or four of ten.
    assert table_reader.from_arrow(got).certified_accuracy(1e-9, "exact", "l2") > 0.1

    again = call("certify", path, "--set", "certify.alpha=0.001")
    assert again.exit_code == 0
    stricter = tables.read(path.parent.with_name(f"{path.parent.name}-alpha-0.001") / path.name)
    assert (np.asarray(stricter["exact_l2"]) <= np.asarray(got["exact_l2"])).all()
    # Smoothed at the inputs as well: certified by both noises.
    call("certify", "noisy", "--runs", runs, "--sigma", "0.25", "--n", "200")
    smoothed = runs / "noisy/certificates/sigma-0.25-fixed-n-200/certificates.parquet"
    both = table_reader.read(smoothed)
    assert both.mode == "fixed" and both.job_record["hidden"] > 0
    assert [sizes.name for sizes in both.sizes] == ["cohen", "input", "hidden", "as_printed"]
    pipeline.report_stage(RunFolder(runs / "noisy"))
    facts = load_results(RunFolder(runs / "noisy"))
    summary = dict(facts.summary())
    assert summary["privacy"].startswith("NOT PRIVATE")
    assert "samples of its noise" in summary["test data"] and "no clip" in summary["training"]
