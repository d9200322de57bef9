"""dpdist landscape: how flat is the loss around the trained parameters?"""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import Field

from dpdist.base.fields import Count, Number
from dpdist.commands.options import RUNS, DataRoot, RunArgument, Runs, option

Iterations = Annotated[int, Number, Field(ge=1, le=10_000)]


def command(
    run: RunArgument,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    inputs: Annotated[int, option("Test inputs used: the first so many.", Count)] = 1000,
    iterations: Annotated[int, option("Of the search for the worst loss.", Iterations)] = 10,
) -> None:
    """Sharpness and a filter-normalised loss picture on TEST data (on training data they would be
    private)."""
    from dpdist.base import console
    from dpdist.evaluation import load_model, require_model
    from dpdist.runs.folder import open_run
    from dpdist.runs.recipe import resolve

    folder = open_run(run, runs)
    recipe = resolve(folder.read_recipe(), data_root=data_root)
    require_model(recipe, folder)
    from dpdist.reports.figures import loss_landscape
    from dpdist.training.landscape import landscape

    measured = landscape(recipe, folder, load_model(recipe, folder), inputs, iterations)
    picture = folder.path / "report" / "landscape.png"
    picture.parent.mkdir(exist_ok=True)
    picture.write_bytes(loss_landscape(measured["alphas"], measured["losses"]))
    rows = [
        ("sharpness", f"{measured['sharpness']:.4g} (box {measured['box']:g}, at least)"),
        ("loss", f"{measured['loss']:.4g}, worst found in the box {measured['worst_loss']:.4g}"),
        ("data", f"first {measured['inputs']:,} of {measured['data']}"),
        ("picture", str(picture)),
    ]
    typer.echo(console.table(rows, title=f"landscape of {folder.name}"))
