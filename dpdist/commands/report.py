"""dpdist report: write the HTML page again, from the files of a run; or one page over all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpdist.base.errors import UserError
from dpdist.commands.options import RUNS, Runs


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run folder, its name under --runs, or its archive's address; with --all: a "
            "folder of runs (default: --runs).",
        ),
    ] = None,
    runs: Runs = RUNS,
    every: Annotated[
        bool, typer.Option("--all", help="One page over all runs of a folder, side by side.")
    ] = False,
    images: Annotated[
        bool | None,
        typer.Option(
            "--images/--no-images",
            help="Whether the page shows test images; kept for later reports of the run (default: "
            "only those of built-in data).",
        ),
    ] = None,
) -> None:
    """Write report/index.html of a run: one file that opens offline."""
    if every:
        if images is not None:
            raise UserError("--images: belongs to the report of one run, not to --all")
        _overview(runs if run is None else Path(run))
        return
    if run is None:
        raise UserError("report: name a RUN, or give --all for one page over all runs")
    from dpdist import pipeline
    from dpdist.base import console
    from dpdist.runs.archive import open_anywhere

    folder = open_anywhere(run, runs)
    folder.require_trained()
    pipeline.report_stage(folder, images, dated=True)
    pipeline.archive_stage(folder)
    print(console.table(pipeline.summary(folder), title=f"run {folder.name}"))


def _overview(given: Path) -> None:
    from dpdist.base.reading import usable_path
    from dpdist.reports.overview import write_overview

    folder = usable_path(given)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of runs")
    print(write_overview(folder))
