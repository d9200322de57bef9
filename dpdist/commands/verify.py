"""dpdist verify: whether a release is whole, and its epsilon follows from what it names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.base.errors import UserError
from dpdist.base.fields import Count
from dpdist.commands.options import DataRoot, ReleaseArgument, Signer, TrustFactory, option

if TYPE_CHECKING:
    from dpdist.data import Dataset
    from dpdist.release.reading import Release

_Redraw = Annotated[
    int | None,
    option("Count K inputs of each table of certificates again, by the test data.", Count,
           metavar="K"),
]  # fmt: skip


def command(
    release: ReleaseArgument,
    signer: Signer = None,
    trust_factory: TrustFactory = None,
    redraw: _Redraw = None,
    data_root: DataRoot = None,
) -> None:
    """Check sums, model and noise of a release, compute its epsilon again, and certified accuracy
    from the counts that it carries.

    Exit code 1, and one line, for the first thing that does not hold.
    """
    from dpdist.base import console
    from dpdist.release.files import ReleaseError
    from dpdist.release.verifying import verify

    if data_root is not None and redraw is None:
        raise UserError("--data-root: only counting again needs data; add --redraw K")
    try:
        rows = verify(
            release, trusted_factory=trust_factory, signer=signer, redraw=redraw or 0,
            data=lambda found: _test_data(found, data_root),
        )  # fmt: skip
    except ReleaseError as error:
        print(f"dpdist: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    typer.echo(console.table(rows, title=f"release {release}"))


def _test_data(release: Release, root: Path | None) -> Dataset:
    """Return the test split that a release names, from where the reader has it."""
    from dpdist import data
    from dpdist.training.records import source_at

    return data.load(source_at(release.about.data, root), "test")
