"""A run without privacy beside one with it: only where it was asked for, and what it says then."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.training import make, train

from dpdist import pipeline
from dpdist.core.errors import UserError
from dpdist.reports import compare
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


def test_what_is_no_baseline_is_refused(runs, private, tmp_path):
    own = RunFolder(runs / "open")
    for folder, other in (
        (own, private),
        (private, private),
        (private, RunFolder(tmp_path / "open")),
    ):
        with pytest.raises(UserError):
            compare.set_baseline(folder, other)
        assert not folder.baseline.exists()
