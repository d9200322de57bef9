"""dpdist report: write the HTML page again, from the files of a run."""

from __future__ import annotations

from dpdist.commands.options import RUNS, ArchivedRunArgument, Runs


def command(run: ArchivedRunArgument, runs: Runs = RUNS) -> None:
    """Write report/index.html of a run: one file that opens offline."""
    from dpdist import pipeline
    from dpdist.base import console
    from dpdist.runs.archive import open_anywhere

    folder = open_anywhere(run, runs)
    folder.require_trained()
    pipeline.report_stage(folder)
    pipeline.archive_stage(folder)
    print(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
