"""dpdist run: everything a recipe asks for."""

from __future__ import annotations

from typing import Annotated

import typer

from dpdist.commands.options import (
    RUNS,
    Archive,
    ArchivePrivate,
    AsJson,
    Changes,
    DataRoot,
    Name,
    RecipeArgument,
    Runs,
    Workers,
    flag,
    option,
)

_DryRun = Annotated[bool, flag("--dry-run", "Print the plan: epsilon, steps, memory, time.")]
_Log = Annotated[
    list[str] | None,
    option(
        "At the end, give what may be published to tensorboard:FOLDER or mlflow:URI.",
        None,
        "--log",
        metavar="KIND:PLACE",
    ),
]


def command(
    recipe: RecipeArgument,
    changes: Changes = None,
    name: Name = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    workers: Workers = None,
    archive: Archive = None,
    archive_private: ArchivePrivate = False,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
    log: _Log = None,
) -> None:
    """Train privately, certify and report, as the recipe says. Continues what was interrupted."""
    from dpdist.base import console
    from dpdist.runs.recipe import read_changes, resolve

    resolved = resolve(
        recipe, changes=read_changes(changes), name=name, data_root=data_root, workers=workers,
        archive=archive, archive_private=archive_private,
    )  # fmt: skip
    if log:
        from dpdist.reports.tracking import check_address

        for address in log:
            check_address(address)
    from dpdist import pipeline

    if dry_run:
        rows = pipeline.dry_run(resolved, runs=runs, where=recipe)
        if as_json:
            console.print_json({"run": resolved.name, "plan": dict(rows)})
        else:
            typer.echo(console.table(rows, title=f"plan of {resolved.name}"))
        return
    folder = pipeline.run(resolved, runs=runs, where=recipe)
    if log:
        from dpdist.reports.tracking import track

        track(folder, log, dated=False)
    if as_json:
        from dpdist.reports.as_json import published
        from dpdist.reports.facts import read_facts

        console.print_json(published(read_facts(folder)))
    else:
        typer.echo(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
