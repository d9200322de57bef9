"""The `dpdist` command. A user's mistake is one line on standard error and exit code 2."""

from __future__ import annotations

import io
import os
import sys

import typer

from dpdist.cli import account, audit, certify, cluster, importing, init, report, run
from dpdist.core.errors import (
    ClusterError,
    Interrupted,
    UserError,
    is_disk_full,
    is_permission_or_limit_error,
)
from dpdist.core.files import error_text
from dpdist.core.version import __version__
from dpdist.privacy.ledger import JournalError

_INTERRUPTED = 130  # exit code of Ctrl-C and SIGTERM

app = typer.Typer(
    name="dpdist",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Differentially private training and certified robustness on Ray clusters.",
    epilog="A first run on built-in data: dpdist run digits. Recipes: dpdist recipes.",
)
app.command("init")(init.init_command)
app.command("run")(run.run_command)
app.command("train")(run.train_command)
app.command("tune")(run.tune_command)
app.command("pretrain")(run.pretrain_command)
app.command("denoise")(run.denoise_command)
app.command("import")(importing.import_command)
app.command("certify")(certify.certify_command)
app.command("attack")(audit.attack_command)
app.command("audit")(audit.audit_command)
app.command("predict")(certify.predict_command)
app.command("report")(report.report_command)
app.command("compare")(report.compare_command)
app.command("release")(report.release_command)
app.command("verify")(report.verify_command)
app.command("serve")(certify.serve_command)
app.command("log")(report.log_command)
app.command("membership")(audit.membership_command)
app.command("poison")(audit.poison_command)
app.add_typer(account.account_app, name="account")
app.add_typer(account.budget_app, name="budget")
app.command("radius")(certify.radius_command)
app.add_typer(run.recipes_app, name="recipes")
app.add_typer(init.data_app, name="data")
app.add_typer(cluster.cluster_app, name="cluster")


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        typer.echo(f"dpdist {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    try:
        here = os.getcwd()
    except OSError as error:
        print(f"dpdist: the folder it was called in: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    # For `model: package.module:factory`; last, so that nothing there shadows a package.
    if here not in sys.path:
        sys.path.append(here)
    for stream in (sys.stdout, sys.stderr):  # a file's name may hold bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="dpdist")  # of python -m dpdist too
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:  # outside a session, which says more
            print("dpdist: interrupted", file=sys.stderr)
        raise
    except (UserError, ClusterError, JournalError) as error:
        for line in str(error).splitlines():
            print(f"dpdist: {line}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if is_disk_full(error) and error.filename is None:
            print(
                f"dpdist: {error.strerror} (where the run lies, or the temporary files); make "
                "room, or raise the limit (ulimit -f), and the same command continues",
                file=sys.stderr,
            )
            sys.exit(2)
        # a library's, with the file in its words
        if error.filename is None and is_permission_or_limit_error(error):
            print(f"dpdist: {error_text(error)}", file=sys.stderr)
            sys.exit(2)
        if error.filename is None:  # not a file of the user's
            raise
        print(f"dpdist: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as error:
        print(f"dpdist: {error}", file=sys.stderr)
        sys.exit(_INTERRUPTED)
