"""dpdist release: the only writer of a run's release/ folder."""

from __future__ import annotations

from typing import Annotated

import typer

from dpdist.commands.options import RUNS, AsJson, RunArgument, Runs


def command(
    run: RunArgument,
    runs: Runs = RUNS,
    not_private: Annotated[
        bool,
        typer.Option("--not-private", help="Release although the run has no finite guarantee."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy what is safe to publish into release/: the model and its privacy card, nothing else."""
    from dpdist.base import console
    from dpdist.base.reading import read_json
    from dpdist.runs.folder import open_run

    folder = open_run(run, runs)
    folder.require_trained()
    from dpdist.commands.releasing import release

    files = release(folder, not_private=not_private)
    if as_json:
        card = read_json(folder.release / "privacy_card.json")
        released = {"run": folder.name, "files": [str(path) for path in files]}
        console.print_json(released | {"privacy_card": card})
        return
    for path in files:
        typer.echo(str(path))
