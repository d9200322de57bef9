"""dpdist recipes: list those that come along, show one complete with defaults."""

from __future__ import annotations

from typing import Annotated

import typer

from dpdist.commands.options import Changes

app = typer.Typer(
    help="List the recipes that come with dpdist; `show NAME` prints one with all defaults.",
    invoke_without_command=True,
)


@app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the recipes that come with dpdist, each with the first line of its comment."""
    if context.invoked_subcommand is not None:
        return
    from dpdist.runs.recipe import RECIPES

    paths = sorted(RECIPES.glob("*.yaml"))
    width = max((len(path.stem) for path in paths), default=0)
    for path in paths:
        first = path.read_text().split("\n", 1)[0]
        typer.echo(f"{path.stem.ljust(width)}  {first.removeprefix('#').strip()}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name or file.")], changes: Changes = None
) -> None:
    """Print a recipe with every default filled in."""
    from dpdist.runs.recipe import read_changes, resolve

    typer.echo(resolve(name, changes=read_changes(changes)).to_yaml(), nl=False)
