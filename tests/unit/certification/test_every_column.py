"""A table that was edited by hand is refused: every row is made again from its counts.

No list of columns stands here: those of each table's own schema are edited, one row at a time and
all rows alike. What passes is what the docs list (benchmarks/results/releases.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import certificates
from support.certificates import Data
from support.local_execution import run_without_ray
from support.networks import save_small_cnn

from dpdist.certification import job, table_reader
from dpdist.certification import table as tables
from dpdist.certification.certificate import Certificate
from dpdist.certification.registry import settings_of
from dpdist.certification.sequential import Anytime, TargetScores
from dpdist.core.errors import UserError

COMMON = {"n": 1130, "n0": 50, "alpha": 0.05, "batch": 100, "seed": "5", "backend": "eager"}
SECTIONS: dict[str, dict[str, Any]] = {
    "fixed": {"sigma": 0.5},
    "anytime": {"sigma": 0.5, "mode": "anytime", "radii": [0.1, 0.3]},
    "target": {"sigma": 0.5, "mode": "target-radius", "radii": [0.1, 0.2, 0.3]},
    "scores": {},
    "target-scores": {"mode": "target-scores", "radii": [0.005, 0.02, 0.05]},
    "laplace": {"sigma": 0.5, "noise": "laplace"},
    "two-class": {"sigma": 0.5, "mode": "two-class"},
    "hoeffding": {"sigma": 0.5, "bound": "hoeffding"},
    "bernstein": {"bound": "bernstein"},
    "counts": {"bound": "counts"},
    "betting": {"bound": "betting"},
    "one-sided": {"bound": "betting", "one_sided": True},
    "with hidden noise": {"sigma": 0.5, "hidden": True},
}
# Columns of the draws themselves, which a reader has to trust; of the other sections: histogram.
SAMPLED = {
    "anytime": {"selected"},
    "target": {"selected", "hits"},
    "target-scores": {"selected", "k"},
    "betting": {"histogram", "squares"},
    "one-sided": {"histogram", "squares"},
    **{key: {"histogram", "sums", "squares"} for key in ("scores", "bernstein", "counts")},
}
BY_DAY = {"fixed", "target"}  # the others are dear, and tried by night


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The table of a section."""
    folder = tmp_path_factory.mktemp("made")

    def make(name: str) -> Path:
        own = dict(SECTIONS[name])
        noisy = own.pop("hidden", "sigma" not in own)
        if not (folder / name).exists():
            model = save_small_cnn(folder / f"model-{noisy}", noise=0.3 if noisy else None, times=2)
            certificates.certify(model, Data(10), settings_of({**COMMON, **own}), folder / name)
        return folder / name / job.TABLE

    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        yield make


def others(value: Any) -> Iterator[Any]:
    """Other values of the same kind, and none."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 0, 2 * value + 1)
    elif isinstance(value, float):
        yield from (value * 1.001 + 1e-6, value + 0.1, value - 0.1, 0.0, float("nan"), float("inf"))
    elif isinstance(value, str):
        yield from (f"{value} of mine", "", "none", "anytime", "laplace", "l1", "l2", "linf")
    elif isinstance(value, list):
        for place in {0, len(value) // 2, len(value) - 1} if value else ():
            for step in (1, -1):
                yield [*value[:place], value[place] + step, *value[place + 1 :]]
        yield from (value[:-1], [*value, 0], value[::-1], [])
    else:
        yield from (0, 1, 0.1, [1, 2, 3])
    yield None


def rows_to_edit(rows: list[dict[str, Any]]) -> list[slice]:
    """One that is certified, one that abstains, and all."""
    answers = [row["prediction"] >= 0 for row in rows]
    places = [answers.index(answer) for answer in sorted(set(answers))]
    return [*(slice(place, place + 1) for place in places), slice(None)]


def believed(path: Path, to: Path, rows: slice, **changes: Any) -> bool:
    """Whether readers take a table in which these rows say other values."""
    table = tables.read(path)
    changed = table.to_pylist()
    for row in changed[rows]:
        row |= changes
    about = tables.read_job_record(table)
    try:
        tables.write(tables.build(changed, about, table.schema.remove_metadata()), to)
        table_reader.read(to)
    except (UserError, pa.ArrowException, TypeError, OverflowError):  # or no such table can be
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each not in BY_DAY)) for each in SECTIONS],
)
def test_an_edit_of_any_column_is_refused_or_listed(
    made: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    found, passed, to = table_reader.read(made(name)), set(), tmp_path / "x.parquet"
    rows, tried = found.table.to_pylist(), 0
    for column in found.table.column_names:
        for some in rows_to_edit(rows):
            was = [row[column] for row in rows[some]]
            for value in others(was[0]):
                if any(repr(value) != repr(each) for each in was):
                    tried += 1
                    if believed(made(name), to, some, **{column: value}):
                        passed.add(column)
    assert passed <= SAMPLED.get(name, {"histogram"})
    assert tried > 5 * len(found.table.column_names)


@pytest.mark.slow
def test_rows_stand_in_the_order_of_their_inputs_and_labels_are_those_of_the_data(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    table = tables.read(made("fixed"))
    tables.write(table.take([1, 0, *range(2, table.num_rows)]), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet"):
        table_reader.read(tmp_path / "x.parquet")
    wrong = [{**row, "label": (row["label"] + 1) % 3} for row in table.to_pylist()]
    with pytest.raises(UserError, match="labels"):
        table_reader.from_arrow(tables.build(wrong, tables.read_job_record(table)))


@pytest.mark.parametrize("kind", [Anytime, TargetScores])
def test_only_whole_blocks_of_draws_can_have_been_counted(kind: type[Certificate]) -> None:
    """A row that leaves out the last misses, in the middle of a block, states a larger share."""
    cap, batch, many = 230, 50, range(1, 321)
    stops = [(50, 1), (100, 2), (150, 3), (200, 4), (230, 5)]  # the last block is cut by the cap
    claims = [(draws, looks) for draws in many for looks in range(1, 8)]
    columns = {
        "n": [draws for draws, _ in claims], "looks": [looks for _, looks in claims],
        "k": [draws - 1 for draws, _ in claims], "selected": [0] * len(claims),
        "cap": [cap] * len(claims),
    }  # fmt: skip
    about = {tables.KEY: json.dumps({"classifier": {"batch": batch}})}
    table = pa.table(columns).replace_schema_metadata(about)
    found = kind.consistent_counts(table)
    assert [claim for claim, sound in zip(claims, found, strict=True) if sound] == stops
