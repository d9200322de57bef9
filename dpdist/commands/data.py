"""dpdist data: list, check and fetch data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpdist.commands.options import Changes, DataRoot, RecipeArgument, file_path

app = typer.Typer(help="List, check and fetch data sets.", no_args_is_help=True)


@app.command("list")
def list_data(data_root: DataRoot = None) -> None:
    """List the built-in data sets, those under --data-root, and those that can be fetched."""
    from dpdist.base.errors import UserError
    from dpdist.data.catalog import BUILT_IN, FETCHABLE

    for name in BUILT_IN:
        typer.echo(f"{name}\tbuilt in")
    if data_root is not None:
        if not data_root.is_dir():
            raise UserError(f"data root {data_root}: no such folder")
        for folder in sorted(path for path in data_root.iterdir() if path.is_dir()):
            files = len(list(folder.rglob("*.parquet")))
            typer.echo(f"{folder.name}\t{folder} ({files} Parquet files)")
    typer.echo(f"to fetch with `dpdist data fetch`: {', '.join(FETCHABLE)}")


@app.command("check")
def check(recipe: RecipeArgument, changes: Changes = None, data_root: DataRoot = None) -> None:
    """Read every record a recipe needs; complain with file and row, or say what was found."""
    from dpdist.runs.recipe import check_against_data, read_changes, resolve
    from dpdist.training.records import evaluation_data, source_of, training_data

    resolved = resolve(recipe, changes=read_changes(changes), data_root=data_root)
    source = source_of(resolved)
    train, test = training_data(resolved, source), evaluation_data(resolved, source)
    for split in (train, test):
        typer.echo(
            f"{split.name}: {len(split):,} records, inputs "
            f"{'x'.join(map(str, split.input_shape))}, {split.classes} classes"
        )
    section = resolved.data
    names = section.class_names
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    following = section.following
    typer.echo("classes: the next token" if following else f"classes: {shown}")
    if section.root is not None:
        columns = section.columns
        inputs = ", ".join(source.columns.inputs)
        label = "" if following else f"; label {columns.label}"
        typer.echo(f"columns: inputs {inputs}{label}")
    typer.echo(f"no private record is in {test.name}: compared by content")
    delta, batch = resolved.privacy.delta, resolved.training.batch_size
    typer.echo(f"privacy.delta {delta:g}: must be below 1 / {len(train):,}")
    typer.echo(f"training.batch_size {batch:,}: at most {len(train):,}")
    check_against_data(resolved, len(train), recipe)


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100 or svhn")],
    data_root: Annotated[
        Path, typer.Option("--data-root", callback=file_path(), help="Where to put it.")
    ] = Path("data"),
) -> None:
    """Download a public data set through torchvision and write it as Parquet."""
    from dpdist import data

    typer.echo(str(data.fetch(name, data_root, typer.echo)))


@app.command("make")
def make_data(
    name: Annotated[str, typer.Argument(help="docstrings")],
    data_root: Annotated[
        Path, typer.Option("--data-root", callback=file_path(), help="Where to put it.")
    ] = Path("data"),
) -> None:
    """Make a set of real texts from the docstrings of what is installed; nothing is downloaded."""
    from dpdist.base.errors import UserError
    from dpdist.data import docstrings

    if name != docstrings.NAME:
        raise UserError(f"data make: unknown {name!r}; there is {docstrings.NAME}")
    typer.echo(str(docstrings.make_docstrings(data_root, typer.echo)))
