"""One page over all runs of a folder: a table to sort, and each two of them side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from dpdist.base.errors import UserError
from dpdist.base.storage import write_atomic
from dpdist.reports import differences
from dpdist.reports.compare import NORMS, SIZES, attacked_grid, certified_grid, privacy_grid
from dpdist.reports.facts import Facts, read_facts
from dpdist.reports.in_short import in_short
from dpdist.reports.page import render
from dpdist.runs.folder import RunFolder

_PAIRS = 28  # of eight runs; more are for `dpdist compare`


@dataclass(frozen=True)
class Pair:
    """The second run less the first. rows: of `differences.grid`, the header first; notes: what is
    not compared, and why."""

    first: str
    second: str
    rows: list[list[str]] = field(default_factory=list)
    notes: Sequence[str] = ()


def write_overview(folder: Path) -> Path:
    """Write FOLDER/index.html over the finished runs in it; returns the page. The others are named
    with what keeps them from it. Raises UserError where there is no run at all."""
    places = sorted(path for path in folder.iterdir() if (path / "run.json").is_file())
    if not places:
        raise UserError(f"{folder}: no runs in this folder; `dpdist run` writes them to runs/")
    runs, left_out = [], []
    for place in places:
        try:
            runs.append(read_facts(RunFolder(place)))
        except UserError as error:
            left_out.append((place.name, str(error).splitlines()[0]))
    grids = [(f"Certified accuracy, {NORMS[n]}, in %", certified_grid(runs, n, SIZES[n]), 1)
             for n in NORMS]  # fmt: skip
    grids += [(f"Under attack, {NORMS[n]}, in %", attacked_grid(runs, n), 3) for n in NORMS]
    page = folder / "index.html"
    write_atomic(
        page,
        render(
            "overview.html",
            heading=f"Runs in {folder.resolve().name}",
            width="78rem",
            script=True,
            runs=[(facts, _link(facts), in_short(facts)) for facts in runs],
            privacy=privacy_grid(runs),
            grids=[grid for grid in grids if len(grid[1]) > 1],
            pairs=_pairs(runs),
            left_out=left_out,
        ),
    )
    return page


def _link(facts: Facts) -> str | None:
    """Where the run's own report lies, from the page."""
    return f"{quote(facts.folder.name)}/report/index.html" if facts.folder.report.exists() else None


def _pairs(runs: Sequence[Facts]) -> list[Pair]:
    """Each two runs, as `dpdist compare` compares them; of very many the first few."""
    return [_pair(*two) for two in itertools.islice(itertools.combinations(runs, 2), _PAIRS)]


def _pair(first: Facts, second: Facts) -> Pair:
    names = (first.folder.name, second.folder.name)
    try:
        rows, notes = differences.differences([first, second], SIZES)
    except UserError as error:
        return Pair(*names, notes=[f"{error}."])
    found = differences.grid(first.folder.name, rows) if rows else []
    return Pair(*names, found, [*notes, *([] if rows else ["Nothing to compare."])])
