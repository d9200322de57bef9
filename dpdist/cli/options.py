"""Options that several commands share."""

from __future__ import annotations

import os
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
    """A group of commands whose help has them in panels, each summary whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each panel, in the order in which they were added."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.commands:
            command = self.commands[name]
            panel = getattr(command, "rich_help_panel", None)
            panel = panel if isinstance(panel, str) else "Commands"
            summary = " ".join((command.help or "").partition("\n\n")[0].split())
            panels.setdefault(panel, []).append((name, summary))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


OptionCallback = Callable[[typer.CallbackParam, Any], Any]  # of typer: callback


def field_callback(field: Any) -> OptionCallback:
    """An option of the kind of a recipe's field, with the same bounds and the same complaint."""
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
    """A path, or several. endings: of a file to be written, which must be able to lie there."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [check(param, each) for each in value]
        try:
            found = validate_path(value)
        except UserError as error:
            raise UserError(f"{_option_name(param)}: {error}") from None
        if suffixes and found.suffix.lower() not in suffixes:
            right = ", ".join(suffixes)
            raise UserError(
                f"{_option_name(param)}: the file must end in {right}, got {quoted(str(found))}"
            )
        if suffixes:
            check_writable(found, _option_name(param))
        return found

    return check


def check_writable(path: Path, context: str) -> None:
    """Raise UserError, before hours of work, when no file could be written at `path`."""
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"{context}: {folder}: no such folder")
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UserError(f"{context}: {path}: something else than a file lies there")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{context}: {path}: may not be written")


def parse_numbers(
    text: str | None, context: str, field: Any = PositiveOrZero
) -> tuple[float, ...] | None:
    """Numbers of a field's kind, separated by commas; None for None. Raises UserError."""
    if text is None:
        return None
    parts = text.split(",")
    try:
        return tuple(TypeAdapter(field).validate_python(part) for part in parts)
    except ValidationError as error:
        item = error.errors()[0]
        rule = validation_message(item)
        raise UserError(
            f"{context}: give numbers separated by commas; each {rule}, got {quoted(item['input'])}"
        ) from None


def complete_recipe_name(incomplete: str) -> list[str]:
    """Names of recipes that come along, for the shell to complete."""
    from dpdist.runs.recipe import built_in_recipes, paper_recipes

    names = [path.stem for path in (*built_in_recipes(), *paper_recipes())]
    return sorted(name for name in names if name.startswith(incomplete))


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, for the shell to complete."""
    found = Path(context.params.get("runs") or DEFAULT_RUNS).glob(f"{incomplete}*/run.json")
    return sorted(path.parent.name for path in found)


def _option_name(param: typer.CallbackParam) -> str:
    return param.opts[-1] if param.opts[-1].startswith("-") else str(param.name).upper()


def option(help: str, field: Any = None, *names: str, **more: Any) -> Any:
    """field: the kind of a recipe's field whose bounds it has."""
    return typer.Option(
        *names, help=help, callback=None if field is None else field_callback(field), **more
    )


def path_option(help: str, *names: str, callback: OptionCallback | None = None, **more: Any) -> Any:
    """callback: which paths are right (`path_callback`); without it any."""
    return typer.Option(*names, help=help, callback=callback or path_callback(), **more)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


def executor_name() -> Literal["local", "ray"] | None:
    """Return what $DPDIST_EXECUTOR says: in this process, or on Ray; None by the size of the work.

    Raises UserError for another value.
    """
    found = os.environ.get("DPDIST_EXECUTOR") or None
    if found not in (None, "local", "ray"):
        raise UserError(f"DPDIST_EXECUTOR: must be local or ray, got {quoted(found)}")
    return cast(Literal["local", "ray"] | None, found)


DEFAULT_RUNS = Path("runs")

# What a command is about.
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        autocompletion=complete_recipe_name,
        help="A recipe file, or the name of one that comes along.",
    ),
]
Changes = Annotated[
    list[str] | None,
    option(
        "Change a key of the recipe: training.batch_size=512. May be repeated.",
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
        metavar="RELEASE", callback=path_callback(), help="A folder that `dpdist release` made."
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
        "Of a release: the public key (PEM) that must have signed it.", "--signer", metavar="KEY"
    ),
]
TrustFactory = Annotated[
    str | None,
    option(
        "Of a release: import this code, which builds its model. It runs.",
        metavar="PACKAGE.MODULE:FACTORY",
    ),
]

# Where things lie.
Runs = Annotated[
    Path,
    path_option("The folder that holds the run folders.", "--runs", envvar="DPDIST_RUNS"),
]
Name = Annotated[str | None, option("Name of the run (default: the recipe's).", RunName, "--name")]
Log = Annotated[
    list[str] | None,
    option(
        "Give what may be published of the run to tensorboard:FOLDER, mlflow:URI or wandb:PROJECT. "
        "May be repeated.",
        None,
        "--log",
        metavar="KIND:PLACE",
    ),
]

# Of the commands that take inputs of the test split, on Ray actors.
MeasuringWorkers = Annotated[
    int | None, option("Workers (default: all CPUs).", ProcessCount, "--workers")
]
Output = Annotated[Path | None, path_option("Folder of the table (default: in the run folder).")]

PublishableJson = Annotated[bool, flag("--json", "Print one JSON object of what may be published.")]
PrintJson = Annotated[bool, flag("--json", "Print JSON.")]


def require_numeric_inputs(recipe: Recipe, command: str) -> None:
    """Raise UserError where inputs are tokens."""
    if (why := recipe.data.numeric_input_error(f"dpdist {command}")) is not None:
        raise UserError(why)


def require_labels(recipe: Recipe, command: str) -> None:
    """Raise UserError where records have no label of their own."""
    if (why := recipe.data.single_label_error(f"dpdist {command}")) is not None:
        raise UserError(why)


def load_trained_recipe(
    folder: RunFolder, command: str, changes: Mapping[str, Any] | None = None
) -> Recipe:  # fmt: skip
    """The recipe of a trained run whose inputs are numbers, with changes. Raises UserError."""
    from dpdist.runs.recipe import resolve_recipe

    folder.require_trained()
    recipe = resolve_recipe(folder.read_recipe(), changes=changes)
    require_numeric_inputs(recipe, command)
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
    """The release that lies at a path; None where the name of a run is meant, which nobody signs.
    labeled: refuse one whose outputs are no classes. numeric: refuse one of texts. Raises
    UserError, ReleaseError where `signer` is given and did not sign it."""
    from dpdist.release.bundle import load
    from dpdist.release.files import is_release

    path = validate_path(name)
    if not is_release(path):
        if signer is not None:
            raise UserError(f"--signer: of a release, and {name} is none")
        return None
    found = load(path, trusted_factory=trusted_factory, signer=signer)
    if numeric:
        found.require_numeric_inputs()
    if labeled:
        found.need_label()
    return found


def changes_by_section(
    changes: Sequence[str] | None, sections: Mapping[str, Sequence[str] | None]
) -> dict[str, dict[str, Any]]:
    """Return the changes of `--set`, by section and key.

    Args:
        changes: KEY=VALUE each, with dotted keys.
        sections: those that a command takes, and the keys of each; None: all that it has.

    Raises:
        UserError: a change is of another section or key.
    """
    from dpdist.runs.recipe import parse_changes

    found: dict[str, dict[str, Any]] = {section: {} for section in sections}
    seeds = [each for each in changes or () if each.partition("=")[0].strip().endswith(".seed")]
    given = parse_changes([each for each in changes or () if each not in seeds])
    for each in seeds:  # text, whatever YAML makes of its digits
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
