"""dpdist pretrain: the public classifier or denoiser of a model, trained without privacy."""

from __future__ import annotations

from dpdist.base.rounding import percent
from dpdist.commands.options import Changes, DataRoot, RecipeArgument


def command(recipe: RecipeArgument, changes: Changes = None, data_root: DataRoot = None) -> None:
    """Train a recipe's public classifier or denoiser WITHOUT privacy, on public records only.

    Writes the folder that the recipe names, with the list of the records it saw.
    """
    import typer

    from dpdist.base import console
    from dpdist.runs.recipe import read_changes, refuse_unused, resolve

    resolved = resolve(recipe, changes=read_changes(changes), data_root=data_root)
    refuse_unused(resolved, recipe)
    from dpdist.training.pretrain import pretrain

    with console.progress("pretraining, WITHOUT privacy", "steps") as show:
        folder, score = pretrain(resolved, recipe, show)
    of = f"{percent(score)} % of the test split"
    if resolved.public is not None and resolved.model.denoiser is not None:
        of = f"noise {resolved.public.sigma:g} on the test split reduced to {score:.4f}"
    other = None if resolved.public is None else resolved.public.data
    if other is not None and other.told_apart != resolved.data.told_apart:
        of = f"learned the {other.told_apart} classes of {other.name}; its head is as it began"
    typer.echo(f"{folder}: {of}; trained on public records")
