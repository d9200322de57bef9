"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from dpdist.core.errors import UserError
from dpdist.core.fields import (
    Count,
    CountOrZero,
    PositiveOrZero,
    Probability,
    Processes,
    RunName,
    rule_of,
)
from dpdist.core.files import shown, usable_path

if TYPE_CHECKING:
    from dpdist.release.bundle import Release
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe

Check = Callable[[typer.CallbackParam, Any], Any]  # of typer: callback


def kind(field: Any) -> Check:
    """An option of the kind of a recipe's field, with the same bounds and the same complaint."""
    adapter: TypeAdapter[Any] = TypeAdapter(field)

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return None
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            rule = rule_of(error.errors()[0])
            raise UserError(f"{_option(param)}: {rule}, got {shown(value)}") from None

    return check


def file_path(*endings: str, written: bool = False) -> Check:
    """A path, or several. endings: of a file to be written, which must be able to lie there."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [check(param, each) for each in value]
        try:
            found = usable_path(value)
        except UserError as error:
            raise UserError(f"{_option(param)}: {error}") from None
        if endings and found.suffix.lower() not in endings:
            right = ", ".join(endings)
            raise UserError(
                f"{_option(param)}: the file must end in {right}, got {shown(str(found))}"
            )
        if endings or written:
            check_writable(found, _option(param))
        return found

    return check


def check_writable(path: Path, where: str) -> None:
    """Raise UserError, before hours of work, when no file could be written at `path`."""
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"{where}: {folder}: no such folder")
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UserError(f"{where}: {path}: something else than a file lies there")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{where}: {path}: may not be written")


def numbers(text: str | None, where: str, field: Any = PositiveOrZero) -> tuple[float, ...] | None:
    """Numbers of a field's kind, separated by commas; None for None. Raises UserError."""
    if text is None:
        return None
    parts = text.split(",")
    try:
        if len(parts) > 100:
            raise UserError(f"{where}: at most 100 numbers, got {len(parts)}")
        return tuple(TypeAdapter(field).validate_python(part) for part in parts)
    except ValidationError as error:
        item = error.errors()[0]
        rule = rule_of(item)
        raise UserError(
            f"{where}: give numbers separated by commas; each {rule}, got {shown(item['input'])}"
        ) from None


def _recipes(incomplete: str) -> list[str]:
    """Names of recipes that come along, for the shell to complete."""
    from dpdist.runs.recipe import RECIPES

    return sorted(path.stem for path in RECIPES.glob(f"{incomplete}*.yaml"))


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, for the shell to complete."""
    found = Path(context.params.get("runs") or RUNS).glob(f"{incomplete}*/run.json")
    return sorted(path.parent.name for path in found)


def _option(param: typer.CallbackParam) -> str:
    return param.opts[-1] if param.opts[-1].startswith("-") else str(param.name).upper()


def option(help: str, field: Any = None, *names: str, **more: Any) -> Any:
    """field: the kind of a recipe's field whose bounds it has."""
    return typer.Option(*names, help=help, callback=None if field is None else kind(field), **more)


def path_option(help: str, *names: str, of: Check | None = None, **more: Any) -> Any:
    """of: which paths are right (`file_path`); without it any."""
    return typer.Option(*names, help=help, callback=of or file_path(), **more)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


PICTURE = file_path(".png", ".pdf", ".svg")
RUNS = Path("runs")

# What a command is about.
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        autocompletion=_recipes,
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
        metavar="RELEASE", callback=file_path(), help="A folder that `dpdist release` made."
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
DataRoot = Annotated[
    Path | None,
    path_option("Folder that holds the data sets (data.root of the recipe).", "--data-root"),
]
Archive = Annotated[
    str | None, option("Copy the run there as it goes: s3://BUCKET/PREFIX.", None, "--archive")
]
ArchivePrivate = Annotated[
    bool,
    flag(
        "--archive-private",
        "The private state too (run key, ledger, checkpoints): brings a lost folder back.",
    ),
]

# Of the commands that take inputs of the test split, on Ray actors.
Start = Annotated[int | None, option("First input.", CountOrZero)]
Every = Annotated[int | None, option("Each how-manieth input.", Count)]
MaxInputs = Annotated[int | None, option("At most this many inputs.", Count)]
Actors = Annotated[int | None, option("Workers (default: all CPUs).", Processes)]
Output = Annotated[Path | None, path_option("Folder of the table (default: in the run folder).")]

Workers = Annotated[
    int | None, option("Training workers (resources.workers).", Processes, "--workers")
]
PrivateSeed = Annotated[str | None, option("64 hex digits (default: secret, stored in private/).")]
AnswerError = Annotated[float, option("Error of each answer.", Probability)]
AsJson = Annotated[bool, flag("--json", "Print one JSON object of what may be published.")]
PrintJson = Annotated[bool, flag("--json", "Print JSON.")]


def need_numbers(recipe: Recipe, command: str) -> None:
    """Raise UserError where inputs are tokens."""
    if (why := recipe.data.refused(f"dpdist {command}")) is not None:
        raise UserError(why)


def need_label(recipe: Recipe, command: str) -> None:
    """Raise UserError where records have no label of their own."""
    if (why := recipe.data.without_label(f"dpdist {command}")) is not None:
        raise UserError(why)


def recipe_of(folder: RunFolder, data_root: Path | None, command: str) -> Recipe:
    """The recipe of a trained run whose inputs are numbers. Raises UserError."""
    from dpdist.runs.recipe import resolve

    folder.require_trained()
    recipe = resolve(folder.read_recipe(), data_root=data_root)
    need_numbers(recipe, command)
    need_label(recipe, command)
    return recipe


def release_at(
    name: str, trusted_factory: str | None, signer: Path | None = None, *, labelled: bool = True
) -> Release | None:
    """The release that lies at a path; None where the name of a run is meant, which nobody signs.
    labelled: refuse one whose outputs are no classes. Raises UserError, ReleaseError where `signer`
    is given and did not sign it."""
    from dpdist.release.bundle import is_release, load

    path = usable_path(name)
    if not is_release(path):
        if signer is not None:
            raise UserError(f"--signer: of a release, and {name} is none")
        return None
    found = load(path, trusted_factory=trusted_factory, signer=signer)
    found.need_numbers()
    if labelled:
        found.need_label()
    return found
