"""dpdist run: everything a recipe asks for."""

from __future__ import annotations

from typing import Annotated

import typer

from dpdist.commands.options import (
    RUNS,
    Archive,
    ArchivePrivate,
    Changes,
    DataRoot,
    Name,
    RecipeArgument,
    Runs,
    Workers,
)


def command(
    recipe: RecipeArgument,
    changes: Changes = None,
    name: Name = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    workers: Workers = None,
    archive: Archive = None,
    archive_private: ArchivePrivate = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan: epsilon, steps, memory, time.")
    ] = False,
) -> None:
    """Train privately, certify and report, as the recipe says. Continues what was interrupted."""
    from dpdist.base import console
    from dpdist.runs.recipe import read_changes, resolve

    resolved = resolve(
        recipe, changes=read_changes(changes), name=name, data_root=data_root, workers=workers,
        archive=archive, archive_private=archive_private,
    )  # fmt: skip
    from dpdist import pipeline

    if dry_run:
        rows = pipeline.dry_run(resolved, runs=runs, where=recipe)
        typer.echo(console.table(rows, title=f"plan of {resolved.name}"))
        return
    folder = pipeline.run(resolved, runs=runs, where=recipe)
    typer.echo(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
