"""``dpdist report``, ``compare``, ``log``, ``release`` and ``verify``: publish.

Only `release` writes a run's folder release/, and `verify` reads one. All other figures that these
commands show or send are those that may be published.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.cli.options import (
    DEFAULT_RUNS,
    DataRoot,
    PublishableJson,
    ReleaseArgument,
    RunArgument,
    Runs,
    Signer,
    TrustFactory,
    flag,
    option,
    parse_numbers,
    path_callback,
    path_option,
)
from dpdist.core.errors import ExitCode, UserError
from dpdist.core.fields import Count, Licence, Positive

if TYPE_CHECKING:
    from dpdist.data import Dataset
    from dpdist.release.bundle import Release
    from dpdist.runs.folder import RunFolder


# --- dpdist report ----------------------------------------------------------------------------


def report_command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run folder, its name under --runs, or its archive's address; with --all: a "
            "folder of runs (default: --runs).",
        ),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    all_runs: Annotated[
        bool, typer.Option("--all", help="One page over all runs of a folder, side by side.")
    ] = False,
    images: Annotated[
        bool | None,
        typer.Option(
            "--images/--no-images",
            help="Whether the page shows test images; kept for later reports of the run (default: "
            "only those of built-in data).",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="RUN2",
            help="A run of the same recipe without privacy, to show beside it on a page in "
            "private/; kept. No epsilon covers its figures.",
        ),
    ] = None,
) -> None:
    """Write report/index.html of a run: one file that opens offline."""
    if all_runs:
        for name, given in (("images", images), ("baseline", baseline)):
            if given is not None:
                raise UserError(f"--{name}: belongs to the report of one run, not to --all")
        _write_overview(runs if run is None else Path(run))
        return
    folder = _open_trained_run(run, runs)
    from dpdist import pipeline  # only now: what is refused needs no data
    from dpdist.core import console

    if baseline is not None:
        _set_baseline(folder, baseline, runs)
    pipeline.report_stage(folder, images, reveal_date=True)
    pipeline.archive_stage(folder)
    print(console.format_table(pipeline.summary(folder), title=f"run {folder.name}"))
    if folder.baseline_report.exists():
        typer.echo(
            f"with a run that no epsilon covers, not to be published: {folder.baseline_report}"
        )


def _open_trained_run(run: str | None, runs: Path) -> RunFolder:
    if run is None:
        raise UserError("report: name a RUN, or give --all for one page over all runs")
    from dpdist.runs.archive import Archive, open_run_or_archive

    folder = open_run_or_archive(run, runs)
    folder.require_trained()
    Archive.check_archive_key(folder)
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


def _write_overview(folder_path: Path) -> None:
    from dpdist.core.files import validate_path
    from dpdist.reports.html import write_overview

    folder = validate_path(folder_path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of runs")
    print(write_overview(folder))


# --- dpdist compare ---------------------------------------------------------------------------


def compare_command(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, by name or path.")],
    runs: Runs = DEFAULT_RUNS,
    l2: Annotated[
        str | None, option("L2 sizes of certified accuracy (default: 0.1,0.25,0.5).")
    ] = None,
    linf: Annotated[
        str | None, option("L-infinity sizes of certified accuracy (default: 0.003,0.01,0.02).")
    ] = None,
    picture: Annotated[
        Path | None,
        path_option("Also draw all curves into this PNG file.", callback=path_callback(".png")),
    ] = None,
    as_json: PublishableJson = False,
) -> None:
    """Compare trained runs: epsilon claimed and proved, accuracy clean, certified and attacked.

    Then each later run less the first, on the same inputs: differences with intervals and p values.
    """
    from dpdist.runs.folder import open_run

    folders = [open_run(name, runs) for name in names]
    from dpdist.reports import compare  # only now: what is refused needs no tables
    from dpdist.reports import compare as differences
    from dpdist.reports.facts import read_facts

    sizes = {
        "l2": parse_numbers(l2, "--l2", Positive) or compare.SIZES["l2"],
        "linf": parse_numbers(linf, "--linf", Positive) or compare.SIZES["linf"],
    }
    facts = [read_facts(folder) for folder in folders]
    if picture is not None:
        compare.write_comparison_png(facts, picture)
    if as_json:
        from dpdist.core import console
        from dpdist.reports.export import comparison_as_json

        console.print_json(comparison_as_json(facts, sizes))
        return
    grids = [compare.privacy_rows(facts)]
    grids += [compare.certified_accuracy_rows(facts, norm, sizes[norm]) for norm in compare.NORMS]
    grids.append(compare.population_rows(facts))
    grids += [compare.attacked_accuracy_rows(facts, norm) for norm in compare.NORMS]
    typer.echo("\n\n".join(compare.markdown_table(grid) for grid in grids if len(grid) > 1))
    for part in differences.differences_section(facts, sizes):
        typer.echo(f"\n{part}")


# --- dpdist log -------------------------------------------------------------------------------


def log_command(
    run: RunArgument,
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND:PLACE...", help="tensorboard:FOLDER, mlflow:URI, wandb:PROJECT."
        ),
    ],
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write what may be published of a run: epsilon against step, scores on test data, certified
    accuracy. Nothing else is given to a tracker."""
    from dpdist.reports.tracking import track_run
    from dpdist.runs.folder import open_run

    track_run(open_run(run, runs), addresses)


