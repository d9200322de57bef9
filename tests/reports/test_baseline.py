"""A run without privacy beside one with it: only where it was asked for, and what it says then."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
from support.local_execution import command
from support.training import make, train

from dpdist import pipeline
from dpdist.core.errors import UserError
from dpdist.reports import compare
from dpdist.reports.results import load_results
from dpdist.runs.archive import publishable_files
from dpdist.runs.folder import RunFolder


def trained(runs: Path, name: str, **changes: object) -> RunFolder:
    recipe, folder = make(
        runs, name, data__max_train=40, training__batch_size=40, training__steps=3, model="linear",
        privacy__run_key=None, **changes,
    )  # fmt: skip
    train(recipe, folder)
    pipeline.evaluate_stage(recipe, folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    trained(place, "private")
    trained(place, "open", privacy__noise_multiplier=0.0, privacy__clipping="none",
            training__learning_rate=0.3)  # fmt: skip
    return place


@pytest.fixture
def private(runs: Path) -> RunFolder:
    folder = RunFolder(runs / "private")
    folder.baseline.unlink(missing_ok=True)
    return folder


@pytest.mark.slow
def test_nothing_of_it_may_leave(runs, private):
    def leaving() -> dict[str, bytes]:
        return {
            str(path): (private.path / path).read_bytes() for path in publishable_files(private)
        }

    pipeline.report_stage(private)
    before = leaving()
    compare.set_baseline(private, RunFolder(runs / "open"))
    pipeline.report_stage(private)
    assert '<h2 id="baseline">' in private.baseline_report.read_text()
    assert leaving() == before and "report/index.html" in before


def test_what_is_no_baseline_is_refused(runs, private, monkeypatch, capsys, tmp_path):
    own = RunFolder(runs / "open")
    for folder, other, why in (
        (own, private, "private"),
        (private, private, "--baseline"),
        (private, RunFolder(tmp_path / "open"), "--baseline"),
    ):
        with pytest.raises(UserError, match=why):
            compare.set_baseline(folder, other)
        assert not folder.baseline.exists()
    asked = ("report", "private", "--runs", runs)
    done = command(monkeypatch, capsys, runs, *asked, "--baseline", "nothing")
    assert done.code == 2 and "nothing" in done.err
    done = command(monkeypatch, capsys, runs, "report", "--runs", runs, "--baseline", "open")
    assert done.code == 2 and "--baseline: " in done.err


def test_the_command_that_makes_one_makes_one(runs, private, monkeypatch, capsys):
    done = command(monkeypatch, capsys, runs, "report", "private", "--runs", runs,
                   "--baseline", "nothing")  # fmt: skip
    made = re.sub(r"\s+", " ", done.err).partition("dpdist run ")[2]
    made = f"dpdist run {made.strip()}"
    assert made == compare.baseline_command(private)
    assert "tune" not in made and "budget" not in made
    from dpdist.runs.recipe import load_recipe, parse_changes

    said = shlex.split(made)
    recipe = load_recipe(
        Path(said[2]),
        parse_changes([said[i + 1] for i, word in enumerate(said) if word == "--set"]),
    )
    assert recipe.privacy.noise_multiplier == 0 and recipe.privacy.clipping == "none"
    assert math.isinf(load_results(RunFolder(runs / "open")).guarantee.epsilon)
