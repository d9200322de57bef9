"""The `dpdist` command. A user's mistake is one line on standard error and exit code 2."""

from __future__ import annotations

import io
import os
import sys

import typer

from dpdist import __version__
from dpdist.base.errors import ClusterError, Interrupted, UserError, is_refused, no_room
from dpdist.base.reading import reason
from dpdist.commands import (
    account,
    attack,
    audit,
    budget,
    certify,
    cluster,
    compare,
    data,
    denoise,
    init,
    log,
    membership,
    poison,
    predict,
    pretrain,
    radius,
    recipes,
    release,
    report,
    run,
    serve,
    train,
    tune,
    verify,
)
from dpdist.privacy.journal import JournalError

_INTERRUPTED = 130  # exit code of Ctrl-C and SIGTERM

app = typer.Typer(
    name="dpdist",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Differentially private training and certified robustness on Ray clusters.",
    epilog="A first run on built-in data: dpdist run digits. Recipes: dpdist recipes.",
)
app.command("init")(init.command)
app.command("run")(run.command)
app.command("train")(train.command)
app.command("tune")(tune.command)
app.command("pretrain")(pretrain.command)
app.command("denoise")(denoise.command)
app.command("certify")(certify.command)
app.command("attack")(attack.command)
app.command("audit")(audit.command)
app.command("predict")(predict.command)
app.command("report")(report.command)
app.command("compare")(compare.command)
app.command("release")(release.command)
app.command("verify")(verify.command)
app.command("serve")(serve.command)
app.command("log")(log.command)
app.command("membership")(membership.command)
app.command("poison")(poison.command)
app.add_typer(account.app, name="account")
app.add_typer(budget.app, name="budget")
app.command("radius")(radius.command)
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
app.add_typer(cluster.app, name="cluster")


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
        if no_room(error) and error.filename is None:
            print(
                f"dpdist: {error.strerror} (where the run lies, or the temporary files); make "
                "room, or raise the limit (ulimit -f), and the same command continues",
                file=sys.stderr,
            )
            sys.exit(2)
        if error.filename is None and is_refused(error):  # a library's, with the file in its words
            print(f"dpdist: {reason(error)}", file=sys.stderr)
            sys.exit(2)
        if error.filename is None:  # not a file of the user's
            raise
        print(f"dpdist: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as error:
        print(f"dpdist: {error}", file=sys.stderr)
        sys.exit(_INTERRUPTED)
