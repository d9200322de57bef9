"""A table that was edited by hand is refused: every row is made again from its counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from dpdist.certification.registry import class_of_table, settings_of
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.sequential import HITS, Anytime, TargetScores
from dpdist.core.errors import UserError

COMMON = {"n": 1130, "n0": 50, "alpha": 0.05, "batch": 100, "seed": "5", "backend": "eager"}
SECTIONS: dict[str, dict[str, Any]] = {
    "fixed": {"sigma": 0.5},
    "laplace": {"sigma": 0.5, "noise": "laplace"},
    "two-class": {"sigma": 0.5, "mode": "two-class"},
    "hoeffding": {"sigma": 0.5, "bound": "hoeffding"},
    "anytime": {"sigma": 0.5, "mode": "anytime", "radii": [0.1, 0.3]},
    "target": {"sigma": 0.5, "mode": "target-radius", "radii": [0.1, 0.2, 0.3]},
    "scores": {},
    "bernstein": {"bound": "bernstein"},
    "counts": {"bound": "counts"},
    "betting": {"bound": "betting"},
    "one-sided": {"bound": "betting", "one_sided": True},
    "target-scores": {"mode": "target-scores", "radii": [0.005, 0.02, 0.05]},
    "with hidden noise": {"sigma": 0.5, "hidden": True},
}


def model_of(folder: Path, noisy: bool) -> Path:
    return save_small_cnn(folder, noise=0.3 if noisy else None, times=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The table of each section."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        for name, section in SECTIONS.items():
            own = dict(section)
            noisy = own.pop("hidden", "sigma" not in own)
            model = folder / f"model-{noisy}"
            if not model.exists():
                model_of(model, noisy)
            certificates.certify(model, Data(10), settings_of({**COMMON, **own}), folder / name)
        yield {name: folder / name / job.TABLE for name in SECTIONS}


def edited(path: Path, to: Path, place: int, **changes: Any) -> Path:
    """A copy in which one row says something else."""
    table = tables.read(path)
    rows = table.to_pylist()
    rows[place] |= changes
    to.parent.mkdir(exist_ok=True, parents=True)
    tables.write(
        tables.build(rows, tables.read_job_record(table), table.schema.remove_metadata()), to
    )
    return to


def follows(path: Path, to: Path, place: int, **changes: Any) -> Path:
    """A copy in which one row has other counts, and says all that follows from these."""
    table = tables.read(edited(path, to, place, **changes))
    kind = class_of_table(table)
    try:
        made = kind.recompute_columns(table, table["alpha"][0].as_py())
    except ValueError:  # nothing does
        return to
    return edited(to, to, place, **{name: column[place].item() for name, column in made.items()})


def fewer_draws(row: dict[str, Any]) -> dict[str, Any]:
    """A hundred draws of the selected class are missing, and the row says so."""
    votes = list(row["histogram"])
    votes[row["selected"]] -= 100
    sums = [name for name in ("sums", "squares") if name in row]
    more = {name: [value // 2 for value in row[name]] for name in sums}
    return {"n": row["n"] - 100, "k": row["k"] - 100, "histogram": votes, **more}


def more_votes(row: dict[str, Any]) -> dict[str, Any]:
    """One draw more than there were said the selected class."""
    votes = list(row["histogram"])
    votes[row["selected"]] += 1
    return {"k": row["k"] + 1, "histogram": votes}


def more_hits_at_a_look(row: dict[str, Any]) -> dict[str, Any]:
    """More hits at the first look than draws until then, no more in all."""
    hits = [101, *row[HITS][1:]]
    return {HITS: [max(hits[: i + 1]) for i in range(len(hits))], "k": max(hits)}


def fewer_hits_later(row: dict[str, Any]) -> dict[str, Any]:
    """Fewer hits at a look than at the one before."""
    return {HITS: [*row[HITS][:-1], row[HITS][-2] - 1], "k": row[HITS][-2] - 1}


def scores_beyond_one(row: dict[str, Any]) -> dict[str, Any]:
    """Scores of a draw that add up to more than 1; each of them is below 1."""
    return {"sums": [row["n"] * SCORE_UNIT // 2] * 3, "squares": [0] * 3}


def squares_beyond_scores(row: dict[str, Any]) -> dict[str, Any]:
    return {"squares": [value * SCORE_UNIT + 1 for value in row["sums"]]}


def negative(row: dict[str, Any]) -> dict[str, Any]:
    """A class that was said less than never."""
    votes = list(row["histogram"])
    other = (row["selected"] + 1) % 3
    votes[other] = -1
    return {"histogram": votes}


def hits_beyond_draws(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["n"] + 1}


def draws_beyond_the_cap(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": row["cap"] + 100, "looks": row["cap"] // 100 + 2}


def draws_of_another_look(row: dict[str, Any]) -> dict[str, Any]:
    return {"looks": row["looks"] + 1}


OF_VOTES = ("fixed", "laplace", "two-class", "scores", "bernstein", "counts")
IMPOSSIBLE = {
    fewer_draws: OF_VOTES,
    more_votes: OF_VOTES,
    negative: OF_VOTES,
    scores_beyond_one: ("scores", "bernstein"),
    squares_beyond_scores: ("scores", "bernstein"),
    more_hits_at_a_look: ("target",),
    fewer_hits_later: ("target",),
    hits_beyond_draws: ("anytime", "target-scores"),
    draws_beyond_the_cap: ("anytime", "target-scores"),
    draws_of_another_look: ("anytime", "target-scores"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"), [(change, name) for change, names in IMPOSSIBLE.items() for name in names]
)
def test_counts_that_no_draws_can_have_are_refused(
    made: dict[str, Path], tmp_path: Path, change: Any, name: str
) -> None:
    """All else in the row follows from them, so nothing but the counts tells."""
    rows = tables.read(made[name]).to_pylist()
    place = next(
        i for i, row in enumerate(rows) if row["k"] > 200 and len(row.get(HITS) or "ab") > 1
    )
    target = tmp_path / "x.parquet"
    table_reader.read(follows(made[name], target, place))  # as it was made
    with pytest.raises(UserError, match="does not follow from its counts"):
        table_reader.read(follows(made[name], target, place, **change(rows[place])))


@pytest.mark.slow
def test_counts_of_target_radii_are_kept_at_each_look(
    made: dict[str, Path], tmp_path: Path
) -> None:
    table = tables.read(made["target"])
    rows = table.to_pylist()
    assert {row["radius"] for row in rows} >= {0.0, 0.3}
    for row in rows:
        assert len(row[HITS]) == row["looks"] and row[HITS][-1] == row["k"]
    # A radius that the counts of an earlier look decided may have too few at the last one.
    place = next(i for i, row in enumerate(rows) if row["looks"] > 2)
    for column, other in (("looks", 1), ("k", 0), ("n", 100)):
        with pytest.raises(UserError, match="does not follow from its counts"):
            table_reader.read(
                edited(made["target"], tmp_path / "x.parquet", place, **{column: other})
            )


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


def test_labels_are_those_of_the_data(made: dict[str, Path], tmp_path: Path) -> None:
    table = tables.read(made["fixed"])
    wrong = [{**row, "label": (row["label"] + 1) % 3} for row in table.to_pylist()]
    with pytest.raises(UserError, match="labels"):
        table_reader.from_arrow(tables.build(wrong, tables.read_job_record(table)))
    about = {k: v for k, v in tables.read_job_record(table).items() if k != "labels"}
    unsaid = table_reader.from_arrow(tables.build(wrong, about))
    assert unsaid.label.tolist() == [(label + 1) % 3 for label in Data(10).labels]
