"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one that comes along."),
]
ArchivedRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run folder, its name under --runs, or its archive's address."
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder, or its name under --runs.")
]
Runs = Annotated[
    Path,
    typer.Option("--runs", envvar="DPDIST_RUNS", help="The folder that holds the run folders."),
]
Name = Annotated[
    str | None, typer.Option("--name", help="Name of the run (default: the recipe's).")
]
DataRoot = Annotated[
    Path | None,
    typer.Option("--data-root", help="Folder that holds the data sets (data.root of the recipe)."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Training workers (resources.workers).")
]
Archive = Annotated[
    str | None,
    typer.Option("--archive", help="Copy the run there as it goes: s3://BUCKET/PREFIX."),
]
ArchivePrivate = Annotated[
    bool,
    typer.Option(
        "--archive-private",
        help="The private state too (run key, ledger, checkpoints): brings a lost folder back.",
    ),
]
# Of the commands that take inputs of the test split, on Ray actors.
Start = Annotated[int | None, typer.Option(help="First input.")]
Every = Annotated[int | None, typer.Option(help="Each how-manieth input.")]
MaxInputs = Annotated[int | None, typer.Option(help="At most this many inputs.")]
Actors = Annotated[int | None, typer.Option(help="Workers (default: all CPUs).")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the table (default: in the run folder).")
]

RUNS = Path("runs")
