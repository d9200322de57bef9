"""dpdist release: the only writer of a run's release/ folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpdist.base.fields import Licence
from dpdist.commands.options import RUNS, AsJson, RunArgument, Runs, flag, option, path_option


def command(
    run: RunArgument,
    runs: Runs = RUNS,
    not_private: Annotated[
        bool, flag("--not-private", "Release although the run has no finite guarantee.")
    ] = False,
    licence: Annotated[
        str | None, option("SPDX identifier of the model's licence.", Licence)
    ] = None,
    sign: Annotated[
        Path | None, path_option("Sign with this Ed25519 private key (PEM).", metavar="KEY")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what is safe to publish into release/: model, privacy card, model card, checksums."""
    from dpdist.base import console
    from dpdist.base.reading import read_json
    from dpdist.runs.folder import open_run

    folder = open_run(run, runs)
    folder.require_trained()
    from dpdist.commands.releasing import write_release

    files = write_release(folder, not_private=not_private, licence=licence, key=sign)
    if as_json:
        card = read_json(folder.release / "privacy_card.json")
        released = {"run": folder.name, "files": [str(path) for path in files]}
        console.print_json(released | {"privacy_card": card})
        return
    for path in files:
        typer.echo(str(path))
