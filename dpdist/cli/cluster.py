"""Check cluster files, submit recipes, follow jobs and fetch reports (``dpdist cluster``)."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.cli.options import (
    DEFAULT_RUNS,
    Changes,
    GroupedCommands,
    RecipeArgument,
    flag,
    option,
    path_callback,
    path_option,
)
from dpdist.cli.options import Runs as LocalRuns
from dpdist.core.errors import UserError

if TYPE_CHECKING:
    from dpdist.cluster.submission import JobClient
    from dpdist.runs.recipe import Recipe

cluster_app = typer.Typer(
    cls=GroupedCommands,
    help="Run on a Ray cluster: check its file, submit recipes, follow jobs, fetch reports.",
    no_args_is_help=True,
)
ClusterRuns = Annotated[
    str | None,
    option("Folder of runs on the cluster (default: $DPDIST_RUNS there).", None, "--runs"),
]
Send = Annotated[
    list[Path] | None,
    typer.Option(
        "--send",
        callback=path_callback(),
        help="A further file or folder of this folder to send. You can repeat it.",
    ),
]
DEFAULT_FETCH_FOLDER = Path("fetched")
_MAX_LISTED = 10  # of the files that are not sent


@cluster_app.command("check")
def check(
    file: Annotated[
        Path, typer.Argument(callback=path_callback(), help="cluster.yaml, or KubeRay manifests.")
    ],
) -> None:
    """Check a cluster file offline: Ray's schema, and five security rules.

    Each error names file, key and cure; the exit code is then 2.
    """
    from dpdist.cluster.cluster_file import check_file

    errors, notes = check_file(file)
    for note in notes:
        typer.echo(f"{file}: note: {note}")
    if errors:
        raise UserError("\n".join(f"{file}: {error}" for error in errors))
    typer.echo(f"{file}: good")


@cluster_app.command("template")
def template(
    name: Annotated[str, typer.Argument(help="aws, gcp, local, kuberay, rayjob or slurm")],
) -> None:
    """Print a cluster file to fill in: dpdist cluster template local > local.yaml"""
    from dpdist.cluster.cluster_file import templates

    known = templates()
    if name not in known:
        raise UserError(f"NAME: must be one of {', '.join(sorted(known))}, got {name}")
    typer.echo(known[name], nl=False)


@cluster_app.command("submit")
def submit(
    recipe: RecipeArgument,
    changes: Changes = None,
    runs: ClusterRuns = None,
    follow: Annotated[
        bool, flag("--follow/--no-follow", "Show progress, and fetch the report at the end.")
    ] = True,
    send: Send = None,
) -> None:
    """Send the current folder and run a recipe on the cluster; fetch the report at the end.

    Code and recipes, public weights that the recipe reads, and files given by --send are sent;
    other files are listed and not sent. Data, budgets, runs, private folders, hidden files and keys
    are never sent. Ctrl-C leaves the job running.
    """
    from dpdist.cluster.submission import JobClient
    from dpdist.core import console
    from dpdist.runs.recipe import find_recipe, parse_changes, resolve_recipe

    path, here = find_recipe(recipe), Path.cwd()
    resolved = resolve_recipe(recipe, changes=parse_changes(changes))
    run = resolved.name
    by_name = Path(recipe).suffix == ""  # recipes of dpdist are installed on the cluster too
    if not by_name and not path.resolve().is_relative_to(here):
        raise UserError(f"{recipe}: must be in the current folder, which is sent: {here}")
    file = recipe if by_name else str(path.resolve().relative_to(here))
    command = ["dpdist", "run", file, *([] if runs is None else ["--runs", runs])]
    for change in changes or ():
        command += ["--set", change]
    if by_name and send:
        raise UserError(f"--send: must be left out with {recipe}, a recipe of dpdist")
    jobs = JobClient()
    job = f"{run}-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="dpdist-submit-") as scratch:
        folder = None
        if not by_name:
            folder = Path(scratch) / "package"
            _pack_working_directory(resolved, send or [], folder)
            if not (folder / command[2]).exists():
                raise UserError(f"{recipe}: is in a folder that is never sent; move it")
        about = {"run": run, "runs": runs or ""}
        jobs.submit(job, shlex.join(command), working_dir=folder, metadata=about)
    console.log(f"job {job} is submitted to {jobs.address}")
    if follow:
        _follow_and_fetch(jobs, job)
    else:
        console.log(f"to follow it: dpdist cluster status {job} --follow")


def _pack_working_directory(recipe: Recipe, send: Sequence[Path], target: Path) -> None:
    """Copy the files to send into `target`, and log which files are sent and which are not."""
    from dpdist.cluster.submission import PackageSpec, excluded_paths, pack
    from dpdist.core import console

    here, settings = Path.cwd(), recipe.model_dump(mode="json")
    sending = PackageSpec(
        here,
        tuple(path.resolve() for path in send),
        tuple(path for path in recipe.public_files if path.exists()),
        tuple(excluded_paths(settings, here)),
    )
    packed = pack(sending, target)
    console.log(f"sending {len(packed.files)} files, {packed.size / 1024:,.0f} KiB")
    if packed.excluded:
        hidden = len(packed.excluded) - _MAX_LISTED
        more = f" and {hidden:,} more" if hidden > 0 else ""
        console.log(
            f"not sent, since it is not code or a recipe: "
            f"{', '.join(packed.excluded[:_MAX_LISTED])}{more}; use --send for files without data "
            "that the job needs"
        )


@cluster_app.command("status")
def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB|RUN]", help="Default: all jobs.")
    ] = None,
    follow: Annotated[
        bool, flag("--follow", "Show progress, and fetch the report at the end.")
    ] = False,
) -> None:
    """Show the state of one job and the end of its log, or the states of all jobs."""
    from dpdist.cluster.submission import JobClient

    jobs = JobClient()
    if job is None:
        if follow:
            raise UserError("--follow: must have a job; list jobs with `dpdist cluster status`")
        for each in jobs.list_jobs():
            start = time.strftime("%Y-%m-%d %H:%M", time.localtime((each.start_time or 0) / 1000))
            typer.echo(f"{each.submission_id}\t{each.status}\t{start}\t{each.entrypoint}")
        return
    job = jobs.find_job(job)
    if follow:
        _follow_and_fetch(jobs, job)
        return
    found = jobs.get_job(job)
    typer.echo(f"{found.submission_id}\t{found.status}\t{found.entrypoint}")
    for line in jobs.read_log(job).splitlines()[-5:]:
        typer.echo(f"  {line}")
    if found.status == "FAILED":
        typer.echo(f"  {(found.message or '').strip()}")


@cluster_app.command("stop")
def stop(
    job: Annotated[
        str, typer.Argument(metavar="JOB|RUN", help="The name of a job, or of a run: its newest.")
    ],
) -> None:
    """Stop a job; to resume its run, submit the same recipe."""
    from dpdist.cluster.submission import JobClient

    jobs = JobClient()
    job = jobs.find_job(job)
    stopped = jobs.stop(job)
    typer.echo(f"{job}: {'stopping' if stopped else 'had already ended'}")


_Restore = Annotated[
    bool,
    flag(
        "--restore",
        "Restore a lost run folder from its archive, with its private state, to continue it.",
    ),
]
_FetchInto = Annotated[
    Path | None,
    path_option("Folder for the run's folder (default: fetched; with --restore: runs).", "--into"),
]


@cluster_app.command("fetch")
def fetch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|URL",
            help="The run's name on the cluster, or its archive's address (s3://BUCKET/PREFIX).",
        ),
    ],
    runs: ClusterRuns = None,
    into: _FetchInto = None,
    restore: _Restore = False,
) -> None:
    """Fetch the report, certificates and released files of a run, and no private files.

    From an archive, it works without a cluster. --restore takes over the archive: if the old folder
    still exists, it cannot continue. Epsilon counts the steps that the old folder may have released
    after the archived ledger.
    """
    from dpdist.cluster.submission import JobClient
    from dpdist.runs import archive

    if not archive.is_archive_url(run):
        if restore:
            raise UserError(f"--restore: must be given the address of an archive, got {run}")
        _fetch_run(JobClient(), run, runs, into or DEFAULT_FETCH_FOLDER)
    elif restore:
        runs_here = into or Path(os.environ.get("DPDIST_RUNS", DEFAULT_RUNS))
        folder, charged = archive.restore(run, runs_here)
        typer.echo(f"restored {folder.path}")
        if charged:
            typer.echo(
                f"epsilon counts {charged:,} steps that may have been released before the folder "
                "was lost"
            )
    else:
        target, paths = archive.fetch_publishable_files(run, into or DEFAULT_FETCH_FOLDER)
        typer.echo(f"fetched {len(paths)} files into {target}")


@cluster_app.command("export", hidden=True)
def export(run: str, runs: LocalRuns = DEFAULT_RUNS) -> None:
    """Print a run's publishable files, for `fetch`; it runs on the cluster."""
    from dpdist.runs.archive import export_text
    from dpdist.runs.folder import open_run

    typer.echo(export_text(open_run(run, runs)))


