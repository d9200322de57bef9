"""``dpdist cluster``: check a cluster file, submit a recipe, follow it, fetch its report."""

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
    help="Run on a Ray cluster: check its file, submit recipes, follow, fetch.",
    no_args_is_help=True,
)
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
ClusterRuns = Annotated[
    str | None,
    option("The folder of runs on the cluster (default: $DPDIST_RUNS there).", None, "--runs"),
]
Followed = Annotated[bool, flag("--follow/--no-follow", "Show progress and fetch the report.")]
Send = Annotated[
    list[Path] | None,
    typer.Option(
        "--send",
        callback=path_callback(),
        help="A file or folder here that is sent as well (again for each).",
    ),
]
DEFAULT_FETCH_FOLDER = Path("fetched")
_MAX_LISTED = 10  # of what is not sent


@cluster_app.command("check")
def check(
    file: Annotated[
        Path, typer.Argument(callback=path_callback(), help="cluster.yaml, or KubeRay manifests.")
    ],
) -> None:
    """Check a cluster file without touching a cloud: Ray's schema, and five rules of security.

    Every complaint names file, key and what would be right; exit code 2 when there is one.
    """
    from dpdist.cluster.cluster_file import check_file

    complaints, notes = check_file(file)
    for note in notes:
        typer.echo(f"{file}: note: {note}")
    if complaints:
        raise UserError("\n".join(f"{file}: {complaint}" for complaint in complaints))
    typer.echo(f"{file}: good")


@cluster_app.command("template")
def template(
    name: Annotated[str, typer.Argument(help="aws, gcp, local, kuberay, rayjob or slurm")],
) -> None:
    """Print a cluster file to fill in: dpdist cluster template local > local.yaml"""
    from dpdist.cluster.cluster_file import templates

    known = templates()
    if name not in known:
        raise UserError(f"{name}: no such template; there are {', '.join(sorted(known))}")
    typer.echo(known[name], nl=False)


@cluster_app.command("submit")
def submit(
    recipe: RecipeArgument,
    changes: Changes = None,
    runs: ClusterRuns = None,
    follow: Followed = True,
    send: Send = None,
) -> None:
    """Send the current directory and run a recipe on the cluster; fetch the report at the end.

    What is sent is code and recipes, public weights that the recipe reads, and what --send names;
    the rest is named and stays. Data, budgets, runs, private folders, hidden files and keys are
    never sent. Ctrl-C leaves the job running.
    """
    from dpdist.cluster.submission import JobClient
    from dpdist.core import console
    from dpdist.runs.recipe import find_recipe, parse_changes, resolve_recipe

    path, here = find_recipe(recipe), Path.cwd()
    resolved = resolve_recipe(recipe, changes=parse_changes(changes))
    run = resolved.name
    by_name = Path(recipe).suffix == ""  # one that comes along is installed on the cluster too
    if not by_name and not path.resolve().is_relative_to(here):
        raise UserError(f"{recipe}: must lie in the current directory, which is sent: {here}")
    file = recipe if by_name else str(path.resolve().relative_to(here))
    command = ["dpdist", "run", file, *([] if runs is None else ["--runs", runs])]
    for change in changes or ():
        command += ["--set", change]
    if by_name and send:
        raise UserError(f"--send: must be left out with {recipe}, of which nothing is sent")
    jobs = JobClient()
    job = f"{run}-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="dpdist-submit-") as scratch:
        folder = None
        if not by_name:
            folder = Path(scratch) / "package"
            _pack_working_directory(resolved, send or [], folder)
            if not (folder / command[2]).exists():
                raise UserError(f"{recipe}: lies in a folder that is never sent; move it")
        about = {"run": run, "runs": runs or ""}
        jobs.submit(job, shlex.join(command), working_dir=folder, metadata=about)
    console.log(f"job {job} is submitted to {jobs.address}")
    if follow:
        _follow_and_fetch(jobs, job)
    else:
        console.log(f"follow it: dpdist cluster status {job} --follow")


