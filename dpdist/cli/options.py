"""Define options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from pydantic import TypeAdapter, ValidationError
from typer.core import TyperGroup

from dpdist.core.errors import UserError
from dpdist.core.fields import (
    PositiveOrZero,
    ProcessCount,
    RunName,
    validation_message,
)
from dpdist.core.files import quoted, validate_path

if TYPE_CHECKING:
    from dpdist.release.bundle import Release
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe


class GroupedCommands(TyperGroup):
    """A group of commands whose help shows panels and complete summaries."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each panel, in the order in which they were added."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            panel = panel if isinstance(panel, str) else "Commands"
            summary = " ".join((command.help or "").partition("\n\n")[0].split())
            panels.setdefault(panel, []).append((name, summary))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


OptionCallback = Callable[[typer.CallbackParam, Any], Any]  # of typer: callback


def field_callback(field: Any) -> OptionCallback:
    """Return a callback that checks an option like a recipe's field of this type."""
    adapter: TypeAdapter[Any] = TypeAdapter(field)

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return None
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            rule = validation_message(error.errors()[0])
            raise UserError(f"{_option_name(param)}: {rule}, got {quoted(value)}") from None

    return check


def path_callback(*suffixes: str) -> OptionCallback:
    """Return a callback that checks one path or several.

    suffixes: those of a file to write, whose folder must exist and be writable; any if empty.
    """

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [check(param, each) for each in value]
        try:
            path = validate_path(value)
        except UserError as error:
            raise UserError(f"{_option_name(param)}: {error}") from None
        if re.match(r"[a-z][a-z0-9+.-]+:/", str(value)):
            url = re.sub("^([^:]*):/+", r"\1://", str(value))  # Path keeps one slash
            raise UserError(
                f"{_option_name(param)}: must be a path that this machine can open, got {url}; "
                "resources.archive copies a run to an object store",
                see="how-to/cluster.md#an-archive-in-an-object-store",
            )
        if suffixes:
            _check_writable(path, suffixes, _option_name(param))
        return path

    return check


def _check_writable(path: Path, suffixes: Sequence[str], option: str) -> None:
    """Raise UserError, before long work, for a file that cannot be written."""
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option}: must end in {', '.join(suffixes)}, got {quoted(str(path))}")
    if not path.parent.is_dir():
        raise UserError(f"{option}: must be in an existing folder, got {path}")
    if path.exists() and not path.is_file():
        raise UserError(f"{option}: must be a file, got {path}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option}: must be writable, got {path}")


def parse_numbers(
    text: str | None, context: str, field: Any = PositiveOrZero
) -> tuple[float, ...] | None:
    """Return numbers of a field's type, separated by commas; None for None. Raises UserError."""
    if text is None:
        return None
    parts = text.split(",")
    try:
        return tuple(TypeAdapter(field).validate_python(part) for part in parts)
    except ValidationError as error:
        item = error.errors()[0]
        rule = validation_message(item)
        raise UserError(
            f"{context}: must be numbers separated by commas; each {rule}, got "
            f"{quoted(item['input'])}"
        ) from None


def complete_recipe_name(incomplete: str) -> list[str]:
    """Return names of dpdist's recipes, for completion in the shell."""
    from dpdist.runs.recipe import built_in_recipes, paper_recipes

    names = [path.stem for path in (*built_in_recipes(), *paper_recipes())]
    return sorted(name for name in names if name.startswith(incomplete))


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return names of runs, for completion in the shell."""
    found = Path(context.params.get("runs") or DEFAULT_RUNS).glob(f"{incomplete}*/run.json")
    return sorted(path.parent.name for path in found)


def _option_name(param: typer.CallbackParam) -> str:
    return param.opts[-1] if param.opts[-1].startswith("-") else str(param.name).upper()


def option(help: str, field: Any = None, *names: str, **more: Any) -> Any:
    """Return an option. field: type of a recipe's field, whose limits it gets."""
    return typer.Option(
        *names, help=help, callback=None if field is None else field_callback(field), **more
    )


def path_option(help: str, *names: str, callback: OptionCallback | None = None, **more: Any) -> Any:
    """Return an option for a path. callback: checks it (`path_callback`); None allows any path."""
    return typer.Option(*names, help=help, callback=callback or path_callback(), **more)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


def executor_name() -> Literal["local", "ray"] | None:
    """Return the executor in $DPDIST_EXECUTOR; None chooses by the size of the work.

    Raises UserError for an unknown value.
    """
    name = os.environ.get("DPDIST_EXECUTOR") or None
    if name not in (None, "local", "ray"):
        raise UserError(f"DPDIST_EXECUTOR: must be local or ray, got {quoted(name)}")
    return cast(Literal["local", "ray"] | None, name)