def _follow_and_fetch(jobs: JobClient, job: str) -> None:
    from dpdist.core.errors import ClusterError, Interrupted

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    try:
        ended = jobs.follow(job, write)
    except KeyboardInterrupt:
        raise Interrupted(
            f"the job continues; to follow it: dpdist cluster status {job} --follow; to end it: "
            f"dpdist cluster stop {job}"
        ) from None
    about = ended.metadata or {}
    if ended.status != "SUCCEEDED":
        reason = ((ended.message or "").strip().splitlines() or [""])[0]
        again = "; submit the same recipe to resume the run" if "run" in about else ""
        raise ClusterError(f"job {job} {ended.status.value.lower()}: {reason}{again}")
    if run := about.get("run"):
        _fetch_run(jobs, run, about.get("runs") or None, DEFAULT_FETCH_FOLDER)


def _fetch_run(jobs: JobClient, run: str, runs: str | None, into: Path) -> None:
    from dpdist.cluster.submission import FETCH
    from dpdist.core import console
    from dpdist.core.errors import ClusterError, UserError
    from dpdist.core.fields import check_run_name
    from dpdist.runs.archive import unpack_export

    try:
        name = check_run_name(Path(run).name)
    except ValueError as error:
        raise UserError(f"{run!r}: {error}") from None
    job = f"fetch-{name}-{secrets.token_hex(4)}"
    command = ["dpdist", "cluster", "export", run, *(["--runs", runs] if runs else [])]
    jobs.submit(job, shlex.join(command), metadata={FETCH: run})
    ended = jobs.follow(job, lambda text: None)
    log = jobs.read_log(job)
    if ended.status != "SUCCEEDED":
        errors = [line for line in log.splitlines() if line.startswith("dpdist: ")]
        reason = errors[-1] if errors else ended.message
        raise ClusterError(f"{run}: could not be fetched: {reason}")
    files = unpack_export(log, into / name)
    console.log(f"fetched {len(files)} files into {into / name}")
    page = into / name / "report" / "index.html"
    if page.exists():
        typer.echo(str(page))
