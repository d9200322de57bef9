"""dpdist denoise: a run's denoiser before another classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpdist.commands.options import RUNS, RunArgument, Runs


def command(
    run: RunArgument,
    classifier: Annotated[Path, typer.Option(help="Model folder of the other classifier.")],
    name: Annotated[str, typer.Option(help="Name of the new run folder.")],
    runs: Runs = RUNS,
    saw: Annotated[
        str | None, typer.Option(help="What it was trained on, if its folder does not say.")
    ] = None,
) -> None:
    """Put a run's trained denoiser before another classifier: a new run folder, no new cost.

    The new run is certified, attacked and released like any other.
    """
    from dpdist import console, pipeline
    from dpdist.denoising import put_before
    from dpdist.runfolder import RunFolder, open_run

    folder = put_before(open_run(run, runs), classifier, RunFolder(runs / name), saw=saw)
    pipeline.evaluate_stage(folder.read_recipe(), folder)
    typer.echo(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
