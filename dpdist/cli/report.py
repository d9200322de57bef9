"""Publish results (``dpdist report``) and models (``release``), and check releases (``verify``).

Only `release` writes a run's folder release/. These commands show and send only publishable values.
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
        help="A run folder, its name under --runs, or its archive's address. Give several runs to "
        "compare them, and none for an overview of all runs in --runs.",
    ),
]
_Images = Annotated[
    bool | None,
    typer.Option(
        "--images/--no-images",
        help="Whether to show test images, in this report and later ones of the run (default: only "
        "those of built-in data).",
    ),
]
_Baseline = Annotated[
    str | None,
    option(
        "A run of the same recipe without privacy, to compare with on a page in private/, now and "
        "in later reports. No epsilon covers its values.",
        metavar="RUN",
    ),
]
_TechnicalFile = Annotated[
    bool,
    flag(
        "--technical-file",
        "Also write report/technical-file.md, with the headings of the EU AI Act and GDPR 35(7).",
    ),
]
_L2 = Annotated[
    list[float] | None,
    option("L2 radius of certified accuracy (default: 0.1, 0.25, 0.5). You can repeat it."),
]
_Linf = Annotated[
    list[float] | None,
    option(
        "L-infinity radius of certified accuracy (default: 0.003, 0.01, 0.02). You can repeat it."
    ),
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

    For several runs, it prints epsilon claimed and proved, and accuracy clean, certified and
    attacked; then the differences of each later run from the first on the same inputs, with
    intervals and p values. Without a run, it writes an overview of all runs in --runs.
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
    """Write the page of a run and the requested files; print its summary unless `quiet`."""
    from dpdist.reports.tracking import check_tracker_address, track_run

    for address in log:
        check_tracker_address(address)
    from dpdist import pipeline  # after the checks, since it loads torch
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
        console.log(f"comparison with the baseline, do NOT publish: {folder.baseline_report}")
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
        raise UserError(f"--baseline: {error}; to train one, run: {how}") from None
    compare.set_baseline(folder, other)


def _write_overview(folder: Path) -> None:
    from dpdist.reports.html import write_overview

    if not folder.is_dir():
        raise UserError(f"--runs: must be a folder of runs, got {folder}")
    print(write_overview(folder))


def _compare(
    folders: Sequence[RunFolder],
    l2: list[float] | None,
    linf: list[float] | None,
    as_json: bool,
) -> None:
    """Print runs side by side, and the differences of each later run from the first."""
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
        bool, flag("--not-private", "Release the run although it has no finite epsilon.")
    ] = False,
    license: Annotated[
        str | None, option("SPDX identifier of the model's license.", License)
    ] = None,
    sign: Annotated[
        Path | None, path_option("Sign with this Ed25519 private key (PEM).", metavar="KEY")
    ] = None,
    factory: Annotated[
        str | None,
        option(
            "Import and execute this function to build the script's trained module.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    as_json: PublishableJson = False,
) -> None:
    """Write the publishable files to release/: model, privacy card, model card and checksums."""
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
        "Sample the counts of K inputs of each table of certificates again, on the test data.",
        Count,
        metavar="K",
    ),
]
_DataRoot = Annotated[
    Path | None, path_option("With --redraw: the folder of the test data.", "--data-root")
]


def verify_command(
    release: ReleaseArgument,
    signer: Signer = None,
    trust_factory: TrustFactory = None,
    redraw: _Redraw = None,
    data_root: _DataRoot = None,
) -> None:
    """Check the files, model and noise of a release, and recompute epsilon and certified accuracy.

    If a check fails, the command prints one line about it and exits with code 1.
    """
    from dpdist.core import console
    from dpdist.release.files import ReleaseError
    from dpdist.release.verify import verify_release

    if data_root is not None and redraw is None:
        raise UserError("--data-root: must be left out without --redraw K")
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
    """Return the test split that a release names, from the folder `root`."""
    from dpdist import data
    from dpdist.training.records import data_source_under

    return data.load(data_source_under(release.description.data, root), "test")