DEFAULT_RUNS = Path("runs")

# Arguments.
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        autocompletion=complete_recipe_name,
        help="A recipe file, or the name of a recipe of dpdist.",
    ),
]
Changes = Annotated[
    list[str] | None,
    option(
        "Change a key of the recipe, such as training.batch_size=512. You can repeat it.",
        None,
        "--set",
        metavar="KEY=VALUE",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", autocompletion=run_names, help="A run folder, or its name under --runs."
    ),
]
ReleaseArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RELEASE", callback=path_callback(), help="A folder that `dpdist release` wrote."
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|RELEASE",
        autocompletion=run_names,
        help="A run folder, its name under --runs, or a release.",
    ),
]
Signer = Annotated[
    Path | None,
    path_option(
        "The public key (PEM) that must have signed the release.", "--signer", metavar="KEY"
    ),
]
TrustFactory = Annotated[
    str | None,
    option(
        "Import and execute this module to rebuild the release's model. Only use code you trust.",
        metavar="PACKAGE.MODULE:FACTORY",
    ),
]

# Folders, names and outputs.
Runs = Annotated[
    Path, path_option("The folder of all run folders.", "--runs", envvar="DPDIST_RUNS")
]
Name = Annotated[str | None, option("Name of the run (default: the recipe's).", RunName, "--name")]
Log = Annotated[
    list[str] | None,
    option(
        "Send the run's publishable results to tensorboard:FOLDER, mlflow:URI or wandb:PROJECT. "
        "You can repeat it.",
        None,
        "--log",
        metavar="KIND:PLACE",
    ),
]
MeasuringWorkers = Annotated[
    int | None, option("Number of workers (default: all CPUs).", ProcessCount, "--workers")
]
Output = Annotated[
    Path | None, path_option("Folder for the table (default: one in the run folder).")
]
PublishableJson = Annotated[
    bool, flag("--json", "Print one JSON object with the publishable results.")
]
PrintJson = Annotated[bool, flag("--json", "Print JSON.")]


def require_labels(recipe: Recipe, command: str) -> None:
    """Raise UserError if records have no label."""
    if (why := recipe.data.single_label_error(f"dpdist {command}")) is not None:
        raise UserError(why)


def load_trained_recipe(
    folder: RunFolder, command: str, changes: Mapping[str, Any] | None = None
) -> Recipe:
    """Return the recipe of a trained run of labeled numbers, with changes. Raises UserError."""
    from dpdist.runs.recipe import resolve_recipe

    folder.require_trained()
    recipe = resolve_recipe(folder.read_recipe(), changes=changes)
    if (why := recipe.data.numeric_input_error(f"dpdist {command}")) is not None:
        raise UserError(why)
    require_labels(recipe, command)
    return recipe


def open_release_if_any(
    name: str,
    trusted_factory: str | None,
    signer: Path | None = None,
    *,
    labeled: bool = True,
    numeric: bool = True,
) -> Release | None:
    """Return the release at a path; None if the path or name is that of a run.

    labeled: require classes as outputs. numeric: require inputs that are not texts. Raises
    UserError, and ReleaseError if `signer` is given and did not sign it.
    """
    from dpdist.release.bundle import load
    from dpdist.release.files import is_release

    path = validate_path(name)
    if not is_release(path):
        if signer is not None:
            raise UserError(f"--signer: must be left out, since {name} is not a release")
        return None
    release = load(path, trusted_factory=trusted_factory, signer=signer)
    if numeric:
        release.require_numeric_inputs()
    if labeled:
        release.need_label()
    return release


def changes_by_section(
    changes: Sequence[str] | None, sections: Mapping[str, Sequence[str] | None]
) -> dict[str, dict[str, Any]]:
    """Return the changes of `--set`, by section and key.

    Args:
        changes: KEY=VALUE each, with dotted keys.
        sections: the sections that a command accepts, and the keys of each; None for all keys.

    Raises:
        UserError: a change has a different section or key.
    """
    from dpdist.runs.recipe import parse_changes

    found: dict[str, dict[str, Any]] = {section: {} for section in sections}
    seeds = [each for each in changes or () if each.partition("=")[0].strip().endswith(".seed")]
    given = parse_changes([each for each in changes or () if each not in seeds])
    for each in seeds:  # strings, which YAML could read as numbers
        name, _, value = each.partition("=")
        given[name.strip()] = value.strip()
    for name, value in given.items():
        section, _, key = name.partition(".")
        if not key or section not in sections or key not in (sections[section] or (key,)):
            allowed = [
                f"{each}.{one}" for each, keys in sections.items() for one in keys or ("KEY",)
            ]
            raise UserError(f"--set {name}: must be one of {', '.join(allowed)}")
        found[section][key] = value
    return found
