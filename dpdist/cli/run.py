"""Run recipes (``dpdist run``), tune them (``tune``), and list them (``recipes``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dpdist.cli.options import (
    DEFAULT_RUNS,
    Changes,
    Name,
    PublishableJson,
    RecipeArgument,
    Runs,
    complete_recipe_name,
    executor_name,
    flag,
    option,
    parse_numbers,
)
from dpdist.core import console
from dpdist.core.console import format_percent, format_significant
from dpdist.core.errors import UserError
from dpdist.core.fields import Count, TrialCount

if TYPE_CHECKING:
    from dpdist.runs.folder import RunFolder
    from dpdist.runs.recipe import Recipe


# --- dpdist run -------------------------------------------------------------------------------


_Until = Annotated[
    str | None,
    option("Stop after this stage: pretrain or train.", Literal["pretrain", "train"]),
]
_DryRun = Annotated[bool, flag("--dry-run", "Only print the plan: epsilon, steps, memory, time.")]


def run_command(
    recipe: RecipeArgument,
    changes: Changes = None,
    name: Name = None,
    runs: Runs = DEFAULT_RUNS,
    until: _Until = None,
    dry_run: _DryRun = False,
    as_json: PublishableJson = False,
) -> None:
    """Train privately, certify and report, as the recipe says; or resume an interrupted run.

    With --until pretrain, it trains only the recipe's public part, without privacy, on public
    records. With --until train, it trains and measures accuracy, without a search, certificates or
    a report.
    """
    from dpdist.runs.recipe import parse_changes, resolve_recipe

    resolved = resolve_recipe(recipe, changes=parse_changes(changes), name=name)
    from dpdist import pipeline

    if dry_run:
        rows = pipeline.dry_run(resolved, runs=runs, context=recipe)
        if as_json:
            console.print_json({"run": resolved.name, "plan": dict(rows)})
        else:
            typer.echo(console.format_table(rows, title=f"Plan of {resolved.name}"))
        return
    if until == "pretrain":
        _pretrain(resolved, recipe)
        return
    stages = pipeline.run if until is None else pipeline.train_only
    folder = stages(resolved, runs=runs, context=recipe, executor=executor_name())
    if as_json:
        from dpdist.reports.export import run_as_json
        from dpdist.reports.results import load_results

        console.print_json(run_as_json(load_results(folder)))
    else:
        _print_results(folder)


def _pretrain(recipe: Recipe, context: str) -> None:
    """Train only a recipe's public classifier or denoiser, without privacy, on public records."""
    from dpdist.runs.recipe import refuse_unused
    from dpdist.training.pretraining import pretrain

    refuse_unused(recipe, context)
    with console.progress("pretraining, WITHOUT privacy", "steps") as show:
        folder, score = pretrain(recipe, context, show)
    result = f"{format_percent(score)} % of the test split"
    if recipe.public is not None and recipe.model.denoiser is not None:
        result = f"noise {recipe.public.sigma:g} on the test split reduced to {score:.4f}"
    other = None if recipe.public is None else recipe.public.data
    if other is not None and other.num_classes != recipe.data.num_classes:
        result = f"learned the {other.num_classes} classes of {other.name}; its head is untrained"
    typer.echo(f"{folder}: {result}; trained on public records")


# --- dpdist tune ------------------------------------------------------------------------------


_Plan = Annotated[
    bool,
    flag(
        "--plan", "Only print epsilon for each distribution of the number of trials; needs no data."
    ),
]
_Trials = Annotated[str | None, option("With --plan: mean numbers of trials, such as 5,10,50.")]
_Records = Annotated[
    int | None,
    option("With --plan: number of training records; of users with privacy.unit: user.", Count),
]
_AsJson = Annotated[bool, flag("--json", "With --plan: print JSON.")]
_Public = Annotated[
    bool,
    flag("--public", "Tune on public records with Ray Tune (privacy: none): NOT PRIVATE."),
]


def tune_command(
    recipe: RecipeArgument,
    changes: Changes = None,
    runs: Runs = DEFAULT_RUNS,
    plan: _Plan = False,
    trials: _Trials = None,
    records: _Records = None,
    as_json: _AsJson = False,
    public: _Public = False,
) -> None:
    """Search the fields of the recipe's tune section; epsilon covers training and search.

    Repeat the command to resume an interrupted search. Do not publish the progress that the
    terminal shows. The result is an ordinary run folder.
    """
    from dpdist.runs.recipe import parse_changes, resolve_recipe

    if (trials or records or as_json) and not plan:
        raise UserError("--trials, --records, --json: must be left out without --plan")
    resolved = resolve_recipe(recipe, changes=parse_changes(changes))
    if plan:
        _print_search_costs(resolved, recipe, trials, records, as_json)
        return
    if public:
        _print_public(resolved, runs, recipe)
        return
    from dpdist import pipeline

    folder = pipeline.tune(resolved, runs=runs, context=recipe, executor=executor_name())
    _print_results(folder)


