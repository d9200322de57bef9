"""dpdist report: write the HTML page again, from the files of a run; or one page over all runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.base.errors import UserError
from dpdist.commands.options import RUNS, Runs

if TYPE_CHECKING:
    from dpdist.runs.folder import RunFolder


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
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="RUN2",
            help="A run of the same recipe without privacy, to show beside it on a page in "
            "private/; kept. No epsilon covers its figures.",
        ),
    ] = None,
) -> None:
    """Write report/index.html of a run: one file that opens offline."""
    if every:
        for name, given in (("images", images), ("baseline", baseline)):
            if given is not None:
                raise UserError(f"--{name}: belongs to the report of one run, not to --all")
        _overview(runs if run is None else Path(run))
        return
    folder = _trained(run, runs)
    from dpdist import pipeline  # only now: what is refused needs no data
    from dpdist.base import console

    if baseline is not None:
        _link(folder, baseline, runs)
    pipeline.report_stage(folder, images, dated=True)
    pipeline.archive_stage(folder)
    print(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
    if folder.beside_baseline.exists():
        typer.echo(
            f"with a run that no epsilon covers, not to be published: {folder.beside_baseline}"
        )


def _trained(run: str | None, runs: Path) -> RunFolder:
    if run is None:
        raise UserError("report: name a RUN, or give --all for one page over all runs")
    from dpdist.runs.archive import Archive, open_anywhere

    folder = open_anywhere(run, runs)
    folder.require_trained()
    Archive.check_key(folder)
    return folder


def _link(folder: RunFolder, name: str, runs: Path) -> None:
    from dpdist.reports import baseline
    from dpdist.runs.folder import open_run

    try:
        other = open_run(name, runs)
        other.require_trained()
    except UserError as error:
        how = baseline.making(folder)
        raise UserError(f"--baseline: {error}; this makes one: {how}") from None
    baseline.link(folder, other)


def _overview(given: Path) -> None:
    from dpdist.base.reading import usable_path
    from dpdist.reports.overview import write_overview

    folder = usable_path(given)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of runs")
    print(write_overview(folder))
