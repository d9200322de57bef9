"""dpdist audit: a lower bound of epsilon, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.base.errors import UserError
from dpdist.commands.options import RUNS, DataRoot, Output, Runs, option

if TYPE_CHECKING:
    from dpdist.audits.result import AuditResult
    from dpdist.audits.target import Target
    from dpdist.privacy.audited import Audited
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe

_Name = Annotated[
    str,
    typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a trained run (by name or path)."),
]
_Kind = Annotated[str | None, option("mechanism (default), or that of the recipe's audit section.")]
_Set = Annotated[
    list[str] | None,
    option(
        "An option of the audit: releases=2000. With a dot, a key of the recipe: "
        "training.steps=50. May be repeated.",
        None,
        "--set",
        metavar="NAME=VALUE",
    ),
]


def command(
    name: _Name,
    kind: _Kind = None,
    options: _Set = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    output: Output = None,
) -> None:
    """Measure how much leaks at least: an empirical lower bound of epsilon, beside what is proved.

    Exit code 1 when it exceeds what is proved, and code or proof is wrong, or what is claimed.
    """
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output: {output}: must be a folder")
    of_audit = [each for each in options or () if "." not in each.partition("=")[0]]
    changed = [each for each in options or () if each not in of_audit]
    recipe, folder = _named(name, runs, data_root, changed)

    from dpdist.audits import catalogue
    from dpdist.audits.canaries import audited_recipe
    from dpdist.audits.result import result_of
    from dpdist.base import console
    from dpdist.privacy.audited import CONSISTENT
    from dpdist.runs.folder import RunFolder

    asked = catalogue.asked_for(recipe, kind, of_audit)
    result = result_of(asked)
    from dpdist import pipeline

    if folder is None and asked.planted is not None:
        planted = audited_recipe(recipe, asked, name)
        folder = pipeline.train_alone(planted, runs=runs, where=name)
    target = _target(recipe, folder, name)
    if folder is not None or output is not None:
        output = result.place(folder or RunFolder(runs / recipe.name), output)
    output = output or runs / f"{recipe.name}.audit" / asked.folder_name
    found = _measured(result, target, output)
    typer.echo(console.table(_rows(found), title=f"audit of {name}"))
    kept = ", which stays private: it is made of many trainings" * result.private
    typer.echo(f"result{kept}: {output / result.file}")
    if folder is not None:
        pipeline.report_stage(folder)
    if found.verdict != CONSISTENT:
        raise typer.Exit(1)


def _named(
    name: str, runs: Path, data_root: Path | None, changed: list[str]
) -> tuple[Recipe, RunFolder | None]:
    """A run of that name, or a recipe, with keys changed."""
    from dpdist.runs.folder import open_run
    from dpdist.runs.recipe import read_changes, refuse_unused, resolve

    try:
        folder = open_run(name, runs)
    except UserError as no_run:
        try:
            changes = read_changes(changed)
            found = resolve(name, changes=changes, data_root=data_root)
            refuse_unused(found, name)
            return found, None
        except UserError as no_recipe:
            if "no such recipe" in str(no_recipe):
                raise UserError(f"{no_run}; {no_recipe}") from None
            raise
    if changed:
        raise UserError(f"--set {changed[0]}: {name} is a run, whose recipe is fixed")
    return folder.read_recipe(), folder


def _target(recipe: Recipe, folder: RunFolder | None, name: str) -> Target:
    """What is audited: the run, or else the recipe."""
    from dpdist.audits.target import of_recipe, of_run
    from dpdist.reports.facts import read_facts

    if folder is None:
        return of_recipe(recipe, name)
    return of_run(folder, read_facts(folder).guarantee)


def _measured(result: AuditResult, target: Target, output: Path) -> Audited:
    from dpdist.audits import catalogue
    from dpdist.base import console

    with console.progress(f"audit, {result.folder_name}", "trials", "trials") as show:
        return catalogue.make_audit(
            result.options, target, output, lambda done, total: show(done, total, 0.0)
        )


def _rows(found: Audited) -> list[tuple[str, str]]:
    rows = [("epsilon", found.three), ("audited", found.line)]
    rows += [("it rests on", line) for line in found.assumptions]
    return rows + [(key.replace("_", " "), str(value)) for key, value in found.details.items()]
