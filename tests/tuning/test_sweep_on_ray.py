"""Ordinary sweeps on Ray Tune: killed and continued, of a recipe and of a function."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.local_execution import Done, command
from support.processes import descendants, kill, start, wait_for
from support.recipes import write_recipe

from dpdist import pipeline
from dpdist.cluster.session import connect
from dpdist.core import optional_imports
from dpdist.core.errors import UserError
from dpdist.privacy.ledger import Ledger
from dpdist.reports.facts import read_facts
from dpdist.runs.folder import RunFolder
from dpdist.tuning.sweep import NOT_PRIVATE, read_sweep

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole, pytest.mark.long]

SPACE = {"training.learning_rate": {"choice": [0.1, 0.5]}}
SMALL = {
    "name": "small",
    "data": {"name": "digits", "max_train": 300},
    "model": "linear",
    "privacy": "none",
    "training": {"batch_size": 50, "steps": 4, "learning_rate": 0.5},
}


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Iterator[None]:
    """A session of Ray that the sweeps of this file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        log = tmp_path_factory.mktemp("ray") / "ray.log"
        with connect(log, cpus=2, worker_setup=optional_imports.install_torchvision_hook):
            yield


def sweep(monkeypatch, capsys, folder: Path, *more: object) -> Done:
    return command(monkeypatch, capsys, folder, "sweep", "r.yaml", "--space", "space.yaml", *more)


@pytest.mark.nightly
def test_not_private_stands_everywhere_and_a_killed_sweep_goes_on(
    tmp_path, monkeypatch, capsys, request
):
    """kill -9 once a trial has ended; the same command then does the others alone."""
    write_recipe(tmp_path, SMALL, training={"steps": 700})
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    process = start("sweep", "r.yaml", "--space", "space.yaml", "--samples", 4, "--seed", 1,
                    "--concurrent", 1, cwd=tmp_path, TUNE_GLOBAL_CHECKPOINT_S="1")  # fmt: skip
    folder = tmp_path / "runs" / "small-sweep"

    def ended() -> list[Path]:
        done = folder.glob("ray/experiment_state*.json")
        saved = any('\\"TERMINATED\\"' in path.read_text() for path in done)
        return sorted(folder.glob("trials/*/private/trained.json")) if saved else []

    wait_for(lambda: bool(ended()), process=process)
    kill(process, list(descendants(process.pid)))
    before = {path: path.stat().st_mtime_ns for path in ended()}
    assert 1 <= len(before) < 4 and not (folder / "trials.json").exists()
    request.getfixturevalue("session")
    words = ("--samples", 4, "--seed", 1, "--concurrent", 1)
    done = sweep(monkeypatch, capsys, tmp_path, *words)
    assert done.code == 0, done.err
    first = min(before)
    assert first.stat().st_mtime_ns == before[first]
    assert len(Ledger.read(first.with_name("ledger.jsonl")).attempts) == 1

    record, trials = read_sweep(folder)
    assert len(trials) == 4 and sum(trial.chosen for trial in trials) == 1
    best = next(trial for trial in trials if trial.chosen)
    assert best.metrics["accuracy"] == max(trial.metrics["accuracy"] for trial in trials)
    page = (folder / "report" / "index.html").read_text()
    for text in (done.out, done.err, record.privacy, (folder / "trials.json").read_text(), page):
        assert "NOT PRIVATE" in text
        assert "proved by" not in text and "(inf" not in text and "-DP" not in text
    assert "delta" not in done.out + done.err
    chosen = RunFolder(folder / best.folder)
    assert read_facts(chosen).privacy_statement.startswith("NOT PRIVATE")
    refused = sweep(monkeypatch, capsys, tmp_path, "--samples", 5, "--seed", 1)
    assert refused.code == 2 and "asked for otherwise (num_samples differ)" in refused.err


def test_a_function_is_swept_by_optuna_and_asha_into_ray_s_own_grid(session, tmp_path):
    pytest.importorskip("optuna")
    from ray.tune import ResultGrid

    def train(config: dict[str, float]) -> None:
        from ray import tune

        for step in range(1, 4):
            tune.report({"score": step - (config["x"] - 0.5) ** 2})

    grid = pipeline.sweep(
        train, {"x": {"uniform": [0.0, 1.0]}}, folder=tmp_path / "f", num_samples=4,
        searcher="optuna", scheduler="asha", seed=1,
    )  # fmt: skip
    assert isinstance(grid, ResultGrid) and len(grid) == 4 and not grid.errors
    assert repr(grid).startswith("NOT PRIVATE") and grid.privacy == NOT_PRIVATE
    best = grid.get_best_result()
    assert best.path == grid.best.path and best.metrics["score"] > 2.7
    _, trials = read_sweep(tmp_path / "f")
    assert [t.values["x"] for t in trials if t.chosen] == [best.config["x"]]
    assert "NOT PRIVATE" in (tmp_path / "f" / "report" / "index.html").read_text()


def test_a_sweep_whose_trials_all_fail_says_why_and_tries_them_again(session, tmp_path):
    mended = tmp_path / "mended"

    def train(config: dict[str, float]) -> dict[str, float]:
        if not mended.exists():
            raise ValueError("the disk was too small")
        return {"score": config["x"]}

    again = functools.partial(
        pipeline.sweep, train, {"x": {"choice": [1.0]}}, folder=tmp_path / "f", num_samples=2
    )
    with pytest.raises(UserError, match="all 2 trials failed, the first by: the disk was too"):
        again()
    mended.touch()
    assert [result.metrics["score"] for result in again().results] == [1.0, 1.0]
