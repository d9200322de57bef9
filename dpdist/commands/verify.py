"""dpdist verify: whether a release is whole, and its epsilon follows from what it names."""

from __future__ import annotations

import sys

import typer

from dpdist.commands.options import ReleaseArgument, Signer, TrustFactory


def command(
    release: ReleaseArgument,
    signer: Signer = None,
    trust_factory: TrustFactory = None,
) -> None:
    """Check sums, model and noise of a release, and compute its epsilon again.

    Exit code 1, and one line, for the first thing that does not hold.
    """
    from dpdist.base import console
    from dpdist.release.files import ReleaseError
    from dpdist.release.verifying import verify

    try:
        rows = verify(release, trusted_factory=trust_factory, signer=signer)
    except ReleaseError as error:
        print(f"dpdist: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    typer.echo(console.table(rows, title=f"release {release}"))
