"""dpdist denoise: a run's denoiser before another classifier, or a denoiser before a run's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpdist.base.errors import UserError
from dpdist.base.fields import RunName, Text
from dpdist.commands.options import RUNS, DataRoot, RunArgument, Runs, option, path_option


def command(
    run: RunArgument,
    name: Annotated[str, option("Name of the new run folder.", RunName)],
    classifier: Annotated[
        Path | None, path_option("Model folder: the run's denoiser goes before it.")
    ] = None,
    denoiser: Annotated[
        Path | None, path_option("Model folder: goes before the run's classifier.")
    ] = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    saw: Annotated[
        str | None, option("What the other was trained on, if its folder does not say.", Text)
    ] = None,
) -> None:
    """Put a denoiser before a classifier, one of them a run's: a new run folder, no new cost.

    The new run is certified, attacked and released like any other; its privacy card says which part
    saw which data.
    """
    from dpdist import pipeline
    from dpdist.base import console
    from dpdist.runs.folder import RunFolder, open_run
    from dpdist.training.denoising import Part, put_together

    part: Part = "denoiser" if classifier is None else "classifier"
    other = denoiser if classifier is None else classifier
    if other is None or (classifier is not None and denoiser is not None):
        raise UserError("give --classifier or --denoiser: the part that is not the run's")
    folder = put_together(
        open_run(run, runs), part, other, RunFolder(runs / name), saw=saw, data_root=data_root
    )
    pipeline.evaluate_stage(folder.read_recipe(), folder)
    typer.echo(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