def _print_public(recipe: Recipe, runs: Path, context: str) -> None:
    """Tune a recipe on public records, and print its trials."""
    from dpdist import pipeline
    from dpdist.tuning.public import NOT_PRIVATE

    grid = pipeline.tune_public(recipe, runs=runs, context=context)
    rows, scores = [], []
    for result in grid:
        metrics = result.metrics or {}
        values = ", ".join(f"{key} {value}" for key, value in (result.config or {}).items())
        score = -math.inf if result.error else metrics.get("score", -math.inf)
        scores.append(-math.inf if math.isnan(score) else score)
        shown = "failed" if result.error else f"{score:.4g}"
        steps = str(metrics.get("steps", ""))
        rows.append([str(metrics.get("trial_id", "")), values, shown, steps, ""])
    if (best := max(scores, default=-math.inf)) > -math.inf:
        rows[scores.index(best)][-1] = "best"
    folder = runs / f"{recipe.name}-public"
    typer.echo(f"{NOT_PRIVATE}\nrun folders of the trials: {folder / 'trials'}")
    typer.echo(console.format_columns(["trial", "values", "score", "steps", "outcome"], rows))


def _print_results(folder: RunFolder) -> None:
    """Print the trials of a search, if they are public, and the results of a run."""
    from dpdist.reports.results import load_results, trial_table

    facts = load_results(folder)
    header, rows = trial_table(facts)
    if rows:
        typer.echo(f"all trials ({folder.trials})")
        typer.echo(console.format_columns(header, rows))
    typer.echo(str(facts))


def _print_search_costs(
    recipe: Recipe,
    context: str,
    trials: str | None,
    records: int | None,
    as_json: bool,
) -> None:
    from dpdist.tuning import preview
    from dpdist.tuning.space import check_space

    if recipe.tune is None:
        raise UserError(
            f"{context}: tune: must be given: the fields to search (space) and the distribution of "
            "the number of trials (docs/how-to/tuning.md)"
        )
    check_space(recipe, context)
    sizes = preview.sizes_without_data(recipe, records, context)
    means = preview.default_means(recipe)
    if trials is not None:
        means = tuple(int(n) for n in parse_numbers(trials, "--trials", TrialCount) or ())
    noise, _ = preview.untuned_run(recipe, sizes, context)
    rows = [
        preview.distribution_cost(recipe, distribution, own, sizes, noise, context)
        for distribution, own in preview.iter_distributions(recipe, means)
    ]
    if as_json:
        console.print_json([row.to_dict() for row in rows])
        return
    _print_cost_table(recipe, sizes.training_records(recipe.data.fraction), noise, rows)


def _print_cost_table(recipe: Recipe, records: int, noise: float, rows: list[Any]) -> None:
    from dpdist.privacy.guarantee import format_epsilon

    target = recipe.privacy.epsilon
    header = ["trials K", f"epsilon at noise {noise:.4g}"]
    if target is not None:
        header.append(f"noise for {target:g} in total")
    header += ["P(K=0)", "P(K>=2)", "P(K>=mean)", "K: 5 / 50 / 95 %"]
    cells = []
    for row in rows:
        chance = dict(row.tail_probabilities)
        line = [
            ("* " if row.is_recipe_distribution else "  ") + row.distribution,
            format_epsilon(row.epsilon),
        ]
        if target is not None:
            line.append(format_significant(row.noise_multiplier))
        line += [
            f"{1 - chance[1]:.3g}",
            f"{chance[2]:.3g}",
            f"{chance[max(chance)]:.3g}",
            " / ".join(map(str, row.quantiles)),
        ]
        cells.append(line)
    epsilon = "" if target is None else f", epsilon {target:g}"
    typer.echo(
        f"training on about {records:,} {recipe.counted}; one run without a search: noise "
        f"multiplier {noise:.4g}{epsilon} at delta {recipe.privacy.delta:g}"
    )
    typer.echo(console.format_columns(header, cells))
    typer.echo(
        "* the recipe's distribution. K is secret (except fixed): distributions with a small "
        "epsilon often run a single trial, which does not choose anything."
    )


# --- dpdist recipes ---------------------------------------------------------------------------


_Shown = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        autocompletion=complete_recipe_name,
        help="Name or file of a recipe to print with its defaults.",
    ),
]
_Papers = Annotated[bool, flag("--papers", "List recipes that reproduce papers, in a checkout.")]


def recipes_command(
    recipe: _Shown = None, changes: Changes = None, papers: _Papers = False
) -> None:
    """List the recipes that come with dpdist, or print one with all its defaults."""
    from dpdist.runs.recipe import built_in_recipes, paper_recipes, parse_changes, resolve_recipe

    if recipe is not None:
        typer.echo(resolve_recipe(recipe, changes=parse_changes(changes)).to_yaml(), nl=False)
        return
    paths = paper_recipes() if papers else built_in_recipes()
    if not paths:
        raise UserError("--papers: only works in a checkout of dpdist, which has papers/")
    width = max(len(path.stem) for path in paths)
    for path in paths:
        first = path.read_text().split("\n", 1)[0]
        typer.echo(f"{path.stem.ljust(width)}  {first.removeprefix('#').strip()}")
