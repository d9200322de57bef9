"""``dpdist report``, ``release`` and ``verify``: publish.

Only `release` writes a run's folder release/, and `verify` reads one. All other values that these
commands show or send are those that may be published.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.cli.options import (
    DEFAULT_RUNS,
    Log,
    PublishableJson,
    ReleaseArgument,
    RunArgument,
    Runs,
    Signer,
    TrustFactory,
    flag,
    option,
    path_option,
    run_names,
)
from dpdist.core.errors import ExitCode, UserError
from dpdist.core.fields import Count, License

if TYPE_CHECKING:
    from dpdist.data import Dataset
    from dpdist.release.bundle import Release
    from dpdist.runs.folder import RunFolder


# --- dpdist report ----------------------------------------------------------------------------


_Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        autocompletion=run_names,
        help="A run folder, its name under --runs, or its archive's address; several to compare; "
        "without one, all runs of the folder --runs.",
    ),
]
_Images = Annotated[
    bool | None,
    typer.Option(
        "--images/--no-images",
        help="Whether the page shows test images; kept for later reports of the run (default: "
        "only those of built-in data).",
    ),
]
_Baseline = Annotated[
    str | None,
    option(
        "A run of the same recipe without privacy, to show next to it on a page in private/; kept. "
        "No epsilon covers its values.",
        metavar="RUN",
    ),
]
_TechnicalFile = Annotated[
    bool,
    flag(
        "--technical-file",
        "Also write report/technical-file.md, by the EU's AI Act and GDPR 35(7).",
    ),
]
_L2 = Annotated[
    list[float] | None,
    option("L2 size of certified accuracy (default: 0.1, 0.25, 0.5). May be repeated."),
]
_Linf = Annotated[
    list[float] | None,
    option("L-infinity size of it (default: 0.003, 0.01, 0.02). May be repeated."),
]


def report_command(
    names: _Names = None,
    runs: Runs = DEFAULT_RUNS,
    images: _Images = None,
    baseline: _Baseline = None,
    technical_file: _TechnicalFile = False,
    log: Log = None,
    l2: _L2 = None,
    linf: _Linf = None,
    as_json: PublishableJson = False,
) -> None:
    """Write the report of a run, one HTML page that opens offline; or compare several runs.

    Of several runs it prints epsilon claimed and proved, accuracy clean, certified and attacked,
    and then each later run less the first, on the same inputs: differences with intervals and p
    values. Without a run it writes one page over all runs of the folder --runs.
    """
    if names is None or len(names) != 1:
        given = {
            "images": images,
            "baseline": baseline,
            "log": log,
            "technical-file": technical_file or None,
        }
        if wrong := [name for name, value in given.items() if value is not None]:
            raise UserError(f"--{wrong[0]}: only applies to the report of one run")
    if not names:
        _write_overview(runs)
    elif len(names) == 1:
        folder = _open_trained_run(names[0], runs)
        if baseline is not None:
            _set_baseline(folder, baseline, runs)
        _report(folder, images, technical_file, log or (), as_json)
        if as_json:
            _compare([folder], l2, linf, as_json)
    else:
        _compare([_open_trained_run(name, runs) for name in names], l2, linf, as_json)


def _report(
    folder: RunFolder, images: bool | None, technical_file: bool, log: Sequence[str], quiet: bool
) -> None:
    """Write the page of a run and what else was asked for; print its summary unless `quiet`."""
    from dpdist.reports.tracking import check_tracker_address, track_run

    for address in log:
        check_tracker_address(address)
    from dpdist import pipeline  # only now: what is refused needs no data
    from dpdist.core import console
    from dpdist.reports.results import load_results

    pipeline.report_stage(folder, images, reveal_date=True)
    pipeline.archive_stage(folder)
    if technical_file:
        from dpdist.reports.technical_file import write_technical_file

        console.log(f"technical file: {write_technical_file(folder)}")
    if not quiet:
        typer.echo(repr(load_results(folder)))
    if folder.baseline_report.exists():
        console.log(
            f"with a run that no epsilon covers, not to be published: {folder.baseline_report}"
        )
    if log:
        track_run(folder, log)


def _open_trained_run(run: str, runs: Path) -> RunFolder:
    from dpdist.runs.archive import open_run_or_archive

    folder = open_run_or_archive(run, runs)
    folder.require_trained()
    return folder


def _set_baseline(folder: RunFolder, name: str, runs: Path) -> None:
    from dpdist.reports import compare
    from dpdist.runs.folder import open_run

    try:
        other = open_run(name, runs)
        other.require_trained()
    except UserError as error:
        how = compare.baseline_command(folder)
        raise UserError(f"--baseline: {error}; this makes one: {how}") from None
    compare.set_baseline(folder, other)


def _write_overview(folder: Path) -> None:
    from dpdist.reports.html import write_overview

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of runs; name one with --runs")
    print(write_overview(folder))


def _compare(
    folders: Sequence[RunFolder],
    l2: list[float] | None,
    linf: list[float] | None,
    as_json: bool,
) -> None:
    """Print runs side by side, and each later one less the first on the same inputs."""
    from dpdist.core import console
    from dpdist.reports import compare
    from dpdist.reports.results import load_results

    sizes = {"l2": l2 or compare.SIZES["l2"], "linf": linf or compare.SIZES["linf"]}
    for norm, each in sizes.items():
        if wrong := [size for size in each if not 0 < size < math.inf]:
            raise UserError(f"--{norm}: must be > 0 and finite, got {wrong[0]:g}")
    facts = [load_results(folder) for folder in folders]
    if as_json:
        from dpdist.reports.export import comparison_as_json

        console.print_json(comparison_as_json(facts, sizes))
    elif len(facts) > 1:
        typer.echo("\n\n".join(compare.comparison_tables(facts, sizes)))


# --- dpdist release ---------------------------------------------------------------------------


def release_command(
    run: RunArgument,
    runs: Runs = DEFAULT_RUNS,
    not_private: Annotated[
        bool, flag("--not-private", "Release although the run has no finite guarantee.")
    ] = False,
    license: Annotated[
        str | None, option("SPDX identifier of the model's license.", License)
    ] = None,
    sign: Annotated[
        Path | None, path_option("Sign with this Ed25519 private key (PEM).", metavar="KEY")
    ] = None,
    factory: Annotated[
        str | None,
        option("Import this to build the script's trained module.", metavar="MODULE:FUNCTION"),
    ] = None,
    as_json: PublishableJson = False,
) -> None:
    """Write what is safe to publish into release/: model, privacy card, model card, checksums."""
    from dpdist.core import console
    from dpdist.core.files import read_json
    from dpdist.runs.folder import open_run

    folder = open_run(run, runs)
    folder.require_trained()
    from dpdist.publishing import write_release

    files = write_release(
        folder, not_private=not_private, license=license, key=sign, factory=factory
    )
    if as_json:
        card = read_json(folder.release_folder / "privacy_card.json")
        released = {"run": folder.name, "files": [str(path) for path in files]}
        console.print_json(released | {"privacy_card": card})
        return
    for path in files:
        typer.echo(str(path))
    from dpdist.certification.statistics import population_row
    from dpdist.reports.results import load_results

    for table in load_results(folder).tables:
        typer.echo(console.format_table([population_row(table)], title=table.title))


# --- dpdist verify ----------------------------------------------------------------------------


_Redraw = Annotated[
    int | None,
    option(
        "Count K inputs of each table of certificates again, by the test data.", Count, metavar="K"
    ),
]


_DataRoot = Annotated[
    Path | None, path_option("With --redraw: the folder that holds the test data.", "--data-root")
]


def verify_command(
    release: ReleaseArgument,
    signer: Signer = None,
    trust_factory: TrustFactory = None,
    redraw: _Redraw = None,
    data_root: _DataRoot = None,
) -> None:
    """Check sums, model and noise of a release, compute its epsilon again, and certified accuracy
    from the counts that it carries.

    Exit code 1, and one line, for the first thing that does not hold.
    """
    from dpdist.core import console
    from dpdist.release.files import ReleaseError
    from dpdist.release.verify import verify_release

    if data_root is not None and redraw is None:
        raise UserError("--data-root: only counting again needs data; add --redraw K")
    try:
        rows = verify_release(
            release,
            trusted_factory=trust_factory,
            signer=signer,
            num_redrawn_inputs=redraw or 0,
            load_data=lambda found: _test_data(found, data_root),
        )
    except ReleaseError as error:
        print(f"dpdist: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.REFUTED) from None
    typer.echo(console.format_table(rows, title=f"Release {release}"))


def _test_data(release: Release, root: Path | None) -> Dataset:
    """Return the test split that a release names, from where the reader has it."""
    from dpdist import data
    from dpdist.training.records import data_source_under

    return data.load(data_source_under(release.description.data, root), "test")