def _pack_working_directory(recipe: Recipe, send: Sequence[Path], target: Path) -> None:
    """Copy what of the current directory is sent into `target`; say what is, and what is not."""
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
        more = (
            f" and {len(packed.excluded) - _MAX_LISTED:,} more"
            if len(packed.excluded) > _MAX_LISTED
            else ""
        )
        console.log(
            "not sent, neither code nor a recipe: "
            f"{', '.join(packed.excluded[:_MAX_LISTED])}{more}; what the job needs of files that "
            "hold no data, name with --send"
        )


@cluster_app.command("status")
def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Default: all jobs.")] = None,
    follow: Annotated[
        bool, flag("--follow", "Show progress to the end, then fetch the report.")
    ] = False,
) -> None:
    """The state of one job and the end of its log, or of all jobs."""
    from dpdist.cluster.submission import JobClient

    jobs = JobClient()
    if job is None:
        if follow:
            raise UserError("--follow: name the job; `dpdist cluster status` lists them")
        for each in jobs.list_jobs():
            begun = time.strftime("%Y-%m-%d %H:%M", time.localtime((each.start_time or 0) / 1000))
            typer.echo(f"{each.submission_id}\t{each.status}\t{begun}\t{each.entrypoint}")
        return
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
def stop(job: JobArgument) -> None:
    """Stop a job; submitting the same recipe continues its run."""
    from dpdist.cluster.submission import JobClient

    stopped = JobClient().stop(job)
    typer.echo(f"{job}: {'stopping' if stopped else 'had ended'}")


_Restore = Annotated[
    bool,
    flag(
        "--restore",
        "Of an archive: bring a lost run folder back, with its private state, to continue it.",
    ),
]
_FetchInto = Annotated[
    Path | None,
    path_option(
        "Where the run goes, in its folder (default: fetched; with --restore: runs).", "--into"
    ),
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
    """Fetch the report, certificates and released files of a run; private files stay.

    Of an archive no cluster is needed. --restore takes the archive over: should the old folder
    still exist somewhere, it cannot go on. Steps that the old folder may have released after the
    archived ledger are charged.
    """
    from dpdist.cluster.submission import JobClient
    from dpdist.runs import archive

    if not archive.is_archive_url(run):
        if restore:
            raise UserError(f"--restore: needs the address of an archive, got {run}")
        _fetch_run(JobClient(), run, runs, into or DEFAULT_FETCH_FOLDER)
    elif restore:
        runs_here = into or Path(os.environ.get("DPDIST_RUNS", DEFAULT_RUNS))
        folder, charged = archive.restore(run, runs_here)
        typer.echo(f"restored {folder.path}")
        if charged:
            typer.echo(
                f"charged {charged:,} steps that may have been released before the folder was lost"
            )
    else:
        target, paths = archive.fetch_publishable_files(run, into or DEFAULT_FETCH_FOLDER)
        typer.echo(f"fetched {len(paths)} files into {target}")


@cluster_app.command("export", hidden=True)
def export(run: str, runs: LocalRuns = DEFAULT_RUNS) -> None:
    """On the cluster: print a run's publishable files, for `fetch`."""
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
            f"the job goes on; follow it: dpdist cluster status {job} --follow; "
            f"end it: dpdist cluster stop {job}"
        ) from None
    about = ended.metadata or {}
    if ended.status != "SUCCEEDED":
        reason = ((ended.message or "").strip().splitlines() or [""])[0]
        again = "; submitting the same recipe again continues the run"
        raise ClusterError(
            f"job {job} {ended.status.value.lower()}: {reason}" + again * ("run" in about)
        )
    if run := about.get("run"):
        _fetch_run(jobs, run, about.get("runs") or None, DEFAULT_FETCH_FOLDER)


def _fetch_run(jobs: JobClient, run: str, runs: str | None, into: Path) -> None:
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
    jobs.submit(job, shlex.join(command))
    ended = jobs.follow(job, lambda text: None)
    log = jobs.read_log(job)
    if ended.status != "SUCCEEDED":
        said = [line for line in log.splitlines() if line.startswith("dpdist: ")]
        raise ClusterError(f"{run}: could not be fetched: {said[-1] if said else ended.message}")
    files = unpack_export(log, into / name)
    console.log(f"fetched {len(files)} files into {into / name}")
    page = into / name / "report" / "index.html"
    if page.exists():
        typer.echo(str(page))
