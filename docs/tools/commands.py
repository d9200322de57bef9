"""Every command and option as Markdown, from typer, and the exit codes, from their class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from dpdist.cli.main import app
from dpdist.core.errors import ExitCode
from tools.recipe_keys import documented, plain


def page() -> str:
    """Return the commands by the panel of `dpdist --help`, each with its options."""
    root: Any = typer.main.get_command(app)
    panels: dict[str, list[str]] = {}
    for name, command in root.commands.items():
        panels.setdefault(command.rich_help_panel, []).append(name)
    parts = []
    for panel, names in panels.items():
        parts.append(f"## {panel}")
        for name in names:
            parts += _command(root.commands[name], f"dpdist {name}")
    return "\n\n".join(parts)


def every_command() -> Iterator[tuple[str, Any]]:
    """Yield every command that a user can give, by its whole name."""
    todo: list[tuple[str, Any]] = [("dpdist", typer.main.get_command(app))]
    while todo:
        name, command = todo.pop(0)
        inner = getattr(command, "commands", {})
        todo += [(f"{name} {each}", found) for each, found in inner.items()]
        if name != "dpdist":
            yield name, command


def _command(command: Any, name: str) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"### {name}"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    yield plain(inspect.cleandoc(command.help or ""))
    rows = [(each, each.get_help_record(context)) for each in command.params]
    named = [(each, found) for each, found in rows if found is not None]
    entries = [f"* `{re.sub(r' / (?=-)', ', ', names)}`: {' '.join(plain(text).split())}"
               for each, (names, text) in named if "--help" not in each.opts]  # fmt: skip
    if entries:
        yield "\n".join(entries)
    for inner, found in getattr(command, "commands", {}).items():
        yield from _command(found, f"{name} {inner}")


def exit_codes() -> str:
    """Return the exit codes as a table."""
    meanings = documented(ExitCode.__doc__ or "")
    lines = ["| code | when |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| **{each.value}** | {meanings[each.name]} |" for each in ExitCode)]
    )
