"""dpdist compare: runs side by side, as Markdown tables and one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpdist.base.fields import Positive
from dpdist.commands.options import (
    RUNS,
    AsJson,
    Runs,
    file_path,
    numbers,
    option,
    path_option,
)


def command(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, by name or path.")],
    runs: Runs = RUNS,
    l2: Annotated[
        str | None, option("L2 sizes of certified accuracy (default: 0.1,0.25,0.5).")
    ] = None,
    linf: Annotated[
        str | None, option("L-infinity sizes of certified accuracy (default: 0.003,0.01,0.02).")
    ] = None,
    picture: Annotated[
        Path | None, path_option("Also draw all curves into this PNG file.", of=file_path(".png"))
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare trained runs: epsilon claimed and proved, accuracy clean, certified and attacked.

    Then each later run less the first, on the same inputs: differences with intervals and p values.
    """
    from dpdist.runs.folder import open_run

    folders = [open_run(name, runs) for name in names]
    from dpdist.reports import compare, differences  # only now: what is refused needs no tables
    from dpdist.reports.facts import read_facts

    sizes = {
        "l2": numbers(l2, "--l2", Positive) or compare.SIZES["l2"],
        "linf": numbers(linf, "--linf", Positive) or compare.SIZES["linf"],
    }
    facts = [read_facts(folder) for folder in folders]
    if picture is not None:
        compare.write_picture(facts, picture)
    if as_json:
        from dpdist.base import console
        from dpdist.reports.as_json import compared

        console.print_json(compared(facts, sizes))
        return
    grids = [compare.privacy_grid(facts)]
    grids += [compare.certified_grid(facts, norm, sizes[norm]) for norm in compare.NORMS]
    grids += [compare.attacked_grid(facts, norm) for norm in compare.NORMS]
    typer.echo("\n\n".join(compare.markdown(grid) for grid in grids if len(grid) > 1))
    for part in differences.section(facts, sizes):
        typer.echo(f"\n{part}")
