"""A kind of evaluation is its class and a line in the catalog; private results stay private."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from dpdist import pipeline
from dpdist.audits import registry
from dpdist.certification.evaluation import EvaluatedModel, Evaluation
from dpdist.cluster import job_folder
from dpdist.cluster.resumable_job import JobSpec, WorkItems
from dpdist.core.errors import UserError
from dpdist.core.files import read_table
from dpdist.publishing import write_release
from dpdist.reports.results import load_results
from dpdist.runs import archive as archives
from dpdist.runs.archive import Archive, export_text, unpack_export
from dpdist.runs.folder import RunFolder

SCHEMA = pa.schema([pa.field("index", pa.int64()), pa.field("score", pa.float64())])


class Counting(JobSpec):
    """The toy's job: each record's number of letters in its place."""

    kind, metadata_key, schema = job_folder.JobKind("toy", "toying"), b"dpdist.toy", SCHEMA

    def __init__(self, toy: Toy, subject: EvaluatedModel) -> None:
        self.table_file, self._toy = toy.file, toy
        self._data = subject.load_training_data() if toy.private else subject.test_data

    def identity(self) -> dict[str, Any]:
        return {"data": self._data.fingerprint, "settings": {"factor": self._toy.factor}}

    def initial_record(self, output: Path) -> dict[str, Any]:
        return {"seed": "s"}

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        return WorkItems(
            {f"record {i}": i for i in range(4)}, worker, job_record["settings"]["factor"]
        )


def worker(factor: int) -> Callable[[int], list[dict[str, Any]]]:
    return lambda index: [{"index": index, "score": float(factor * index)}]


@dataclass(frozen=True)
class Toy(Evaluation):
    factor: int = 3

    name: ClassVar[str] = "toy evaluation"
    file: ClassVar[str] = "toy.parquet"
    private: ClassVar[bool] = False

    @property
    def folder_name(self) -> str:
        return f"toy-{self.factor}"

    def job_spec(self, subject: EvaluatedModel) -> JobSpec:
        return Counting(self, subject)

    @classmethod
    def read(cls, path: Path) -> pa.Table:
        return read_table(path, {"index": (int, 0), "score": (float, 0)})

    @classmethod
    def summary_rows(cls, results: Sequence[pa.Table]) -> list[tuple[str, str]]:
        return [
            (cls.name, f"largest score {max(table['score'].to_pylist()):g}") for table in results
        ]


@dataclass(frozen=True)
class Membership(Toy):
    """Scores of training records."""

    name: ClassVar[str] = "membership scores"
    file: ClassVar[str] = "membership.parquet"
    private: ClassVar[bool] = True

    @property
    def folder_name(self) -> str:
        return f"membership-{self.factor}"


@pytest.fixture(scope="module")
def run(
    here: None, golden: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, RunFolder]]:
    """A trained run with a result of each, by the same job as attacks."""
    folder = golden("release", tmp_path_factory.mktemp("runs"))
    recipe = folder.read_recipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "EVALUATIONS", (*registry.EVALUATIONS, Toy, Membership))
        for kind in (Toy, Membership):
            found = pipeline.evaluation_stage(recipe, folder, kind())
            assert kind.read(found)["score"].to_pylist() == [0.0, 3.0, 6.0, 9.0]
        pipeline.report_stage(folder)
        yield recipe, folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_public_results_are_reported(run: tuple[Any, RunFolder]) -> None:
    _, folder = run
    assert (folder.path / "attacks/toy-3/toy.parquet").exists()
    assert ("toy evaluation", "largest score 9") in load_results(folder).summary()
    assert "largest score 9" in folder.report_file.read_text()


def test_private_results_leave_by_no_door(run: tuple[Any, RunFolder], tmp_path: Path) -> None:
    _, folder = run
    assert (folder.private / "attacks/membership-3/membership.parquet").exists()
    assert not [name for name in names(folder.path) if "membership" in name
                and not name.startswith("private/")]  # fmt: skip
    assert all(name != Membership.name for name, _ in load_results(folder).summary())
    assert "membership" not in folder.report_file.read_text()
    released = write_release(folder)
    assert released and "membership" not in "".join(names(folder.release_folder))
    # What `dpdist cluster fetch` brings home.
    unpack_export(export_text(folder), tmp_path / "fetched")
    assert "attacks/toy-3/toy.parquet" in names(tmp_path / "fetched")
    assert "membership" not in "".join(names(tmp_path / "fetched"))
    # An archive without private state.
    archive = Archive.claim(folder, f"file://{tmp_path}/archive", False)
    assert archive is not None
    archive.update()
    brought, _ = archives.fetch_publishable_files(
        f"file://{tmp_path}/archive", tmp_path / "archived"
    )
    assert "attacks/toy-3/toy.parquet" in names(brought)
    everything = [path for path in (tmp_path / "archive").rglob("*") if path.is_file()]
    assert not any(b"membership" in path.read_bytes() for path in everything)


def test_private_results_are_not_written_where_they_may_be_published(
    run: tuple[Any, RunFolder], tmp_path: Path
) -> None:
    recipe, folder = run
    for place in ("attacks/mine", "certificates", "private/../report"):
        with pytest.raises(UserError, match=place):
            pipeline.evaluation_stage(recipe, folder, Membership(2), folder.path / place)
    assert Toy().output_folder(folder, folder.path / "attacks/mine") == folder.path / "attacks/mine"
    for place in (folder.private / "mine", tmp_path / "elsewhere"):
        assert Membership(2).output_folder(folder, place) == place
