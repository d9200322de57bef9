"""dpdist tune: search hyper-parameters privately; the guarantee covers training and search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpdist.base import console
from dpdist.base.errors import UserError
from dpdist.base.fields import Count, Trials
from dpdist.base.rounding import significant
from dpdist.commands.options import (
    PICTURE,
    RUNS,
    Changes,
    DataRoot,
    Name,
    RecipeArgument,
    Runs,
    Workers,
    flag,
    numbers,
    option,
    path_option,
)

if TYPE_CHECKING:
    from dpdist.runs.recipe import Recipe

_Plan = Annotated[
    bool, flag("--plan", "Print what each law of the number of trials costs; no data.")
]
_Trials = Annotated[str | None, option("With --plan: expected numbers of trials, such as 5,10,50.")]
_Records = Annotated[int | None, option("With --plan: number of training records.", Count)]
_AsJson = Annotated[bool, flag("--json", "With --plan: print JSON.")]
_Plot = Annotated[
    Path | None,
    path_option("With --plan: draw epsilon against trials into this file.", of=PICTURE),
]
_Resume = Annotated[
    bool, flag("--resume", "Continue an interrupted search; never begin a new one.")
]


def command(
    recipe: RecipeArgument,
    changes: Changes = None,
    name: Name = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    workers: Workers = None,
    plan: _Plan = False,
    trials: _Trials = None,
    records: _Records = None,
    as_json: _AsJson = False,
    plot: _Plot = None,
    resume: _Resume = False,
) -> None:
    """Search the fields of the recipe's tune section; epsilon covers training and search.

    The same command continues an interrupted search: nothing is drawn again. What the terminal
    shows of a running search is for the operator only; the result is an ordinary run folder.
    """
    from dpdist.runs.recipe import read_changes, resolve

    if plan:
        _plan(
            resolve(recipe, changes=read_changes(changes)), recipe, trials, records, as_json, plot
        )
        return
    if trials or records or as_json or plot:
        raise UserError("tune: --trials, --records, --json and --plot belong to --plan")
    resolved = resolve(
        recipe, changes=read_changes(changes), name=name, data_root=data_root, workers=workers
    )
    from dpdist import pipeline

    folder = pipeline.tune(resolved, runs=runs, where=recipe, only_resume=resume)
    typer.echo(console.table(pipeline.summary(folder), title=f"run {folder.name}"))


def _plan(
    recipe: Recipe,
    name: str,
    trials: str | None,
    records: int | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    from dpdist.tuning import preview
    from dpdist.tuning.space import check_space

    _require_tune(recipe, name)
    check_space(recipe, name)
    sizes = preview.sizes_without_data(recipe, records, name)
    means = preview.default_means(recipe) if trials is None else _means(trials)
    noise, alone = preview.one_run(recipe, sizes, name)
    rows = [
        preview.row(recipe, law, own, sizes, noise, name)
        for law, own in preview.laws(recipe, means)
    ]
    if plot is not None:
        preview.plot(rows, alone.guarantee().epsilon, recipe.privacy.delta, plot)
    if as_json:
        console.print_json([row.to_dict() for row in rows])
        return
    _show(recipe, sizes.train(recipe.data.fraction), noise, rows)


def _require_tune(recipe: Recipe, where: str) -> None:
    """Raise UserError when it has no tune section."""
    if recipe.tune is None:
        raise UserError(
            f"{where}: tune: is required: the fields to search (space) and the law of the number "
            "of trials; docs/how-to/tuning.md shows one"
        )


def _means(text: str) -> tuple[int, ...]:
    return tuple(int(mean) for mean in numbers(text, "--trials", Trials) or ())


def _show(recipe: Recipe, records: int, noise: float, rows: list) -> None:
    from dpdist.privacy.guarantee import format_epsilon

    target = recipe.privacy.epsilon
    header = ["trials K", f"epsilon at noise {noise:.4g}", "by Renyi DP"]
    if target is not None:
        header.append(f"noise for {target:g} in all")
    header += ["P(K=0)", "P(K>=2)", "P(K>=mean)", "K: 5 / 50 / 95 %"]
    cells = []
    for row in rows:
        chance = dict(row.at_least)
        line = [("* " if row.own else "  ") + row.law, format_epsilon(row.epsilon)]
        line.append("none" if row.renyi is None else format_epsilon(row.renyi))
        if target is not None:
            line.append(significant(row.noise))
        line += [
            f"{1 - chance[1]:.3g}",
            f"{chance[2]:.3g}",
            f"{chance[max(chance)]:.3g}",
            " / ".join(map(str, row.quantiles)),
        ]
        cells.append(line)
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    typer.echo(
        f"training on about {records:,} records; one untuned run: noise multiplier {noise:.4g}"
        + ("" if target is None else f", epsilon {target:g}")
        + f" at delta {recipe.privacy.delta:g}"
    )
    for line in [header, *cells]:
        typer.echo("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    typer.echo(
        "* the recipe's law. K stays secret (except fixed): a cheap law often runs a single trial, "
        "which chooses nothing."
    )