# --- dpdist release ---------------------------------------------------------------------------


def release_command(
    run: RunArgument,
    runs: Runs = DEFAULT_RUNS,
    not_private: Annotated[
        bool, flag("--not-private", "Release although the run has no finite guarantee.")
    ] = False,
    licence: Annotated[
        str | None, option("SPDX identifier of the model's licence.", Licence)
    ] = None,
    sign: Annotated[
        Path | None, path_option("Sign with this Ed25519 private key (PEM).", metavar="KEY")
    ] = None,
    factory: Annotated[
        str | None,
        option("Import this to build the script's trained module.", metavar="MODULE:FUNCTION"),
    ] = None,
    dossier: Annotated[
        bool, flag("--dossier", "Also write dossier.md, by the EU's AI Act and GDPR 35(7).")
    ] = False,
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
        folder, not_private=not_private, licence=licence, key=sign, factory=factory, dossier=dossier
    )
    if as_json:
        card = read_json(folder.release_folder / "privacy_card.json")
        released = {"run": folder.name, "files": [str(path) for path in files]}
        console.print_json(released | {"privacy_card": card})
        return
    for path in files:
        typer.echo(str(path))
    from dpdist.reports import compare
    from dpdist.reports.facts import read_facts

    (_, _, name), *rows = compare.population_rows([read_facts(folder)])
    for _, title, stated in rows:
        typer.echo(f"{title}: {name}: {stated}")


# --- dpdist verify ----------------------------------------------------------------------------


_Redraw = Annotated[
    int | None,
    option("Count K inputs of each table of certificates again, by the test data.", Count,
           metavar="K"),
]  # fmt: skip


def verify_command(
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
    from dpdist.core import console
    from dpdist.release.bundle import ReleaseError
    from dpdist.release.verify import verify_release

    if data_root is not None and redraw is None:
        raise UserError("--data-root: only counting again needs data; add --redraw K")
    try:
        rows = verify_release(
            release, trusted_factory=trust_factory, signer=signer, num_redrawn_inputs=redraw or 0,
            load_data=lambda found: _test_data(found, data_root),
        )  # fmt: skip
    except ReleaseError as error:
        print(f"dpdist: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.REFUTED) from None
    typer.echo(console.format_table(rows, title=f"release {release}"))


def _test_data(release: Release, root: Path | None) -> Dataset:
    """Return the test split that a release names, from where the reader has it."""
    from dpdist import data
    from dpdist.training.records import data_source_under

    return data.load(data_source_under(release.description.data, root), "test")
