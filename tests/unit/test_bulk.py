"""Results belong to the settings they were computed with, whichever file is removed or changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpdist.cluster import job_folder
from dpdist.cluster.resumable_job import (
    JobState,
    WorkItems,
    WorkUnit,
    _record_invalid_results,
    _resume_state,
)
from dpdist.core.errors import InvalidResultsError, UserError
from dpdist.core.files import ColumnSpec

KIND = job_folder.JobKind("certification", "certifying", frozenset({"radii"}))
SCHEMA = pa.schema(
    [pa.field("index", pa.int64(), nullable=False), pa.field("radius", pa.float64())]
)
COLUMNS: dict[str, ColumnSpec] = {"index": (int, 0), "radius": (float, 0)}
KEY = b"test"


def wanted(model: str = "A", **settings: Any) -> dict[str, Any]:
    return {"model": model, "data": "d", "settings": {"n": 10, "radii": (0.5,), **settings}}


def work(folder: Path, entry: Any = None, seed: str | None = None, **what: Any) -> list[Any]:
    """Open the folder as a job does, add one entry; what it held before."""
    with job_folder.open_job_folder(folder, KIND) as journal:
        begin = {"seed": seed or "drawn", "classifier": None}
        job_folder.pin_settings(journal, KIND, wanted(**what), seed, lambda: begin)
        before = list(journal.entries)
        journal.append(entry)
        return before


def test_other_settings_are_refused_by_name(tmp_path):
    work(tmp_path, 1)
    for changed in ({"model": "B"}, {"n": 11}, {"seed": "mine"}):
        with pytest.raises(UserError, match=f"{next(iter(changed))} was "):
            work(tmp_path, **changed)
    with job_folder.open_job_folder(tmp_path, KIND) as journal, pytest.raises(UserError) as refused:
        secret = replace(KIND, is_seed_secret=True)
        job_folder.pin_settings(journal, secret, wanted(), "mine", lambda: {})
    assert "seed" in str(refused.value) and "drawn" not in str(refused.value)
    assert work(tmp_path) == [1]


def test_a_journal_of_other_settings_is_refused(tmp_path):
    work(tmp_path / "a", "a row of A")
    work(tmp_path / "b", "a row of B", model="B")
    (tmp_path / "b" / job_folder.JOURNAL).write_bytes(
        (tmp_path / "a" / job_folder.JOURNAL).read_bytes()
    )
    with pytest.raises(UserError, match=r"settings\.json"):
        work(tmp_path / "b", model="B")


def test_no_journal_is_begun_before_its_settings_are_written(tmp_path, monkeypatch):
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job_folder, "write_json", killed)
        work(tmp_path / "a")
    assert work(tmp_path / "a") == []


class Halves(WorkItems):
    """One item of 6 units, whose rows are the numbers of its units."""

    units_per_item = 6

    def parse_entry(self, entry: dict[str, Any]) -> tuple[WorkUnit, list[int]]:
        return WorkUnit("x", *entry["units"]), list(range(*entry["units"]))

    def merge_partials(self, first: list[int], second: list[int]) -> list[int]:
        return first + second


def test_units_that_were_done_twice_count_once():
    state = JobState(Halves({"x": 0}, list, None))
    for units in ((4, 6), (0, 2), (1, 4), (0, 3), (4, 6), (5, 6)):
        state.add_entry({"units": units})
    assert state.missing_intervals("x") == [(2, 4)] and not state.finished_rows
    state.add_entry({"units": (2, 4)})
    assert state.finished_rows == {"x": [0, 1, 2, 3, 4, 5]} and state.missing_intervals("x") == []


def test_results_that_were_found_invalid_stay_so(tmp_path):
    path = tmp_path / job_folder.JOURNAL
    with (
        pytest.raises(InvalidResultsError),
        job_folder.Journal(path) as journal,
        _record_invalid_results(journal, tmp_path),
    ):
        raise InvalidResultsError("a tie")
    with pytest.raises(InvalidResultsError), job_folder.Journal(path) as journal:
        _resume_state(Halves({"x": 0}, list, None), journal, tmp_path)


def table(folder: Path, model: str = "A") -> Path:
    about = {**wanted(model), "format": 2, "seed": "s"}
    path = folder / "t.parquet"
    job_folder.write_table(
        job_folder.build_table([{"index": 1, "radius": 0.5}], SCHEMA, about, KEY), path
    )
    (folder / job_folder.SETTINGS).write_text(json.dumps(about))
    return path


def read(path: Path) -> pa.Table:
    return job_folder.read_table(path, COLUMNS, KEY)


def test_a_table_is_read_beside_its_own_settings_only(tmp_path):
    ours, theirs = table(tmp_path / "a"), table(tmp_path / "b", "B")
    assert read(ours).num_rows == 1
    (tmp_path / "a" / job_folder.SETTINGS).write_bytes(
        (tmp_path / "b" / job_folder.SETTINGS).read_bytes()
    )
    with pytest.raises(UserError, match=r"settings\.json"):
        read(ours)
    (tmp_path / "a" / job_folder.SETTINGS).unlink()
    assert job_folder.read_job_record(read(ours), KEY)["model"] == "A"  # it says itself
    assert read(theirs).num_rows == 1


def test_a_table_whose_settings_were_replaced_is_damaged(tmp_path):
    path = table(tmp_path)
    (tmp_path / job_folder.SETTINGS).unlink()
    found = pq.read_table(path)
    metadata = dict(found.schema.metadata)
    metadata[KEY] = metadata[KEY].replace(b'"A"', b'"B"')
    pq.write_table(found.replace_schema_metadata(metadata), path)
    with pytest.raises(UserError, match="damaged"):
        read(path)
