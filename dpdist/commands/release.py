"""dpdist release: the only writer of a run's release/ folder."""

from __future__ import annotations

from typing import Annotated

import typer

from dpdist.commands.options import RUNS, RunArgument, Runs


def command(
    run: RunArgument,
    runs: Runs = RUNS,
    not_private: Annotated[
        bool,
        typer.Option("--not-private", help="Release although the run has no finite guarantee."),
    ] = False,
) -> None:
    """Copy what is safe to publish into release/: the model and its privacy card, nothing else."""
    from dpdist.commands.releasing import release
    from dpdist.runs.folder import open_run

    for path in release(open_run(run, runs), not_private=not_private):
        typer.echo(str(path))
