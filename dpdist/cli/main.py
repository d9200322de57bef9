"""Define the `dpdist` command. A user's mistake gives one line on standard error, exit code 2."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer

from dpdist.cli import account, audit, certify, cluster, importing, init, report, run
from dpdist.cli.options import GroupedCommands
from dpdist.core.errors import (
    ClusterError,
    ExitCode,
    Interrupted,
    UserError,
    is_disk_full,
    is_permission_or_limit_error,
)
from dpdist.core.files import error_text
from dpdist.core.version import __version__
from dpdist.privacy.ledger import JournalError

app = typer.Typer(
    name="dpdist",
    cls=GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Differentially private training and certified robustness on Ray clusters.",
    epilog="A first run on built-in data: dpdist run digits. Recipes: dpdist recipes.",
)
_COMMANDS: dict[str, dict[str, Any]] = {
    "Start": {
        "init": init.init_command,
        "run": run.run_command,
        "recipes": run.recipes_command,
        "data": init.data_app,
    },
    "Train": {
        "tune": run.tune_command,
    },
    "Certify, attack and audit": {
        "import": importing.import_command,
        "certify": certify.certify_command,
        "attack": audit.attack_command,
        "audit": audit.audit_command,
    },
    "Report and publish": {
        "report": report.report_command,
        "release": report.release_command,
        "verify": report.verify_command,
        "predict": certify.predict_command,
    },
    "Calculate": {
        "account": account.account_command,
        "budget": account.budget_command,
    },
    "Clusters": {
        "cluster": cluster.cluster_app,
    },
}
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_command)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        typer.echo(f"dpdist {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the console script."""
    try:
        here = os.getcwd()
    except OSError as error:
        print(f"dpdist: current folder: {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)
    # For `model: package.module:factory`; last, so that it cannot hide a package.
    if here not in sys.path:
        sys.path.append(here)
    for stream in (sys.stdout, sys.stderr):  # file names may have bytes that are not text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="dpdist")  # for python -m dpdist too
    except SystemExit as stop:
        if stop.code == ExitCode.INTERRUPTED:  # outside of a session, which prints more
            print("dpdist: interrupted", file=sys.stderr)
        raise
    except (UserError, ClusterError, JournalError) as error:
        for line in str(error).splitlines():
            print(f"dpdist: {line}", file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)
    except OSError as error:
        if error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        elif is_disk_full(error):
            text = (
                f"{error.strerror} (where the run lies, or temporary files); free space, or "
                "raise the limit (ulimit -f), and repeat the command to resume"
            )
        elif is_permission_or_limit_error(error):  # a library's message, which names the file
            text = error_text(error)
        else:  # not about a user's file
            raise
        print(f"dpdist: {text}", file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)
    except Interrupted as error:
        print(f"dpdist: {error}", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
