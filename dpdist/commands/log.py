"""dpdist log: a finished run's figures for TensorBoard or MLflow."""

from __future__ import annotations

from typing import Annotated

import typer

from dpdist.commands.options import RUNS, RunArgument, Runs


def command(
    run: RunArgument,
    to: Annotated[
        list[str], typer.Argument(metavar="KIND:PLACE...", help="tensorboard:FOLDER, mlflow:URI.")
    ],
    runs: Runs = RUNS,
) -> None:
    """Write what may be published of a run: epsilon against step, scores on test data, certified
    accuracy. Nothing else is given to a tracker."""
    from dpdist.reports.tracking import track
    from dpdist.runs.folder import open_run

    track(open_run(run, runs), to)
