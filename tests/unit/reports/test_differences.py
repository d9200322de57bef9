"""Two runs compared: pairs by input, one terms of certification, one data set, one direction."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from support.training import make, train

from dpdist import evaluation, pipeline
from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.certification.cohen import Cohen
from dpdist.certification.registry import settings_of
from dpdist.certification.statistics import ERROR, curve_difference, difference_interval
from dpdist.core.errors import UserError
from dpdist.evaluation import load_model
from dpdist.reports.compare import (
    accuracy_difference_rows,
    accuracy_differences,
    curve_difference_rows,
    curve_differences,
    set_baseline,
)
from dpdist.reports.results import load_results
from dpdist.runs.archive import publishable_files
from dpdist.runs.folder import RunFolder
from dpdist.training.records import data_source, load_test_records

SIZES = {"l2": (0.1,), "linf": ()}
# Inputs that only the later run gets right, that only the first one does, and all.
ONLY_LATER, ONLY_FIRST, ALL = range(0, 9), range(9, 12), range(40)


def certificates(path: Path, right: set[int], **changes: Any) -> table_reader.CertificateTable:
    """One certificate for each input of `indices`; of the wrong class where it is not right."""
    indices = changes.pop("indices", ALL)
    data, labels = changes.pop("data", "d"), changes.pop("labels", 0)
    settings: Any = settings_of({"sigma": 0.5, "n": 1000, **changes})
    counted = Cohen(sigma=settings.sigma, n=settings.n, noise=settings.noise, alpha=settings.alpha)
    rows = []
    for index in indices:
        selected = labels if index in right else 1 - labels
        hits = settings.n - 5
        counts = [hits, 5] if selected == 0 else [5, hits]
        verdict = counted.decide(
            [{"selected": selected, "histogram": counts}], counted.build_sampler(None, ())
        )
        rows.append(settings.table_row(index, labels, verdict, None))
    about = {
        "settings": {"n": settings.n, "mode": settings.mode, "noise": settings.noise,
                     "sigma": settings.sigma, "start": indices.start,
                     "every": indices.step, "max_inputs": len(indices)},
        "model": "m", "data": data, "seed": "s",
    }  # fmt: skip
    tables.write(tables.build(rows, about), path / "certificates.parquet")
    return table_reader.read(path / "certificates.parquet")


def run_of(folder: Path, *found: table_reader.CertificateTable, **evaluation: Any) -> Any:
    return SimpleNamespace(
        folder=RunFolder(folder), tables=list(found), input_shape=(4,), evaluation=evaluation
    )


def right(only: range) -> set[int]:
    """What one run gets right: its own inputs, and from 20 on those that both do."""
    return {*only, *range(20, 40)}


@pytest.fixture
def two(tmp_path: Path) -> list[Any]:
    first = certificates(tmp_path / "t1", right(ONLY_FIRST))
    later = certificates(tmp_path / "t2", right(ONLY_LATER))
    return [run_of(tmp_path / "first", first), run_of(tmp_path / "later", later)]


def test_difference_is_of_the_later_run_less_the_first(two: list[Any]) -> None:
    (row,), notes = accuracy_differences(two, SIZES)
    it = row.comparison
    assert notes == [] and row.run == "later" and row.size == "0.1"
    assert row.quantity == "vote (Cohen), gaussian 0.5, L2"
    assert (it.inputs, it.only_first, it.only_second) == (40, 3, 9)
    assert (it.first, it.second, it.difference) == (23 / 40, 29 / 40, 6 / 40)
    assert it.p_value == pytest.approx(stats.binomtest(9, 12, 0.5).pvalue)
    _, shown = accuracy_difference_rows("first", [row])
    assert shown[4:7] == ["57.50", "72.50", "+15.00"] and shown[9] == "3 : 9"
    low, high = (float(part) for part in shown[7].split(" to "))
    assert low <= 100 * it.low and high >= 100 * it.high
    ((back,), _) = accuracy_differences(two[::-1], SIZES)
    assert back.comparison.difference == -6 / 40


def test_all_intervals_share_one_error(two: list[Any]) -> None:
    (row,), _ = accuracy_differences(two, SIZES)
    shown = accuracy_difference_rows("first", [row] * 4)[1]
    low, high = difference_interval(3, 9, 40, ERROR / 4)
    assert [float(part) for part in shown[8].split(" to ")] == [
        math.floor(1e4 * low) / 100,
        math.ceil(1e4 * high) / 100,
    ]


def test_whole_curves_share_one_error_and_name_the_better(two: list[Any]) -> None:
    ((found, curve),) = curve_differences(two, {"l2": (0.1, 0.5), "linf": ()})
    assert (found.run, found.norm) == ("later", "l2") and curve.knots[[0, -1]].tolist() == [0, 0.5]
    alone = curve_difference(found.first, found.later, 0.5, ERROR)
    assert (curve.low == alone.low).all()
    several = curve_differences([two[0], two[1], two[1]], {"l2": (0.5,), "linf": (0.1,)})
    assert len(several) == 4
    shared = curve_difference(found.first, found.later, 0.5, ERROR / 4)
    assert (several[0][1].low == shared.low).all() and (shared.low < alone.low).any()
    _, shown = curve_difference_rows([(found, curve)])
    assert shown[2:5] == ["up to 0.5", "nowhere", "nowhere"]
    low, high = (float(part) for part in shown[5].split(" to "))
    assert low <= 100 * curve.low.min() and high >= 100 * curve.high.max()
    better = replace(curve, low=np.linspace(-1, 1, 64))
    assert curve_difference_rows([(found, better)])[1][3] == "above 0.25 to 0.5"


def test_what_does_not_hold_is_not_compared(two: list[Any], monkeypatch) -> None:
    """A certificate as printed, which attacks refute, is beside the others in a table of scores."""
    kind = type(two[0].tables[0])
    real = kind.sizes_in_norm

    def and_as_printed(table: Any, norm: str, numbers: int) -> list[Any]:
        found = real(table, norm, numbers)
        printed = [replace(each, name="as_printed", is_valid=False) for each in found]
        return [*found, *printed]

    monkeypatch.setattr(kind, "sizes_in_norm", and_as_printed)
    assert len(accuracy_differences(two, SIZES)[0]) == len(curve_differences(two, SIZES)) == 1


def test_pairs_are_made_by_input_and_not_by_row(tmp_path: Path, two: list[Any]) -> None:
    # The later run's share begins elsewhere, and has every other input.
    share = certificates(tmp_path / "t3", right(ONLY_LATER), indices=range(4, 40, 2))
    two[1].tables = [share]
    (row,), _ = accuracy_differences(two, SIZES)
    assert row.comparison.inputs == 18
    assert (row.comparison.only_first, row.comparison.only_second) == (1, 3)  # 10; 4, 6 and 8
    # Of several tables on the same terms, the two with the most inputs in common.
    two[1].tables.append(certificates(tmp_path / "t4", right(ONLY_LATER), indices=range(30)))
    (row,), _ = accuracy_differences(two, SIZES)
    assert row.comparison.inputs == 30


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"alpha": 0.01}, "alpha"), ({"sigma": 0.25}, "sigma"), ({"noise": "laplace"}, "noise"),
     ({"data": "other"}, "t3/"), ({"labels": 1}, "labels")],
)  # fmt: skip
def test_what_cannot_be_paired_is_refused(
    tmp_path: Path, two: list[Any], changes: dict[str, Any], key: str
) -> None:
    two[1].tables = [certificates(tmp_path / "t3", right(ONLY_LATER), **changes)]
    with pytest.raises(UserError, match=key):
        accuracy_differences(two, SIZES)


def plain(wrong: list[int], fingerprint: str = "d", inputs: int = 40) -> dict[str, Any]:
    return {
        "accuracy": (inputs - len(wrong)) / inputs, "inputs": inputs, "data": "points/test",
        "wrong": " ".join(map(str, wrong)), "fingerprint": fingerprint,
    }  # fmt: skip


def test_plain_accuracy_on_the_same_inputs(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / "first", **plain(list(range(9)))),
        run_of(tmp_path / "b", **plain([8, 9])),
        run_of(tmp_path / "c", **plain(list(range(9)))),
    ]
    rows, notes = accuracy_differences(runs, SIZES)
    assert notes == [] and [(row.run, row.quantity, row.size) for row in rows] == [
        ("b", "plain accuracy", ""), ("c", "plain accuracy", "")
    ]  # fmt: skip
    assert (rows[0].comparison.only_first, rows[0].comparison.only_second) == (1, 8)
    assert rows[1].comparison.p_value == 1
    # Two later runs: Holm's correction doubles the smaller p value.
    p = stats.binomtest(1, 9, 0.5).pvalue
    shown = accuracy_difference_rows("first", rows)
    assert shown[1][10:12] == [f"{p:.2g}", f"{2 * p:.2g}"] and shown[2][10:12] == ["1", "1"]
    with pytest.raises(UserError, match="first and b"):
        accuracy_differences([runs[0], run_of(tmp_path / "b", **plain([1], "other"))], SIZES)


def test_a_run_says_which_inputs_it_got_wrong(
    golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = golden("release", tmp_path)
    recipe = run.read_recipe()
    monkeypatch.setattr(evaluation, "_BATCH", 100)
    pipeline.evaluate_stage(recipe, run)
    facts = load_results(run)
    test = load_test_records(recipe, data_source(recipe))
    with torch.no_grad():
        answers = load_model(recipe, run)(test.batch(slice(None))).argmax(1)
    wrong = np.flatnonzero(answers.numpy() != np.asarray(test.labels))
    assert facts.evaluation and facts.evaluation["wrong"] == " ".join(map(str, wrong))
    assert len(test) > 100


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
    set_baseline(private, RunFolder(runs / "open"))
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
            set_baseline(folder, other)
        assert not folder.baseline.exists()
