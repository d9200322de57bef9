"""dpdist pretrain: the public classifier behind a denoiser, trained without privacy."""

from __future__ import annotations

from dpdist.commands.options import DataRoot, RecipeArgument


def command(recipe: RecipeArgument, data_root: DataRoot = None) -> None:
    """Train a recipe's public classifier WITHOUT privacy, on public records only.

    Writes the folder that model.classifier names, with the list of the records it saw.
    """
    import typer

    from dpdist import console, pipeline
    from dpdist.training.pretrain import pretrain

    resolved = pipeline.resolve(recipe, data_root=data_root)
    with console.progress("pretraining, WITHOUT privacy", "steps") as show:
        folder, accuracy = pretrain(resolved, recipe, show)
    typer.echo(f"{folder}: {100 * accuracy:.2f} % of the test split; trained on public records")
