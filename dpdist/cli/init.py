"""``dpdist init`` and ``dpdist data``: a starter recipe for a user's own data, and the data sets.

data: list, check and fetch data sets.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.cli.options import Changes, DataRoot, RecipeArgument, file_path, kind
from dpdist.core.errors import UserError
from dpdist.core.fields import RunName

if TYPE_CHECKING:
    from dpdist.data.discovery import Found


# --- dpdist init ------------------------------------------------------------------------------


def init_command(
    folder: Annotated[
        Path,
        typer.Argument(
            callback=file_path(),
            help="Of the data: train.parquet and test.parquet, or train/CLASS/*.png and "
            "test/CLASS/*.png.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", callback=file_path(".yaml", ".yml"), help="Default: FOLDER's name, here."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", callback=kind(RunName), help="Of the recipe (default: its file's)."),
    ] = None,
) -> None:
    """Write a starter recipe, with comments, for your own data.

    Splits, columns, classes, their names and the size of an input are found out from the files.
    Pictures in folders are first written as Parquet beside them.
    """
    from dpdist.data.discovery import has_pictures, look, look_at_pictures

    output = output or Path(f"{folder.resolve().name}.yaml")
    if output.exists():  # before pictures are written for nothing
        raise UserError(f"{output}: exists already; name another --output")
    if has_pictures(folder):
        # Aside until nothing can be refused any more: what is left would be taken for the data.
        with tempfile.TemporaryDirectory(prefix=".dpdist-init-", dir=folder) as aside:
            found = look_at_pictures(folder, Path(aside))
            _write(found, name, output, sorted(Path(aside).glob("*.parquet")))
    else:
        found = look(folder)
        _write(found, name, output)
    typer.echo(f"wrote {output}: {in_a_line(found)}")
    typer.echo(f"next: dpdist data check {output}; dpdist run {output} --dry-run")


def _write(found: Found, name: str | None, output: Path, files: Sequence[Path] = ()) -> None:
    """Write the recipe, and move the files that it reads to their places; all or nothing.

    Raises UserError for a recipe that nobody could run.
    """
    from dpdist.core.files import move_together, parse_yaml, write_atomic
    from dpdist.runs.recipe import parse

    text = recipe_text(found, name or output.stem)
    parse(parse_yaml(text, str(output))[0], str(output))
    moved = move_together(files, found.root / found.name)
    try:
        write_atomic(output, text)
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise
    for path in moved:
        typer.echo(f"wrote {path}")


def in_a_line(found: Found) -> str:
    """What was found, for who reads the recipe."""
    what = "x".join(map(str, found.shape))
    inputs = f"images {what}" if found.image is not None else f"{what} features"
    return (
        f"{found.records:,} training and {found.tested:,} test records, {inputs}, "
        f"{found.classes} classes"
    )


def recipe_text(found: Found, name: str) -> str:
    """The recipe of a first run: DP-SGD on noisy copies, certified."""
    batch, epochs = _batch(found.records), 20
    lines = [
        f"# Starter recipe for {found.name}: {in_a_line(found)}.",
        "# Column names, classes, sizes and the number of records were read from the files, and",
        "# are public with this recipe. Chosen without looking at a record: all the rest.",
        f"name: {_text(name)}",
        "data:",
        f"  name: {_text(found.name)}               # the folder below root",
        f"  root: {_text(str(found.root))}",
        *_data(found),
        f"model: {_model(found)}              # or your own: package.module:factory; no BatchNorm",
        "method:",
        "  name: input-noise            # trains on noisy copies, as the certificate draws them",
        "  sigma: 0.25                  # noise; inputs lie in [0, 1]",
        "  draws: 4                     # copies of each record, averaged before the clip",
        "privacy:",
        "  epsilon: 3.0                 # the noise is calibrated to it, never above",
        f"  delta: {_delta(found.records):.1e}               # below 1 / {found.records:,} records",
        "  clip_norm: 1.0",
        "  # group_size: 5              # also for a person with up to so many records",
        "  # budget: budgets            # charge all runs on these records to one budget",
        "training:",
        f"  batch_size: {batch}             # expected; large batches need less noise for each",
        f"  epochs: {epochs}",
        "  learning_rate: 0.5           # try others with `dpdist tune`: looking at results costs",
        "  momentum: 0.9",
        "certify:",
        "  sigma: 0.25",
        "  n: 10000                     # draws for each input",
        f"  max_inputs: {min(500, found.tested)}           # of the test split; leave out for all",
        "  radii: [0.1, 0.25, 0.5]      # L2, in input units; reported, all are certified",
        "resources:",
        "  workers: 1                   # of Ray Train; the result is the same on any number",
    ]
    return "\n".join(lines) + "\n"


def _data(found: Found) -> list[str]:
    lines = [f"  classes: {found.classes}"]
    if found.names:
        lines.append(f"  names: {_text(list(found.names))}")
    for key, value, usual in (("train", found.train, "train"), ("test", found.test, "test")):
        if value != usual:
            lines.append(f"  {key}: {_text(value)}")
    columns: list[str] = []
    if found.image is None:
        columns.append(f"features: {_text(list(found.features))}")
    elif found.image != "image":
        columns.append(f"image: {_text(found.image)}")
    if found.label != "label":
        columns.append(f"label: {_text(found.label)}")
    return lines + (["  columns:"] + [f"    {line}" for line in columns] if columns else [])


def _text(value: Any) -> str:
    """JSON, which YAML reads alike."""
    return json.dumps(value, ensure_ascii=False)


def _model(found: Found) -> str:
    if found.image is None:
        return "mlp"
    return "tf-cnn" if min(found.shape[1:]) >= 20 else "small-cnn"


def _delta(records: int) -> float:
    """The largest power of ten below 1 / records."""
    return 10.0 ** -(math.floor(math.log10(max(records, 10))) + 1)


def _batch(records: int) -> int:
    """A power of two, about an eighth of the records, at most 2,048."""
    result: int = 2 ** max(0, min(11, math.floor(math.log2(max(records, 8) / 8))))
    return result


# --- dpdist data ------------------------------------------------------------------------------


data_app = typer.Typer(help="List, check and fetch data sets.", no_args_is_help=True)


@data_app.command("list")
def list_data(data_root: DataRoot = None) -> None:
    """List the built-in data sets, those under --data-root, and those that can be fetched."""
    from dpdist.core.errors import UserError
    from dpdist.data.registry import BUILT_IN, FETCHABLE

    for name in BUILT_IN:
        typer.echo(f"{name}\tbuilt in")
    if data_root is not None:
        if not data_root.is_dir():
            raise UserError(f"data root {data_root}: no such folder")
        for folder in sorted(path for path in data_root.iterdir() if path.is_dir()):
            files = len(list(folder.rglob("*.parquet")))
            typer.echo(f"{folder.name}\t{folder} ({files} Parquet files)")
    typer.echo(f"to fetch with `dpdist data fetch`: {', '.join(FETCHABLE)}")


@data_app.command("check")
def check_data(recipe: RecipeArgument, changes: Changes = None, data_root: DataRoot = None) -> None:
    """Read every record a recipe needs; complain with file and row, or say what was found."""
    from dpdist.runs.recipe import check_against_data, read_changes, resolve
    from dpdist.training.records import evaluation_data, source_of, training_data

    resolved = resolve(recipe, changes=read_changes(changes), data_root=data_root)
    source = source_of(resolved)
    train, test = training_data(resolved, source), evaluation_data(resolved, source)
    for split in (train, test):
        typer.echo(
            f"{split.name}: {len(split):,} records, inputs "
            f"{'x'.join(map(str, split.input_shape))}, {split.classes} {_TOLD[split.target_kind]}"
        )
    section = resolved.data
    names = section.class_names
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    following = section.following
    if section.targets == "class":
        typer.echo("classes: the next token" if following else f"classes: {shown}")
    if section.root is not None:
        columns = section.columns
        inputs = ", ".join(source.columns.inputs)
        label = "" if following else f"; label {columns.label}"
        typer.echo(f"columns: inputs {inputs}{label}")
    typer.echo(f"no private record is in {test.name}: compared by content")
    delta, batch = resolved.privacy.delta, resolved.training.batch_size
    typer.echo(f"privacy.delta {delta:g}: must be below 1 / {len(train):,}")
    typer.echo(f"training.batch_size {batch:,}: at most {len(train):,}")
    check_against_data(resolved, len(train), recipe)


_TOLD = {"class": "classes", "number": "numbers to tell", "labels": "labels to tell"}


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100 or svhn")],
    data_root: Annotated[
        Path, typer.Option("--data-root", callback=file_path(), help="Where to put it.")
    ] = Path("data"),
) -> None:
    """Download a public data set through torchvision and write it as Parquet."""
    from dpdist import data

    typer.echo(str(data.fetch(name, data_root, typer.echo)))


@data_app.command("make")
def make_data(
    name: Annotated[str, typer.Argument(help="docstrings")],
    data_root: Annotated[
        Path, typer.Option("--data-root", callback=file_path(), help="Where to put it.")
    ] = Path("data"),
) -> None:
    """Make a set of real texts from the docstrings of what is installed; nothing is downloaded."""
    from dpdist.core.errors import UserError
    from dpdist.data import text

    if name != text.NAME:
        raise UserError(f"data make: unknown {name!r}; there is {text.NAME}")
    typer.echo(str(text.make_docstrings(data_root, typer.echo)))
